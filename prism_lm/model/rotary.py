"""Rotary positions that restart at every document, and the numbering of documents within a row.

Dims: B batch, T tokens, H heads, K key width. A first dim of 1 stands for any batch.
"""

import torch
from torch import Tensor


def compute_positions(document_start_BT: Tensor | None, entry_position_B: Tensor, num_tokens: int) -> Tensor:
    """Each token's distance from the start of its document, int64 BT.

    entry_position_B: tokens of the current document that were read before this row began, 0 for a fresh row.
    """
    index_T = torch.arange(num_tokens, device=entry_position_B.device)
    if document_start_BT is None:
        return index_T + entry_position_B[:, None]
    origin_BT = torch.where(document_start_BT, index_T, -entry_position_B[:, None])
    return index_T - origin_BT.cummax(dim=1).values


def rotate(x_BTHK: Tensor, position_BT: Tensor, theta: float) -> Tensor:
    """Turn pairs (i, i + K/2) of each head by position * theta^(-2i/K), angles in fp32 or wider."""
    half = x_BTHK.shape[-1] // 2
    exponent = torch.arange(half, device=x_BTHK.device, dtype=torch.promote_types(x_BTHK.dtype, torch.float32)) / half
    angle = position_BT[:, :, None, None] * theta**-exponent
    first, second = x_BTHK.to(angle.dtype).split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHK.dtype)
