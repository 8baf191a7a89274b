"""Which rank the others wait for: every rank's times of a step, compared from time to time.

All ranks meet in every step: where they agree on the batch, and where they sum the loss. A rank's own time of a step is
what it does before the first meeting (data, host) and its forward passes, in which it waits for nobody; backward passes
and the update, in which ranks wait for one another unseen, are taken to be as slow as its forward passes. So a rank
that is slow in its backward pass alone is not found, and of a sequence group, whose ranks wait for one another in the
forward pass, any rank may be named for the slow one.
"""

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from prism_lm.parallel.collectives import gather_objects, sum_tensor
from prism_lm.parallel.mesh import Ranks
from prism_lm.parallel.process_identity import ProcessIdentity, identify_process
from prism_lm.train.metrics import Meter
from prism_lm.train.stopwatch import FORWARD, GATHER, LOSS_SUM, Stopwatch

# Slower than the median rank by a tenth: what a cooler GPU or a longer way to the storage makes is less.
NAMED_FROM = 1.1
_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Times:
    """One rank's seconds of a mean step, pauses for validation and saving left out."""

    step_s: float = 0.0
    "From the end of one update to the end of the next, about the same on all ranks."
    data_s: float = 0.0
    "Waiting for data, a part of arrival_s."
    arrival_s: float = 0.0
    "From the end of the update before to where all ranks agree on the batch."
    forward_s: float = 0.0
    "The device's forward passes, without the gathering of weights that stage 3 does in them."
    wait_s: float = 0.0
    "Waiting for the other ranks where that can be seen: agreeing, summing the loss, gathering weights."


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """The rank with the longest step of its own."""

    rank: int
    own_s: float
    "Its step without waiting for others."
    median_s: float
    "That of the median rank; of two ranks it is the faster one's."
    data_s: float
    "How much longer than the median rank it waits for data, in seconds a step."
    forward_s: float
    "How much longer forward and, with them, backward passes and update take it, in seconds a step."
    slow_ranks: tuple[int, ...]
    "Ranks, this one among them, that take NAMED_FROM times the median or longer."

    @property
    def over_median(self) -> float:
        """Its own step over the median rank's."""
        return self.own_s / max(self.median_s, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a comparison has to record."""

    figures: dict[str, float]
    name: str
    "The slowest rank with its host and process."
    text: str
    "One line that names it; empty where no rank is slow."


class StragglerWatch:
    """Takes this rank's times and compares them with the others' every so many steps. Every rank calls every method,
    in one order. With one process, or every_steps=0, it does nothing."""

    def __init__(
        self,
        ranks: Ranks,
        stopwatch: Stopwatch,
        meter: Meter,
        *,
        every_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Gathers the ranks' names: the process group must be up."""
        self._ranks, self._stopwatch, self._meter, self._clock = ranks, stopwatch, meter, clock
        self._every_steps = every_steps if ranks.world_size > 1 else 0
        self._processes: list[ProcessIdentity] = gather_objects(identify_process()) if self._every_steps else []
        self._mark_s: float | None = None
        self._begin_window()

    def _begin_window(self) -> None:
        self._steps, self._sampled_steps = 0, 0
        self._sum = Times()
        self._stopwatch.read()

    @contextmanager
    def agreeing(self) -> Generator[None, None, None]:
        """The block is where all ranks agree on the batch."""
        begun_s = self._clock()
        yield
        self._arrived_s, self._agreed_s = begun_s, self._clock() - begun_s

    def end_step(self, step: int) -> Report | None:
        """Takes down this step; a report, the same on all ranks, where one is due. The first step of a process, which
        may compile, does not count."""
        if not self._every_steps:
            return None
        if self._mark_s is not None:
            self._add_step()
        report = None
        if step % self._every_steps == 0:
            report = self._compare(step)
            self._begin_window()
        self._begin_step(step + 1)
        return report

    def _begin_step(self, step: int) -> None:
        self._stopwatch.is_on = step % max(1, self._every_steps // _SAMPLES) == 0
        self._mark_s, self._paused_s, self._waited_s = self._clock(), self._meter.paused_s, self._meter.waited_s

    def _add_step(self) -> None:
        """Pauses lie before the ranks agree, never behind: the step is taken to begin that much later."""
        begun_s = (self._mark_s or 0.0) + self._meter.paused_s - self._paused_s
        self._steps += 1
        self._sampled_steps += int(self._stopwatch.is_on)
        self._sum = replace(
            self._sum,
            step_s=self._sum.step_s + self._clock() - begun_s,
            data_s=self._sum.data_s + self._meter.waited_s - self._waited_s,
            arrival_s=self._sum.arrival_s + self._arrived_s - begun_s,
            wait_s=self._sum.wait_s + self._agreed_s,
        )

    def _compare(self, step: int) -> Report | None:
        """Equally many steps were counted on all ranks, so that either all compare or none."""
        if not self._sampled_steps:
            return None
        mine = self._average()
        times = gather_times(mine, self._ranks)
        slowest = find_slowest(times)
        name = f"rank {slowest.rank} ({self._processes[slowest.rank]})"
        figures = {
            "speed/slowest_rank": float(slowest.rank),
            "speed/slowest_over_median": slowest.over_median,
            "speed/data_wait_max_s": max(each.data_s for each in times),
            "speed/collective_wait_max_s": max(each.wait_s for each in times),
        }
        hosts = [process.host for process in self._processes]
        text = describe_slowest(step, slowest, name, hosts) if slowest.slow_ranks else ""
        return Report(figures=figures, name=name, text=text)

    def _average(self) -> Times:
        device_s = self._stopwatch.read()
        waited_s = device_s[LOSS_SUM] + device_s[GATHER]
        return Times(
            step_s=self._sum.step_s / self._steps,
            data_s=self._sum.data_s / self._steps,
            arrival_s=self._sum.arrival_s / self._steps,
            forward_s=(device_s[FORWARD] - device_s[GATHER]) / self._sampled_steps,
            wait_s=self._sum.wait_s / self._steps + waited_s / self._sampled_steps,
        )


def gather_times(mine: Times, ranks: Ranks) -> list[Times]:
    """Every rank's times, by rank, in one small sum on the host: other ranks' rows are zeros."""
    table = torch.zeros(ranks.world_size, 5, dtype=torch.float64)
    row = [mine.step_s, mine.data_s, mine.arrival_s, mine.forward_s, mine.wait_s]
    table[ranks.rank] = torch.tensor(row, dtype=torch.float64)
    rows: list[list[float]] = sum_tensor(table).tolist()
    return [
        Times(step_s=step_s, data_s=data_s, arrival_s=arrival_s, forward_s=forward_s, wait_s=wait_s)
        for step_s, data_s, arrival_s, forward_s, wait_s in rows
    ]


def find_slowest(times: Sequence[Times]) -> Slowest:
    """The rank with the longest step of its own; of two ranks as slow, the first.

    What follows a forward pass takes all ranks equally long on the clock, waiting included. It holds least waiting, for
    its forward pass, at the rank with the slowest device: that rank's ratio is taken to be everyone's.
    """
    ratio = max(0.0, min((each.step_s - each.arrival_s - each.wait_s) / max(each.forward_s, 1e-9) for each in times))
    owns_s = [each.arrival_s + ratio * each.forward_s for each in times]
    median_s = statistics.median_low(owns_s)
    rank = owns_s.index(max(owns_s))
    return Slowest(
        rank=rank,
        own_s=owns_s[rank],
        median_s=median_s,
        data_s=times[rank].data_s - statistics.median_low(each.data_s for each in times),
        forward_s=ratio * (times[rank].forward_s - statistics.median_low(each.forward_s for each in times)),
        slow_ranks=tuple(rank for rank, own_s in enumerate(owns_s) if own_s >= NAMED_FROM * median_s),
    )


def describe_slowest(step: int, slowest: Slowest, name: str, hosts: Sequence[str]) -> str:
    """`step 400: slowest rank 3 (node02, pid 12): 1.31x the median rank's step, 1.100 s against 0.840 s by itself; of
    it +0.250 s waiting for data, +0.010 s computing`; and how many ranks of that node are slow."""
    host = hosts[slowest.rank]
    on_host = [rank for rank, each in enumerate(hosts) if each == host]
    slow = sum(hosts[rank] == host for rank in slowest.slow_ranks)
    shared = f"; {slow} of the {len(on_host)} ranks of {host} are slow" if slow > 1 else ""
    over = f"{slowest.over_median:.2f}x the median rank's step, {slowest.own_s:.3f} s against {slowest.median_s:.3f} s"
    parts = f"{slowest.data_s:+.3f} s waiting for data, {slowest.forward_s:+.3f} s computing"
    return f"step {step}: slowest {name}: {over} by itself; of it {parts}{shared}"
