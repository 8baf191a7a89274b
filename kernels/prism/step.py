"""One token of the PRISM recurrence as one Triton kernel, for decoding: the fp32 state is read once and written once.

With k, b the first key and step size (arXiv 2602.10796, eq. 14 to 18), the solver's loop in registers:

    d_l = act(p_l * r_l),  r_{l+1} = r_l - d_l                          l = 1..L  (L = 0: d_1 = r_1)
    S' = alpha S + b (d_1 - alpha S k) k^T + sum_{l>=2} b_l d_l k_l^T   V x K
    o = S' q K^(-1/2)

Each program owns BV rows of one head's state; their K columns lie side by side in memory and in a warp's lanes.

Dims: B batch, H heads, K key width, V value width, L solver steps, M written pairs = max(L, 1).
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import (
    check_at_least,
    check_dtype,
    check_multiple,
    check_num_dims,
    check_on_gpu,
    check_one_of,
    check_shape,
)
from kernels.prism.activation import ACTIVATIONS, Activation
from kernels.prism.tiles import activate

PLAIN = "prism_step_reference"
MAX_WIDTH = 256
BLOCK_V = 8
THREAD_ELEMENTS = 32
NAMES = ("query_BHK", "key_BMHK", "residual_BHV", "gain_BLHV", "step_size_BMH", "log_decay_BH", "state_BHVK")
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _step_kernel(
    p_query, p_key, p_residual, p_gain, p_step_size, p_log_decay, p_state, p_out, p_new_state,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = L if L > 0 else 1
    NUM_BLOCKS: tl.constexpr = V // BV
    i_program = tl.program_id(0)
    i_head = i_program // NUM_BLOCKS
    i_h = i_head % H
    i_b = (i_head // H).to(tl.int64)
    i_head = i_head.to(tl.int64)
    o_v = (i_program % NUM_BLOCKS) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_state = i_head * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_state = tl.load(p_state + o_state, mask=m_k[None, :], other=0.0).to(tl.float32)
    b_alpha = tl.exp(tl.load(p_log_decay + i_head).to(tl.float32))
    b_query = tl.load(p_query + i_head * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_residual = tl.load(p_residual + i_head * V + o_v).to(tl.float32)
    b_next = b_alpha * b_state
    for i_l in tl.static_range(M):
        i_pair = (i_b * M + i_l) * H + i_h
        b_key = tl.load(p_key + i_pair * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_size = tl.load(p_step_size + i_pair).to(tl.float32)
        b_step = b_residual
        if L > 0:
            b_gain = tl.load(p_gain + i_pair * V + o_v).to(tl.float32)
            b_step = activate(b_gain * b_residual, GELU)
            b_residual -= b_step
        if i_l == 0:
            b_first_key, b_first_size, b_first_step = b_key, b_size, b_step
        else:
            b_next += (b_size * b_step)[:, None] * b_key[None, :]
    b_forgotten = b_alpha * tl.sum(b_state * b_first_key[None, :], 1)
    b_next += (b_first_size * (b_first_step - b_forgotten))[:, None] * b_first_key[None, :]
    tl.store(p_new_state + o_state, b_next, mask=m_k[None, :])
    b_out = tl.sum(b_next * b_query[None, :], 1) * (K**-0.5)
    tl.store(p_out + i_head * V + o_v, b_out.to(p_out.dtype.element_ty))


def prism_step(
    query_BHK: torch.Tensor,
    key_BMHK: torch.Tensor,
    residual_BHV: torch.Tensor,
    gain_BLHV: torch.Tensor | None,
    step_size_BMH: torch.Tensor,
    log_decay_BH: torch.Tensor,
    *,
    activation: Activation = "gelu",
    state_BHVK: torch.Tensor,
    out_state_BHVK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the state by one token and read it; the arguments of `prism_step_reference`, without gradients.

    Inputs are fp16, bf16 or fp32, in any mixture; K and V multiples of 16 up to 256. out_state_BHVK: where to write
    the new state, fp32 and contiguous; it may be state_BHVK itself, which then advances in place, at one address, as
    CUDA graphs want. None: a new tensor.

    Returns the output (B, H, V) in query's dtype and the new state in fp32. Raises ValueError on shapes, dtypes and
    devices that do not fit, and where a gradient would be recorded.
    """
    tensors = (query_BHK, key_BMHK, residual_BHV, gain_BLHV, step_size_BMH, log_decay_BH, state_BHVK)
    _check_sizes(*tensors, activation)
    if out_state_BHVK is None:
        out_state_BHVK = allocate.allocate(*state_BHVK.shape, like=state_BHVK, dtype=torch.float32)
    else:
        _check_out_state(out_state_BHVK, state_BHVK)
    _check_dtypes(tensors)
    # The registered operator costs a decode step several times its kernel's time, and only a compiler needs it.
    advance = _advance_registered if torch.compiler.is_compiling() else _advance
    return advance(*tensors, out_state_BHVK, activation == "gelu"), out_state_BHVK


def _advance(
    query_BHK: torch.Tensor,
    key_BMHK: torch.Tensor,
    residual_BHV: torch.Tensor,
    gain_BLHV: torch.Tensor | None,
    step_size_BMH: torch.Tensor,
    log_decay_BH: torch.Tensor,
    state_BHVK: torch.Tensor,
    new_state_BHVK: torch.Tensor,
    is_gelu: bool,
) -> torch.Tensor:
    """Write the new state, return the output."""
    tensors = (query_BHK, key_BMHK, residual_BHV, gain_BLHV, step_size_BMH, log_decay_BH, state_BHVK, new_state_BHVK)
    check_on_gpu("prism_step", PLAIN, dict(zip((*NAMES, "out_state_BHVK"), tensors, strict=True)))
    B, H, V, K = state_BHVK.shape
    gain = None if gain_BLHV is None else gain_BLHV.contiguous()
    out_BHV = allocate.allocate(B, H, V, like=query_BHK)
    BK = 1 << (K - 1).bit_length()
    _step_kernel[(B * H * (V // BLOCK_V),)](
        query_BHK.contiguous(), key_BMHK.contiguous(), residual_BHV.contiguous(), gain,
        step_size_BMH.contiguous(), log_decay_BH.contiguous(), state_BHVK.contiguous(), out_BHV, new_state_BHVK,
        H, K, V, 0 if gain is None else gain.shape[1], BK, BLOCK_V, is_gelu,
        num_warps=max(1, BK * BLOCK_V // (32 * THREAD_ELEMENTS)),
    )  # fmt: skip
    return out_BHV


_advance_registered = torch.library.custom_op("prism::step", _advance, mutates_args=("new_state_BHVK",))


@_advance_registered.register_fake
def _(query, key, residual, gain, step_size, log_decay, state, new_state, is_gelu):
    return torch.empty_like(residual, dtype=query.dtype, memory_format=torch.contiguous_format)


def _check_sizes(
    query_BHK: torch.Tensor,
    key_BMHK: torch.Tensor,
    residual_BHV: torch.Tensor,
    gain_BLHV: torch.Tensor | None,
    step_size_BMH: torch.Tensor,
    log_decay_BH: torch.Tensor,
    state_BHVK: torch.Tensor,
    activation: Activation,
) -> None:
    check_num_dims("query_BHK", query_BHK, "BHK")
    check_num_dims("key_BMHK", key_BMHK, "BMHK")
    check_num_dims("residual_BHV", residual_BHV, "BHV")
    check_one_of("activation", activation, ACTIVATIONS)
    (B, H, K), M, V = query_BHK.shape, key_BMHK.shape[1], residual_BHV.shape[2]
    check_at_least("key_BMHK.shape[1]", M, 1)
    check_multiple("query_BHK.shape[2]", K, 16, MAX_WIDTH)
    check_multiple("residual_BHV.shape[2]", V, 16, MAX_WIDTH)
    check_shape("key_BMHK", key_BMHK, "(B, M, H, K)", (B, M, H, K))
    check_shape("residual_BHV", residual_BHV, "(B, H, V)", (B, H, V))
    check_shape("step_size_BMH", step_size_BMH, "(B, M, H)", (B, M, H))
    check_shape("log_decay_BH", log_decay_BH, "(B, H)", (B, H))
    check_shape("state_BHVK", state_BHVK, "(B, H, V, K)", (B, H, V, K))
    if gain_BLHV is None:
        check_shape("key_BMHK", key_BMHK, "(B, 1, H, K) without gains", (B, 1, H, K))
    else:
        check_shape("gain_BLHV", gain_BLHV, "(B, L=M, H, V)", (B, M, H, V))


def _check_out_state(out_state_BHVK: torch.Tensor, state_BHVK: torch.Tensor) -> None:
    check_shape("out_state_BHVK", out_state_BHVK, "state_BHVK.shape", tuple(state_BHVK.shape))
    check_dtype("out_state_BHVK", out_state_BHVK, torch.float32)
    if not out_state_BHVK.is_contiguous():
        raise ValueError(f"out_state_BHVK.stride()={out_state_BHVK.stride()} must be contiguous; give another tensor")


def _check_dtypes(tensors: tuple[torch.Tensor | None, ...]) -> None:
    is_recording = torch.is_grad_enabled()
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.dtype not in INPUT_DTYPES:
            raise ValueError(f"{name}.dtype={tensor.dtype} must be one of {INPUT_DTYPES}; cast it, or call {PLAIN}")
        if is_recording and tensor.requires_grad:
            raise ValueError(f"{name}.requires_grad=True must be False; call {PLAIN}, or run under torch.no_grad()")
