"""`prism import HF_FOLDER RUN [key=value ...]`: a run folder made of a model that another folder holds.

Of a folder that `prism export` wrote, weights and tokenizer are those of the folder, bit by bit. RUN is then a run like
any other, at step 0: `prism evaluate`, `generate` and `export` read it. With data.path=PATH and train.* keys
`prism train RUN/config.yaml` trains from these weights, with a fresh optimizer. --from fla reads Gated DeltaNet weights
of flash-linear-attention, whose own tokenizer.model is given by --tokenizer.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from launcher.config import RunConfig, dump_config, load_config

if TYPE_CHECKING:
    from torch import Tensor

    from prism_lm.model.config import ModelConfig

Source = Literal["prism", "fla"]
EXAMPLE = """\
example:
  prism import exported/tiny runs/tiny_again
  prism import exported/tiny runs/tuned data.path=data/my_text train.steps=500 train.optim.learning_rate=1e-4
  prism import gated_deltanet-1.3B runs/peer --from fla --tokenizer tokenizer.model
"""
FIXED = ("run_dir", "model")
MODEL_TYPES = {"prism": "prism", "fla": "gated_deltanet"}
ROW_KEY = "max_position_embeddings"
FLA_COUNTS = ("hidden_size", "num_hidden_layers", "head_dim")
MAY_BE_NULL = ("num_v_heads", ROW_KEY)
"Counts of config.json that are left open by null."


def main(arguments: list[str]) -> int:
    """Import and print one line."""
    parsed = build_parser().parse_intermixed_args(arguments)
    run_dir = Path(parsed.run)
    checkpoint = import_model(
        Path(parsed.folder),
        run_dir,
        source=parsed.source,
        tokenizer_file=None if parsed.tokenizer is None else Path(parsed.tokenizer),
        overrides=parsed.overrides,
    )
    print(f"{run_dir}: a run at step 0 with the weights of {parsed.folder}, in {checkpoint}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism import",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLE,
    )
    parser.add_argument("folder", metavar="HF_FOLDER", help="config.json, safetensors, tokenizer.model")
    parser.add_argument("run", metavar="RUN", help="folder to make")
    words = "what wrote the folder: prism export, or flash-linear-attention (default %(default)s)"
    parser.add_argument("--from", dest="source", choices=["prism", "fla"], default="prism", help=words)
    words = "SentencePiece model of these weights (default: HF_FOLDER/tokenizer.model)"
    parser.add_argument("--tokenizer", metavar="FILE", help=words)
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="keys of the run's configuration, but model.*"
    )
    return parser


def import_model(
    folder: Path, run_dir: Path, *, source: Source, tokenizer_file: Path | None, overrides: Sequence[str]
) -> Path:
    """Make the run folder; returns its checkpoint's folder. Raises ValueError or DataError for what does not fit."""
    from data_pipeline.tokenizer import load_tokenizer
    from launcher.imported_run import check_free, write_imported_run

    check_free(run_dir)
    model, weights, row_tokens = read_model(folder, source)
    tokenizer = load_tokenizer(tokenizer_file or folder / "tokenizer.model")
    config = build_config(run_dir, model, weights, row_tokens, overrides)
    origin = {"imported_from": str(folder.absolute()), "source": source, "weights_sha256": hash_weights(weights)}
    return write_imported_run(run_dir, config, weights, tokenizer.model, origin=origin)


def read_model(folder: Path, source: Source) -> "tuple[ModelConfig, dict[str, Tensor], int]":
    """Configuration, weights by our names, and the tokens of a row that the folder speaks of. Raises ValueError for a
    folder of another kind."""
    from prism_lm.export.folder import read_prism, read_settings

    settings = read_settings(folder)
    if settings.get("model_type") == MODEL_TYPES[source]:
        check_integers(folder / "config.json", settings)
    match source:
        case "prism":
            model, weights = read_prism(folder)
        case "fla":
            from prism_lm.export.fla import read_fla

            model, weights = read_fla(folder)
    row_tokens: int = settings.get(ROW_KEY) or RunConfig(run_dir="unused").data.row_tokens
    return model, weights, row_tokens


def check_integers(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the key, for a count in a config.json that is no whole number."""
    from prism_lm.model.config import ModelConfig

    hints = get_type_hints(ModelConfig)
    for key in (*(name for name, hint in hints.items() if hint is int), *FLA_COUNTS, *MAY_BE_NULL):
        value = settings.get(key, 1)
        if type(value) is not int and not (value is None and key in MAY_BE_NULL):
            raise ValueError(
                f"{key}={json.dumps(value)} must be a whole number in {path}; copy the file again, or mend it there"
            )
    row_tokens = settings.get(ROW_KEY)
    if row_tokens is not None and row_tokens < 1:
        raise ValueError(f"{ROW_KEY}={row_tokens} must be at least 1 in {path}; give the tokens of a row, such as 2048")


def build_config(
    run_dir: Path, model: "ModelConfig", weights: "dict[str, Tensor]", row_tokens: int, overrides: Sequence[str]
) -> RunConfig:
    """The run's configuration: defaults, the model's own, what was typed. Raises ValueError for a key that the weights
    fix."""
    import torch

    for override in overrides:
        if override.partition("=")[0].split(".")[0] in FIXED:
            raise ValueError(f"{override} must not be given: the weights are of one model, RUN is the folder")
    base = RunConfig(run_dir=str(run_dir), model=model)
    is_bf16 = all(weight.dtype == torch.bfloat16 for weight in weights.values())
    base = replace(
        base,
        data=replace(base.data, row_tokens=row_tokens),
        train=replace(base.train, precision="bf16" if is_bf16 else "fp32"),
    )
    with tempfile.TemporaryDirectory() as held:
        file = Path(held) / "config.yaml"
        file.write_text(dump_config(base), encoding="utf-8")
        return load_config(RunConfig, file, overrides)


def hash_weights(weights: "dict[str, Tensor]") -> str:
    """Of names and values, in the order of names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        values: Any = weights[name].contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values)
    return digest.hexdigest()
