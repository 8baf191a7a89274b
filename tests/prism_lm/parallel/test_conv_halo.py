"""The short convolution over shards against the whole row's, in one process, fp64; test_sequence.py has processes."""

import pytest
import torch
from torch import Tensor

from kernels.short_conv.reference import short_conv_reference
from kernels.short_conv.shifted import short_conv_shifted
from prism_lm.parallel.conv_halo import short_conv_sharded
from tests.prism_lm.parallel.shards import ReplayGroup, assert_all_close, build_starts, run_shards, take_slice

WIDTH = 3


def build_inputs(start_BT: Tensor, taps: int, *, has_entry: bool) -> list[Tensor | None]:
    """x, the weight and the entry window."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(*start_BT.shape, WIDTH), (WIDTH, taps), (len(start_BT), taps - 1, WIDTH)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return [*tensors[:2], tensors[2] if has_entry else None]


def run_whole(inputs: list[Tensor | None], start_BT: Tensor | None) -> list[Tensor]:
    x_BTD, weight_DW, entry_BWD = inputs
    return list(short_conv_reference(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=start_BT))


def run_sharded(inputs: list[Tensor | None], start_BT: Tensor | None, num_shards: int) -> list[Tensor]:
    """The joined outputs, and the windows of all shards."""
    x_BTD, weight_DW, entry_BWD = inputs

    def compute(group: ReplayGroup) -> tuple[Tensor, Tensor]:
        x, start = take_slice(x_BTD, group), take_slice(start_BT, group)
        given = {"entry_BWD": entry_BWD, "document_start_BT": start, "group": group, "short_conv": short_conv_shifted}
        return short_conv_sharded(x, weight_DW, **given)

    outs, windows = zip(*run_shards(num_shards, compute), strict=True)
    return [torch.cat(outs, dim=1), *windows]


def differentiate(outs: list[Tensor], inputs: list[Tensor | None]) -> list[Tensor]:
    """Gradients of the output and of one window, that of the last shard."""
    loss = outs[0].sin().sum() + (outs[-1] * torch.arange(WIDTH)).cos().sum()
    given = [tensor for tensor in inputs if tensor is not None]
    return list(torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("taps", [2, 4, 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16])
def test_shards_equal_the_whole_row_in_output_window_and_every_gradient(num_shards, taps, num_tokens):
    for has_entry in (False, True):
        starts = build_starts(num_shards, num_tokens)
        for start_BT in (None, starts):
            inputs = build_inputs(starts, taps, has_entry=has_entry)
            whole, sharded = run_whole(inputs, start_BT), run_sharded(inputs, start_BT, num_shards)
            assert_all_close(sharded, [whole[0], *[whole[1]] * num_shards])
            assert_all_close(differentiate(sharded, inputs), differentiate(whole, inputs))


def test_convolution_of_one_tap_exchanges_nothing():
    starts = build_starts(2, 3)
    x_BTD, weight_DW, _ = build_inputs(starts, 1, has_entry=False)
    group = ReplayGroup(1, 2, [])
    given = {"entry_BWD": None, "document_start_BT": starts[:, :3], "group": group, "short_conv": short_conv_shifted}
    out_BTD, window_BWD = short_conv_sharded(x_BTD[:, 3:], weight_DW, **given)
    assert_all_close([out_BTD], [run_whole([x_BTD, weight_DW, None], None)[0][:, 3:]])
    assert window_BWD.shape == (6, 0, WIDTH) and group.payload is None


def test_shard_receives_only_the_tails():
    starts = build_starts(2, 16)
    x_BTD, weight_DW, _ = build_inputs(starts, 4, has_entry=False)
    payloads = []

    def compute(group: ReplayGroup) -> tuple[Tensor, Tensor]:
        slices = take_slice(x_BTD, group), take_slice(starts, group)
        given = {"entry_BWD": None, "document_start_BT": slices[1], "group": group, "short_conv": short_conv_shifted}
        try:
            return short_conv_sharded(slices[0], weight_DW, **given)
        finally:
            payloads.extend([] if group.payload is None else [group.payload])

    run_shards(2, compute)
    assert [payload.shape for payload in payloads] == [(6, 3, WIDTH + 1)] * 2
