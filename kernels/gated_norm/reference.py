"""Gated RMS norm, the definition, over the last dim V of any leading dims:

y = x / sqrt(mean_V(x^2) + eps) * weight * SiLU(gate)
"""

import torch
import torch.nn.functional as F

from kernels.checks import check_float, check_shape, compute_dtype_of


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight_V: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Normalise x (..., V), scale by weight_V, gate by SiLU(gate (..., V)).

    Computed in fp32 (fp64 for fp64 inputs), returned in x's dtype. Raises ValueError on shapes that do not fit.
    """
    check_gated_norm_inputs(x, gate, weight_V)
    dtype = compute_dtype_of(x)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight_V.to(dtype) * F.silu(gate.to(dtype))).to(x.dtype)


def check_gated_norm_inputs(x: torch.Tensor, gate: torch.Tensor, weight_V: torch.Tensor) -> None:
    """Raise ValueError unless the norm's tensors fit together."""
    check_float("x", x)
    check_shape("gate", gate, "x.shape", tuple(x.shape))
    check_shape("weight_V", weight_V, "(V,)", (x.shape[-1],))
