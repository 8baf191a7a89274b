"""The chunk form in plain torch on one shard of a row whose other shards are elsewhere (state_passing.py).

The stages are those of chunk_reference.py, each run once. Where its serial loop runs one state, this one runs the maps
from the shard's start to every chunk's, before the entry state is known; then all states are one product. Nothing but
that product and the reading is left when the gather has begun.

Dims as in chunk_reference.py.
"""

import torch
from torch.autograd.function import once_differentiable

from kernels.prism.activation import Activation
from kernels.prism.chunk_reference import (
    Cut,
    Saved,
    compute_cut_grads,
    cut_scan,
    join_chunks,
    prepare_chunks,
    prepare_state_grads,
    prism_scan_chunked,
    read_out,
)
from kernels.prism.reference import check_scan_inputs, check_scan_state
from kernels.prism.state_passing import (
    ShardGroup,
    apply_map,
    place_states,
    run_maps,
    split_map,
    start_entry,
    start_exit_grad,
)


def prism_scan_chunked_sharded(
    query_BTHK: torch.Tensor,
    key_BTMHK: torch.Tensor,
    residual_BTHV: torch.Tensor,
    gain_BTLHV: torch.Tensor | None,
    step_size_BTMH: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    *,
    activation: Activation = "gelu",
    entry_state_BHVK: torch.Tensor | None = None,
    document_start_BT: torch.Tensor | None = None,
    chunk_tokens: int = 64,
    group: ShardGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over a shard's T tokens; the arguments of `prism_scan_chunked`, and the shards of the row.

    Shards may differ in T. entry_state_BHVK is the row's, and so is the final state returned: both are equal on all
    shards. Every shard calls this, and the backward of what it returns, in the same order as the others. The shards'
    gradients add up to those of the sum of what they compute; the entry state's is on the first, zero on the others.

    Returns the shard's output in query's dtype and the row's final state in the dtype of computation. Raises ValueError
    on shapes and dtypes that do not fit.
    """
    tensors = (query_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH)
    if group.count == 1:
        return prism_scan_chunked(
            *tensors, activation=activation, entry_state_BHVK=entry_state_BHVK,
            document_start_BT=document_start_BT, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    check_scan_inputs(*tensors, activation)
    check_scan_state(query_BTHK, residual_BTHV, entry_state_BHVK, document_start_BT, chunk_tokens)
    cut = cut_scan(*tensors, activation, document_start_BT, chunk_tokens)
    if entry_state_BHVK is None:
        (B, _, H, K), V = query_BTHK.shape, residual_BTHV.shape[-1]
        entry_state_BHVK = query_BTHK.new_zeros(B, H, V, K, dtype=cut.query_PCK.dtype)
    out_PCV, final_BHVK = _scan_shard(group, entry_state_BHVK.to(cut.query_PCK.dtype), *cut)
    return join_chunks(out_PCV, query_BTHK), final_BHVK


@torch.compiler.disable
def _scan_shard(group: ShardGroup, entry_BHVK: torch.Tensor, *cut: torch.Tensor | None):
    return _ShardScan.apply(group, entry_BHVK, *cut)


class _ShardScan(torch.autograd.Function):
    """One shard, on the row's entry state (B, H, V, K) and what `Cut` holds: output (P, C, V) and the row's final
    state (B, H, V, K)."""

    @staticmethod
    def forward(ctx, group, entry_BHVK, *cut):
        chunks = prepare_chunks(Cut(*cut))
        ctx.group, (B, H) = group, entry_BHVK.shape[:2]
        maps = run_maps(chunks.step_PKK, chunks.source_PKV, B * H)
        entered = start_entry(maps.whole_GXK.unflatten(0, (B, H)), entry_BHVK, group)()
        out_PCV, saved = read_out(chunks, place_states(maps, entered.entry_BHVK.mT.flatten(0, 1)))
        ctx.save_for_backward(entered.later_RBHKK, *saved.flatten())
        ctx.set_materialize_grads(False)
        return out_PCV, entered.final_BHVK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_PCV, grad_final_BHVK):
        later_RBHKK, *tensors = ctx.saved_tensors  # read once: activation checkpointing allows no second reading
        saved, (B, H) = Saved.from_flat(tuple(tensors)), later_RBHKK.shape[1:3]
        if grad_out_PCV is None:
            grad_out_PCV = torch.zeros_like(saved.value_PJV[:, : saved.erase_PC.shape[1]])
        back_GNKK, source_GNKV = prepare_state_grads(saved, grad_out_PCV, B * H)
        maps = run_maps(back_GNKK.flatten(0, 1), source_GNKV.flatten(0, 1), B * H)
        whole = split_map(maps.whole_GXK.unflatten(0, (B, H)))
        grad_exit_BHVK = start_exit_grad(whole.source_BHVK, grad_final_BHVK, later_RBHKK, ctx.group)()
        grad_next_PKV = place_states(maps, grad_exit_BHVK.mT.flatten(0, 1))
        grad_next_PKV = grad_next_PKV.unflatten(0, (B * H, -1)).flip(1).flatten(0, 1)
        grads = compute_cut_grads(saved, grad_out_PCV, grad_next_PKV)
        if ctx.group.index > 0:
            return None, torch.zeros_like(grad_exit_BHVK), *grads, None
        return None, apply_map(whole, grad_exit_BHVK), *grads, None
