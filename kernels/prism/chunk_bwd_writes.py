"""Backward kernels of the chunk form for what is written: values, the solver's loop and keys. chunk_bwd.py has the
equations, the order and the kernels that run before these.

Dims as in chunk_fwd.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.prism.chunk_fwd import PRECISION, Decays, Sizes, Solved
from kernels.prism.launch import choose
from kernels.prism.tiles import (
    activate,
    activate_with_slope,
    decay_between,
    load_segments,
    load_tile,
    locate_chunk,
    store_tile,
)


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


@triton.jit(do_not_specialize=["T", "N", "H", "num_tokens"])
def write_grad_kernel(
    p_key, p_residual, p_gain, p_step, p_exit, p_forget, p_attend, p_grad_out, p_grad_value, p_grad_state, p_lambda,
    p_grad_residual, p_grad_gain, p_grad_step,
    T, N, H, num_tokens,
    L: tl.constexpr, M: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of values of one chunk: lambda, dE_l, and the solver's loop backwards, recomputed from its inputs."""
    i_v, i_n, i_b, i_h = locate_chunk(N, H, (V + BV - 1) // BV)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_t, m_c, m_k, m_v = o_c < T - i_n * C, o_c >= 0, o_k < K, o_v < V
    p_residual, p_grad_residual = p_residual + (i_token * H + i_h) * V, p_grad_residual + (i_token * H + i_h) * V
    p_step, p_grad_step = p_step + i_token * M * H + i_h, p_grad_step + (i_v * num_tokens + i_token) * M * H + i_h
    if L > 0:
        p_gain, p_grad_gain = p_gain + (i_token * L * H + i_h) * V, p_grad_gain + (i_token * L * H + i_h) * V

    b_residual = load_tile(p_residual, o_c, m_t, H * V, o_v, m_v)
    if M > 1:
        b_value = load_tile(p_grad_value + i_chunk * V * C, o_v, m_v, C, o_c, m_c)
        b_grad_state = load_tile(p_grad_state + i_chunk * V * K, o_v, m_v, K, o_k, m_k)
        b_grad_out = load_tile(p_grad_out + (i_token * H + i_h) * V, o_c, m_t, H * V, o_v, m_v)
        b_exit = tl.load(p_exit + i_chunk * C + o_c)
    b_carried = tl.zeros((C, BV), tl.float32)
    for i_l in tl.static_range(M - 1, -1, -1):
        b_step = tl.load(p_step + i_l * H + o_c * M * H, mask=m_t, other=0.0).to(tl.float32)
        if i_l > 0:
            i_pair = i_chunk * (M - 1) + (i_l - 1)
            p_key_l = p_key + ((i_token * M + i_l) * H + i_h) * K
            b_key = load_tile(p_key_l, o_c, m_t, M * H * K, o_k, m_k)
            b_attend = load_tile(p_attend + i_pair * C * C, o_c, m_c, C, o_c, m_c)
            b_forget = load_tile(p_forget + i_pair * C * C, o_c, m_c, C, o_c, m_c)
        if L > 0:
            b_gain = load_tile(p_gain + i_l * H * V, o_c, m_t, L * H * V, o_v, m_v)
        if i_l == 0:
            b_grad = load_tile(p_lambda + i_chunk * C * V, o_c, m_c, V, o_v, m_v).to(tl.float32)
        else:
            b_grad = tl.dot(b_key, tl.trans(b_grad_state), input_precision=PRECISION) * b_exit[:, None]
            b_grad = tl.dot(b_attend, b_grad_out, b_grad, input_precision=PRECISION)
            b_grad = tl.dot(tl.trans(b_forget), tl.trans(b_value), b_grad, input_precision=PRECISION)
        b_left = b_residual.to(tl.float32)
        if L > 0:
            for i_m in tl.static_range(i_l):
                b_before = load_tile(p_gain + i_m * H * V, o_c, m_t, L * H * V, o_v, m_v).to(tl.float32)
                b_left -= activate(b_before * b_left, GELU)
            b_gain = b_gain.to(tl.float32)
            b_write, b_slope = activate_with_slope(b_gain * b_left, GELU)
        else:
            b_write = b_left
        tl.store(p_grad_step + i_l * H + o_c * M * H, tl.sum(b_grad * b_write, 1), mask=m_t)
        b_grad *= b_step[:, None]
        if L > 0:
            b_slope *= b_grad - b_carried
            store_tile(p_grad_gain + i_l * H * V, b_slope * b_left, o_c, m_t, L * H * V, o_v, m_v)
            b_carried += b_slope * b_gain
        else:
            b_carried = b_grad
    store_tile(p_grad_residual, b_carried, o_c, m_t, H * V, o_v, m_v)


@triton.jit(do_not_specialize=["T", "N", "H", "num_tokens"])
def key_grad_kernel(
    p_query, p_key, p_step, p_entry, p_exit, p_carry,
    p_value, p_write, p_state, p_lambda, p_grad_state, p_erased, p_pair, p_diagonal, p_inside,
    p_grad_key, p_grad_erase, p_grad_decay,
    T, N, H, num_tokens,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of key columns of one chunk: the gradients of its keys, and row sums for step size and log decay."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_n, i_b, i_h = locate_chunk(N, H, (K + BK - 1) // BK)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_k = tl.arange(0, C), i_k * BK + tl.arange(0, BK)
    m_t, m_c, m_k = o_c < T - i_n * C, o_c >= 0, o_k < K
    dtype = p_key.dtype.element_ty
    p_key, p_grad_key = p_key + (i_token * M * H + i_h) * K, p_grad_key + (i_token * M * H + i_h) * K
    p_state, p_grad_state = p_state + i_chunk * V * K, p_grad_state + i_chunk * V * K
    p_lambda += i_chunk * C * V

    b_query = load_tile(p_query + (i_token * H + i_h) * K, o_c, m_t, H * K, o_k, m_k)
    b_key = load_tile(p_key, o_c, m_t, M * H * K, o_k, m_k)
    b_step = tl.load(p_step + i_token * M * H + i_h + o_c * M * H, mask=m_t, other=0.0).to(tl.float32)
    b_entry, b_exit = tl.load(p_entry + i_chunk * C + o_c), tl.load(p_exit + i_chunk * C + o_c)
    b_forget_key = (b_key.to(tl.float32) * b_step[:, None]).to(dtype)
    b_read, b_through = tl.zeros((C, BK), tl.float32), 0.0
    b_inside, b_leaving = tl.load(p_inside + i_chunk * C + o_c), tl.zeros((C,), tl.float32)
    b_inside = tl.where(i_k == 0, b_inside, 0.0)
    for i_l in tl.static_range(M - 1, -1, -1):
        p_written = p_value + i_chunk * V * C if i_l == 0 else p_write + (i_chunk * (M - 1) + (i_l - 1)) * V * C
        b_grad = tl.zeros((C, BK), tl.float32)
        for i_v in tl.static_range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            b_written = load_tile(p_written, o_v, m_v, C, o_c, m_c)
            b_grad_state = load_tile(p_grad_state, o_v, m_v, K, o_k, m_k)
            b_grad = tl.dot(tl.trans(b_written), b_grad_state, b_grad, input_precision=PRECISION)
            if i_l == 0:
                b_state = load_tile(p_state, o_v, m_v, K, o_k, m_k)
                b_through += tl.sum(b_state.to(tl.float32) * b_grad_state.to(tl.float32))
                b_lambda = load_tile(p_lambda, o_c, m_c, V, o_v, m_v)
                b_lambda = (b_lambda.to(tl.float32) * -b_entry[:, None]).to(dtype)
                b_read = tl.dot(b_lambda, b_state, b_read, input_precision=PRECISION)
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
    i_vector = (i_k * num_tokens + i_token) * H + i_h
    tl.store(p_grad_erase + i_vector + o_c * H, b_erase, mask=m_t)
    b_before = tl.sum(tl.where(o_c[:, None] > o_c[None, :], b_leaving[None, :], 0.0), 1)
    b_grad_decay = tl.cumsum(b_inside, 0, reverse=True) + b_before + b_through * tl.load(p_carry + i_chunk)
    tl.store(p_grad_decay + i_vector + o_c * H, b_grad_decay, mask=m_t)


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


def run_write_grad(sizes, saved, grad_out, queries, grad_state, grad_lambda, gelu):
    """Gradients of residual and gains, and those of step sizes by block of values."""
    key, gain, solved = saved.key, saved.residual if saved.gain is None else saved.gain, saved.solved
    launch = choose("write_grad", sizes.shape(key))
    grads = [allocate.allocate(*tensor.shape, like=tensor) for tensor in (saved.residual, gain)]
    steps = allocate.allocate(sizes.blocks(launch), *saved.step_size.shape, like=key, dtype=torch.float32)
    write_grad_kernel[(sizes.blocks(launch) * sizes.chunks,)](
        key, saved.residual, gain, saved.step_size, saved.decays.exit_PC, solved.forget_PMCC,
        queries.attend_PMCC, grad_out, queries.grad_value_PVC, grad_state, grad_lambda, *grads, steps,
        sizes.T, sizes.N, sizes.H, sizes.B * sizes.T, L=0 if saved.gain is None else sizes.M,
        **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v, GELU=gelu,
        PRECISION=PRECISION, num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return *grads, steps


def run_key_grad(sizes, saved, queries, grad_state, grad_lambda, erased):
    """Gradients of keys, and by block of key columns those of the forgetting step and the log decay."""
    key, launch, solved = saved.key, choose("key_grad", sizes.shape(saved.key)), saved.solved
    num_blocks = -(-sizes.K // launch.block_k)
    grad_key = allocate.allocate(*key.shape, like=key)
    sums = [allocate.allocate(num_blocks, sizes.B, sizes.T, sizes.H, like=key, dtype=torch.float32) for _ in range(2)]
    key_grad_kernel[(num_blocks * sizes.chunks,)](
        saved.query, key, saved.step_size, *saved.decays[1:], solved.value_PVC, solved.write_PMVC,
        solved.state_PVK, grad_lambda, grad_state, erased, queries.pair_PMCC, queries.diagonal_PMC, queries.inside_PC,
        grad_key, *sums,
        sizes.T, sizes.N, sizes.H, sizes.B * sizes.T, **sizes.widths(), BK=launch.block_k, BV=launch.block_v,
        PRECISION=PRECISION, num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return grad_key, *sums
