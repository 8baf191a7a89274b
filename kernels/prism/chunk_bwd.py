"""Backward kernels of the chunk form: the adjoint of its lines, which no gradient of the triangular inverse enters.

    query gradients, every chunk at once: P^T dO with P = Gam.(q k^T), P' = (dO V'^T).Gam, P'_l of E_l alike, gamma q,
        dq   = gamma dO S^T + P' k + sum P'_l K_l
    state gradient, last chunk first:     dV' = P^T dO + (e k) dS_next,  dS = gamma_C dS_next + (gamma q)^T dO - w^T dV'
    erase gradients, every chunk at once: lambda = T^T dV', X = -tril(lambda V'^T, -1).Gs, X_l of E_l alike
    write gradients, every chunk at once: dE_l = [Gam.(q K_l^T)]^T dO + F_l^T dV' + (e K_l) dS_next, for l >= 2
    solver gradients, every chunk at once: the loop backwards from dE_1 = lambda and dE_l
    key gradients, every chunk at once:
        y    = X k + sum X_l K_l - gamma lambda S^T                  (gradient of what reads the state, b k)
        Z    = X^T (b k) + P'^T q,  Z_l = X_l^T (b k) + P'_l^T q
        dk   = b y + Z + e V' dS_next^T,  dK_l = Z_l + e E_l dS_next^T
    collection, every chunk at once: row sums of these to gradients of the scalars,
        db_l = rowsum(d_l.dE_l), and for the first pair also rowsum(k.y)
        in   = rowsum(q.dq) + b rowsum(k.y) - rowsum(k.Z) - sum rowsum(K_l.Z_l)
        out  = e rowsum(k.(V' dS_next^T)) + sum e rowsum(K_l.(E_l dS_next^T))
        dlog alpha_t = sum_{i>=t} in_i + sum_{i<t} out_i + gamma_C sum(S.dS_next)

P' and X pass through memory in 16 bits, where their transposes cost nothing: compilers in use get a product with a
transposed accumulator wrong. The diagonals of P' are kept out of `in`, for no decay touches them and their rounding
would drown strongly decayed pairs.

The first two are here, the other five in chunk_bwd_writes.py. Dims as in chunk_fwd.py; gradients of the state are kept
transposed like it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.prism.chunk_bwd_writes import (
    QueryGrads,
    Saved,
    collect,
    run_erase_grad,
    run_key_grad,
    run_solver_grad,
    run_write_grad,
    stand_in_documents,
)
from kernels.prism.chunk_fwd import PRECISION, Sizes
from kernels.prism.launch import choose
from kernels.prism.tiles import (
    decay_between,
    decay_between_transposed,
    load_segments,
    load_tile,
    locate_chunk,
    store_tile,
    store_transposed,
)


@triton.jit(do_not_specialize=["T", "N", "H"])
def query_grad_kernel(
    p_query, p_key, p_start, p_total, p_entry, p_value, p_write, p_state, p_grad_out,
    p_grad_value, p_read_query, p_grad_query, p_pair, p_diagonal, p_attend, p_inside,
    T, N, H, scale,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: the gradient of its queries, and every product that needs dO but not the gradient of a state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    _, i_n, i_b, i_h = locate_chunk(N, H, 1)
    i_chunk, i_token = (i_b * H + i_h) * N + i_n, i_b * T + i_n * C
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_t, m_c, m_k = o_c < T - i_n * C, o_c >= 0, o_k < K
    m_diagonal = o_c[:, None] == o_c[None, :]
    dtype = p_key.dtype.element_ty
    p_key, p_grad_out = p_key + (i_token * M * H + i_h) * K, p_grad_out + (i_token * H + i_h) * V

    b_query = load_tile(p_query + (i_token * H + i_h) * K, o_c, m_t, H * K, o_k, m_k)
    b_total, b_entry = tl.load(p_total + i_chunk * C + o_c), tl.load(p_entry + i_chunk * C + o_c) * scale
    b_segment = load_segments(p_start + i_token, o_c, m_t, HAS_DOCUMENTS)
    b_read_query = b_query.to(tl.float32) * b_entry[:, None]
    store_tile(p_read_query + i_chunk * C * K, b_read_query, o_c, m_c, K, o_k, m_k)
    b_grad_query, b_diagonals = tl.zeros((C, BK), tl.float32), tl.zeros((C, 4), tl.float32)
    o_m = tl.arange(0, 4)[None, :]
    for i_l in tl.static_range(M):
        b_key = load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
        b_attend = tl.dot(b_key, tl.trans(b_query), input_precision=PRECISION) * scale
        b_attend = (b_attend * decay_between_transposed(b_total, b_segment, o_c, False)).to(dtype)
        if i_l > 0:
            p_attend_l = p_attend + (i_chunk * (M - 1) + (i_l - 1)) * C * C
            store_tile(p_attend_l, b_attend, o_c, m_c, C, o_c, m_c)
        p_written = p_value + i_chunk * V * C if i_l == 0 else p_write + (i_chunk * (M - 1) + (i_l - 1)) * V * C
        b_pair = tl.zeros((C, C), tl.float32)
        for i_v in tl.static_range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            b_grad_out = load_tile(p_grad_out, o_c, m_t, H * V, o_v, m_v)
            b_written = load_tile(p_written, o_v, m_v, C, o_c, m_c)
            b_pair = tl.dot(b_grad_out, b_written, b_pair, input_precision=PRECISION)
            if i_l == 0:
                b_local = tl.dot(b_attend, b_grad_out, input_precision=PRECISION)
                store_transposed(p_grad_value + i_chunk * V * C, b_local, o_c, C, o_v, m_v)
                b_state = load_tile(p_state + i_chunk * V * K, o_v, m_v, K, o_k, m_k)
                b_grad_query = tl.dot(b_grad_out, b_state, b_grad_query, input_precision=PRECISION)
        if i_l == 0:
            b_grad_query *= b_entry[:, None]
        b_pair *= scale
        b_diagonal = tl.sum(tl.where(m_diagonal, b_pair, 0.0), 1)
        b_low = (b_pair * decay_between(b_total, b_segment, o_c, True)).to(dtype)
        b_grad_query = tl.dot(b_low, b_key, b_grad_query, input_precision=PRECISION)
        b_diagonals += tl.where(o_m == i_l, b_diagonal[:, None], 0.0)
        store_tile(p_pair + (i_chunk * M + i_l) * C * C, b_low, o_c, m_c, C, o_c, m_c)
        tl.store(p_diagonal + (i_chunk * M + i_l) * C + o_c, b_diagonal)
    tl.store(p_inside + i_chunk * C + o_c, tl.sum(b_grad_query * b_query.to(tl.float32), 1))
    for i_l in tl.static_range(M):
        b_key = load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
        b_diagonal = tl.sum(tl.where(o_m == i_l, b_diagonals, 0.0), 1)
        b_grad_query += b_diagonal[:, None] * b_key.to(tl.float32)
    store_tile(p_grad_query + (i_token * H + i_h) * K, b_grad_query, o_c, m_t, H * K, o_k, m_k)


@triton.jit(do_not_specialize=["T", "N", "H"])
def state_grad_kernel(
    p_read_query, p_key, p_exit, p_carry, p_w, p_grad_out, p_grad_value, p_grad_final, p_grad_state, p_grad_entry,
    T, N, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_FINAL: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of values of one head, last chunk first: the gradient of the entry state. With KEEP it stores that of
    the state after each chunk too and turns P^T dO into dV'."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_v, i_head = (i_program % NV).to(tl.int32), i_program // NV
    i_b, i_h, i_chunk = i_head // H, i_head % H, i_head * N + N - 1
    i_token = i_b * T + (N - 1) * C
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_c, m_k, m_v = o_c >= 0, o_k < K, o_v < V
    dtype = p_key.dtype.element_ty
    p_key, p_grad_out = p_key + (i_token * M * H + i_h) * K, p_grad_out + (i_token * H + i_h) * V
    p_exit, p_carry = p_exit + i_chunk * C, p_carry + i_chunk
    p_w, p_read_query = p_w + i_chunk * C * K, p_read_query + i_chunk * C * K
    p_grad_value, p_grad_state = p_grad_value + i_chunk * V * C, p_grad_state + i_chunk * V * K

    b_grad = tl.zeros((BV, BK), tl.float32)
    if HAS_FINAL:
        b_grad = load_tile(p_grad_final + i_head * V * K, o_v, m_v, K, o_k, m_k).to(tl.float32)
    for i_back in tl.range(0, N, num_stages=STAGES):
        m_t = o_c < T - (N - 1 - i_back) * C
        b_key = load_tile(p_key, o_c, m_t, M * H * K, o_k, m_k)
        b_local = load_tile(p_grad_value, o_v, m_v, C, o_c, m_c)
        b_w = load_tile(p_w, o_c, m_c, K, o_k, m_k)
        b_query = load_tile(p_read_query, o_c, m_c, K, o_k, m_k)
        b_grad_out = load_tile(p_grad_out, o_c, m_t, H * V, o_v, m_v)
        b_exit, b_carry = tl.load(p_exit + o_c), tl.load(p_carry)
        b_low = b_grad.to(dtype)
        if KEEP:
            store_tile(p_grad_state, b_low, o_v, m_v, K, o_k, m_k)
        b_value = tl.dot(b_low, tl.trans(b_key), input_precision=PRECISION)
        b_value = (b_value * b_exit[None, :] + b_local.to(tl.float32)).to(dtype)
        if KEEP:
            store_tile(p_grad_value, b_value, o_v, m_v, C, o_c, m_c)
        b_grad = tl.dot(tl.trans(b_grad_out), b_query, b_grad * b_carry, input_precision=PRECISION)
        b_grad = tl.dot(b_value, b_w, b_grad, input_precision=PRECISION)
        p_key, p_grad_out = p_key - C * M * H * K, p_grad_out - C * H * V
        p_exit, p_carry = p_exit - C, p_carry - 1
        p_w, p_read_query = p_w - C * K, p_read_query - C * K
        p_grad_value, p_grad_state = p_grad_value - V * C, p_grad_state - V * K
    store_tile(p_grad_entry + i_head * V * K, b_grad, o_v, m_v, K, o_k, m_k)


class Gradients(NamedTuple):
    """Gradients of the scan's tensor arguments, contiguous and in their dtypes; of gains, those of the residual for
    L = 0."""

    query: torch.Tensor
    key: torch.Tensor
    residual: torch.Tensor
    gain: torch.Tensor
    step_size: torch.Tensor
    log_decay: torch.Tensor
    entry_state: torch.Tensor


def run_backward(
    saved: Saved, grad_out: torch.Tensor, grad_final: torch.Tensor | None, *, gelu: bool, chunk_tokens: int
) -> Gradients:
    """Gradients of the forward's arguments from those of its output and, if any, of its final state."""
    (B, T, H, K), M, V = saved.query.shape, saved.key.shape[2], saved.residual.shape[3]
    sizes = Sizes(B, T, H, K, V, M, chunk_tokens)
    queries = run_query_grad(sizes, saved, grad_out)
    return run_from_exit(sizes, saved, grad_out, queries, grad_final, gelu=gelu)


def run_from_exit(
    sizes: Sizes,
    saved: Saved,
    grad_out: torch.Tensor,
    queries: QueryGrads,
    grad_final: torch.Tensor | None,
    *,
    gelu: bool,
) -> Gradients:
    """The backward after `run_query_grad`, whose gradient of V' becomes whole."""
    grad_state = allocate.allocate(sizes.chunks, sizes.V, sizes.K, like=saved.key)
    grad_entry = _run_state_grad(sizes, saved, grad_out, queries, grad_final, grad_state)
    grad_lambda, erased = run_erase_grad(sizes, saved, queries)
    grad_write = run_write_grad(sizes, saved, grad_out, queries, grad_state)
    residual, gain, steps = run_solver_grad(sizes, saved, grad_lambda, grad_write, gelu)
    keys = run_key_grad(sizes, saved, queries, grad_state, grad_lambda, erased)
    step_size, log_decay = collect(sizes, saved, steps, keys)
    return Gradients(queries.query_BTHK, keys.key_BTMHK, residual, gain, step_size, log_decay, grad_entry)


def run_query_grad(sizes: Sizes, saved: Saved, grad_out: torch.Tensor) -> QueryGrads:
    """What needs the gradient of the output, but of no state."""
    P, M, C, key, solved = sizes.chunks, sizes.M, sizes.C, saved.key, saved.solved
    grads = QueryGrads(
        allocate.allocate(P, sizes.V, C, like=key),
        allocate.allocate(P, C, sizes.K, like=key),
        allocate.allocate(*saved.query.shape, like=key),
        allocate.allocate(P, M, C, C, like=key),
        allocate.allocate(P, M, C, like=key, dtype=torch.float32),
        allocate.allocate(P, M - 1, C, C, like=key),
        allocate.allocate(P, C, like=key, dtype=torch.float32),
    )
    launch = choose("query_grad", sizes.shape(key))
    query_grad_kernel[(P,)](
        saved.query, key, stand_in_documents(saved), saved.decays.total_PC, saved.decays.entry_PC,
        solved.value_PVC, solved.write_PMVC, solved.state_PVK, grad_out, *grads,
        sizes.T, sizes.N, sizes.H, sizes.K**-0.5, **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v,
        HAS_DOCUMENTS=saved.document_start is not None, PRECISION=PRECISION,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return grads


def summarise_grads(sizes: Sizes, saved: Saved, grad_out: torch.Tensor, queries: QueryGrads) -> torch.Tensor:
    """The gradient (B, H, V, K) of the entry state in fp32, as it is where the final state has none."""
    return _run_state_grad(sizes, saved, grad_out, queries, None, None)


def _run_state_grad(sizes, saved, grad_out, queries, grad_final, grad_state):
    """The gradient of the entry state. Where grad_state is given, those of the states after the chunks are written
    there, and the local gradient of V' becomes whole."""
    decays, key = saved.decays, saved.key
    grad_entry = allocate.allocate(sizes.B, sizes.H, sizes.V, sizes.K, like=key, dtype=torch.float32)
    launch = choose("state_grad", sizes.shape(key))
    state_grad_kernel[(sizes.blocks(launch) * sizes.B * sizes.H,)](
        queries.read_query_PCK, key, decays.exit_PC, decays.carry_P, saved.solved.w_PCK, grad_out,
        queries.grad_value_PVC, grad_entry if grad_final is None else grad_final,
        grad_entry if grad_state is None else grad_state, grad_entry,
        sizes.T, sizes.N, sizes.H, **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v,
        HAS_FINAL=grad_final is not None, KEEP=grad_state is not None, PRECISION=PRECISION, STAGES=launch.num_stages,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return grad_entry
