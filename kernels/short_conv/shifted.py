"""Causal depthwise convolution and SiLU as a sum of W shifted copies of the input; the equation of reference.py.

The backward recomputes the convolution from its inputs, so that nothing but them is kept.

Dims: B batch, T tokens, D width, W conv width, R = T + W - 1 inputs with the window before them.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.checks import compute_dtype_of, narrow
from kernels.short_conv.reference import check_short_conv_inputs


def short_conv_shifted(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    *,
    entry_BWD: torch.Tensor | None = None,
    document_start_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve T tokens that follow the window `entry_BWD`; arguments and results of `short_conv_reference`.

    Differentiable once, in x, weight and entry, through the output and the returned window.
    """
    check_short_conv_inputs(x_BTD, weight_DW, entry_BWD, document_start_BT)
    (B, T, D), W = x_BTD.shape, weight_DW.shape[1]
    before_BWD = x_BTD.new_zeros(B, W - 1, D) if entry_BWD is None else entry_BWD
    inputs_BRD = torch.cat([before_BWD, x_BTD], dim=1) if W > 1 else x_BTD
    window_BWD = inputs_BRD[:, T:]
    if document_start_BT is None:
        return _ShiftedConv.apply(inputs_BRD, weight_DW, None), window_BWD
    document_BR = F.pad(document_start_BT.cumsum(1), (W - 1, 0))
    same_BTW = document_BR.unfold(1, W, 1) == document_BR[:, W - 1 :, None]
    same_BW = same_BTW[:, -1, 1:]
    window_BWD = torch.where(same_BW[:, :, None], window_BWD, torch.zeros_like(window_BWD))
    return _ShiftedConv.apply(inputs_BRD, weight_DW, same_BTW), window_BWD


def _convolve(inputs_BRD: torch.Tensor, weight_DW: torch.Tensor, same_BTW: torch.Tensor | None) -> torch.Tensor:
    W = weight_DW.shape[1]
    T = inputs_BRD.shape[1] - W + 1
    sum_BTD = inputs_BRD[:, W - 1 :] * weight_DW[:, W - 1]
    buffer_BTD = torch.empty_like(sum_BTD)
    for j in range(W - 1):
        sum_BTD.addcmul_(_mask_tap(inputs_BRD[:, j : j + T], same_BTW, j, buffer_BTD), weight_DW[:, j])
    return sum_BTD


def _mask_tap(
    tensor_BTD: torch.Tensor, same_BTW: torch.Tensor | None, j: int, buffer_BTD: torch.Tensor
) -> torch.Tensor:
    """The tensor, zero (in the buffer) at tokens whose j-th input is of another document."""
    if same_BTW is None or j == same_BTW.shape[2] - 1:
        return tensor_BTD
    return torch.mul(tensor_BTD, same_BTW[:, :, j, None], out=buffer_BTD)


class _ShiftedConv(torch.autograd.Function):
    """SiLU of the convolution of (B, R, D) inputs; same_BTW says which of its W inputs are of a token's document."""

    @staticmethod
    def forward(ctx, inputs_BRD, weight_DW, same_BTW):
        ctx.save_for_backward(inputs_BRD, weight_DW, same_BTW)
        dtype = compute_dtype_of(inputs_BRD)
        sum_BTD = _convolve(inputs_BRD.to(dtype), weight_DW.to(dtype), same_BTW)
        return narrow(F.silu(sum_BTD), inputs_BRD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_BTD):
        inputs_BRD, weight_DW, same_BTW = ctx.saved_tensors
        dtype = compute_dtype_of(inputs_BRD)
        wide_BRD, wide_DW = inputs_BRD.to(dtype), weight_DW.to(dtype)
        sum_BTD = _convolve(wide_BRD, wide_DW, same_BTW)
        T, W = sum_BTD.shape[1], weight_DW.shape[1]
        grad_sum_BTD = torch.ops.aten.silu_backward(grad_out_BTD.to(dtype), sum_BTD)
        grad_inputs_BRD, grad_DW = torch.zeros_like(wide_BRD), torch.empty_like(wide_DW)
        for j in range(W):
            reached_BTD = _mask_tap(grad_sum_BTD, same_BTW, j, sum_BTD)
            grad_inputs_BRD[:, j : j + T].addcmul_(reached_BTD, wide_DW[:, j])
            grad_DW[:, j] = torch.mul(reached_BTD, wide_BRD[:, j : j + T], out=sum_BTD).sum((0, 1))
        return grad_inputs_BRD.to(inputs_BRD.dtype), grad_DW.to(weight_DW.dtype), None
