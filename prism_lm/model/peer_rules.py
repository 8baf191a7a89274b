"""What a layer of flash-linear-attention (model.mixer=peer) is given of the configuration, and what it cannot do.

Importing this file loads neither torch nor that package.
"""

import importlib.util
from collections.abc import Collection
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from prism_lm.model.config import ModelConfig

PEER_FIELDS = ("peer_layer", "peer_options")
"Of ModelConfig; empty without a peer, as they are in what was recorded before they existed."

SPARED_MARK = "_no_weight_decay"
"Attribute by which layers mark parameters that must not decay, whatever their dims."


def has_peer(config: ModelConfig) -> bool:
    """Whether any layer's mixer is a peer's."""
    return "peer" in config.layer_mixers()


def describe_model(config: ModelConfig) -> dict[str, Any]:
    """The configuration's fields for records that are compared; those of a peer where there is one."""
    return {name: value for name, value in asdict(config).items() if value or name not in PEER_FIELDS}


def check_peer_installed(config: ModelConfig) -> None:
    """Raises ValueError where a peer is asked for and flash-linear-attention is not installed."""
    if has_peer(config) and importlib.util.find_spec("fla") is None:
        raise ValueError("model.mixer=peer must have flash-linear-attention; pip install -e '.[peers]'")


def refuse_peer(config: ModelConfig, asked: str, remedy: str) -> None:
    """Raises ValueError where a peer is asked for what needs a state to go on from, or the model's code elsewhere."""
    if has_peer(config):
        raise ValueError(
            f"{asked} must not go with model.mixer=peer, whose layers read whole rows and keep no state; {remedy}"
        )


def fill_arguments(config: ModelConfig, names: Collection[str], *, layer: int) -> dict[str, Any]:
    """Arguments of a layer's constructor that takes `names`: those our configuration decides, then peer_options.

    expand_k and expand_v count in heads where a layer takes head_dim, else in model widths. A layer that takes
    state_size beside head_dim is a state-space model: its head is as wide as our values, its state as our keys.
    Raises ValueError for an option that is not among `names`.
    """
    _check_options(config, names)
    heads, keys, values, width = config.num_heads, config.key_width, config.value_width, config.model_width
    has_heads = "head_dim" in names
    is_state_space = has_heads and "state_size" in names
    known = {
        "hidden_size": width,
        "num_heads": heads,
        "head_dim": values if is_state_space else keys,
        "expand_k": 1.0 if has_heads else heads * keys / width,
        "expand_v": values / keys if has_heads else heads * values / width,
        "mode": "chunk",
        "layer_idx": layer,
    }
    if is_state_space:
        expand = heads * values / width
        known |= {"state_size": keys, "expand": int(expand) if expand.is_integer() else expand}
    return {name: value for name, value in known.items() if name in names} | config.peer_options


def spell_choices(asked: str, known: Collection[str]) -> str:
    """The names nearest to what was asked for; all of them where none is near."""
    near = {name.lower(): name for name in sorted(known)}
    found = [near[name] for name in get_close_matches(asked.lower(), near, n=4, cutoff=0.5)]
    return ", ".join(found or sorted(known))


def _check_options(config: ModelConfig, names: Collection[str]) -> None:
    for name, value in config.peer_options.items():
        if name == "hidden_size":
            raise ValueError(f"model.peer_options.hidden_size={value} must be left out; model.model_width is that")
        if name not in names:
            raise ValueError(
                f"model.peer_options.{name}={value} must be an argument of {config.peer_layer}; "
                f"use {spell_choices(name, names)}"
            )
