"""A Hugging Face folder of a model: safetensors in shards, config.json, generation_config.json, its own source files.

The weights carry our names below `model.`; a shared one stands once, under its first name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from prism_lm.checkpoint.share import naming
from prism_lm.export.sources import ENTRY_NAME, collect_sources
from prism_lm.model.config import ModelConfig

PREFIX = "model."
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
MODEL_TYPE = "prism"
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids that a reader of the folder must know."""

    bos: int
    eos: int
    pad: int


def write_model(
    folder: Path, model: nn.Module, config: ModelConfig, *, tokens: SpecialTokens, row_tokens: int, max_shard_bytes: int
) -> None:
    """Write all but the tokenizer and the card into an existing folder. Raises ValueError for a shard size below the
    largest weight."""
    weights = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    write_weights(folder, weights, max_shard_bytes)
    dtype = DTYPES[next(iter(weights.values())).dtype]
    _write_json(folder / "config.json", describe_config(config, tokens=tokens, row_tokens=row_tokens, dtype=dtype))
    ids = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos, "pad_token_id": tokens.pad}
    _write_json(folder / "generation_config.json", ids)
    for name, text in collect_sources().items():
        (folder / name).write_text(text, encoding="utf-8")


def describe_config(config: ModelConfig, *, tokens: SpecialTokens, row_tokens: int, dtype: str) -> dict[str, Any]:
    """What config.json holds: our fields, and those that Hugging Face's tools look for."""
    return {
        "architectures": ["PrismForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{ENTRY_NAME}.PrismConfig",
            "AutoModelForCausalLM": f"{ENTRY_NAME}.PrismForCausalLM",
        },
        "model_type": MODEL_TYPE,
        **asdict(config),
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        "max_position_embeddings": row_tokens,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write model.safetensors, or shards of at most that many bytes of weights and the index that names them."""
    from safetensors.torch import save_file

    shards = split_shards({name: count_bytes(weight) for name, weight in weights.items()}, max_shard_bytes)
    names = [WEIGHTS_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        places = {PREFIX + name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total_bytes = sum(count_bytes(weight) for weight in weights.values())
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total_bytes}, "weight_map": places})
    for file, shard in zip(names, shards, strict=True):
        with naming(folder / file):
            save_file({PREFIX + name: weights[name] for name in shard}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors leaves the file to its owner alone


def split_shards(sizes_bytes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names in order, cut into as few consecutive shards as fit. Raises ValueError where one does not fit at all."""
    largest = max(sizes_bytes, key=lambda name: sizes_bytes[name])
    if sizes_bytes[largest] > max_shard_bytes:
        raise ValueError(
            f"--max-shard-size must be at least {sizes_bytes[largest]} bytes, which {largest} has; use 5GB"
        )
    shards: list[list[str]] = []
    filled = max_shard_bytes
    for name, size in sizes_bytes.items():
        if filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def count_bytes(weight: Tensor) -> int:
    """Bytes of a tensor's values."""
    return weight.numel() * weight.element_size()


def read_prism(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model that an exported folder holds, and its weights by our names, in their own dtype.

    Raises ValueError for a folder of another kind, or one with files missing.
    """
    settings = read_settings(folder)
    if settings.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{folder / 'config.json'} must have model_type={MODEL_TYPE}, not {settings.get('model_type')}; "
            "give a folder that `prism export` wrote, or --from fla"
        )
    held = {field.name: settings[field.name] for field in fields(ModelConfig) if field.name in settings}
    try:
        config = ModelConfig(**held)
    except TypeError as error:
        raise ValueError(f"{folder / 'config.json'} must describe a model ({error}); copy it again") from error
    return config, {name.removeprefix(PREFIX): weight for name, weight in read_weights(folder).items()}


def read_settings(folder: Path) -> dict[str, Any]:
    """What config.json holds. Raises ValueError where there is none that can be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"HF_FOLDER={folder} must hold config.json; give a folder that `prism export` wrote")
    return _read_object(path)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every weight of one file or of the shards that an index names, by its name there. Raises ValueError where a file
    is missing or cut off."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, names = folder / INDEX_NAME, [WEIGHTS_NAME]
    if index.is_file():
        names = sorted(set(_read_object(index).get("weight_map", {}).values()))
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"HF_FOLDER={folder} must hold {name}; copy the folder whole")
        try:
            weights |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} must be a whole safetensors file ({error}); copy it again") from error
    return weights


def _read_object(path: Path) -> dict[str, Any]:
    try:
        held: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON ({error}); copy it again") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} must be a JSON object; copy it again")
    return cast(dict[str, Any], held)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
