"""The short convolution of a row cut over processes: each needs the last W-1 inputs before its slice.

All processes gather all tails: with the row's entry window before them they are a line, of which every window is a
slice. A slice of a row shorter than W-1 tokens is its own tail, so windows that span several slices come out right.

Dims: R shards of a row, B batch, T tokens of a shard, D channels, W conv taps; halo = W-1; S tokens of the line.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from prism_lm.model.operators import ShortConvolution
    from prism_lm.parallel.sequence import SequenceGroup


def short_conv_sharded(
    x_BTD: Tensor,
    weight_DW: Tensor,
    /,
    *,
    entry_BWD: Tensor | None,
    document_start_BT: Tensor | None,
    group: "SequenceGroup",
    short_conv: "ShortConvolution",
) -> tuple[Tensor, Tensor]:
    """`short_conv` of this process's slice of the row; arguments and results of `short_conv_reference`.

    entry_BWD: the row's, the same on all processes; so is the returned window, that after the whole row. The sum over
    processes of the gradients of x, weight and entry is that of the sum of what they compute.
    """
    halo = weight_DW.shape[1] - 1
    if halo == 0:
        return short_conv(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=document_start_BT)
    tail = min(halo, x_BTD.shape[1])
    line = _gather_line(x_BTD[:, -tail:], halo, entry_BWD, document_start_BT, group)
    window_BWD = _take_window(line, group.index * tail, halo)
    out_BTD, _ = short_conv(x_BTD, weight_DW, entry_BWD=window_BWD, document_start_BT=document_start_BT)
    return out_BTD, _take_window(line, group.count * tail, halo)


class _Line(NamedTuple):
    """The row's entry window, then the tails of all its slices."""

    input_BSD: Tensor
    document_BS: Tensor | None  # numbers that differ between documents


def _gather_line(
    tail_BTD: Tensor, halo: int, entry_BWD: Tensor | None, document_start_BT: Tensor | None, group: "SequenceGroup"
) -> _Line:
    B, tail, D = tail_BTD.shape
    if entry_BWD is None:
        entry_BWD = tail_BTD.new_zeros(B, halo, D)
    if document_start_BT is None:
        return _Line(torch.cat([entry_BWD, group.gather_tokens(tail_BTD)], dim=1), None)
    # Starts travel as one more channel: one exchange instead of two.
    start_BT1 = document_start_BT[:, -tail:, None].to(tail_BTD.dtype)
    joined_BSC = group.gather_tokens(torch.cat([tail_BTD, start_BT1], dim=-1))
    start_BS = functional.pad(joined_BSC[:, :, D] != 0, (halo, 0))
    return _Line(torch.cat([entry_BWD, joined_BSC[:, :, :D]], dim=1), start_BS.cumsum(dim=1))


def _take_window(line: _Line, first: int, halo: int) -> Tensor:
    """The `halo` inputs from place `first` on, zero where a document starts after them."""
    window_BWD = line.input_BSD[:, first : first + halo]
    if line.document_BS is None:
        return window_BWD
    document_BW = line.document_BS[:, first : first + halo]
    return window_BWD.masked_fill((document_BW != document_BW[:, -1:])[:, :, None], 0)
