"""The shards of a row in one process, as threads or in rounds: `ShardGroup`s for tests.

Only one thread computes at a time, and hands over where it waits for the others: Triton's interpreter knows one kernel
at a time.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.kernels.prism.cases import Case

TIMEOUT_S = 120


class Meeting:
    """What the threads of one row share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self.payloads: dict[tuple[int, int], torch.Tensor] = {}


class ThreadGroup:
    """One thread's place; `num_gathers` counts what it began to gather."""

    def __init__(self, index: int, meeting: Meeting) -> None:
        self.index, self.count, self.meeting, self.num_gathers = index, meeting.count, meeting, 0

    def start_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        number, meeting = self.num_gathers, self.meeting
        self.num_gathers += 1
        meeting.payloads[number, self.index] = payload.detach().clone()

        def wait() -> torch.Tensor:
            meeting.turn.release()
            try:
                meeting.barrier.wait()
            finally:
                meeting.turn.acquire()
            return torch.stack([meeting.payloads[number, index] for index in range(self.count)])

        return wait


class Echo:
    """A group of two shards that are alike, in one thread."""

    index, count = 0, 2

    def start_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.stack([payload, payload])


def run_shards(count: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What `function` returns for each shard of a row, called in as many threads."""
    meeting = Meeting(count)

    def run(index: int) -> Any:
        with meeting.turn:
            try:
                return function(ThreadGroup(index, meeting))
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
    errors = [error for future in futures if (error := future.exception())]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in (*own, *errors):
        raise error
    return [future.result() for future in futures]


class RoundGroup:
    """One place of a row whose first gathers are known; those after them give zeros for the other shards."""

    def __init__(self, index: int, count: int, known: list[torch.Tensor]) -> None:
        self.index, self.count, self.known, self.payloads = index, count, known, []

    def start_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        number = len(self.payloads)
        self.payloads.append(payload.detach().clone())
        if number < len(self.known):
            return lambda: self.known[number]
        stacked = payload.new_zeros(self.count, *payload.shape)
        stacked[self.index] = payload
        return lambda: stacked


def run_in_rounds(count: int, function: Callable[[RoundGroup], Any]) -> list[Any]:
    """What `function` returns for each shard, in one thread: all shards again and again, until every gather is known.

    For devices whose backward runs in one thread of its own, where shards cannot wait for one another.
    """
    known: list[torch.Tensor] = []
    while True:
        groups = [RoundGroup(index, count, known) for index in range(count)]
        results = [function(group) for group in groups]
        if len(groups[0].payloads) == len(known):
            return results
        number = len(known)
        known = [*known, torch.stack([group.payloads[number] for group in groups])]


def cut_case(case: Case, cuts: tuple[int, ...]) -> list[Case]:
    """The case's tokens between the cuts, as new leaves; every shard has the row's entry state."""
    edges = (0, *cuts, case.tensors[0].shape[1])
    spans = [slice(*edge) for edge in itertools.pairwise(edges)]

    def pick(tensor: torch.Tensor | None, span: slice) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach()[:, span].clone().requires_grad_(tensor.requires_grad)

    def copy(state: torch.Tensor | None) -> torch.Tensor | None:
        return None if state is None else state.detach().clone().requires_grad_()

    start = case.document_start
    return [
        Case([pick(x, span) for x in case.tensors], copy(case.entry_state), None if start is None else start[:, span])
        for span in spans
    ]


def run_cut(
    case: Case, scan: Callable, cuts: tuple[int, ...], *, run_all: Callable = run_shards, **options: Any
) -> list[torch.Tensor]:
    """What `case.run` returns, from shards: outputs and gradients joined, final states checked to be one.

    Shard r takes the final state with a weight of (r + 1) over the sum of these: the whole of them is that of
    `case.run`.
    """
    shards = cut_case(case, cuts)
    count = len(shards)
    weights = [weight.to(case.tensors[0].device) for weight in build_weights(case)]
    out_weights = weights[0].split([shard.tensors[0].shape[1] for shard in shards], dim=1)

    def run(group: ThreadGroup | RoundGroup) -> list[torch.Tensor]:
        shard = shards[group.index]
        state = {"entry_state_BHVK": shard.entry_state, "document_start_BT": shard.document_start}
        out, final = scan(*shard.tensors, **state, **options, group=group)
        share = (group.index + 1) / (count * (count + 1) / 2)
        loss = (out.double() * out_weights[group.index]).sum() + share * (final.double() * weights[1]).sum()
        return [out.detach(), final.detach(), *torch.autograd.grad(loss, shard.leaves())]

    outs, finals, *grads = zip(*run_all(count, run), strict=True)
    assert all(torch.equal(final, finals[0]) for final in finals)
    joined = [torch.cat(parts, dim=1) for parts in (outs, *grads[: len(grads) - (case.entry_state is not None)])]
    if case.entry_state is not None:
        assert not any(grad.any() for grad in grads[-1][1:])
        joined.append(grads[-1][0])
    return [joined[0], finals[0], *joined[1:]]


def build_weights(case: Case) -> list[torch.Tensor]:
    """The weights of output and final state in the function that `Case.run` differentiates."""
    (B, T, H, K), V = case.tensors[0].shape, case.tensors[2].shape[-1]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x, generator=generator).bfloat16().double() for x in ((B, T, H, V), (B, H, V, K))]
