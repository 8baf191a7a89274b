"""Times and memory of one piece of work on the GPU: medians with 20/80 quantiles, over rotating sets of inputs."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

L2_BYTES = 60 * 2**20
MAX_SETS = 64
QUANTILES = (0.5, 0.2, 0.8)
EAGER_CALLS, EAGER_ROUNDS = 100, 21
# A graph holds every call of so many milliseconds, each a node.
GRAPH_REP_MS = 20
GIB = 2**30

Leaves = Sequence[torch.Tensor | None]
Forward = Callable[[Leaves], torch.Tensor]


@dataclass(frozen=True)
class Timing:
    """Median and 20/80 quantiles in milliseconds."""

    median_ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one piece of work; None where it was not, `absent` saying why."""

    forward: Timing | None = None
    both: Timing | None = None
    peak_gib: float | None = None
    saved_ratio: float | None = None
    absent: str | None = None


def count_sets(num_bytes: int) -> int:
    """How many sets of inputs, of so many bytes each, leave an L2 cache no use."""
    return 1 if num_bytes >= L2_BYTES else min(MAX_SETS, -(-2 * L2_BYTES // num_bytes))


def count_bytes(tensors: Leaves) -> int:
    """Bytes of all the elements of `tensors`."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def measure(forward: Forward, sets: Sequence[Leaves], *, has_backward: bool, rep_ms: int) -> Measured:
    """Forward, and forward with backward, of `forward` on each set of leaves in turn.

    An operator that refuses is no failure of the run: what could be measured is kept, with the reason for the rest.
    """
    found: dict[str, Timing | float | None] = {}
    try:
        found["forward"] = _time(forward, sets, rep_ms)
        if has_backward:
            found["both"] = _time(_build_both(forward, sets[0]), sets, rep_ms)
            found["peak_gib"], found["saved_ratio"] = _measure_memory(forward, sets[0])
    except Exception as error:  # a peer's code may refuse in any way
        return Measured(**found, absent=shorten(error))
    finally:
        torch.cuda.empty_cache()
    return Measured(**found)


def shorten(error: BaseException) -> str:
    """One line of what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def _time(work: Callable, sets: Sequence[Leaves], rep_ms: int) -> Timing:
    turns = itertools.cycle(sets)
    work(next(turns))
    torch.cuda.synchronize()
    return Timing(*triton.testing.do_bench(lambda: work(next(turns)), rep=rep_ms, quantiles=QUANTILES))


def _build_both(forward: Forward, leaves: Leaves) -> Callable:
    with torch.no_grad():
        grad_out = torch.randn_like(forward(leaves))

    def run(leaves: Leaves) -> None:
        torch.autograd.grad(forward(leaves), [x for x in leaves if x is not None and x.requires_grad], grad_out)

    return run


def _measure_memory(forward: Forward, leaves: Leaves) -> tuple[float, float]:
    """Peak of forward and backward with its inputs, in GiB; what the forward keeps beyond inputs and output, over the
    inputs."""
    run, num_bytes = _build_both(forward, leaves), count_bytes(leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(leaves)
    peak = torch.cuda.max_memory_allocated() - before + num_bytes
    out = forward(leaves)
    kept = torch.cuda.memory_allocated() - before - count_bytes([out])
    return peak / GIB, kept / num_bytes


@torch.no_grad()
def measure_calls(call: Callable, sets: Sequence[object]) -> Timing:
    """One eager call of a launch-bound operator: the wall time of many calls in a row, host and device together."""
    turns, times_ms = itertools.cycle(sets), []
    for _ in range(EAGER_ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(EAGER_CALLS):
            call(next(turns))
        torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - start) * 1e3 / EAGER_CALLS)
    return Timing(*torch.tensor(times_ms[2:], dtype=torch.float64).quantile(torch.tensor(QUANTILES).double()).tolist())


@torch.no_grad()
def measure_graph(call: Callable, sets: Sequence[object]) -> Timing:
    """One call inside a CUDA graph that runs it on every set in turn."""

    def run() -> None:
        for inputs in sets:
            call(inputs)

    times_ms = triton.testing.do_bench_cudagraph(run, rep=GRAPH_REP_MS, quantiles=QUANTILES)
    return Timing(*(ms / len(sets) for ms in times_ms))
