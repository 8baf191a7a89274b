"""Forward kernels of the chunk form (kernels/README.md), V' written as u - w S with w = T (b gamma k):

    solve, every chunk at once:     the decays, T, -w, and F_l = -T B_l with B_l = b Gs.(k K_l^T), for l >= 2
    write, every chunk at once:     u = T E_1 + sum_{l>=2} F_l E_l, and E_l for l >= 2
    state, one chunk after another: V' = u - w S,  S_next = gamma_C S + k^T (e V') + sum_{l>=2} K_l^T (e E_l)
    output, every chunk at once:    O = gamma q S + Gam.(q k^T) V' + sum_{l>=2} Gam.(q K_l^T) E_l

The state is kept transposed, V x K, and so are u, V' and E_l: the products of the serial loop then take what the last
one left in registers as their first operand.

T B_l is rounded once, after products in fp32 or tf32: rounded apart, T and B_l E_l would not cancel where keys are
alike.

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, C tokens in a chunk,
N chunks of a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.prism.launch import Launch, Shape, choose, pad_width
from kernels.prism.tiles import (
    activate,
    decay_between,
    invert_unit_lower,
    load_segments,
    load_tile,
    locate_chunk,
    store_tile,
    store_transposed,
)

PRECISION = "tf32x3"


@triton.jit(do_not_specialize=["T", "N", "H"])
def solve_kernel(
    p_key, p_step, p_log_decay, p_start, p_total, p_entry, p_exit, p_carry, p_inverse, p_w, p_forget,
    T, N, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: its decays, T, -w and, for the pairs from the second on, F_l."""
    _, i_n, i_b, i_h = locate_chunk(N, H, 1)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_t, m_c, m_k = o_c < T - i_n * C, o_c >= 0, o_k < K
    dtype = p_key.dtype.element_ty

    b_decay = tl.load(p_log_decay + i_token * H + i_h + o_c * H, mask=m_t, other=0.0)
    b_total = tl.cumsum(b_decay.to(p_total.dtype.element_ty), 0)
    b_segment = load_segments(p_start + i_token, o_c, m_t, HAS_DOCUMENTS)
    b_last = tl.sum(tl.where(o_c == C - 1, b_total, 0.0), 0)
    b_entry = tl.exp(tl.where(b_segment == 0, b_total.to(tl.float32), float("-inf")))
    b_exit = tl.exp(tl.where(b_segment == tl.max(b_segment, 0), (b_last - b_total).to(tl.float32), float("-inf")))
    tl.store(p_total + i_chunk * C + o_c, b_total)
    tl.store(p_entry + i_chunk * C + o_c, b_entry)
    tl.store(p_exit + i_chunk * C + o_c, b_exit)
    tl.store(p_carry + i_chunk, tl.sum(tl.where(o_c == C - 1, b_entry, 0.0), 0))

    p_key += (i_token * M * H + i_h) * K
    b_key = load_tile(p_key, o_c, m_t, M * H * K, o_k, m_k)
    b_step = tl.load(p_step + i_token * M * H + i_h + o_c * M * H, mask=m_t, other=0.0).to(tl.float32)
    b_erase = decay_between(b_total, b_segment, o_c, True) * b_step[:, None]
    b_strict = tl.dot(b_key, tl.trans(b_key), input_precision=PRECISION) * b_erase
    b_inverse = invert_unit_lower(b_strict, C, SOLVE_PRECISION)
    for i_l in tl.static_range(1, M):
        b_key_l = load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
        b_forget = tl.dot(b_key, tl.trans(b_key_l), input_precision=PRECISION) * -b_erase
        b_forget = tl.dot(b_inverse, b_forget, input_precision=SOLVE_PRECISION)
        store_tile(p_forget + (i_chunk * (M - 1) + (i_l - 1)) * C * C, b_forget, o_c, m_c, C, o_c, m_c)
    b_inverse = b_inverse.to(dtype)
    store_tile(p_inverse + i_chunk * C * C, b_inverse, o_c, m_c, C, o_c, m_c)
    b_read = (b_key.to(tl.float32) * -(b_step * b_entry)[:, None]).to(dtype)
    b_w = tl.dot(b_inverse, b_read, input_precision=PRECISION)
    store_tile(p_w + i_chunk * C * K, b_w, o_c, m_c, K, o_k, m_k)


@triton.jit(do_not_specialize=["T", "N", "H"])
def write_kernel(
    p_residual, p_gain, p_step, p_inverse, p_forget, p_value, p_write,
    T, N, H,
    L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    GELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of values of one chunk: the solver's loop, E_l for l >= 2 and u, both stored transposed."""
    i_v, i_n, i_b, i_h = locate_chunk(N, H, (V + BV - 1) // BV)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_v = tl.arange(0, C), i_v * BV + tl.arange(0, BV)
    m_t, m_c, m_v = o_c < T - i_n * C, o_c >= 0, o_v < V
    dtype = p_residual.dtype.element_ty
    p_step += i_token * M * H + i_h

    b_residual = load_tile(p_residual + (i_token * H + i_h) * V, o_c, m_t, H * V, o_v, m_v).to(tl.float32)
    b_value = tl.zeros((C, BV), tl.float32)
    for i_l in tl.static_range(M):
        i_pair = i_chunk * (M - 1) + (i_l - 1)
        p_solve = p_inverse + i_chunk * C * C if i_l == 0 else p_forget + i_pair * C * C
        b_solve = load_tile(p_solve, o_c, m_c, C, o_c, m_c)
        b_step = tl.load(p_step + i_l * H + o_c * M * H, mask=m_t, other=0.0).to(tl.float32)
        b_write = b_residual
        if L > 0:
            p_gain_l = p_gain + ((i_token * L + i_l) * H + i_h) * V
            b_gain = load_tile(p_gain_l, o_c, m_t, L * H * V, o_v, m_v).to(tl.float32)
            b_write = activate(b_gain * b_residual, GELU)
            b_residual -= b_write
        # The mask keeps this product out of the layout of the matrix unit's operand: there ptxas 12.9 takes gain and
        # residual, which pass through one place of shared memory in turn, for one value whose square has no sign.
        b_low = tl.where(m_t[:, None], b_write * b_step[:, None], 0.0).to(dtype)
        if i_l > 0:
            store_transposed(p_write + i_pair * V * C, b_low, o_c, C, o_v, m_v)
        b_value = tl.dot(b_solve, b_low, b_value, input_precision=PRECISION)
    store_transposed(p_value + i_chunk * V * C, b_value, o_c, C, o_v, m_v)


@triton.jit(do_not_specialize=["T", "N", "H"])
def state_kernel(
    p_key, p_exit, p_carry, p_w, p_value, p_write, p_entry_state, p_state, p_final_state,
    T, N, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_ENTRY: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of values of one head, chunk after chunk: stores the state before each chunk and turns u into V'."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_v, i_head = (i_program % NV).to(tl.int32), i_program // NV
    i_b, i_h = i_head // H, i_head % H
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_c, m_k, m_v = o_c >= 0, o_k < K, o_v < V
    dtype = p_key.dtype.element_ty
    p_key += (i_b * T * M * H + i_h) * K
    p_exit, p_carry = p_exit + i_head * N * C, p_carry + i_head * N
    p_w, p_value, p_state = p_w + i_head * N * C * K, p_value + i_head * N * V * C, p_state + i_head * N * V * K
    if M > 1:
        p_write += i_head * N * (M - 1) * V * C

    b_state = tl.zeros((BV, BK), tl.float32)
    if HAS_ENTRY:
        b_state = load_tile(p_entry_state + i_head * V * K, o_v, m_v, K, o_k, m_k).to(tl.float32)
    for i_n in tl.range(0, N, num_stages=STAGES):
        m_t = o_c < T - i_n * C
        b_w = load_tile(p_w, o_c, m_c, K, o_k, m_k)
        b_key = load_tile(p_key, o_c, m_t, M * H * K, o_k, m_k)
        b_source = load_tile(p_value, o_v, m_v, C, o_c, m_c)
        b_exit = tl.load(p_exit + o_c)
        b_carry = tl.load(p_carry)
        b_low = b_state.to(dtype)
        store_tile(p_state, b_low, o_v, m_v, K, o_k, m_k)
        b_value = tl.dot(b_low, tl.trans(b_w), input_precision=PRECISION)
        b_value = (b_value + b_source.to(tl.float32)).to(dtype)
        store_tile(p_value, b_value, o_v, m_v, C, o_c, m_c)
        b_kept = (b_value.to(tl.float32) * b_exit[None, :]).to(dtype)
        b_state = tl.dot(b_kept, b_key, b_state * b_carry, input_precision=PRECISION)
        for i_l in tl.static_range(1, M):
            b_write = load_tile(p_write + (i_l - 1) * V * C, o_v, m_v, C, o_c, m_c)
            b_key_l = load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
            b_kept = (b_write.to(tl.float32) * b_exit[None, :]).to(dtype)
            b_state = tl.dot(b_kept, b_key_l, b_state, input_precision=PRECISION)
        p_key += C * M * H * K
        p_exit, p_carry = p_exit + C, p_carry + 1
        p_w, p_value, p_state = p_w + C * K, p_value + V * C, p_state + V * K
        if M > 1:
            p_write += (M - 1) * V * C
    store_tile(p_final_state + i_head * V * K, b_state, o_v, m_v, K, o_k, m_k)


@triton.jit(do_not_specialize=["T", "N", "H"])
def output_kernel(
    p_query, p_key, p_start, p_total, p_entry, p_value, p_write, p_state, p_out,
    T, N, H, scale,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of values of one chunk: what its queries read from the state and from its own writes."""
    i_v, i_n, i_b, i_h = locate_chunk(N, H, (V + BV - 1) // BV)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_t, m_c, m_k, m_v = o_c < T - i_n * C, o_c >= 0, o_k < K, o_v < V
    dtype = p_key.dtype.element_ty

    b_query = load_tile(p_query + (i_token * H + i_h) * K, o_c, m_t, H * K, o_k, m_k)
    b_state = load_tile(p_state + i_chunk * V * K, o_v, m_v, K, o_k, m_k)
    b_total = tl.load(p_total + i_chunk * C + o_c)
    b_segment = load_segments(p_start + i_token, o_c, m_t, HAS_DOCUMENTS)
    b_decay = decay_between(b_total, b_segment, o_c, False)
    b_out = tl.dot(b_query, tl.trans(b_state), input_precision=PRECISION)
    b_out *= tl.load(p_entry + i_chunk * C + o_c)[:, None]
    p_key += (i_token * M * H + i_h) * K
    for i_l in tl.static_range(M):
        p_written = p_value + i_chunk * V * C if i_l == 0 else p_write + (i_chunk * (M - 1) + (i_l - 1)) * V * C
        b_key = load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
        b_written = load_tile(p_written, o_v, m_v, C, o_c, m_c)
        b_score = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * b_decay
        b_out = tl.dot(b_score.to(dtype), tl.trans(b_written), b_out, input_precision=PRECISION)
    store_tile(p_out + (i_token * H + i_h) * V, b_out * scale, o_c, m_t, H * V, o_v, m_v)


class Decays(NamedTuple):
    """Of every chunk (P, C): cumulative log decay, factors from its start and to its end; over all of it (P)."""

    total_PC: torch.Tensor
    entry_PC: torch.Tensor
    exit_PC: torch.Tensor
    carry_P: torch.Tensor


class Prepared(NamedTuple):
    """What no state enters, of every chunk: its decays, T, -w and u; of its pairs from the second on F_l and E_l."""

    decays: Decays
    inverse_PCC: torch.Tensor
    w_PCK: torch.Tensor
    forget_PMCC: torch.Tensor
    value_PVC: torch.Tensor
    write_PMVC: torch.Tensor


class Solved(NamedTuple):
    """Of every chunk: T, -w, V' and the state at its start; of its pairs from the second on E_l and F_l."""

    inverse_PCC: torch.Tensor
    w_PCK: torch.Tensor
    forget_PMCC: torch.Tensor
    value_PVC: torch.Tensor
    write_PMVC: torch.Tensor
    state_PVK: torch.Tensor


class Forward(NamedTuple):
    """What the forward kernels leave; P = B H N chunks."""

    out_BTHV: torch.Tensor
    final_BHVK: torch.Tensor
    decays: Decays
    solved: Solved


class Sizes(NamedTuple):
    """Sizes of one scan. `chunks` is the number of chunks of all rows and heads."""

    B: int
    T: int
    H: int
    K: int
    V: int
    M: int
    C: int

    @property
    def N(self) -> int:
        """Chunks of a row."""
        return -(-self.T // self.C)

    @property
    def chunks(self) -> int:
        """Chunks of all rows and heads."""
        return self.B * self.H * self.N

    def widths(self) -> dict[str, int]:
        """The compile-time sizes that every kernel takes."""
        return {"M": self.M, "K": self.K, "V": self.V, "C": self.C}

    def shape(self, tensor: torch.Tensor) -> Shape:
        """What launches are chosen by."""
        return Shape(self.M, self.K, self.V, tensor.element_size(), self.C)

    @property
    def padded_key(self) -> int:
        """Key columns of a tile that holds whole keys."""
        return pad_width(self.K, self.C)

    def blocks(self, launch: Launch) -> int:
        """Blocks of values."""
        return -(-self.V // launch.block_v)


def run_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor | None,
    step_size: torch.Tensor,
    log_decay: torch.Tensor,
    entry_state: torch.Tensor | None,
    document_start: torch.Tensor | None,
    *,
    gelu: bool,
    chunk_tokens: int,
) -> Forward:
    """Contiguous tensors of `prism_scan` to its results and what the backward reads."""
    (B, T, H, K), M, V = query.shape, key.shape[2], residual.shape[3]
    sizes = Sizes(B, T, H, K, V, M, chunk_tokens)
    prepared = prepare_chunks(sizes, key, residual, gain, step_size, log_decay, document_start, gelu)
    return run_from_entry(sizes, query, key, prepared, entry_state, document_start)


def prepare_chunks(
    sizes: Sizes,
    key: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor | None,
    step_size: torch.Tensor,
    log_decay: torch.Tensor,
    document_start: torch.Tensor | None,
    gelu: bool,
) -> Prepared:
    """The forward up to the states."""
    decays, inverse, w, forget = _solve(sizes, key, step_size, log_decay, document_start)
    value, write = _compute_writes(sizes, residual, gain, step_size, inverse, forget, gelu)
    return Prepared(decays, inverse, w, forget, value, write)


def run_from_entry(
    sizes: Sizes,
    query: torch.Tensor,
    key: torch.Tensor,
    prepared: Prepared,
    entry_state: torch.Tensor | None,
    document_start: torch.Tensor | None,
) -> Forward:
    """The states, and what queries read of them. u becomes V' in place."""
    decays, inverse, w, forget, value, write = prepared
    state, final = _run_state(sizes, key, decays, w, value, write, entry_state)
    out = _read_out(sizes, query, key, decays, value, write, state, document_start)
    return Forward(out, final, decays, Solved(inverse, w, forget, value, write, state))


def _solve(sizes, key, step_size, log_decay, document_start):
    P, M, C = sizes.chunks, sizes.M, sizes.C
    wide = torch.float64 if key.dtype == torch.float32 else torch.float32
    vectors = [allocate.allocate(P, C, like=key, dtype=dtype) for dtype in (wide, torch.float32, torch.float32)]
    decays = Decays(*vectors, allocate.allocate(P, like=key, dtype=torch.float32))
    inverse, w, forget = (allocate.allocate(P, *rest, like=key) for rest in ((C, C), (C, sizes.K), (M - 1, C, C)))
    launch = choose("solve", sizes.shape(key))
    solve_kernel[(P,)](
        key, step_size, log_decay, key if document_start is None else document_start, *decays, inverse, w, forget,
        sizes.T, sizes.N, sizes.H, **sizes.widths(), BK=sizes.padded_key,
        HAS_DOCUMENTS=document_start is not None, PRECISION=PRECISION,
        SOLVE_PRECISION="tf32x3" if key.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return decays, inverse, w, forget


def _compute_writes(sizes, residual, gain, step_size, inverse, forget, gelu):
    value = allocate.allocate(sizes.chunks, sizes.V, sizes.C, like=residual)
    write = allocate.allocate(sizes.chunks, sizes.M - 1, sizes.V, sizes.C, like=residual)
    launch = choose("write", sizes.shape(residual))
    write_kernel[(sizes.blocks(launch) * sizes.chunks,)](
        residual, residual if gain is None else gain, step_size, inverse, forget, value, write,
        sizes.T, sizes.N, sizes.H, L=0 if gain is None else sizes.M, **sizes.widths(), BV=launch.block_v, GELU=gelu,
        PRECISION=PRECISION, num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return value, write


def _run_state(sizes, key, decays, w, value, write, entry_state):
    """States at the chunks' starts and after the last; u becomes V' in place."""
    state = allocate.allocate(sizes.chunks, sizes.V, sizes.K, like=key)
    final = allocate.allocate(sizes.B, sizes.H, sizes.V, sizes.K, like=key, dtype=torch.float32)
    launch = choose("state", sizes.shape(key))
    state_kernel[(sizes.blocks(launch) * sizes.B * sizes.H,)](
        key, decays.exit_PC, decays.carry_P, w, value, write,
        final if entry_state is None else entry_state, state, final,
        sizes.T, sizes.N, sizes.H, **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v,
        HAS_ENTRY=entry_state is not None, PRECISION=PRECISION, STAGES=launch.num_stages,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return state, final


def _read_out(sizes, query, key, decays, value, write, state, document_start):
    out = allocate.allocate(sizes.B, sizes.T, sizes.H, sizes.V, like=key)
    launch = choose("output", sizes.shape(key))
    output_kernel[(sizes.blocks(launch) * sizes.chunks,)](
        query, key, key if document_start is None else document_start, decays.total_PC, decays.entry_PC,
        value, write, state, out,
        sizes.T, sizes.N, sizes.H, sizes.K**-0.5, **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v,
        HAS_DOCUMENTS=document_start is not None, PRECISION=PRECISION,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return out
