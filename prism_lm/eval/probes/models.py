"""The models that are compared: two layers of width 16, one head of 16 x 16, and parameters matched by the MLP.

Importing this file loads no torch.
"""

import importlib.util
from dataclasses import replace
from typing import Any, cast, get_args

from prism_lm.eval.probes.rows import VOCAB_SIZE
from prism_lm.model.config import Mixer, ModelConfig
from prism_lm.model.cost import count_parameters

LARGEST = ModelConfig(
    vocab_size=VOCAB_SIZE,
    model_width=16,
    num_layers=2,
    num_heads=1,
    key_width=16,
    value_width=16,
    mlp_width=32,
    solver_steps=4,
    solver_rank=0,
    chunk_tokens=32,
    tie_embeddings=False,
)
"PRISM with four solver steps of full rank: the others are given its number of parameters by a wider MLP."
MATCHED_PCT = 1.0
"How far from LARGEST a model's number of parameters may lie, in percent."
DEPTHS = {f"prism_l{steps}": steps for steps in range(5)}
CORE = [*DEPTHS, "linear_attention", "gated_delta", "attention"]
LIBRARY_PEERS = ["mamba2", "gla", "delta_net", "delta_product", "titans"]
"Layers that flash-linear-attention, an optional package, might have."
PEER_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", {}),
    "gla": ("GatedLinearAttention", {}),
    "delta_net": ("DeltaNet", {}),
    "delta_product": ("GatedDeltaProduct", {"num_householder": 2, "use_forget_gate": False}),
}
"Those that it has: model.peer_layer and model.peer_options. DeltaProduct is its gated form without forgetting."
PEERS = [*LIBRARY_PEERS, "ttt"]


def is_there(name: str, device: str = "cpu") -> bool:
    """Whether a model of that name can be trained here, on that device."""
    return why_absent(name, device) is None


def why_absent(name: str, device: str = "cpu") -> str | None:
    """What a model of CORE or PEERS lacks here; None where it can be trained. `device`: cpu, cuda, cuda:1, ..."""
    if name in LIBRARY_PEERS and name not in PEER_LAYERS:
        return "flash-linear-attention has no such layer"
    if name in PEER_LAYERS and importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (the `peers` extra)"
    if name in PEER_LAYERS and not device.startswith("cuda"):
        return "flash-linear-attention's kernels need a CUDA device"
    if name not in (*DEPTHS, *PEER_LAYERS) and name not in get_args(Mixer):
        return "model.mixer has no choice of that name"
    return None


def choose_models(names: list[str], device: str = "cpu") -> tuple[list[str], list[str]]:
    """Those that can be trained on the device, and those that are known but absent; for no name, CORE and PEERS.

    Raises ValueError for a name that is neither.
    """
    for name in names:
        if name not in (*CORE, *PEERS):
            raise ValueError(f"--models={name} must be a model; use {', '.join(CORE + PEERS)}")
    names = names or CORE + PEERS
    there = [name for name in names if is_there(name, device)]
    return there, [name for name in names if name not in there]


def configure_model(name: str) -> ModelConfig:
    """The configuration of that name, its number of parameters within MATCHED_PCT of LARGEST's.

    Raises ValueError for a mixer that is too large or too coarse for that.
    """
    if name in DEPTHS:
        narrow = replace(LARGEST, solver_steps=DEPTHS[name], mlp_width=1)
    elif name in PEER_LAYERS:
        layer, options = PEER_LAYERS[name]
        narrow = replace(
            LARGEST, mixer="peer", peer_layer=layer, peer_options=dict(options), solver_steps=0, mlp_width=1
        )
    else:
        narrow = replace(LARGEST, mixer=cast(Mixer, name), solver_steps=0, mlp_width=1)
    config = _widen(narrow, count_parameters(LARGEST))
    unlike_pct = 100 * abs(count_parameters(config) / count_parameters(LARGEST) - 1)
    if unlike_pct > MATCHED_PCT:
        raise ValueError(
            f"--models={name} must have {count_parameters(LARGEST):,} parameters within {MATCHED_PCT}%, and comes to "
            f"{count_parameters(config):,} at the best MLP; leave it out"
        )
    return config


def _widen(narrow: ModelConfig, parameters: int) -> ModelConfig:
    per_unit = count_parameters(replace(narrow, mlp_width=narrow.mlp_width + 1)) - count_parameters(narrow)
    missing = round((parameters - count_parameters(narrow)) / per_unit)
    return replace(narrow, mlp_width=max(1, narrow.mlp_width + missing))
