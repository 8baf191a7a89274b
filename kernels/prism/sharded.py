"""The Triton scan on one shard of a row whose other shards are elsewhere (state_passing.py).

The kernels are those of chunk.py and one more, which runs beside N, the shard's state from none, the rows of the
identity to M: K more rows of the same recursion, at the cost of one of its passes and with nothing stored for a chunk.
The backward summarises by the recursion of the state's gradient, nothing stored either.

Nothing is left to compute while a gather runs, either way: V', and through it the output, needs the entry state in all
but the products of E_l, and what follows query_grad_kernel reads whole gradients of V'. Kernels split so that some work
is left would load their tiles twice.

Dims as in chunk_fwd.py; X = K + V rows of (M | N).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import allocate
from kernels.prism.activation import Activation
from kernels.prism.chunk import check_kernel_inputs, choose_chunk, make_contiguous, prism_scan
from kernels.prism.chunk_bwd import run_from_exit, run_query_grad, summarise_grads
from kernels.prism.chunk_bwd_writes import Saved
from kernels.prism.chunk_fwd import PRECISION, Decays, Prepared, Sizes, Solved, prepare_chunks, run_from_entry
from kernels.prism.launch import choose
from kernels.prism.state_passing import ShardGroup, start_entry, start_exit_grad
from kernels.prism.tiles import load_tile, store_tile

PLAIN = "prism_scan_chunked_sharded"


@triton.jit(do_not_specialize=["T", "N", "H"])
def summary_kernel(
    p_key, p_exit, p_carry, p_w, p_value, p_write, p_summary,
    T, N, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head's (M | N), chunk after chunk: of M, from the identity and without sources, or of N,
    from zero and with them."""
    NM: tl.constexpr = (K + BV - 1) // BV
    NUM: tl.constexpr = NM + (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_block, i_head = (i_program % NUM).to(tl.int32), i_program // NUM
    i_b, i_h = i_head // H, i_head % H
    o_c, o_k, o_x = tl.arange(0, C), tl.arange(0, BK), i_block * BV + tl.arange(0, BV)
    o_v = o_x - NM * BV
    m_c, m_k, m_x, m_v = o_c >= 0, o_k < K, o_x < K, (o_v >= 0) & (o_v < V)
    dtype = p_key.dtype.element_ty
    p_key += (i_b * T * M * H + i_h) * K
    p_exit, p_carry = p_exit + i_head * N * C, p_carry + i_head * N
    p_w, p_value = p_w + i_head * N * C * K, p_value + i_head * N * V * C
    if M > 1:
        p_write += i_head * N * (M - 1) * V * C

    b_map = tl.where(m_x[:, None] & (o_x[:, None] == o_k[None, :]), 1.0, 0.0)
    for i_n in tl.range(0, N, num_stages=STAGES):
        m_t = o_c < T - i_n * C
        b_w = load_tile(p_w, o_c, m_c, K, o_k, m_k)
        b_key = load_tile(p_key, o_c, m_t, M * H * K, o_k, m_k)
        b_source = load_tile(p_value, o_v, m_v, C, o_c, m_c)
        b_exit = tl.load(p_exit + o_c)
        b_carry = tl.load(p_carry)
        b_value = tl.dot(b_map.to(dtype), tl.trans(b_w), input_precision=PRECISION)
        b_value = (b_value + b_source.to(tl.float32)).to(dtype)
        b_kept = (b_value.to(tl.float32) * b_exit[None, :]).to(dtype)
        b_map = tl.dot(b_kept, b_key, b_map * b_carry, input_precision=PRECISION)
        for i_l in tl.static_range(1, M):
            b_write = load_tile(p_write + (i_l - 1) * V * C, o_v, m_v, C, o_c, m_c)
            b_key_l = load_tile(p_key + i_l * H * K, o_c, m_t, M * H * K, o_k, m_k)
            b_kept = (b_write.to(tl.float32) * b_exit[None, :]).to(dtype)
            b_map = tl.dot(b_kept, b_key_l, b_map, input_precision=PRECISION)
        p_key += C * M * H * K
        p_exit, p_carry = p_exit + C, p_carry + 1
        p_w, p_value = p_w + C * K, p_value + V * C
        if M > 1:
            p_write += (M - 1) * V * C
    o_row = tl.where(m_x, o_x, K + o_v)
    store_tile(p_summary + i_head * (K + V) * K, b_map, o_row, m_x | m_v, K, o_k, m_k)


def summarise_chunks(sizes: Sizes, key: Tensor, prepared: Prepared) -> Tensor:
    """(M | N) of the shard, (B, H, K + V, K) in fp32; reads u, before the states turn it into V'."""
    summary = allocate.allocate(sizes.B, sizes.H, sizes.K + sizes.V, sizes.K, like=key, dtype=torch.float32)
    launch = choose("state", sizes.shape(key))
    num_blocks = sizes.blocks(launch) - (-sizes.K // launch.block_v)
    summary_kernel[(num_blocks * sizes.B * sizes.H,)](
        key, prepared.decays.exit_PC, prepared.decays.carry_P, prepared.w_PCK, prepared.value_PVC, prepared.write_PMVC,
        summary,
        sizes.T, sizes.N, sizes.H, **sizes.widths(), BK=sizes.padded_key, BV=launch.block_v,
        PRECISION=PRECISION, STAGES=launch.num_stages, num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return summary


def prism_scan_sharded(
    query_BTHK: Tensor,
    key_BTMHK: Tensor,
    residual_BTHV: Tensor,
    gain_BTLHV: Tensor | None,
    step_size_BTMH: Tensor,
    log_decay_BTH: Tensor,
    *,
    activation: Activation = "gelu",
    entry_state_BHVK: Tensor | None = None,
    document_start_BT: Tensor | None = None,
    chunk_tokens: int = 64,
    group: ShardGroup,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a shard's T tokens on the GPU; the arguments of `prism_scan`, and the shards of the row.

    Entry and final state, calls and gradients are as `prism_scan_chunked_sharded` says. A compiler's graph ends before
    the scan and begins again after it. The same inputs give the same bits.

    Raises ValueError on shapes, dtypes and devices that do not fit; `prism_scan_chunked_sharded` takes the rest.
    """
    tensors = (query_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH)
    if group.count == 1:
        return prism_scan(
            *tensors, activation=activation, entry_state_BHVK=entry_state_BHVK,
            document_start_BT=document_start_BT, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    given = (*tensors, entry_state_BHVK, document_start_BT)
    check_kernel_inputs("prism_scan_sharded", PLAIN, given, activation, chunk_tokens)
    chunk = choose_chunk(query_BTHK.dtype, chunk_tokens)
    return _scan_shard(group, activation == "gelu", chunk, *make_contiguous(given))


@torch.compiler.disable
def _scan_shard(group: ShardGroup, gelu: bool, chunk_tokens: int, *given: Tensor | None) -> tuple[Tensor, Tensor]:
    return _ShardScan.apply(group, gelu, chunk_tokens, *given)


class _ShardScan(torch.autograd.Function):
    """One shard, on contiguous tensors: its output and the row's final state."""

    @staticmethod
    def forward(
        ctx, group, gelu, chunk_tokens,
        query, key, residual, gain, step_size, log_decay, entry_state, document_start,
    ):  # fmt: skip
        (B, T, H, K), M, V = query.shape, key.shape[2], residual.shape[3]
        sizes = Sizes(B, T, H, K, V, M, chunk_tokens)
        prepared = prepare_chunks(sizes, key, residual, gain, step_size, log_decay, document_start, gelu)
        entered = start_entry(summarise_chunks(sizes, key, prepared), entry_state, group)()
        forward = run_from_entry(sizes, query, key, prepared, entered.entry_BHVK, document_start)
        ctx.group, ctx.gelu, ctx.sizes = group, gelu, sizes
        ctx.dtypes = step_size.dtype, log_decay.dtype, None if entry_state is None else entry_state.dtype
        ctx.set_materialize_grads(False)
        inputs = (query, key, residual, gain, step_size, document_start)
        ctx.save_for_backward(entered.later_RBHKK, *inputs, *forward.decays, *forward.solved)
        return forward.out_BTHV, entered.final_BHVK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_final):
        later, *tensors = ctx.saved_tensors  # read once: activation checkpointing allows no second reading
        saved = Saved(*tensors[:6], Decays(*tensors[6:10]), Solved(*tensors[10:]))
        grad_out = torch.zeros_like(saved.residual) if grad_out is None else grad_out.contiguous()
        queries = run_query_grad(ctx.sizes, saved, grad_out)
        local = summarise_grads(ctx.sizes, saved, grad_out, queries)
        grad_exit = start_exit_grad(local, grad_final, later, ctx.group)()
        grads = run_from_exit(ctx.sizes, saved, grad_out, queries, grad_exit, gelu=ctx.gelu)
        step_dtype, decay_dtype, entry_dtype = ctx.dtypes
        grad_entry = grads.entry_state if ctx.group.index == 0 else torch.zeros_like(grads.entry_state)
        return (
            None, None, None, *grads[:3], None if saved.gain is None else grads.gain,
            grads.step_size.to(step_dtype), grads.log_decay.to(decay_dtype),
            None if entry_dtype is None else grad_entry.to(entry_dtype), None,
        )  # fmt: skip
