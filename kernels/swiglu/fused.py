"""The SwiGLU product in one pass, and its gradient in one; the equation of reference.py. With s = sigmoid(gate):

    y = gate s up        dgate = dy up s (1 + gate (1 - s))        dup = dy gate s

Dims: N rows, F inner width.
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import check_no_fp64, check_on_gpu
from kernels.swiglu.reference import check_swiglu_input

ROWS, BLOCK = 8, 256


@triton.jit
def locate_tile(N, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of this program's gates (N, 2 F) and products (N, F), and which exist."""
    i_program, num_blocks = tl.program_id(0).to(tl.int64), tl.cdiv(F, BLOCK)
    o_row = i_program // num_blocks * ROWS + tl.arange(0, ROWS)
    o_f = i_program % num_blocks * BLOCK + tl.arange(0, BLOCK)
    m_tile = (o_row[:, None] < N) & (o_f[None, :] < F)
    return o_row[:, None] * (2 * F) + o_f[None, :], o_row[:, None] * F + o_f[None, :], m_tile


@triton.jit(do_not_specialize=["N"])
def swiglu_kernel(p_gate_up, p_y, N, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of products."""
    o_gate, o_y, m_tile = locate_tile(N, F, ROWS, BLOCK)
    b_gate = tl.load(p_gate_up + o_gate, mask=m_tile, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + F + o_gate, mask=m_tile, other=0.0).to(tl.float32)
    tl.store(p_y + o_y, (b_gate * tl.sigmoid(b_gate) * b_up).to(p_y.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["N"])
def swiglu_backward_kernel(p_gate_up, p_grad_y, p_grad, N, F, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of a tile of gates and ups."""
    o_gate, o_y, m_tile = locate_tile(N, F, ROWS, BLOCK)
    b_gate = tl.load(p_gate_up + o_gate, mask=m_tile, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + F + o_gate, mask=m_tile, other=0.0).to(tl.float32)
    b_grad_y = tl.load(p_grad_y + o_y, mask=m_tile, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_grad_gate = b_grad_y * b_up * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
    tl.store(p_grad + o_gate, b_grad_gate.to(p_grad.dtype.element_ty), mask=m_tile)
    tl.store(p_grad + F + o_gate, (b_grad_y * b_gate * b_sigmoid).to(p_grad.dtype.element_ty), mask=m_tile)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up; argument and result of `swiglu_reference`.

    Differentiable once. Only the input is kept for the backward. Raises ValueError for fp64 and off the GPU.
    """
    check_swiglu_input(gate_up)
    check_on_gpu("swiglu", "swiglu_reference", {"gate_up": gate_up})
    check_no_fp64("gate_up", gate_up, "swiglu_reference")
    return _swiglu(gate_up)


@torch.library.custom_op("prism::swiglu", mutates_args=())
def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up, F = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = allocate.allocate(*gate_up.shape[:-1], F, like=gate_up)
    N, grid = _plan(y)
    if N:
        swiglu_kernel[grid](gate_up, y, N, F, ROWS=ROWS, BLOCK=BLOCK)
    return y


@torch.library.custom_op("prism::swiglu_backward", mutates_args=())
def _swiglu_backward(gate_up: torch.Tensor, grad_y: torch.Tensor) -> torch.Tensor:
    gate_up, grad_y = gate_up.contiguous(), grad_y.contiguous()
    grad = allocate.allocate(*gate_up.shape, like=gate_up)
    N, grid = _plan(grad_y)
    if N:
        swiglu_backward_kernel[grid](gate_up, grad_y, grad, N, grad_y.shape[-1], ROWS=ROWS, BLOCK=BLOCK)
    return grad


@_swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_swiglu_backward.register_fake
def _(gate_up, grad_y):
    return gate_up.new_empty(gate_up.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_y):
    (gate_up,) = ctx.saved_tensors
    return _swiglu_backward(gate_up, grad_y)


_swiglu.register_autograd(_backward, setup_context=_save)


def _plan(y: torch.Tensor) -> tuple[int, tuple[int]]:
    """Rows, and programs to launch."""
    F = y.shape[-1]
    N = y.numel() // F if F else 0
    return N, (triton.cdiv(N, ROWS) * triton.cdiv(F, BLOCK),)
