"""Causal softmax attention with rotary positions, within documents; what a cache of keys holds.

Dims: B batch, T new tokens, S keys (cached and new), H heads, K key width, V value width.
"""

import torch
from torch import Tensor
from torch.nn import functional

from prism_lm.model.decode_state import AttentionState
from prism_lm.model.rotary import compute_positions, rotate


def causal_attention(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTHV: Tensor,
    /,
    *,
    document_start_BT: Tensor | None,
    state: AttentionState | None,
    theta: float,
) -> tuple[Tensor, AttentionState]:
    """Outputs BTHV and the cache with the new tokens at its end; scores are scaled by K^(-1/2).

    Queries and keys come without positions: they are turned by their distance from their document's start. No token
    sees another document of its row. `state` continues a row, None begins one; the cache carries no gradient.

    Where document starts or a state are given, a boolean mask of T x S for each row of the batch is made.
    """
    num_tokens = query_BTHK.shape[1]
    position_BT = compute_positions(document_start_BT, read_entry_positions(state, query_BTHK), num_tokens)
    query_BTHK, key_BTHK = (rotate(x_BTHK, position_BT, theta) for x_BTHK in (query_BTHK, key_BTHK))
    document_BT = number_documents(document_start_BT, state, position_BT)
    cache = extend_cache(state, key_BTHK, value_BTHV, document_BT, position_BT[:, -1] + 1)
    mask_BTS = None if document_start_BT is None and state is None else find_visible(cache.document_BT, num_tokens)
    return attend(query_BTHK, cache.key_BTHK, cache.value_BTHV, mask_BTS), detach_cache(cache)


def read_entry_positions(state: AttentionState | None, like_BTHK: Tensor) -> Tensor:
    """Tokens of the current document that were read before, int64 B."""
    return like_BTHK.new_zeros(like_BTHK.shape[0], dtype=torch.int64) if state is None else state.position_B


def number_documents(document_start_BT: Tensor | None, state: AttentionState | None, position_BT: Tensor) -> Tensor:
    """Each new token's document, numbered from 0 within its row."""
    last_B = position_BT.new_zeros(position_BT.shape[0]) if state is None else state.document_BT[:, -1]
    if document_start_BT is None:
        return last_B[:, None].expand_as(position_BT)
    return last_B[:, None] + document_start_BT.cumsum(dim=1)


def extend_cache(
    state: AttentionState | None, key_BTHK: Tensor, value_BTHV: Tensor, document_BT: Tensor, position_B: Tensor
) -> AttentionState:
    """The cache with the new tokens at its end."""
    if state is None:
        return AttentionState(key_BTHK, value_BTHV, document_BT, position_B)
    return AttentionState(
        torch.cat([state.key_BTHK, key_BTHK], dim=1),
        torch.cat([state.value_BTHV, value_BTHV], dim=1),
        torch.cat([state.document_BT, document_BT], dim=1),
        position_B,
    )


def detach_cache(cache: AttentionState) -> AttentionState:
    """The same values without a gradient."""
    return cache._replace(key_BTHK=cache.key_BTHK.detach(), value_BTHV=cache.value_BTHV.detach())


def find_visible(document_BS: Tensor, num_tokens: int) -> Tensor:
    """Which keys BTS each of the last `num_tokens` tokens may see: not later ones, not another document's."""
    same_BTS = document_BS[:, -num_tokens:, None] == document_BS[:, None, :]
    num_keys = document_BS.shape[1]
    causal_TS = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=document_BS.device)
    return same_BTS & causal_TS.tril(num_keys - num_tokens)


def attend(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHV: Tensor, mask_BTS: Tensor | None) -> Tensor:
    """Softmax attention BTHV over the keys that the mask shows; causal over T = S keys without one."""
    out_BHTV = functional.scaled_dot_product_attention(
        query_BTHK.transpose(1, 2),
        key_BSHK.transpose(1, 2),
        value_BSHV.transpose(1, 2),
        attn_mask=None if mask_BTS is None else mask_BTS[:, None],
        is_causal=mask_BTS is None,
    )
    return out_BHTV.transpose(1, 2)
