"""Backward kernels of the chunk form for what is written; chunk_bwd.py has the equations and the two that run before:

    erase_grad:  lambda, X, X_l
    write_grad:  dE_l of the pairs from the second on
    solver_grad: the solver's loop backwards, gradients of residual and gains
    key_grad:    gradients of keys
    collect:     gradients of step sizes and log decays, from the sums that the last two leave for each block

Dims as in chunk_fwd.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.prism.chunk_fwd import PRECISION, Decays, Sizes, Solved
from kernels.prism.launch import choose, pad_width
from kernels.prism.tiles import (
    activate_with_slope,
    decay_between,
    load_segments,
    load_tile,
    locate_chunk,
    store_tile,
)

COLLECTED_HEADS = 16


@triton.jit(do_not_specialize=["T", "N", "H"])
def erase_grad_kernel(
    p_start, p_total, p_inverse, p_value, p_write, p_grad_value, p_lambda, p_erased,
    T, N, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: lambda, and what it says of reading each written value through the state, X and X_l."""
    _, i_n, i_b, i_h = locate_chunk(N, H, 1)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c = tl.arange(0, C)
    m_t, m_c = o_c < T - i_n * C, o_c >= 0
    dtype = p_lambda.dtype.element_ty
    b_inverse = load_tile(p_inverse + i_chunk * C * C, o_c, m_c, C, o_c, m_c)
    b_total = tl.load(p_total + i_chunk * C + o_c)
    b_segment = load_segments(p_start + i_token, o_c, m_t, HAS_DOCUMENTS)
    b_decay = decay_between(b_total, b_segment, o_c, True)
    for i_l in tl.static_range(M):
        p_written = p_value + i_chunk * V * C if i_l == 0 else p_write + (i_chunk * (M - 1) + (i_l - 1)) * V * C
        b_erased = tl.zeros((C, C), tl.float32)
        for i_v in tl.static_range((V + BV - 1) // BV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            b_written = load_tile(p_written, o_v, m_v, C, o_c, m_c)
            b_value = load_tile(p_grad_value + i_chunk * V * C, o_v, m_v, C, o_c, m_c)
            b_lambda = tl.dot(tl.trans(b_inverse), tl.trans(b_value), input_precision=PRECISION).to(dtype)
            if i_l == 0:
                store_tile(p_lambda + i_chunk * C * V, b_lambda, o_c, m_c, V, o_v, m_v)
            b_erased = tl.dot(b_lambda, b_written, b_erased, input_precision=PRECISION)
        store_tile(p_erased + (i_chunk * M + i_l) * C * C, b_erased * -b_decay, o_c, m_c, C, o_c, m_c)


@triton.jit(do_not_specialize=["T", "N", "H"])
def write_grad_kernel(
    p_key, p_exit, p_forget, p_attend, p_grad_out, p_grad_value, p_grad_state, p_grad_write,
    T, N, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of values of one chunk and of one pair from the second on: dE_l."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_block, i_n, i_b, i_h = locate_chunk(N, H, NV * (M - 1))
    i_v, i_l = i_block % NV, i_block // NV + 1
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    i_pair = i_chunk * (M - 1) + (i_l - 1)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_t, m_c, m_k, m_v = o_c < T - i_n * C, o_c >= 0, o_k < K, o_v < V
    b_key = load_tile(p_key + ((i_token * M + i_l) * H + i_h) * K, o_c, m_t, M * H * K, o_k, m_k)
    b_grad_state = load_tile(p_grad_state + i_chunk * V * K, o_v, m_v, K, o_k, m_k)
    b_attend = load_tile(p_attend + i_pair * C * C, o_c, m_c, C, o_c, m_c)
    b_grad_out = load_tile(p_grad_out + (i_token * H + i_h) * V, o_c, m_t, H * V, o_v, m_v)
    b_forget = load_tile(p_forget + i_pair * C * C, o_c, m_c, C, o_c, m_c)
    b_value = load_tile(p_grad_value + i_chunk * V * C, o_v, m_v, C, o_c, m_c)
    b_grad = tl.dot(b_key, tl.trans(b_grad_state), input_precision=PRECISION)
    b_grad *= tl.load(p_exit + i_chunk * C + o_c)[:, None]
    b_grad = tl.dot(b_attend, b_grad_out, b_grad, input_precision=PRECISION)
    b_grad = tl.dot(tl.trans(b_forget), tl.trans(b_value), b_grad, input_precision=PRECISION)
    store_tile(p_grad_write + i_pair * C * V, b_grad, o_c, m_c, V, o_v, m_v)


@triton.jit(do_not_specialize=["T", "N", "H", "num_tokens"])
def solver_grad_kernel(
    p_residual, p_gain, p_step, p_lambda, p_grad_write, p_grad_residual, p_grad_gain, p_step_sum,
    T, N, H, num_tokens,
    L: tl.constexpr, M: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One block of values of one chunk: the solver's loop, then backwards from lambda, which is dE_1, and dE_l:
    gradients of residual and gains, and this block's part of those of the step sizes."""
    i_v, i_n, i_b, i_h = locate_chunk(N, H, (V + BV - 1) // BV)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_v = tl.arange(0, C), i_v * BV + tl.arange(0, BV)
    m_t, m_c, m_v = o_c < T - i_n * C, o_c >= 0, o_v < V
    i_value, i_gain = (i_token * H + i_h) * V, (i_token * L * H + i_h) * V
    p_step += i_token * M * H + i_h
    p_step_sum += (i_v * num_tokens + i_token) * M * H + i_h

    b_left = load_tile(p_residual + i_value, o_c, m_t, H * V, o_v, m_v).to(tl.float32)
    lefts, gains, slopes, writes = (), (), (), ()
    for i_l in tl.static_range(M):
        b_write = b_left
        if L > 0:
            b_gain = load_tile(p_gain + i_gain + i_l * H * V, o_c, m_t, L * H * V, o_v, m_v).to(tl.float32)
            b_write, b_slope = activate_with_slope(b_gain * b_left, GELU)
            gains += (b_gain,)
            slopes += (b_slope,)
        lefts += (b_left,)
        writes += (b_write,)
        b_left -= b_write
    b_carried = tl.zeros((C, BV), tl.float32)
    for i_l in tl.static_range(M - 1, -1, -1):
        p_grad = p_lambda + i_chunk * C * V if i_l == 0 else p_grad_write + (i_chunk * (M - 1) + (i_l - 1)) * C * V
        b_grad = load_tile(p_grad, o_c, m_c, V, o_v, m_v).to(tl.float32)
        b_step = tl.load(p_step + i_l * H + o_c * M * H, mask=m_t, other=0.0).to(tl.float32)
        tl.store(p_step_sum + i_l * H + o_c * M * H, tl.sum(b_grad * writes[i_l], 1), mask=m_t)
        b_grad *= b_step[:, None]
        if L > 0:
            b_grad = slopes[i_l] * (b_grad - b_carried)
            store_tile(p_grad_gain + i_gain + i_l * H * V, b_grad * lefts[i_l], o_c, m_t, L * H * V, o_v, m_v)
            b_grad *= gains[i_l]
        b_carried += b_grad
    store_tile(p_grad_residual + i_value, b_carried, o_c, m_t, H * V, o_v, m_v)


@triton.jit(do_not_specialize=["T", "N", "H", "num_tokens"])
def key_grad_kernel(
    p_query, p_key, p_step, p_entry, p_exit,
    p_value, p_write, p_state, p_lambda, p_grad_state, p_erased, p_pair, p_diagonal, p_inside,
    p_grad_key, p_erase_sum, p_inside_sum, p_leaving_sum, p_through_sum,
    T, N, H, num_tokens,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of key columns of one chunk: the gradients of its keys, and sums of their products: for the
    forgetting step, for log decays up to a token (inside), after it (leaving) and of the whole chunk (through)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_n, i_b, i_h = locate_chunk(N, H, NK)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_k = tl.arange(0, C), i_k * BK + tl.arange(0, BK)
    m_t, m_c, m_k = o_c < T - i_n * C, o_c >= 0, o_k < K
    dtype = p_key.dtype.element_ty
    p_key, p_grad_key = p_key + (i_token * M * H + i_h) * K, p_grad_key + (i_token * M * H + i_h) * K
    p_state, p_grad_state = p_state + i_chunk * V * K, p_grad_state + i_chunk * V * K
    p_lambda += i_chunk * C * V

    b_read, b_through = tl.zeros((C, BK), tl.float32), 0.0
    for i_v in tl.static_range(NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < V
        b_state = load_tile(p_state, o_v, m_v, K, o_k, m_k)
        b_grad_state = load_tile(p_grad_state, o_v, m_v, K, o_k, m_k)
        b_lambda = load_tile(p_lambda, o_c, m_c, V, o_v, m_v)
        b_through += tl.sum(b_state.to(tl.float32) * b_grad_state.to(tl.float32))
        b_read = tl.dot(b_lambda, b_state, b_read, input_precision=PRECISION)
    tl.store(p_through_sum + i_chunk * NK + i_k, b_through)
    b_read *= -tl.load(p_entry + i_chunk * C + o_c)[:, None]
    b_query = load_tile(p_query + (i_token * H + i_h) * K, o_c, m_t, H * K, o_k, m_k)
    b_key = load_tile(p_key, o_c, m_t, M * H * K, o_k, m_k)
    b_step = tl.load(p_step + i_token * M * H + i_h + o_c * M * H, mask=m_t, other=0.0).to(tl.float32)
    b_exit = tl.load(p_exit + i_chunk * C + o_c)
    b_forget_key = (b_key.to(tl.float32) * b_step[:, None]).to(dtype)
    b_inside = tl.load(p_inside + i_chunk * C + o_c, mask=m_c & (i_k == 0), other=0.0)
    b_leaving = tl.zeros((C,), tl.float32)
    for i_l in tl.static_range(M - 1, -1, -1):
        p_written = p_value + i_chunk * V * C if i_l == 0 else p_write + (i_chunk * (M - 1) + (i_l - 1)) * V * C
        b_grad = tl.zeros((C, BK), tl.float32)
        for i_v in tl.static_range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            b_written = load_tile(p_written, o_v, m_v, C, o_c, m_c)
            b_grad_state = load_tile(p_grad_state, o_v, m_v, K, o_k, m_k)
            b_grad = tl.dot(tl.trans(b_written), b_grad_state, b_grad, input_precision=PRECISION)
        b_key_l = b_key if i_l == 0 else load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
        b_pair = load_tile(p_pair + (i_chunk * M + i_l) * C * C, o_c, m_c, C, o_c, m_c)
        b_erased = load_tile(p_erased + (i_chunk * M + i_l) * C * C, o_c, m_c, C, o_c, m_c)
        b_grad *= b_exit[:, None]
        b_leaving += tl.sum(b_grad * b_key_l.to(tl.float32), 1)
        b_pairs = tl.dot(tl.trans(b_erased), b_forget_key, input_precision=PRECISION)
        b_pairs = tl.dot(tl.trans(b_pair), b_query, b_pairs, input_precision=PRECISION)
        b_inside -= tl.sum(b_pairs * b_key_l.to(tl.float32), 1)
        b_diagonal = tl.load(p_diagonal + (i_chunk * M + i_l) * C + o_c)
        b_grad += b_pairs + b_diagonal[:, None] * b_query.to(tl.float32)
        b_read = tl.dot(b_erased, b_key_l, b_read, input_precision=PRECISION)
        if i_l == 0:
            b_erase = tl.sum(b_read * b_key.to(tl.float32), 1)
            b_inside += b_erase * b_step
            b_grad += b_read * b_step[:, None]
        store_tile(p_grad_key + i_l * H * K, b_grad, o_c, m_t, M * H * K, o_k, m_k)
    o_vector = (i_k * num_tokens + i_token) * H + i_h + o_c * H
    tl.store(p_erase_sum + o_vector, b_erase, mask=m_t)
    tl.store(p_inside_sum + o_vector, b_inside, mask=m_t)
    tl.store(p_leaving_sum + o_vector, b_leaving, mask=m_t)


@triton.jit(do_not_specialize=["T", "N", "H", "num_tokens"])
def collect_kernel(
    p_carry, p_write_step, p_erase, p_inside, p_leaving, p_through, p_grad_step, p_grad_decay,
    T, N, H, num_tokens,
    M: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    """One chunk of some heads: gradients of step sizes and log decays, from the sums of every block. A token's log
    decay is in what leaves the tokens before it, read one row up: a difference of sums would drown strong decays."""
    i_block, i_n, i_b, _ = locate_chunk(N, 1, (H + BH - 1) // BH)
    o_c, o_h = tl.arange(0, C), i_block * BH + tl.arange(0, BH)
    m_t, m_h = o_c < T - i_n * C, o_h < H
    i_token, o_chunk = i_b * T + i_n * C, (i_b * H + o_h) * N + i_n
    b_inside, b_leaving = tl.zeros((C, BH), tl.float32), tl.zeros((C, BH), tl.float32)
    b_erase, b_through = tl.zeros((C, BH), tl.float32), tl.zeros((BH,), tl.float32)
    for i_k in tl.static_range(NK):
        i_vector = (i_k * num_tokens + i_token) * H
        b_erase += load_tile(p_erase + i_vector, o_c, m_t, H, o_h, m_h)
        b_inside += load_tile(p_inside + i_vector, o_c, m_t, H, o_h, m_h)
        b_leaving += load_tile(p_leaving + i_vector, o_c - 1, m_t & (o_c > 0), H, o_h, m_h)
        b_through += tl.load(p_through + o_chunk * NK + i_k, mask=m_h, other=0.0)
    for i_l in tl.static_range(M):
        b_step = b_erase if i_l == 0 else tl.zeros((C, BH), tl.float32)
        for i_v in tl.static_range(NV):
            p_step_v = p_write_step + ((i_v * num_tokens + i_token) * M + i_l) * H
            b_step += load_tile(p_step_v, o_c, m_t, M * H, o_h, m_h)
        store_tile(p_grad_step + (i_token * M + i_l) * H, b_step, o_c, m_t, M * H, o_h, m_h)
    b_decay = tl.cumsum(b_inside, 0, reverse=True) + tl.cumsum(b_leaving, 0)
    b_decay += (b_through * tl.load(p_carry + o_chunk, mask=m_h, other=0.0))[None, :]
    store_tile(p_grad_decay + i_token * H, b_decay, o_c, m_t, H, o_h, m_h)


class Saved(NamedTuple):
    """What the backward reads of the forward, inputs first."""

    query: torch.Tensor
    key: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor | None
    step_size: torch.Tensor
    document_start: torch.Tensor | None
    decays: Decays
    solved: Solved


class QueryGrads(NamedTuple):
    """Of the queries, and what the later kernels read: the local gradient of V', queries as they read the state,
    strict P'_l, their diagonals, transposed scores of the pairs from the second on, row sums for the log decay."""

    grad_value_PVC: torch.Tensor
    read_query_PCK: torch.Tensor
    query_BTHK: torch.Tensor
    pair_PMCC: torch.Tensor
    diagonal_PMC: torch.Tensor
    attend_PMCC: torch.Tensor
    inside_PC: torch.Tensor


def stand_in_documents(saved: Saved) -> torch.Tensor:
    """What stands for document starts where there are none."""
    return saved.key if saved.document_start is None else saved.document_start


def run_erase_grad(sizes: Sizes, saved: Saved, queries: QueryGrads) -> tuple[torch.Tensor, torch.Tensor]:
    """lambda (P, C, V), and X and X_l (P, M, C, C) without their step sizes."""
    key, solved = saved.key, saved.solved
    grad_lambda = allocate.allocate(sizes.chunks, sizes.C, sizes.V, like=key)
    erased = allocate.allocate(sizes.chunks, sizes.M, sizes.C, sizes.C, like=key)
    launch = choose("erase_grad", sizes.shape(key))
    erase_grad_kernel[(sizes.chunks,)](
        stand_in_documents(saved), saved.decays.total_PC, solved.inverse_PCC, solved.value_PVC,
        solved.write_PMVC, queries.grad_value_PVC, grad_lambda, erased,
        sizes.T, sizes.N, sizes.H, **sizes.widths(), BV=launch.block_v,
        HAS_DOCUMENTS=saved.document_start is not None, PRECISION=PRECISION,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return grad_lambda, erased


def run_write_grad(sizes, saved, grad_out, queries, grad_state) -> torch.Tensor:
    """dE_l (P, M - 1, C, V) of the pairs from the second on."""
    key = saved.key
    grad_write = allocate.allocate(sizes.chunks, sizes.M - 1, sizes.C, sizes.V, like=key)
    if sizes.M > 1:
        launch = choose("write_grad", sizes.shape(key))
        write_grad_kernel[(sizes.blocks(launch) * (sizes.M - 1) * sizes.chunks,)](
            key, saved.decays.exit_PC, saved.solved.forget_PMCC, queries.attend_PMCC, grad_out,
            queries.grad_value_PVC, grad_state, grad_write,
            sizes.T, sizes.N, sizes.H, **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v,
            PRECISION=PRECISION, num_warps=launch.num_warps, maxnreg=launch.max_registers,
        )  # fmt: skip
    return grad_write


def run_solver_grad(sizes, saved, grad_lambda, grad_write, gelu):
    """Gradients of residual and gains, and those of step sizes by block of values."""
    residual, gain = saved.residual, saved.residual if saved.gain is None else saved.gain
    launch = choose("solver_grad", sizes.shape(residual))
    grads = [allocate.allocate(*tensor.shape, like=tensor) for tensor in (residual, gain)]
    steps = allocate.allocate(sizes.blocks(launch), *saved.step_size.shape, like=residual, dtype=torch.float32)
    solver_grad_kernel[(sizes.blocks(launch) * sizes.chunks,)](
        residual, gain, saved.step_size, grad_lambda, grad_write, *grads, steps,
        sizes.T, sizes.N, sizes.H, sizes.B * sizes.T, L=0 if saved.gain is None else sizes.M, M=sizes.M, V=sizes.V,
        C=sizes.C, BV=launch.block_v, GELU=gelu, num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return *grads, steps


class KeyGrads(NamedTuple):
    """Of keys, and by block of key columns the sums that `collect` reads."""

    key_BTMHK: torch.Tensor
    erase_RBTH: torch.Tensor
    inside_RBTH: torch.Tensor
    leaving_RBTH: torch.Tensor
    through_PR: torch.Tensor


def run_key_grad(sizes, saved, queries, grad_state, grad_lambda, erased) -> KeyGrads:
    """Gradients of keys and what those of step sizes and log decays are made of."""
    key, launch, solved = saved.key, choose("key_grad", sizes.shape(saved.key)), saved.solved
    num_blocks = -(-sizes.K // launch.block_k)
    sums = [allocate.allocate(num_blocks, sizes.B, sizes.T, sizes.H, like=key, dtype=torch.float32) for _ in range(3)]
    through = allocate.allocate(sizes.chunks, num_blocks, like=key, dtype=torch.float32)
    grads = KeyGrads(allocate.allocate(*key.shape, like=key), *sums, through)
    key_grad_kernel[(num_blocks * sizes.chunks,)](
        saved.query, key, saved.step_size, saved.decays.entry_PC, saved.decays.exit_PC, solved.value_PVC,
        solved.write_PMVC, solved.state_PVK, grad_lambda, grad_state, erased, queries.pair_PMCC, queries.diagonal_PMC,
        queries.inside_PC, *grads,
        sizes.T, sizes.N, sizes.H, sizes.B * sizes.T, **sizes.widths(), BK=launch.block_k, BV=launch.block_v,
        PRECISION=PRECISION, num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return grads


def collect(sizes: Sizes, saved: Saved, steps: torch.Tensor, keys: KeyGrads) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of step sizes (B, T, M, H) and log decays (B, T, H), summed over blocks, in fp32."""
    grad_step = allocate.allocate(*saved.step_size.shape, like=saved.key, dtype=torch.float32)
    grad_decay = allocate.allocate(sizes.B, sizes.T, sizes.H, like=saved.key, dtype=torch.float32)
    block = min(COLLECTED_HEADS, pad_width(sizes.H, 1))
    collect_kernel[(-(-sizes.H // block) * sizes.B * sizes.N,)](
        saved.decays.carry_P, steps, *keys[1:], grad_step, grad_decay,
        sizes.T, sizes.N, sizes.H, sizes.B * sizes.T, M=sizes.M, C=sizes.C, BH=block,
        NK=keys.through_PR.shape[1], NV=steps.shape[0],
    )  # fmt: skip
    return grad_step, grad_decay
