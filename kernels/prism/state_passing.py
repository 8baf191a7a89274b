"""Passing the state of a row that is cut in shards: a run of tokens is an affine map of the state at its start,

    S_out = S_in M + N,    M = prod_t alpha_t (I - b_t k_t k_t^T),    N: what the run makes of a zero state,

with k, b the first key and step size, so M is the same for every number of solver steps; a document start makes it 0.
Maps compose to (M1 M2, N1 M2 + N2), and gradients run back by dS_in = dS_out M^T + R, R being the gradient of the state
at a shard's start where that at its end has none. Each shard gathers the others' maps once forward, R and what it was
given as gradient of the row's final state once backward, and then folds what precedes or follows it by itself.

Folds multiply and carry in fp64 and round each result once to the maps' dtype: an fp32 product is TF32 wherever that is
switched on, by a setting of the whole process, and TF32 and bf16 both drift. They are a few K x K products a head.

Dims: R shards of a row, B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from kernels.prism.activation import Activation
from kernels.prism.chunk_reference import cut_scan, prepare_chunks, run_states
from kernels.prism.reference import check_scan_inputs, check_scan_state


class AffineMap(NamedTuple):
    """S_out = S_in M + N, states V x K, in fp32 (fp64 in fp64). Maps of R shards have R before their dims."""

    transition_BHKK: torch.Tensor  # M
    source_BHVK: torch.Tensor  # N


class ShardGroup(Protocol):
    """The shards of one row, seen from one of them."""

    @property
    def index(self) -> int:
        """This shard's place in its row, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many shards the row has."""
        ...

    def start_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to gather the shards' payloads, all of one shape and dtype; what is returned waits and gives them
        stacked by place (count, *payload.shape). Every shard calls it, in the same order."""
        ...


def compose(first: AffineMap, second: AffineMap) -> AffineMap:
    """The map of two runs of tokens, one after the other."""
    next_transition_BHKK = second.transition_BHKK.double()
    transition_BHKK = first.transition_BHKK.double() @ next_transition_BHKK
    source_BHVK = first.source_BHVK.double() @ next_transition_BHKK + second.source_BHVK
    return AffineMap(transition_BHKK.to(first.transition_BHKK.dtype), source_BHVK.to(first.source_BHVK.dtype))


def apply_map(map_: AffineMap, state_BHVK: torch.Tensor) -> torch.Tensor:
    """The state after a run of tokens, in the map's dtype, from that before it."""
    state_BHVK = state_BHVK.double() @ map_.transition_BHKK.double() + map_.source_BHVK
    return state_BHVK.to(map_.source_BHVK.dtype)


def fold_entries(maps: AffineMap, entry_state_BHVK: torch.Tensor | None) -> torch.Tensor:
    """States (R + 1, B, H, V, K) before each of R shards and after the last, from the row's entry state (None: 0)."""
    transition_RBHKK, source_RBHVK = (tensor.double() for tensor in maps)
    state_BHVK = torch.zeros_like(source_RBHVK[0]) if entry_state_BHVK is None else entry_state_BHVK.double()
    states = [state_BHVK]
    for transition_BHKK, source_BHVK in zip(transition_RBHKK, source_RBHVK, strict=True):
        states.append(states[-1] @ transition_BHKK + source_BHVK)
    return torch.stack(states).to(maps.source_BHVK.dtype)


def fold_exit_grads(
    transition_RBHKK: torch.Tensor, grad_entry_RBHVK: torch.Tensor, grad_final_BHVK: torch.Tensor | None
) -> torch.Tensor:
    """Gradients of the states of `fold_entries`, at their places (R + 1, B, H, V, K): [r + 1] is that of the state
    after shard r, [0] that of the row's entry state.

    grad_entry_RBHVK: of each shard's entry state, as it is where the shard's final state has none. grad_final_BHVK: of
    the row's final state (None: zero).
    """
    transposed_RBHKK, local_RBHVK = transition_RBHKK.double().mT, grad_entry_RBHVK.double()
    if grad_final_BHVK is None:
        grad_final_BHVK = local_RBHVK.new_zeros(local_RBHVK.shape[1:])
    grads = [grad_final_BHVK.double()]
    for transposed_BHKK, local_BHVK in zip(transposed_RBHKK.flip(0), local_RBHVK.flip(0), strict=True):
        grads.append(grads[-1] @ transposed_BHKK + local_BHVK)
    return torch.stack(grads[::-1]).to(grad_entry_RBHVK.dtype)


def summarise_shard(
    key_BTMHK: torch.Tensor,
    residual_BTHV: torch.Tensor,
    gain_BTLHV: torch.Tensor | None,
    step_size_BTMH: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    *,
    activation: Activation = "gelu",
    document_start_BT: torch.Tensor | None = None,
    chunk_tokens: int = 64,
) -> AffineMap:
    """The map of a shard's tokens, in plain torch; the arguments of `prism_scan_reference`, without queries.

    In fp32 (fp64 for fp64 inputs). Raises ValueError on shapes and dtypes that do not fit.
    """
    first_key_BTHK = key_BTMHK[:, :, 0]  # stands for queries, which no state depends on
    tensors = (first_key_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH)
    check_scan_inputs(*tensors, activation)
    check_scan_state(first_key_BTHK, residual_BTHV, None, document_start_BT, chunk_tokens)
    chunks = prepare_chunks(cut_scan(*tensors, activation, document_start_BT, chunk_tokens))
    B, _, H, _ = first_key_BTHK.shape
    return split_map(run_maps(chunks.step_PKK, chunks.source_PKV, B * H).whole_GXK.unflatten(0, (B, H)))


class ChunkMaps(NamedTuple):
    """Maps from a shard's start, S_n = reach_n S + local_n with states K x V, and the map of all of it as (M | N)."""

    reach_GNKK: torch.Tensor
    local_GNKV: torch.Tensor
    whole_GXK: torch.Tensor


def run_maps(step_PKK: torch.Tensor, source_PKV: torch.Tensor, G: int) -> ChunkMaps:
    """The maps to the start of each chunk, and of all chunks, of S_{n+1} = step_n S_n + source_n: the states of all
    entry states at once, so that no chunk is run a second time when the entry state is known."""
    K, V = source_PKV.shape[1:]
    step_GNKK, source_GNKV = step_PKK.unflatten(0, (G, -1)), source_PKV.unflatten(0, (G, -1))
    identity_KX = torch.eye(K, K + V, dtype=step_PKK.dtype, device=step_PKK.device)
    maps = run_states(step_GNKK, F.pad(source_GNKV, (K, 0)), identity_KX.expand(G, -1, -1))
    reach_GNKK, local_GNKV = torch.stack(maps[:-1], dim=1).split([K, V], dim=-1)
    return ChunkMaps(reach_GNKK, local_GNKV, maps[-1].mT)


def place_states(maps: ChunkMaps, entry_GKV: torch.Tensor) -> torch.Tensor:
    """States (P, K, V) at the start of each chunk, from the entry state."""
    reach_GXK, local_GXV = maps.reach_GNKK.flatten(1, 2), maps.local_GNKV.flatten(1, 2)
    return torch.baddbmm(local_GXV, reach_GXK, entry_GKV).view(-1, *entry_GKV.shape[1:])


def split_map(summary: torch.Tensor) -> AffineMap:
    """(M | N) of (..., K + V, K), as it is gathered, in its two parts."""
    K = summary.shape[-1]
    return AffineMap(summary[..., :K, :], summary[..., K:, :])


class Entered(NamedTuple):
    """What a shard learns from the others' maps."""

    entry_BHVK: torch.Tensor  # the state before the shard
    final_BHVK: torch.Tensor  # the state after the row
    later_RBHKK: torch.Tensor  # M of the shards after this one, which its backward folds


def start_entry(
    summary_BHXK: torch.Tensor, entry_state_BHVK: torch.Tensor | None, group: ShardGroup
) -> Callable[[], Entered]:
    """Begin to gather the shards' (M | N), (B, H, K + V, K); what is returned waits and folds from the row's entry
    state."""
    wait = group.start_gather(summary_BHXK.contiguous())

    def finish() -> Entered:
        maps = split_map(wait())
        states_RBHVK = fold_entries(maps, entry_state_BHVK)
        later_RBHKK = maps.transition_BHKK[group.index + 1 :].clone()
        return Entered(states_RBHVK[group.index].clone(), states_RBHVK[-1].clone(), later_RBHKK)

    return finish


def start_exit_grad(
    grad_entry_BHVK: torch.Tensor, grad_final_BHVK: torch.Tensor | None, later_RBHKK: torch.Tensor, group: ShardGroup
) -> Callable[[], torch.Tensor]:
    """Begin to gather the shards' R and their gradients of the row's final state (None: none); what is returned waits
    and folds them to the gradient of the state after this shard.

    The M of the shards after this one come from the forward: (R - 1) B H K^2 numbers kept at most, on the first shard,
    so that as many bytes are gathered backward as forward although any shard may have used the final state.
    """
    grad_final_BHVK = torch.zeros_like(grad_entry_BHVK) if grad_final_BHVK is None else grad_final_BHVK
    wait = group.start_gather(torch.stack([grad_entry_BHVK, grad_final_BHVK.to(grad_entry_BHVK.dtype)]))

    def finish() -> torch.Tensor:
        grad_entry_RBHVK, grad_final_RBHVK = wait().unbind(1)
        grad_final_BHVK = grad_final_RBHVK.double().sum(0)
        return fold_exit_grads(later_RBHKK, grad_entry_RBHVK[group.index + 1 :], grad_final_BHVK)[0]

    return finish
