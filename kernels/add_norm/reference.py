"""A residual addition and the RMS norm of its sum, the definition:

    s = x + added        y = s / sqrt(mean_D s^2 + eps) weight

Dims: D model width.
"""

import torch
import torch.nn.functional as F

from kernels.checks import check_dtype, check_float, check_shape


def add_rms_norm_reference(
    x: torch.Tensor, added: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum (..., D) and its norm, in x's dtype; the norm is that of the rounded sum.

    Raises ValueError on shapes and dtypes that do not fit.
    """
    check_add_norm_inputs(x, added, weight_D)
    total = x + added
    return total, F.rms_norm(total, weight_D.shape, weight_D, eps)


def check_add_norm_inputs(x: torch.Tensor, added: torch.Tensor, weight_D: torch.Tensor) -> None:
    """Raise ValueError unless the tensors fit together."""
    check_float("x", x)
    check_shape("added", added, "x.shape", tuple(x.shape))
    check_dtype("added", added, x.dtype)
    check_shape("weight_D", weight_D, "(D,)", (x.shape[-1],))
    check_dtype("weight_D", weight_D, x.dtype)
