"""Causal depthwise convolution and SiLU as one Triton kernel each way; the equation of reference.py.

A program owns BLOCK_D channels of TOKENS tokens of a row. It walks the tokens in order and keeps the last W inputs of
each channel in registers, so that it reads every input once, and W-1 of the program before it. Where a document starts
the kept inputs become zero. With z the sum under SiLU, s = sigmoid(z) and dz = dy s (1 + z (1 - s)):

    dx_s = sum_j weight_j dz_{s+W-1-j}    over tokens of the document of s: W-1 sums are kept in registers, too
    dweight_j = sum_t dz_t x_{t-W+1+j}    one partial sum a program, added up afterwards in a fixed order

The backward computes z again, so that nothing but the inputs is kept for it.

Dims: B batch, T tokens, D width, W conv width, P programs along tokens and batch.
"""

# ruff: noqa: RUF005  (Triton joins tuples, but has no starred ones)

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import check_on_gpu
from kernels.short_conv.reference import check_short_conv_inputs

MIN_WIDTH, MAX_WIDTH = 2, 8
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Launch(NamedTuple):
    """Settings of a kernel. More tokens mean fewer inputs read twice and fewer partial sums, but fewer programs."""

    tokens: int  # of a program
    group: int  # tokens whose loads are in flight together, a divisor of `tokens`
    num_warps: int = 2
    vector_bytes: int = 16  # that a thread loads at once, at most
    max_registers: int | None = None  # of a thread; None leaves them to the compiler


FORWARD = Launch(tokens=64, group=8)
BACKWARD = Launch(tokens=64, group=2, max_registers=168)  # 12 warps a multiprocessor, and nothing spilled
WIDE_BACKWARD = Launch(tokens=64, group=2)  # above W = 4


@triton.jit
def locate(T, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The program's place among all (P of dweight), its row, first token and channels."""
    i_program = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(D, BLOCK_D)
    num_parts = tl.cdiv(T, TOKENS)
    i_part = i_program // num_blocks
    o_d = (i_program % num_blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    return i_part, i_part // num_parts, (i_part % num_parts) * TOKENS, o_d


@triton.jit
def load_weights(p_weight, o_d, m_d, D: tl.constexpr, W: tl.constexpr):
    """The W weights of each channel."""
    weights = ()
    for j in tl.static_range(W):
        weights = weights + (tl.load(p_weight + j * D + o_d, mask=m_d, other=0.0),)
    return weights


@triton.jit
def load_rows(p_row, i_t, T, m_d, D: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tokens' channels from token i_t on, zero beyond the row's end."""
    rows = ()
    for j in tl.static_range(COUNT):
        rows = rows + (tl.load(p_row + i_t * D + j * D, mask=m_d & (i_t + j < T), other=0.0),)
    return rows


@triton.jit
def load_start(p_start, i_t, T):
    """Whether a document starts at token i_t; p_start is that of the row, or None."""
    if p_start is None:
        return tl.full((), False, tl.int1)
    else:
        return tl.load(p_start + i_t, mask=(i_t >= 0) & (i_t < T), other=0) != 0


@triton.jit
def load_window(p_row, p_entry, p_start, i_t, T, m_d, D: tl.constexpr, W: tl.constexpr):
    """The W-1 inputs before token i_t, zero where a document starts after them; p_entry is that of the row, or None."""
    window = ()
    for j in tl.static_range(W - 1):
        i_s = i_t - (W - 1) + j
        b_x = tl.load(p_row + i_s * D, mask=m_d & (i_s >= 0), other=0.0)
        if p_entry is not None:
            b_x += tl.load(p_entry + (i_s + W - 1) * D, mask=m_d & (i_s < 0), other=0.0)
        window = restart(window, load_start(p_start, i_s, T), p_start) + (b_x.to(tl.float32),)
    return window


@triton.jit
def restart(window, is_start, p_start):
    """The window, zero where a document starts."""
    if p_start is None:
        return window
    else:
        kept = ()
        for j in tl.static_range(len(window)):
            kept = kept + (tl.where(is_start, 0.0, window[j]),)
        return kept


@triton.jit
def convolve(taps, weights, W: tl.constexpr):
    """z of one token, from its inputs."""
    b_sum = taps[0] * weights[0]
    for j in tl.static_range(1, W):
        b_sum += taps[j] * weights[j]
    return b_sum


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    p_x, p_weight, p_entry, p_start, p_out,
    T, D: tl.constexpr,
    W: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The output of one program's tokens."""
    _, i_b, i_first, o_d = locate(T, D, TOKENS, BLOCK_D)
    m_d = o_d < D
    p_x += i_b * T * D + o_d
    p_out += i_b * T * D + o_d
    if p_entry is not None:
        p_entry += i_b * (W - 1) * D + o_d
    if p_start is not None:
        p_start += i_b * T
    weights = load_weights(p_weight, o_d, m_d, D, W)
    window = load_window(p_x, p_entry, p_start, i_first, T, m_d, D, W)
    for i_group in range(tl.cdiv(tl.minimum(T - i_first, TOKENS), GROUP)):
        i_t = i_first + i_group * GROUP
        rows = load_rows(p_x, i_t, T, m_d, D, GROUP)
        for j in tl.static_range(GROUP):
            window = restart(window, load_start(p_start, i_t + j, T), p_start)
            taps = window + (rows[j].to(tl.float32),)
            b_sum = convolve(taps, weights, W)
            b_out = (b_sum * tl.sigmoid(b_sum)).to(p_out.dtype.element_ty)
            tl.store(p_out + i_t * D + j * D, b_out, mask=m_d & (i_t + j < T))
            window = taps[1:]


@triton.jit
def differentiate(taps, weights, b_grad_out, W: tl.constexpr):
    """dz of one token, from its inputs and the gradient of its output."""
    b_sum = convolve(taps, weights, W)
    b_sigmoid = tl.sigmoid(b_sum)
    return b_grad_out.to(tl.float32) * b_sigmoid * (1.0 + b_sum * (1.0 - b_sigmoid))


@triton.jit
def spread(pending, alive, weights, b_grad, is_start, p_start, W: tl.constexpr):
    """dx of the W-1 tokens before and of this one after its share, and which of them are of this one's document."""
    sums, same = (), ()
    for j in tl.static_range(W - 1):
        if p_start is None:
            b_reached, m_same = b_grad, alive[j]
        else:
            m_same = alive[j] & (is_start == 0)
            b_reached = tl.where(m_same, b_grad, 0.0)
        sums = sums + (pending[j] + weights[j] * b_reached,)
        same = same + (m_same,)
    return sums + (weights[W - 1] * b_grad,), same + (tl.full((), True, tl.int1),)


@triton.jit
def store_finished(p_grad_x, p_grad_entry, b_grad, i_s, i_first, T, m_d, D: tl.constexpr, W: tl.constexpr):
    """dx of token i_s, unless it is another program's; tokens before the row are the entry's."""
    b_grad_x = b_grad.to(p_grad_x.dtype.element_ty)
    tl.store(p_grad_x + i_s * D, b_grad_x, mask=m_d & (i_s >= i_first) & (i_s < T))
    if p_grad_entry is not None:
        tl.store(p_grad_entry + (i_s + W - 1) * D, b_grad_x, mask=m_d & (i_s < 0))


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    p_grad_out, p_x, p_weight, p_entry, p_start, p_grad_x, p_grad_entry, p_partial,
    T, D: tl.constexpr,
    W: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx of one program's tokens, of the entry before them, and its partial sum of dweight."""
    i_part, i_b, i_first, o_d = locate(T, D, TOKENS, BLOCK_D)
    m_d = o_d < D
    p_x += i_b * T * D + o_d
    p_grad_out += i_b * T * D + o_d
    p_grad_x += i_b * T * D + o_d
    if p_entry is not None:
        p_entry += i_b * (W - 1) * D + o_d
        p_grad_entry += i_b * (W - 1) * D + o_d
    if p_start is not None:
        p_start += i_b * T
    weights = load_weights(p_weight, o_d, m_d, D, W)
    window = load_window(p_x, p_entry, p_start, i_first, T, m_d, D, W)
    pending, alive, grads = (), (), (tl.zeros((BLOCK_D,), tl.float32),)
    for _ in tl.static_range(W - 1):
        pending = pending + (tl.zeros((BLOCK_D,), tl.float32),)
        alive = alive + (tl.full((), True, tl.int1),)
        grads = grads + (tl.zeros((BLOCK_D,), tl.float32),)

    num_groups = tl.cdiv(tl.minimum(T - i_first, TOKENS), GROUP)
    for i_group in range(num_groups):
        i_t = i_first + i_group * GROUP
        rows = load_rows(p_x, i_t, T, m_d, D, GROUP)
        grad_rows = load_rows(p_grad_out, i_t, T, m_d, D, GROUP)
        for j in tl.static_range(GROUP):
            is_start = load_start(p_start, i_t + j, T)
            taps = restart(window, is_start, p_start) + (rows[j].to(tl.float32),)
            b_grad = differentiate(taps, weights, grad_rows[j], W)
            added = ()
            for k in tl.static_range(W):
                added = added + (grads[k] + b_grad * taps[k],)
            sums, same = spread(pending, alive, weights, b_grad, is_start, p_start, W)
            store_finished(p_grad_x, p_grad_entry, sums[0], i_t + j - (W - 1), i_first, T, m_d, D, W)
            window, pending, alive, grads = taps[1:], sums[1:], same[1:], added

    # The next W-1 tokens, another program's, give this program's last tokens their remaining shares.
    i_t = i_first + num_groups * GROUP
    rows = load_rows(p_x, i_t, T, m_d, D, W - 1)
    grad_rows = load_rows(p_grad_out, i_t, T, m_d, D, W - 1)
    for j in tl.static_range(W - 1):
        is_start = load_start(p_start, i_t + j, T)
        taps = restart(window, is_start, p_start) + (rows[j].to(tl.float32),)
        b_grad = differentiate(taps, weights, grad_rows[j], W)
        sums, same = spread(pending, alive, weights, b_grad, is_start, p_start, W)
        store_finished(p_grad_x, p_grad_entry, sums[0], i_t + j - (W - 1), i_first, T, m_d, D, W)
        window, pending, alive = taps[1:], sums[1:], same[1:]
    for j in tl.static_range(W):
        tl.store(p_partial + (i_part * W + j) * D + o_d, grads[j], mask=m_d)


def short_conv(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    *,
    entry_BWD: torch.Tensor | None = None,
    document_start_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve T tokens that follow the window `entry_BWD`; arguments and results of `short_conv_reference`, W from 2
    to 8, fp16, bf16 or fp32, on a CUDA device.

    Differentiable once, in x, weight and entry, through the output and the returned window.
    """
    check_short_conv_inputs(x_BTD, weight_DW, entry_BWD, document_start_BT)
    _check_fits_kernel(x_BTD, weight_DW)
    tensors = {"x_BTD": x_BTD, "weight_DW": weight_DW, "entry_BWD": entry_BWD, "document_start_BT": document_start_BT}
    check_on_gpu("short_conv", "short_conv_shifted", tensors)
    out_BTD = torch.ops.prism.short_conv(x_BTD, weight_DW, entry_BWD, document_start_BT)
    return out_BTD, _take_window(x_BTD, weight_DW.shape[1], entry_BWD, document_start_BT)


def _check_fits_kernel(x_BTD: torch.Tensor, weight_DW: torch.Tensor) -> None:
    for name, tensor in {"x_BTD": x_BTD, "weight_DW": weight_DW}.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name}.dtype={tensor.dtype} must be one of {DTYPES}; cast it, or call short_conv_shifted"
            )
    W = weight_DW.shape[1]
    if not MIN_WIDTH <= W <= MAX_WIDTH:
        rule = f"must be from {MIN_WIDTH} to {MAX_WIDTH}"
        raise ValueError(f"weight_DW.shape[1]={W} {rule}; change it, or call short_conv_shifted")


def _take_window(
    x_BTD: torch.Tensor, W: int, entry_BWD: torch.Tensor | None, document_start_BT: torch.Tensor | None
) -> torch.Tensor:
    """The last W-1 inputs, as a copy that does not keep x alive; zero where a document starts after them."""
    (B, T, D), R = x_BTD.shape, W - 1
    window_BWD = x_BTD[:, max(T - R, 0) :]
    if T < R:
        before_BWD = x_BTD.new_zeros(B, R - T, D) if entry_BWD is None else entry_BWD[:, T:]
        window_BWD = torch.cat([before_BWD, window_BWD], dim=1)
    if document_start_BT is None:
        return window_BWD.clone(memory_format=torch.contiguous_format)
    start_BW = F.pad(document_start_BT[:, max(T - R, 0) :], (max(R - T, 0), 0))
    num_later_BW = F.pad(start_BW[:, 1:].flip(1).cumsum(1).flip(1), (0, 1))
    return window_BWD.masked_fill(num_later_BW[:, :, None] > 0, 0.0)


@torch.library.custom_op("prism::short_conv", mutates_args=())
def _convolve_op(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    entry_BWD: torch.Tensor | None,
    document_start_BT: torch.Tensor | None,
) -> torch.Tensor:
    x_BTD, weight_WD, entry_BWD, start_BT = _lay_out(x_BTD, weight_DW, entry_BWD, document_start_BT)
    out_BTD = allocate.allocate(*x_BTD.shape, like=x_BTD)
    num_programs, settings = _prepare_launch(FORWARD, x_BTD, weight_DW.shape[1])
    T, D = x_BTD.shape[1:]
    if num_programs:
        forward_kernel[(num_programs,)](x_BTD, weight_WD, entry_BWD, start_BT, out_BTD, T, D, **settings)
    return out_BTD


@_convolve_op.register_fake
def _(x_BTD, weight_DW, entry_BWD, document_start_BT):
    return x_BTD.new_empty(x_BTD.shape)


@torch.library.custom_op("prism::short_conv_backward", mutates_args=())
def _convolve_backward_op(
    grad_out_BTD: torch.Tensor,
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    entry_BWD: torch.Tensor | None,
    document_start_BT: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and entry (of no tokens where there is none)."""
    x_BTD, weight_WD, entry_BWD, start_BT = _lay_out(x_BTD, weight_DW, entry_BWD, document_start_BT)
    (B, T, D), W = x_BTD.shape, weight_DW.shape[1]
    launch = BACKWARD if W <= 4 else WIDE_BACKWARD
    num_programs, settings = _prepare_launch(launch, x_BTD, W)
    grad_BTD = allocate.allocate(B, T, D, like=x_BTD)
    grad_BWD = allocate.allocate(B, 0 if entry_BWD is None else W - 1, D, like=x_BTD)
    partial_PWD = allocate.allocate(B * triton.cdiv(T, launch.tokens), W, D, like=weight_WD)
    if num_programs:
        backward_kernel[(num_programs,)](
            grad_out_BTD.contiguous(), x_BTD, weight_WD, entry_BWD, start_BT,
            grad_BTD, None if entry_BWD is None else grad_BWD, partial_PWD, T, D, **settings,
        )  # fmt: skip
    return grad_BTD, partial_PWD.sum(0).t().contiguous().to(weight_DW.dtype), grad_BWD


@_convolve_backward_op.register_fake
def _(grad_out_BTD, x_BTD, weight_DW, entry_BWD, document_start_BT):
    (B, _, D), W = x_BTD.shape, weight_DW.shape[1]
    grad_BWD = x_BTD.new_empty(B, 0 if entry_BWD is None else W - 1, D)
    return x_BTD.new_empty(x_BTD.shape), weight_DW.new_empty(weight_DW.shape), grad_BWD


def _lay_out(x_BTD, weight_DW, entry_BWD, document_start_BT):
    """The inputs as kernels read them: contiguous, the weight transposed and in fp32, booleans as bytes."""
    D, W = weight_DW.shape
    weight_WD = allocate.allocate(W, D, like=weight_DW, dtype=torch.float32).copy_(weight_DW.t())
    entry_BWD = None if entry_BWD is None else entry_BWD.contiguous()
    start_BT = None if document_start_BT is None else document_start_BT.contiguous().view(torch.uint8)
    return x_BTD.contiguous(), weight_WD, entry_BWD, start_BT


def _prepare_launch(launch: Launch, x_BTD: torch.Tensor, W: int) -> tuple[int, dict]:
    """Programs and settings. Above W = 4 a thread holds at most 4 channels, or it runs out of registers."""
    B, T, D = x_BTD.shape
    num_channels = min(launch.vector_bytes // x_BTD.element_size(), 8 if W <= 4 else 4)
    block_d = min(32 * launch.num_warps * num_channels, triton.next_power_of_2(D))
    settings = {"W": W, "TOKENS": launch.tokens, "GROUP": launch.group, "BLOCK_D": block_d}
    settings["num_warps"] = launch.num_warps
    if launch.max_registers is not None:
        settings["maxnreg"] = launch.max_registers
    return B * triton.cdiv(T, launch.tokens) * triton.cdiv(D, block_d), settings


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad_out_BTD):
    x_BTD, weight_DW, entry_BWD, document_start_BT = ctx.saved_tensors
    grad_BTD, grad_DW, grad_BWD = torch.ops.prism.short_conv_backward(
        grad_out_BTD, x_BTD, weight_DW, entry_BWD, document_start_BT
    )
    return grad_BTD, grad_DW, None if entry_BWD is None else grad_BWD, None


_convolve_op.register_autograd(_differentiate, setup_context=_keep_inputs)
