"""Named sizes: PRISM with two solver steps, and twins of each with the same number of parameters within 1%.

`350m` is PRISM, `350m-gated_delta` and `350m-transformer` are its twins: the same layers and widths, no solver, and
an MLP as much wider as the solver was large. Importing this file loads no torch.
"""

from dataclasses import replace

from prism_lm.model.config import Mixer, ModelConfig
from prism_lm.model.cost import count_parameters

TWINS: dict[str, Mixer] = {"gated_delta": "gated_delta", "transformer": "attention"}
MLP_WIDTH_MULTIPLE = 16


def size_names() -> list[str]:
    """Every named size, small to large, each PRISM followed by its twins."""
    return [name for base in _BASES for name in (base, *(f"{base}-{twin}" for twin in TWINS))]


def named_size(name: str) -> ModelConfig:
    """The configuration of that name. Raises ValueError for a name that is not in size_names()."""
    if name not in size_names():
        raise ValueError(f"size={name} must be a named size; use {', '.join(size_names())}")
    base, _, twin = name.partition("-")
    return _match_parameters(_BASES[base], TWINS[twin]) if twin else _BASES[base]


def _match_parameters(base: ModelConfig, mixer: Mixer) -> ModelConfig:
    """The same model with another mixer, its MLP widened until the parameters agree."""
    twin = replace(base, mixer=mixer)
    missing = count_parameters(base) - count_parameters(twin)
    wider = missing / (3 * base.model_width * base.num_layers)
    mlp_width = round((base.mlp_width + wider) / MLP_WIDTH_MULTIPLE) * MLP_WIDTH_MULTIPLE
    return replace(twin, mlp_width=mlp_width)


def _build_large(width: int, layers: int, mlp_width: int, *, tie_embeddings: bool) -> ModelConfig:
    """Heads of 128 that fill the width, and a solver of rank D/8, which costs less than a tenth of the model."""
    return ModelConfig(
        model_width=width,
        num_layers=layers,
        num_heads=width // 128,
        key_width=128,
        value_width=128,
        mlp_width=mlp_width,
        solver_rank=width // 8,
        tie_embeddings=tie_embeddings,
    )


_BASES = {
    "tiny": ModelConfig(
        vocab_size=1024,
        model_width=192,
        num_layers=3,
        num_heads=3,
        key_width=64,
        value_width=64,
        mlp_width=512,
        solver_rank=32,
        chunk_tokens=32,
    ),
    "130m": _build_large(768, 12, 2304, tie_embeddings=True),
    "350m": _build_large(1024, 24, 2304, tie_embeddings=True),
    "1b": _build_large(2048, 24, 4096, tie_embeddings=False),
    "3b": _build_large(2560, 36, 5376, tie_embeddings=False),
    "7b": _build_large(4096, 32, 9216, tie_embeddings=False),
}
