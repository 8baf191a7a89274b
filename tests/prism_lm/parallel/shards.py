"""The shards of a row in one process: gathers are replayed until every shard has what it asked for."""

from collections.abc import Callable

import torch
from torch import Tensor

from prism_lm.parallel.sequence import SequenceGroup


class _GatherPending(Exception):
    """A shard asks for what others have not given yet."""


class ReplayGroup(SequenceGroup):
    """One place of a group whose first gathers are known; gradients flow through the stack itself."""

    def __init__(self, index: int, count: int, gathered: list[Tensor]) -> None:
        self.index, self.count, self.known = index, count, iter(gathered)
        self.payload: Tensor | None = None

    def gather(self, payload: Tensor) -> Tensor:
        for stacked in self.known:
            return stacked
        self.payload = payload
        raise _GatherPending


def run_shards(count: int, compute: Callable[[ReplayGroup], tuple]) -> list[tuple]:
    """What `compute` returns at each place. Fails where shards do not gather equally often."""
    gathered: list[Tensor] = []
    while True:
        groups = [ReplayGroup(index, count, gathered) for index in range(count)]
        results = [_try(compute, group) for group in groups]
        if all(result is not None for result in results):
            return results
        assert not any(results), "some shards gather more often than others"
        gathered.append(torch.stack([group.payload for group in groups]))


def _try(compute: Callable[[ReplayGroup], tuple], group: ReplayGroup) -> tuple | None:
    try:
        return compute(group)
    except _GatherPending:
        return None


def take_slice(tensor_BT: Tensor | None, group: SequenceGroup) -> Tensor | None:
    """This place's tokens of a whole row."""
    return None if tensor_BT is None else tensor_BT.chunk(group.count, dim=1)[group.index]


def build_starts(num_shards: int, num_tokens: int) -> Tensor:
    """Rows by what begins about every cut: nothing, a document one token before it, at it, one after it, two of them;
    the last row begins one at its very first token only."""
    start_BT = torch.zeros(6, num_shards * num_tokens, dtype=torch.bool)
    for cut in range(num_tokens, num_shards * num_tokens, num_tokens):
        for row, offsets in enumerate([(), (-1,), (0,), (1,), (-1, 1)]):
            for offset in offsets:
                start_BT[row, (cut + offset) % start_BT.shape[1]] = True
    start_BT[5, 0] = True
    return start_BT


def assert_all_close(actual: list[Tensor], expected: list[Tensor], *, bound: float = 1e-12) -> None:
    """In fp64, to the largest expected magnitude or 1; a sum of some hundred terms in another order."""
    for place, (left, right) in enumerate(zip(actual, expected, strict=True)):
        error = (left - right).abs().max().item() / max(right.abs().max().item(), 1.0)
        assert error <= bound, f"tensor {place}: {error:.2e}"
