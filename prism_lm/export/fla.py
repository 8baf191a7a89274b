"""Gated DeltaNet weights that flash-linear-attention has saved, under our names: the recurrence with L = 0 (arXiv
2412.06464).

Its projections lie one by one where ours lie side by side, its convolutions likewise. Where it shares queries and keys
between several value heads, each of those gets its own copy here, which computes the same. Its embedding enters the
residual stream as it is, ours times D^(1/4), which is divided out; a tied head is untied by that.

Dims: D model width, H heads, K key width, V value width, W conv taps.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism_lm.export.folder import read_settings, read_weights
from prism_lm.model.config import ModelConfig
from prism_lm.model.lm import embedding_scale_of

MODEL_TYPE = "gated_deltanet"
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "norm_eps")
# Settings under which its layer is ours; a folder written before one of them existed has the value here.
REQUIRED: dict[str, object] = {
    "use_gate": True,
    "use_short_conv": True,
    "hidden_act": "swish",
    "output_gate_activation": "swish",
    "allow_neg_eigval": False,
    "attn": None,
    "attnres_block_size": None,
}


def read_fla(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model that a folder of config.json and safetensors holds, and its weights by our names, in their own dtype.

    Raises ValueError for a folder without them, another model type, settings that ours cannot compute, and weights that
    are missing or left over.
    """
    settings = _read_settings(folder)
    found = read_weights(folder)
    head_copies = settings["num_v_heads"] // settings["num_heads"]
    weights = _name_ends(found, settings)
    for layer in range(settings["num_hidden_layers"]):
        weights |= _name_layer(found, layer, head_dim=settings["head_dim"], head_copies=head_copies)
    if found:
        raise ValueError(f"HF_FOLDER={folder} must hold no weights but Gated DeltaNet's, but has {sorted(found)[:3]}")
    return _build_config(settings, weights), weights


def _read_settings(folder: Path) -> dict[str, Any]:
    path, settings = folder / "config.json", read_settings(folder)
    if settings.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{path} must have model_type={MODEL_TYPE}, not {settings.get('model_type')}; other models of "
            "flash-linear-attention have no counterpart here"
        )
    for key in NEEDED:
        if key not in settings:
            raise ValueError(f"{path} must have the key {key}; give the config.json that belongs to the weights")
    for key, value in REQUIRED.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{path} must have {key}={value}, not {settings[key]}; our layer cannot compute that")
    settings["num_v_heads"] = settings.get("num_v_heads") or settings["num_heads"]
    return settings


def _build_config(settings: dict[str, Any], weights: dict[str, Tensor]) -> ModelConfig:
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        model_width=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_v_heads"],
        key_width=settings["head_dim"],
        value_width=weights["blocks.0.mixer.norm.weight"].shape[0],
        mlp_width=weights["blocks.0.mlp.down.weight"].shape[1],
        mixer="gated_delta",
        solver_steps=0,
        solver_rank=0,
        conv_width=weights["blocks.0.mixer.conv.weight"].shape[1],
        tie_embeddings=False,
        norm_eps=settings["norm_eps"],
    )


def _name_ends(found: dict[str, Tensor], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Embedding, last norm and head; what is taken leaves `found`, here and below."""
    embedding = _take(found, "model.embeddings.weight")
    head = embedding if settings.get("tie_word_embeddings") else _take(found, "lm_head.weight")
    if settings.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return {
        "embedding.weight": embedding / embedding_scale_of(settings["hidden_size"]),
        "final_norm.weight": _take(found, "model.norm.weight"),
        "head.weight": head,
    }


def _name_layer(found: dict[str, Tensor], layer: int, *, head_dim: int, head_copies: int) -> dict[str, Tensor]:
    theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"

    def take(name: str) -> Tensor:
        return _take(found, f"{theirs}.{name}")

    def copy_heads(weight: Tensor) -> Tensor:
        """(H K, ...) with the rows of each head repeated for all value heads that share it."""
        return weight.unflatten(0, (-1, head_dim)).repeat_interleave(head_copies, dim=0).flatten(0, 1)

    query, key, value = (take(f"attn.{part}_proj.weight") for part in "qkv")
    query_conv, key_conv, value_conv = (take(f"attn.{part}_conv1d.weight").squeeze(1) for part in "qkv")
    step, decay = take("attn.b_proj.weight"), take("attn.a_proj.weight")
    gate, up = take("mlp.gate_proj.weight"), take("mlp.up_proj.weight")
    return {
        f"{ours}.mixer_norm.weight": take("attn_norm.weight"),
        f"{ours}.mixer.query_key_value.weight": torch.cat([copy_heads(query), copy_heads(key), value]),
        f"{ours}.mixer.conv.weight": torch.cat([copy_heads(query_conv), copy_heads(key_conv), value_conv]),
        f"{ours}.mixer.step_and_decay.weight": torch.cat([step, decay]),
        f"{ours}.mixer.decay.A_log": take("attn.A_log"),
        f"{ours}.mixer.decay.dt_bias": take("attn.dt_bias"),
        f"{ours}.mixer.gate.weight": take("attn.g_proj.weight"),
        f"{ours}.mixer.norm.weight": take("attn.o_norm.weight"),
        f"{ours}.mixer.output.weight": take("attn.o_proj.weight"),
        f"{ours}.mlp_norm.weight": take("mlp_norm.weight"),
        f"{ours}.mlp.gate_up.weight": torch.cat([gate, up]),
        f"{ours}.mlp.down.weight": take("mlp.down_proj.weight"),
    }


def _take(found: dict[str, Tensor], name: str) -> Tensor:
    if name not in found:
        raise ValueError(f"HF_FOLDER must hold the weight {name}; its config.json promises it")
    return found.pop(name)
