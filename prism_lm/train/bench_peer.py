"""flash-linear-attention's Gated DeltaNet model as a candidate of the bench, with its own defaults (fused norm, SwiGLU
and cross-entropy). The package is optional (the `peers` extra)."""

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prism_lm.train.bench import Candidate

PEER_NAME = "fla_gated_delta"
# By model width: 380 M and 1.467 B parameters at 32,000 pieces.
SIZES: dict[int, dict[str, Any]] = {
    1024: {"num_heads": 6, "head_dim": 128, "expand_v": 2, "num_hidden_layers": 21},
    2048: {"num_heads": 16, "head_dim": 128, "expand_v": 1, "num_hidden_layers": 24},
}


def is_installed() -> bool:
    """Whether flash-linear-attention is there."""
    return importlib.util.find_spec("fla") is not None


def describe_peer(*, model_width: int, vocab_size: int) -> Candidate:
    """The peer of that width, its MLP four times as wide. Raises ValueError for a width without one."""
    if model_width not in SIZES:
        widths = " or ".join(str(width) for width in SIZES)
        raise ValueError(f"model.model_width={model_width} must have a size of --peer {PEER_NAME}; use {widths}")
    settings = {"hidden_size": model_width, "vocab_size": vocab_size, "use_cache": False, **SIZES[model_width]}
    return Candidate(
        name=PEER_NAME,
        vocab_size=vocab_size,
        build=partial(_build, settings),
        compute_loss=_compute_loss,
        flops_per_token=None,
    )


def _build(settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    models: Any = importlib.import_module("fla.models")
    with torch.device(device):
        model: nn.Module = models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig(**settings))
    return model.to(device, dtype)


def _compute_loss(model: nn.Module, input_ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """The peer shifts labels itself: those of the inputs are given, and one position a row is left out."""
    return model(input_ids=input_ids_BT, labels=input_ids_BT).loss
