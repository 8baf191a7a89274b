"""Folders as flash-linear-attention's save_pretrained leaves them, and what its Gated DeltaNet computes, one token at a
time, written from the paper (arXiv 2412.06464, eq. 10 and figure 1).

Dims: T tokens, D model width, H heads, K key width, V value width.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

SETTINGS = {
    "model_type": "gated_deltanet",
    "hidden_size": 32,
    "num_heads": 2,
    "num_v_heads": None,
    "head_dim": 16,
    "expand_v": 2,
    "num_hidden_layers": 2,
    "conv_size": 4,
    "norm_eps": 1e-6,
    "vocab_size": 50,
    "hidden_act": "swish",
    "output_gate_activation": "swish",
    "use_gate": True,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "attn": None,
    "tie_word_embeddings": False,
}
MLP_WIDTH = 48


def draw_weights(settings: dict, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights by the peer's names."""
    D, H, K = settings["hidden_size"], settings["num_heads"], settings["head_dim"]
    value_heads, V = settings["num_v_heads"] or H, K * settings["expand_v"]
    layer_shapes = {
        "attn_norm.weight": (D,), "mlp_norm.weight": (D,), "attn.o_norm.weight": (V,),
        "attn.A_log": (value_heads,), "attn.dt_bias": (value_heads,),
        "attn.q_proj.weight": (H * K, D), "attn.k_proj.weight": (H * K, D), "attn.v_proj.weight": (value_heads * V, D),
        "attn.a_proj.weight": (value_heads, D), "attn.b_proj.weight": (value_heads, D),
        "attn.g_proj.weight": (value_heads * V, D), "attn.o_proj.weight": (D, value_heads * V),
        "attn.q_conv1d.weight": (H * K, 1, 4), "attn.k_conv1d.weight": (H * K, 1, 4),
        "attn.v_conv1d.weight": (value_heads * V, 1, 4),
        "mlp.gate_proj.weight": (MLP_WIDTH, D), "mlp.up_proj.weight": (MLP_WIDTH, D),
        "mlp.down_proj.weight": (D, MLP_WIDTH),
    }  # fmt: skip
    shapes = {"model.embeddings.weight": (settings["vocab_size"], D), "model.norm.weight": (D,)}
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (settings["vocab_size"], D)
    for layer in range(settings["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    generator = torch.Generator().manual_seed(3)
    scale = {2: settings["hidden_size"] ** -0.5, 1: 1.0, 3: 0.5}
    return {name: torch.randn(*s, generator=generator, dtype=dtype) * scale[len(s)] for name, s in shapes.items()}


def write_folder(folder: Path, settings: dict, weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    names = sorted(weights)
    place = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(place.values())):
        save_file({name: weights[name] for name in names if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return folder


def run_loop(settings: dict, weights: dict[str, Tensor], input_ids_T: Tensor) -> Tensor:
    """Logits (T, vocabulary)."""
    x_TD = weights["model.embeddings.weight"][input_ids_T]
    eps = settings["norm_eps"]
    for layer in range(settings["num_hidden_layers"]):
        own = {n.removeprefix(f"model.layers.{layer}."): w for n, w in weights.items() if f"layers.{layer}." in n}
        x_TD = x_TD + _mix(settings, own, _norm(x_TD, own["attn_norm.weight"], eps))
        h_TD = _norm(x_TD, own["mlp_norm.weight"], eps)
        inner = functional.silu(h_TD @ own["mlp.gate_proj.weight"].T) * (h_TD @ own["mlp.up_proj.weight"].T)
        x_TD = x_TD + inner @ own["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embeddings.weight"])
    return _norm(x_TD, weights["model.norm.weight"], eps) @ head.T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _mix(settings: dict, own: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    query, key, value = (
        _convolve(x_TD @ own[f"attn.{c}_proj.weight"].T, own[f"attn.{c}_conv1d.weight"]) for c in "qkv"
    )
    value_heads = settings["num_v_heads"] or settings["num_heads"]
    copies, V = value_heads // settings["num_heads"], settings["head_dim"] * settings["expand_v"]
    query_THK, key_THK = (
        functional.normalize(part.unflatten(-1, (-1, settings["head_dim"])), dim=-1).repeat_interleave(copies, dim=1)
        for part in (query, key)
    )
    value_THV = value.unflatten(-1, (-1, V))
    beta_TH = torch.sigmoid(x_TD @ own["attn.b_proj.weight"].T)
    rate_TH = functional.softplus(x_TD @ own["attn.a_proj.weight"].T + own["attn.dt_bias"])
    alpha_TH = torch.exp(-own["attn.A_log"].exp() * rate_TH)
    state_HVK, outs = x_TD.new_zeros(value_heads, V, settings["head_dim"]), []
    for q_HK, k_HK, v_HV, beta_H, alpha_H in zip(query_THK, key_THK, value_THV, beta_TH, alpha_TH, strict=True):
        state_HVK = alpha_H[:, None, None] * state_HVK
        error_HV = v_HV - torch.einsum("hvk,hk->hv", state_HVK, k_HK)
        state_HVK = state_HVK + torch.einsum("h,hv,hk->hvk", beta_H, error_HV, k_HK)
        outs.append(torch.einsum("hvk,hk->hv", state_HVK, q_HK) * settings["head_dim"] ** -0.5)
    gate_THV = (x_TD @ own["attn.g_proj.weight"].T).unflatten(-1, (-1, V))
    out_THV = _norm(torch.stack(outs), own["attn.o_norm.weight"], settings["norm_eps"]) * functional.silu(gate_THV)
    return out_THV.flatten(1) @ own["attn.o_proj.weight"].T


def _convolve(x_TC: Tensor, weight_C1W: Tensor) -> Tensor:
    padded = functional.pad(x_TC.T[None], (weight_C1W.shape[-1] - 1, 0))
    return functional.silu(functional.conv1d(padded, weight_C1W, groups=x_TC.shape[1])[0].T)
