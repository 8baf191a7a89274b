"""Attention of a row cut over processes: every process gathers all keys and values and answers its own queries.

Dims: R shards of a row, B batch, T tokens of a shard, S tokens of the row (with the cache: keys), H heads, K key width,
V value width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prism_lm.model.attention import (
    attend,
    detach_cache,
    extend_cache,
    find_visible,
    number_documents,
    read_entry_positions,
)
from prism_lm.model.rotary import compute_positions, rotate

if TYPE_CHECKING:
    from prism_lm.model.decode_state import AttentionState
    from prism_lm.parallel.sequence import SequenceGroup


def causal_attention_sharded(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    /,
    *,
    document_start_BT: Tensor | None,
    state: "AttentionState | None",
    theta: float,
    group: "SequenceGroup",
) -> "tuple[Tensor, AttentionState]":
    """`causal_attention` of this process's slice of the row; positions are those of the row.

    state: the row's, the same on all processes; so is the returned cache, that of the whole row.
    """
    num_tokens = query_BTHK.shape[1]
    start_BS = None if document_start_BT is None else group.gather_tokens(document_start_BT)
    position_BS = compute_positions(start_BS, read_entry_positions(state, query_BTHK), group.count * num_tokens)
    own_BT = position_BS[:, group.index * num_tokens : (group.index + 1) * num_tokens]
    query_BTHK, key_BTHK = (rotate(x_BTHK, own_BT, theta) for x_BTHK in (query_BTHK, key_BTHK))
    key_BSHK, value_BSHV = _gather_pair(key_BTHK, value_BTHV, group)
    document_BS = number_documents(start_BS, state, position_BS)
    cache = extend_cache(state, key_BSHK, value_BSHV, document_BS, position_BS[:, -1] + 1)
    num_keys = cache.document_BT.shape[1] - (group.count - 1 - group.index) * num_tokens
    mask_BTS = find_visible(cache.document_BT[:, :num_keys], num_tokens)
    out_BTHV = attend(query_BTHK, cache.key_BTHK[:, :num_keys], cache.value_BTHV[:, :num_keys], mask_BTS)
    return out_BTHV, detach_cache(cache)


def _gather_pair(key_BTHK: Tensor, value_BTHV: Tensor, group: "SequenceGroup") -> tuple[Tensor, Tensor]:
    """Keys and values of the whole row, in one exchange."""
    joined_BSHC = group.gather_tokens(torch.cat([key_BTHK, value_BTHV], dim=-1))
    key_BSHK, value_BSHV = joined_BSHC.split([key_BTHK.shape[-1], value_BTHV.shape[-1]], dim=-1)
    return key_BSHK, value_BSHV
