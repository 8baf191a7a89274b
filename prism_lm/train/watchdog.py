"""Ends a run that cannot go on: hung, without one of its ranks, or asked to stop and not stopping.

A thread watches what the main thread cannot see while it waits in a collective or in C++. What it ends is lost since
the newest checkpoint, and nothing on the disk is harmed: whatever matters there is published whole or not at all.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from prism_lm.checkpoint.folder import list_published, read_step
from prism_lm.parallel.presence import Presence, Sign, Verdict
from prism_lm.train.stop_signal import StopSignal

EXIT_HUNG = 70
EXIT_RANK_LOST = 71
EXIT_GRACE_PASSED = 72
EXIT_SECOND_SIGNAL = 130

STACKS_NAME = "stacks"
_TICK_S = 0.5
# A process known to have died is left to the error that its partners meet, unless they meet none.
_DEAD_S = 10.0
_DISK_S = 5.0
_OWN_THREADS = ("watchdog", "presence", "owner")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a run may seem not to go on; all in seconds, and positive."""

    hang_timeout_s: float = 1800.0
    "From one phase of the main thread to the next: a step, an evaluation batch, a save, compilation with the first."
    rank_timeout_s: float = 60.0
    "Without a sign of life of a rank."
    stop_grace_s: float = 120.0
    "From the first stop signal to the end."


class Watchdog:
    """Watches this process in a thread. `on_end` is given the words of a run that it ends, to write them down; where
    several ranks call theirs, the first is believed."""

    def __init__(
        self, run_dir: Path, presence: Presence, stop: StopSignal, limits: Limits, on_end: Callable[[str], None]
    ) -> None:
        self._run_dir, self._presence, self._stop, self._limits = run_dir, presence, stop, limits
        self._on_end = on_end
        self._rank = presence.ranks.rank
        self._clock = presence.clock
        self._phase, self._begun_s = "start", self._clock.read()
        self._stop_seen_s: float | None = None
        self._finishing, self._closing = False, False
        self._stderr = 2

    def beat(self, phase: str) -> None:
        """The main thread begins this phase. All ranks call it for the same phases, in the same order."""
        self._phase, self._begun_s = phase, self._clock.read()
        self._presence.begin_phase(phase)

    def touch(self) -> None:
        """The phase goes on; it counts as begun now, for this rank alone."""
        self._begun_s = self._clock.read()

    def finish(self) -> None:
        """The run has saved what it will save, and ends: a further stop signal changes nothing any more. A launcher
        sends one to the ranks that are left as soon as the first has ended."""
        self._finishing = True
        self.beat("end")

    @contextmanager
    def watching(self) -> Generator["Watchdog", None, None]:
        """Watches for the time of the block, inside that of the stop signals and of the presence."""
        self._stderr = os.dup(2)
        self._stop.is_watched = True
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing = True
            self._stop.wake()
            thread.join()
            self._stop.is_watched = False
            os.close(self._stderr)

    def _run(self) -> None:
        while not self._closing:
            is_further = self._stop.wait(_TICK_S)
            if is_further and not self._finishing:
                self._end_at_once()
            if not self._closing:
                self._look()

    def _look(self) -> None:
        """One look at everything that may end the run."""
        now_s = self._clock.read()
        if self._stop.requested and self._stop_seen_s is None:
            self._stop_seen_s = now_s
        if self._presence.verdict is not None:
            self._end(self._presence.verdict)
        if now_s - self._begun_s > self._limits.hang_timeout_s:
            self._leave(EXIT_HUNG, self._describe_hang())
        if self._stop_seen_s is not None and now_s - self._stop_seen_s > self._limits.stop_grace_s:
            self._leave(EXIT_GRACE_PASSED, self._describe_grace())
        if lost := self._presence.find_lost(rank_timeout_s=self._limits.rank_timeout_s, dead_s=_DEAD_S):
            self._leave(EXIT_RANK_LOST, self._describe_lost(lost))

    def _describe_hang(self) -> str:
        key = f"train.hang_timeout_s={self._limits.hang_timeout_s:g}"
        return f"rank {self._rank} was in {self._phase!r} for longer than {key}"

    def _describe_grace(self) -> str:
        key = f"train.stop_grace_s={self._limits.stop_grace_s:g}"
        return (
            f"the run had not ended {key} after a stop signal (rank {self._rank} is in {self._phase!r}); "
            f"{self._describe_newest()}"
        )

    def _describe_lost(self, lost: Sequence[int]) -> str:
        names = ", ".join(self._presence.name_rank(rank) for rank in lost)
        key = f"train.rank_timeout_s={self._limits.rank_timeout_s:g}"
        return f"{names} of the run died or gave no sign of life for {key}; its own output says why"

    def _describe_newest(self) -> str:
        found: list[int] = []
        _call_within(_DISK_S, lambda: found.extend(read_step(folder) or 0 for folder in list_published(self._run_dir)))
        return f"the newest complete checkpoint is step {found[-1]}" if found else "there is no complete checkpoint"

    def _leave(self, code: int, text: str) -> None:
        """Ends all ranks so, or as another rank has found before."""
        mine = Verdict(code=code, text=text)
        verdict = self._presence.leave_verdict(mine, wait_s=self._presence.interval_s)
        if verdict == mine and code != EXIT_HUNG and (self._rank <= 1 or self._presence.verdict is not None):
            self._say(f"error: {text}")
        self._end(verdict)

    def _end(self, verdict: Verdict) -> None:
        """Ends this process as a verdict says, later than the ranks need to read it from the store of rank 0."""
        text = self._explain_hang(verdict.text) if verdict.code == EXIT_HUNG else verdict.text
        if self._presence.ranks.world_size > 1 and not self._presence.ranks.is_main:
            time.sleep(0.5)
        _call_within(_DISK_S, lambda: self._on_end(text))
        if self._presence.ranks.world_size > 1 and self._presence.ranks.is_main:
            time.sleep(1.25 * self._presence.interval_s)
        os._exit(verdict.code)

    def _end_at_once(self) -> None:
        text = f"stopped at once by a second signal; {self._describe_newest()}"
        _call_within(0.5, lambda: self._on_end(text))
        self._presence.leave_verdict(Verdict(code=EXIT_SECOND_SIGNAL, text=text), wait_s=0.2)
        self._say(f"error: {text}")
        os._exit(EXIT_SECOND_SIGNAL)

    def _explain_hang(self, text: str) -> str:
        """Writes this process's stacks down and, at rank 0, says which ranks are behind."""
        path = self._run_dir / STACKS_NAME / f"rank_{self._rank}.txt"
        written = _call_within(_DISK_S, lambda: _write_stacks(path))
        where = f"its threads' stacks are in {path}" if written else f"{path} could not be written"
        self._say(f"rank {self._rank} hung in {self._phase!r}; {where}")
        place, is_waiting = _find_place()
        self._presence.note_place(place, is_waiting=is_waiting)
        signs = self._presence.read_signs(wait_s=2.5 * self._presence.interval_s)
        behind = find_behind(signs)
        places = [f"{self._presence.name_rank(rank)} in {_spell_place(signs[rank])}" for rank in behind]
        text += f"; behind: {', '.join(places)}" if len(places) < len(signs) else f"; it is in {_spell_place(signs[0])}"
        if self._presence.ranks.is_main:
            self._say(f"error: the run hung: {text}")
        return f"the run hung: {text}"

    def _say(self, text: str) -> None:
        """To the standard error that the process began with, whatever it is turned to for the moment."""
        with suppress(OSError):
            os.write(self._stderr, f"{text}\n".encode())


def find_behind(signs: Sequence[Sign]) -> list[int]:
    """The ranks that the others wait for: those with the fewest phases begun and, among them, those that do not wait
    for others themselves. All ranks where nothing tells them apart."""
    fewest = min(sign.beats for sign in signs)
    last = [rank for rank, sign in enumerate(signs) if sign.beats == fewest]
    busy = [rank for rank in last if not signs[rank].is_waiting]
    return busy or last


def _spell_place(sign: Sign) -> str:
    return f"{sign.phase or 'start'!r} at {sign.place}" if sign.place else f"{sign.phase or 'start'!r}"


def _write_stacks(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _find_place() -> tuple[str, bool]:
    """Where the main thread is, and whether any thread waits for other ranks in a collective."""
    own = {thread.ident for thread in threading.enumerate() if thread.name in _OWN_THREADS}
    frames = {ident: frame for ident, frame in _read_frames().items() if ident not in own}
    main = frames.get(threading.main_thread().ident or 0)
    place = f"{main.f_code.co_name} ({main.f_code.co_filename}:{main.f_lineno})" if main else "an unknown place"
    return place, any(_is_in_collective(frame) for frame in frames.values())


def _read_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]


def _is_in_collective(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/distributed/distributed_c10d.py"):
            return True
        frame = frame.f_back
    return False


def _call_within(wait_s: float, function: Callable[[], object]) -> bool:
    """True once the function has returned; False where it raises, or takes longer: a file system may not answer."""
    returned: list[bool] = []

    def call() -> None:
        with suppress(Exception):
            function()
            returned.append(True)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(wait_s)
    return bool(returned)
