"""Attention over shards against the whole row's, in one process, fp64; test_sequence.py has processes."""

import pytest
import torch
from torch import Tensor

from prism_lm.model.attention import causal_attention
from prism_lm.model.decode_state import AttentionState
from prism_lm.parallel.attention_gather import causal_attention_sharded
from tests.prism_lm.parallel.shards import ReplayGroup, assert_all_close, build_starts, run_shards, take_slice

HEADS, KEY, VALUE, THETA = 2, 8, 6, 100.0


def build_inputs(start_BT: Tensor) -> list[Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(*start_BT.shape, HEADS, width) for width in (KEY, KEY, VALUE)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def build_state(rows: int) -> AttentionState:
    """The cache after five tokens of two documents."""
    start_BT = torch.zeros(rows, 5, dtype=torch.bool)
    start_BT[:, 2] = True
    return causal_attention(*build_inputs(start_BT), document_start_BT=start_BT, state=None, theta=THETA)[1]


def run_sharded(
    inputs: list[Tensor], start_BT: Tensor | None, state: AttentionState | None, num_shards: int
) -> tuple[Tensor, list[AttentionState]]:
    """The joined outputs, and the caches of all shards."""

    def compute(group: ReplayGroup) -> tuple[Tensor, AttentionState]:
        slices, start = [take_slice(tensor, group) for tensor in inputs], take_slice(start_BT, group)
        return causal_attention_sharded(*slices, document_start_BT=start, state=state, theta=THETA, group=group)

    outs, caches = zip(*run_shards(num_shards, compute), strict=True)
    return torch.cat(outs, dim=1), list(caches)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_shards_equal_the_whole_row_in_output_cache_and_every_gradient(num_shards, num_tokens):
    starts = build_starts(num_shards, num_tokens)
    inputs = build_inputs(starts)
    for start_BT in (None, starts):
        for state in (None, build_state(len(starts))):
            whole_BTHV, whole_cache = causal_attention(*inputs, document_start_BT=start_BT, state=state, theta=THETA)
            out_BTHV, caches = run_sharded(inputs, start_BT, state, num_shards)
            assert_all_close([out_BTHV], [whole_BTHV])
            for cache in caches:
                assert_all_close(list(cache), list(whole_cache))
            actual, expected = (torch.autograd.grad(out.sin().sum(), inputs) for out in (out_BTHV, whole_BTHV))
            assert_all_close(list(actual), list(expected))
