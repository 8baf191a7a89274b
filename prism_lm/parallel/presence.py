"""Signs of life: every rank tells the others every INTERVAL_S that its process runs, and how far it is.

A thread of its own writes a rank's sign to the run's store over a connection of its own, so that a main thread that
waits in a collective does not silence it. Rank 0 looks at every rank's sign, the others at rank 0's and at the verdict:
the first rank to find that the run cannot go on leaves a verdict, for all to end with the same words and exit code.
"""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast

from torch._C._distributed_c10d import Store

from prism_lm.parallel.mesh import Ranks
from prism_lm.parallel.process_identity import ProcessIdentity, identify_process

INTERVAL_S = 2.0
_LOOK_S = 0.1
_LEAVE_S = 4.0
_VERDICT = "verdict"
_LEFT = ("ended", "failed")


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a rank last told of itself."""

    count: int = 0
    "Grows with every sign."
    state: Literal["starting", "alive", "ended", "failed"] = "starting"
    "ended and failed: it has left the run, in the latter case with an error."
    beats: int = 0
    "Phases its main thread has begun."
    phase: str = ""
    "The newest of them."
    place: str = ""
    "Where its main thread was found when the run was taken for hung; empty before."
    is_waiting: bool = False
    "There: in a collective, for other ranks."
    process: ProcessIdentity | None = None
    "None before its first sign."


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the run cannot go on, and the code that its processes exit with."""

    code: int
    text: str


class AwakeClock:
    """Seconds that this process has run: a time in which it was stopped, and its watchers with it, counts as 2 s. It
    must be read more often than that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s, self._read_at_s = 0.0, time.monotonic()

    def read(self) -> float:
        """The seconds so far."""
        with self._lock:
            now_s = time.monotonic()
            self._total_s += min(now_s - self._read_at_s, 2.0)
            self._read_at_s = now_s
            return self._total_s


class Presence:
    """This rank's sign of life, and what it knows of the others'. Without a store, as with one process, it does nothing
    but keep this rank's own sign."""

    def __init__(self, ranks: Ranks, store: Store | None, *, interval_s: float = INTERVAL_S) -> None:
        self.ranks, self.interval_s, self.clock = ranks, interval_s, AwakeClock()
        self._store = store
        self._look_s = max(_LOOK_S, ranks.world_size / 256)
        self._others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        self._lock = threading.Lock()
        self._mine = Sign(state="alive", process=identify_process())
        self._signs = [Sign() for _ in range(ranks.world_size)]
        self._moved_at_s = [0.0] * ranks.world_size
        self._dead_since_s: dict[int, float] = {}
        self._verdict: Verdict | None = None
        self._wanted: Verdict | None = None
        self._wake, self._closing, self._looking, self._broken, self._rounds = threading.Event(), False, False, False, 0
        self._thread: threading.Thread | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that some rank has left."""
        return self._verdict

    @contextmanager
    def showing(self) -> Generator["Presence", None, None]:
        """Gives signs of life for the time of the block; the last one says whether it ended with an error."""
        if self._store is not None:
            if self.ranks.is_main:
                # So that reading waits for nobody; what a rank that came first has told stays.
                for key in (_VERDICT, *(f"sign/{rank}" for rank in self._others)):
                    self._store.compare_set(key, "", "")
            self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
            self._thread.start()
        try:
            yield self
        except BaseException:
            self._close("failed")
            raise
        self._close("ended")

    def begin_phase(self, phase: str) -> None:
        """The main thread begins a phase; the next sign says so."""
        with self._lock:
            self._mine = replace(self._mine, beats=self._mine.beats + 1, phase=phase)

    def note_place(self, place: str, *, is_waiting: bool) -> None:
        """The next sign says where the main thread was found."""
        with self._lock:
            self._mine = replace(self._mine, place=place, is_waiting=is_waiting)

    def leave_verdict(self, verdict: Verdict, *, wait_s: float) -> Verdict:
        """Tells all ranks to end so, unless a rank has left another verdict before; returns what holds. Waits at most
        wait_s for the store."""
        self._wanted = verdict
        self._wait_until(lambda: self._verdict is not None, wait_s)
        return self._verdict or verdict

    def read_signs(self, *, wait_s: float) -> list[Sign]:
        """The newest sign of every rank, this one's included, once all have told their place, after wait_s at the
        latest."""
        self._looking = True
        self._wait_until(lambda: all(self._signs[rank].place for rank in self._others), wait_s)
        self._signs[self.ranks.rank] = self._mine
        return list(self._signs)

    def find_missing(self, wait_s: float) -> list[str]:
        """Names the ranks that show no sign of life: those whose process is known to have died, otherwise, after
        wait_s, those that gave no sign meanwhile. Where all others live it names those that left by themselves."""
        self._looking = True
        before = [sign.count for sign in self._signs]
        self._wait_until(lambda: not self._list_silent(before) or bool(self._list_dead()), wait_s)
        # A process that has just left may have died since its last sign was read.
        rounds = self._rounds + 2
        self._wait_until(lambda: self._rounds >= rounds, 1.0 + 4 * self._look_s)
        silent = self._list_silent(before)
        if self._broken or (silent and self._rounds < rounds):
            silent = [] if self.ranks.is_main else [0]
        left = [rank for rank in self._others if self._signs[rank].state in _LEFT]
        return [self.name_rank(rank) for rank in self._list_dead() or silent or left]

    def find_lost(self, *, rank_timeout_s: float, dead_s: float) -> list[int]:
        """Ranks silent for rank_timeout_s, a rank that left with an error among them, or known to have died dead_s ago;
        never one that has not shown itself yet. Rank 0 answers for all ranks, another rank for rank 0 alone."""
        now_s = self.clock.read()
        if self._store is None or (self.ranks.is_main and self._broken):
            return []
        looked_at = self._others if self.ranks.is_main else [0]
        dead = [rank for rank in self._list_dead() if now_s - self._dead_since_s[rank] >= dead_s]
        silent = [rank for rank in looked_at if now_s - self._moved_at_s[rank] > rank_timeout_s]
        shown = [rank for rank in looked_at if self._signs[rank].state in ("alive", "failed")]
        return [rank for rank in shown if rank in dead or rank in silent]

    def name_rank(self, rank: int) -> str:
        """`rank 2 (host, pid 1234)`."""
        process = self._signs[rank].process
        return f"rank {rank}" + ("" if process is None else f" ({process})")

    def _wait_until(self, is_true: Callable[[], bool], wait_s: float) -> None:
        """Wakes the thread and waits; at once without one, and not for a store that is gone."""
        end_s = time.monotonic() + wait_s
        while self._store is not None and not self._broken and not is_true() and time.monotonic() < end_s:
            self._wake.set()
            time.sleep(self._look_s / 4)

    def _list_silent(self, before: list[int]) -> list[int]:
        return [
            rank
            for rank in self._others
            if self._signs[rank].state not in _LEFT and self._signs[rank].count <= before[rank]
        ]

    def _list_dead(self) -> list[int]:
        """Ranks of this host whose process has ended without leaving."""
        dead = [rank for rank in self._others if _is_dead(self._signs[rank])]
        now_s = self.clock.read()
        for rank in dead:
            self._dead_since_s.setdefault(rank, now_s)
        return dead

    def _run(self) -> None:
        while not self._closing:
            self._try_round()
            self._wake.wait(self._look_s if self._looking else self.interval_s)
            self._wake.clear()

    def _try_round(self) -> None:
        """One round over the store. A store whose server is gone is not asked again: each try would print a trace."""
        self._broken = self._broken or (not self.ranks.is_main and 0 in self._list_dead())
        if self._broken:
            return
        try:
            self._round(cast(Store, self._store))
        except RuntimeError:
            self._broken = True

    def _round(self, store: Store) -> None:
        with self._lock:
            self._mine = replace(self._mine, count=self._mine.count + 1)
        store.set(f"sign/{self.ranks.rank}", json.dumps(asdict(self._mine)))
        if self._wanted is not None:
            store.compare_set(_VERDICT, "", json.dumps(asdict(self._wanted)))
        ranks = self._others if self._looking or self.ranks.is_main else [0]
        verdict, *texts = store.multi_get([_VERDICT, *(f"sign/{rank}" for rank in ranks)])
        for rank, text in zip(ranks, texts, strict=True):
            self._take_sign(rank, text)
        self._verdict = Verdict(**json.loads(verdict)) if verdict else None
        self._rounds += 1

    def _take_sign(self, rank: int, text: bytes) -> None:
        if not text:
            return
        fields = json.loads(text)
        sign = Sign(**fields | {"process": ProcessIdentity(**fields["process"])})
        if sign.count != self._signs[rank].count:
            self._moved_at_s[rank] = self.clock.read()
            self._dead_since_s.pop(rank, None)
        self._signs[rank] = sign

    def _close(self, state: Literal["ended", "failed"]) -> None:
        """Rank 0, which may serve the store, stays until all have left, some seconds at the most."""
        with self._lock:
            self._mine = replace(self._mine, state=state)
        if self._thread is None:
            return
        if self.ranks.is_main:
            self._looking = True
            self._wait_until(self._have_all_left, _LEAVE_S)
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=_LEAVE_S)
        if not self._thread.is_alive():
            self._try_round()

    def _have_all_left(self) -> bool:
        dead = self._list_dead()
        return all(rank in dead or self._signs[rank].state in _LEFT for rank in self._others)


def _is_dead(sign: Sign) -> bool:
    return sign.state == "alive" and sign.process is not None and sign.process.is_alive() is False
