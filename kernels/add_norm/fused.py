"""A residual addition and the RMS norm of its sum in one pass each way; the equation of reference.py.
With n = s / rms, ds the sum's own gradient and a = dy weight:

    dx = dadded = ds + (a - n mean_D(a n)) / rms        dweight = sum dy n

Each program of the backward writes one partial sum of dweight; these are added up afterwards in a fixed order.

Dims: N rows, D width, P programs.
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.add_norm.reference import check_add_norm_inputs
from kernels.checks import check_no_fp64, check_on_gpu

TILE_ELEMENTS, TILES = 2048, 16


@triton.jit(do_not_specialize=["N"])
def add_norm_kernel(
    p_x, p_added, p_weight, p_sum, p_y, N, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile of rows, and their norms."""
    o_n, o_d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    o_tile, m_tile = o_n[:, None] * D + o_d[None, :], (o_n[:, None] < N) & (o_d[None, :] < D)
    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_x += tl.load(p_added + o_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_sum = b_x.to(p_sum.dtype.element_ty)
    tl.store(p_sum + o_tile, b_sum, mask=m_tile)
    b_x = b_sum.to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None] * b_weight
    tl.store(p_y + o_tile, b_y.to(p_y.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["N"])
def add_norm_backward_kernel(
    p_grad_sum, p_grad_y, p_sum, p_weight, p_grad_x, p_partial, N, eps,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx of TILES tiles of rows, and their partial sum of dweight."""
    i_program, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    b_weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    b_grad_weight = tl.zeros((ROWS, BD), tl.float32)
    for i_tile in range(TILES):
        o_n = (i_program * TILES + i_tile) * ROWS + tl.arange(0, ROWS)
        o_tile, m_tile = o_n[:, None] * D + o_d[None, :], (o_n[:, None] < N) & (o_d[None, :] < D)
        b_sum = tl.load(p_sum + o_tile, mask=m_tile, other=0.0).to(tl.float32)
        b_grad_y = tl.load(p_grad_y + o_tile, mask=m_tile, other=0.0).to(tl.float32)
        b_scale = tl.rsqrt(tl.sum(b_sum * b_sum, 1) / D + eps)[:, None]
        b_normed = b_sum * b_scale
        b_grad_weight += b_grad_y * b_normed
        b_grad = b_grad_y * b_weight
        b_grad = (b_grad - b_normed * (tl.sum(b_grad * b_normed, 1) / D)[:, None]) * b_scale
        b_grad += tl.load(p_grad_sum + o_tile, mask=m_tile, other=0.0).to(tl.float32)
        tl.store(p_grad_x + o_tile, b_grad.to(p_grad_x.dtype.element_ty), mask=m_tile)
    tl.store(p_partial + i_program * D + o_d, tl.sum(b_grad_weight, 0), mask=o_d < D)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its norm; arguments and results of `add_rms_norm_reference`.

    Differentiable once. Only the sum is kept for the backward. Raises ValueError for fp64 and off the GPU.
    """
    check_add_norm_inputs(x, added, weight_D)
    check_on_gpu("add_rms_norm", "add_rms_norm_reference", {"x": x, "added": added, "weight_D": weight_D})
    check_no_fp64("x", x, "add_rms_norm_reference")
    return _add_norm(x, added, weight_D, eps)


@torch.library.custom_op("prism::add_rms_norm", mutates_args=())
def _add_norm(
    x: torch.Tensor, added: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total, y = (allocate.allocate(*x.shape, like=x) for _ in range(2))
    N, D, block, rows = _plan(x)
    if N:
        add_norm_kernel[(triton.cdiv(N, rows),)](
            x.contiguous(), added.contiguous(), weight_D, total, y, N, eps, D=D, BD=block, ROWS=rows
        )
    return total, y


@torch.library.custom_op("prism::add_rms_norm_backward", mutates_args=())
def _add_norm_backward(
    grad_sum: torch.Tensor, grad_y: torch.Tensor, total: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of both summands, and of the weight."""
    grad_x = allocate.allocate(*total.shape, like=total)
    N, D, block, rows = _plan(total)
    num_programs = triton.cdiv(N, rows * TILES)
    partial_PD = allocate.allocate(num_programs, D, like=total, dtype=torch.float32)
    if N:
        add_norm_backward_kernel[(num_programs,)](
            grad_sum.contiguous(), grad_y.contiguous(), total, weight_D, grad_x, partial_PD, N, eps,
            D=D, BD=block, ROWS=rows, TILES=TILES,
        )  # fmt: skip
    return grad_x, partial_PD.sum(0).to(weight_D.dtype)


@_add_norm.register_fake
def _(x, added, weight_D, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_add_norm_backward.register_fake
def _(grad_sum, grad_y, total, weight_D, eps):
    return total.new_empty(total.shape), weight_D.new_empty(weight_D.shape)


def _save(ctx, inputs, output):
    _, _, weight_D, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight_D)


def _backward(ctx, grad_sum, grad_y):
    total, weight_D = ctx.saved_tensors
    grad_x, grad_weight_D = _add_norm_backward(grad_sum, grad_y, total, weight_D, ctx.eps)
    return grad_x, grad_x, grad_weight_D, None


_add_norm.register_autograd(_backward, setup_context=_save)


def _plan(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows, width, and the tile: columns and rows."""
    D = x.shape[-1]
    block = triton.next_power_of_2(D)
    return x.numel() // D, D, block, max(1, TILE_ELEMENTS // block)
