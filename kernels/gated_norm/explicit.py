"""Gated RMS norm in plain torch with its own backward; the equation of reference.py.

With n = x / rms, s = sigmoid(gate), a = dy weight SiLU(gate):

    dx = (a - n mean_V(a n)) / rms,  dgate = dy n weight s (1 + gate (1 - s)),  dweight = sum dy n SiLU(gate)
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.checks import compute_dtype_of, narrow
from kernels.gated_norm.reference import check_gated_norm_inputs


def gated_rms_norm_explicit(x: torch.Tensor, gate: torch.Tensor, weight_V: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise x (..., V), scale by weight_V, gate by SiLU(gate); the arguments of `gated_rms_norm_reference`.

    Differentiable once. Only the inputs are kept for the backward.
    """
    check_gated_norm_inputs(x, gate, weight_V)
    return _GatedNorm.apply(x, gate, weight_V, eps)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight_V, eps):
        ctx.save_for_backward(x, gate, weight_V)
        ctx.eps = eps
        dtype = compute_dtype_of(x)
        normed, _ = _normalise(x.to(dtype), eps)
        return narrow(normed.mul_(weight_V.to(dtype)) * F.silu(gate.to(dtype)), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, gate, weight_V = ctx.saved_tensors
        dtype = compute_dtype_of(x)
        normed, scale = _normalise(x.to(dtype), ctx.eps)
        wide_gate, weight = gate.to(dtype), weight_V.to(dtype)
        sigmoid = wide_gate.sigmoid()
        silu = wide_gate * sigmoid
        grad_scaled = grad_out.to(dtype) * normed
        slope = sigmoid.mul_(1 + wide_gate - silu)
        grad_gate = slope.mul_(grad_scaled).mul_(weight)
        grad_weight_V = (grad_scaled * silu).flatten(0, -2).sum(0)
        grad_normed = silu.mul_(weight).mul_(grad_out)
        shared = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = torch.addcmul(grad_normed, normed, shared, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_weight_V.to(weight_V.dtype), None


def _normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div_(x.shape[-1]).add_(eps))
    return x * scale, scale
