"""One token of the convolution, for decoding: the window of the last inputs is read once and moved on where it lies.

The equation is that of reference.py, the order of its sum that of fused.py. Dims: B batch, D width, W conv width.
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import check_on_gpu, check_shape
from kernels.short_conv.fused import convolve
from kernels.short_conv.reference import check_short_conv_inputs

BLOCK_D, NUM_WARPS = 256, 4


@triton.jit
def token_kernel(p_x, p_weight, p_window, p_out, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """The output of one program's channels of a row, and their window."""
    i_b, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = i_block * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    p_window += i_b * (W - 1) * D + o_d
    weights, inputs, taps = (), (), ()
    for j in tl.static_range(W):
        weights = weights + (tl.load(p_weight + o_d * W + j, mask=m_d, other=0.0).to(tl.float32),)  # noqa: RUF005
    for j in tl.static_range(W - 1):
        inputs = inputs + (tl.load(p_window + j * D, mask=m_d, other=0.0),)  # noqa: RUF005
    inputs = inputs + (tl.load(p_x + i_b * D + o_d, mask=m_d, other=0.0),)  # noqa: RUF005
    for j in tl.static_range(W):
        taps = taps + (inputs[j].to(tl.float32),)  # noqa: RUF005
    b_sum = convolve(taps, weights, W)
    tl.store(p_out + i_b * D + o_d, (b_sum * tl.sigmoid(b_sum)).to(p_out.dtype.element_ty), mask=m_d)
    for j in tl.static_range(W - 1):
        tl.store(p_window + j * D, inputs[j + 1], mask=m_d)


def short_conv_token(x_BTD: torch.Tensor, weight_DW: torch.Tensor, *, window_BWD: torch.Tensor) -> torch.Tensor:
    """The output (B, 1, D) of one token that follows the window, which then ends with it: at one address, as CUDA
    graphs want. Arguments of `short_conv_reference` with T = 1, without gradients; the window is contiguous.

    Raises ValueError on shapes, dtypes and devices that do not fit, and where a gradient would be recorded.
    """
    check_short_conv_inputs(x_BTD, weight_DW, window_BWD, None)
    (B, _, D), W = x_BTD.shape, weight_DW.shape[1]
    check_shape("x_BTD", x_BTD, "(B, 1, D)", (B, 1, D))
    tensors = {"x_BTD": x_BTD, "weight_DW": weight_DW, "window_BWD": window_BWD}
    check_on_gpu("short_conv_token", "short_conv_shifted", dict(tensors))
    if not window_BWD.is_contiguous():
        raise ValueError(f"window_BWD.stride()={window_BWD.stride()} must be contiguous; give another tensor")
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{name}.requires_grad=True must be False; run under torch.no_grad()")
    out_BTD = allocate.allocate(B, 1, D, like=x_BTD)
    block = min(BLOCK_D, triton.next_power_of_2(D))
    token_kernel[(B, triton.cdiv(D, block))](
        x_BTD.contiguous(), weight_DW.contiguous(), window_BWD, out_BTD, D, W, block, num_warps=NUM_WARPS
    )
    return out_BTD
