"""The time that a device spends in named stretches of a program, taken without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch

# The stretches of a training step.
FORWARD, LOSS_SUM, GATHER = "forward", "loss sum", "gather"


class HostMoment:
    """A moment on the host's clock, asked as an event of a GPU is."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """It is past."""
        return True

    def elapsed_time(self, later: "HostMoment") -> float:
        """Milliseconds to the later moment."""
        return 1e3 * (later._at_s - self._at_s)


class Stopwatch:
    """Adds up stretches by name: of a GPU's current stream by events on it, of a CPU by the clock. Off at first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stretches: list[tuple[str, HostMoment, HostMoment]] = []
        self._around = ""
        self.is_on = False

    @contextmanager
    def measuring(self, name: str, *, within: str = "") -> Generator[None, None, None]:
        """The block is a stretch of this name, and counts where it lies in one of the name `within`, in none with "".
        One in which something is raised does not count."""
        if not self.is_on or self._around != within:
            yield
            return
        begun, self._around = self._mark(), name
        try:
            yield
        finally:
            self._around = within
        self._stretches.append((name, begun, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds by name, 0 for a name never met, of the stretches since the last reading that the device is through
        with; the others stay for the next."""
        totals: dict[str, float] = defaultdict(float)
        unfinished: list[tuple[str, HostMoment, HostMoment]] = []
        for name, begun, ended in self._stretches:
            if ended.query():
                totals[name] += 1e-3 * begun.elapsed_time(ended)
            else:
                unfinished.append((name, begun, ended))
        self._stretches = unfinished
        return totals

    def _mark(self) -> HostMoment:
        if self._device.type != "cuda":
            return HostMoment()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cast(HostMoment, event)
