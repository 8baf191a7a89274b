"""Gated RMS norm as one Triton kernel each way; the equation of reference.py.

A program owns BLOCK_ROWS rows at a time, whole: one forward, TILES one after another backward. With n = x / rms,
s = sigmoid(gate), a = dy weight SiLU(gate):

    dx = (a - n mean_V(a n)) / rms,  dgate = dy n weight s (1 + gate (1 - s)),  dweight = sum dy n SiLU(gate)

The backward computes rms again, so that nothing but the inputs is kept for it; each of its programs writes one partial
sum of dweight, and these are added up afterwards in a fixed order.

Dims: N rows, V width, P programs.
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import check_on_gpu
from kernels.gated_norm.reference import check_gated_norm_inputs

MAX_WIDTH = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK_ELEMENTS = 2048  # of a tile: 16 a thread
TILES = 16  # of a backward program: more means fewer partial sums, but fewer programs
NUM_WARPS = 4


@triton.jit
def locate(i_tile, N, V: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Offsets and mask of a tile of rows, and its columns."""
    o_n = i_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_v = tl.arange(0, BLOCK_V)
    return o_n[:, None] * V + o_v[None, :], (o_n < N)[:, None] & (o_v < V)[None, :], o_v


@triton.jit
def compute_scale(b_x, eps, V: tl.constexpr):
    """1 / rms of each row."""
    return tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None]


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    p_x, p_gate, p_weight, p_out, N, eps, V: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """The output of one tile of rows."""
    o_nv, m_nv, o_v = locate(tl.program_id(0).to(tl.int64), N, V, BLOCK_ROWS, BLOCK_V)
    b_x = tl.load(p_x + o_nv, mask=m_nv, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + o_nv, mask=m_nv, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    b_out = b_x * compute_scale(b_x, eps, V) * b_weight * (b_gate * tl.sigmoid(b_gate))
    tl.store(p_out + o_nv, b_out.to(p_out.dtype.element_ty), mask=m_nv)


@triton.jit(do_not_specialize=["N"])
def backward_kernel(
    p_grad_out, p_x, p_gate, p_weight, p_grad_x, p_grad_gate, p_partial,
    N, eps, V: tl.constexpr,
    TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dx and dgate of TILES tiles of rows, and their partial sum of dweight."""
    i_program = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK_V)
    b_weight = tl.load(p_weight + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    b_grad_weight = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    for i_tile in range(TILES):
        o_nv, m_nv, _ = locate(i_program * TILES + i_tile, N, V, BLOCK_ROWS, BLOCK_V)
        b_x = tl.load(p_x + o_nv, mask=m_nv, other=0.0).to(tl.float32)
        b_gate = tl.load(p_gate + o_nv, mask=m_nv, other=0.0).to(tl.float32)
        b_grad = tl.load(p_grad_out + o_nv, mask=m_nv, other=0.0).to(tl.float32)
        b_scale = compute_scale(b_x, eps, V)
        b_normed = b_x * b_scale
        b_sigmoid = tl.sigmoid(b_gate)
        b_silu = b_gate * b_sigmoid
        b_scaled = b_grad * b_normed
        b_grad_weight += b_scaled * b_silu
        b_grad_gate = b_scaled * b_weight * b_sigmoid * (1.0 + b_gate - b_silu)
        tl.store(p_grad_gate + o_nv, b_grad_gate.to(p_grad_gate.dtype.element_ty), mask=m_nv)
        b_grad_normed = b_grad * b_weight * b_silu
        b_shared = (tl.sum(b_grad_normed * b_normed, 1) / V)[:, None]
        b_grad_x = (b_grad_normed - b_normed * b_shared) * b_scale
        tl.store(p_grad_x + o_nv, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_nv)
    tl.store(p_partial + i_program * V + o_v, tl.sum(b_grad_weight, 0), mask=o_v < V)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight_V: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise x (..., V), scale by weight_V, gate by SiLU(gate); the arguments of `gated_rms_norm_reference`, V up to
    1024, fp16, bf16 or fp32, on a CUDA device.

    Differentiable once. Only the inputs are kept for the backward.
    """
    check_gated_norm_inputs(x, gate, weight_V)
    tensors = {"x": x, "gate": gate, "weight_V": weight_V}
    _check_fits_kernel(tensors)
    check_on_gpu("gated_rms_norm", "gated_rms_norm_explicit", tensors)
    return torch.ops.prism.gated_rms_norm(x, gate, weight_V, eps)


def _check_fits_kernel(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            remedy = "cast it, or call gated_rms_norm_explicit"
            raise ValueError(f"{name}.dtype={tensor.dtype} must be one of {DTYPES}; {remedy}")
    V = tensors["weight_V"].shape[0]
    if not 0 < V <= MAX_WIDTH:
        rule = f"must be from 1 to {MAX_WIDTH}"
        raise ValueError(f"weight_V.shape[0]={V} {rule}; change it, or call gated_rms_norm_explicit")


@torch.library.custom_op("prism::gated_rms_norm", mutates_args=())
def _norm_op(x: torch.Tensor, gate: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    out = allocate.allocate(*x.shape, like=x)
    N, V, block_rows, block_v = _choose_blocks(x)
    if N:
        forward_kernel[(triton.cdiv(N, block_rows),)](
            x.contiguous(), gate.contiguous(), weight_V.contiguous(), out, N, eps, V,
            BLOCK_ROWS=block_rows, BLOCK_V=block_v, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


@_norm_op.register_fake
def _(x, gate, weight_V, eps):
    return x.new_empty(x.shape)


@torch.library.custom_op("prism::gated_rms_norm_backward", mutates_args=())
def _norm_backward_op(
    grad_out: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gate and weight."""
    grad_x, grad_gate = allocate.allocate(*x.shape, like=x), allocate.allocate(*gate.shape, like=gate)
    N, V, block_rows, block_v = _choose_blocks(x)
    num_programs = triton.cdiv(N, block_rows * TILES)
    partial_PV = allocate.allocate(num_programs, V, like=x, dtype=torch.float32)
    if num_programs:
        backward_kernel[(num_programs,)](
            grad_out.contiguous(), x.contiguous(), gate.contiguous(), weight_V.contiguous(),
            grad_x, grad_gate, partial_PV, N, eps, V,
            TILES=TILES, BLOCK_ROWS=block_rows, BLOCK_V=block_v, num_warps=NUM_WARPS,
        )  # fmt: skip
    return grad_x, grad_gate, partial_PV.sum(0).to(weight_V.dtype)


@_norm_backward_op.register_fake
def _(grad_out, x, gate, weight_V, eps):
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight_V.new_empty(weight_V.shape)


def _choose_blocks(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows, width, rows of a tile, and the width rounded up to a power of two."""
    V = x.shape[-1]
    block_v = triton.next_power_of_2(V)
    return x.numel() // V, V, max(BLOCK_ELEMENTS // block_v, 1), block_v


def _keep_inputs(ctx, inputs, output):
    x, gate, weight_V, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight_V)


def _differentiate(ctx, grad_out):
    x, gate, weight_V = ctx.saved_tensors
    return *torch.ops.prism.gated_rms_norm_backward(grad_out, x, gate, weight_V, ctx.eps), None


_norm_op.register_autograd(_differentiate, setup_context=_keep_inputs)
