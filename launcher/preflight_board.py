"""Where the ranks of a preflight leave what they found, and read what rank 0 makes of it, within a stated time."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

from torch._C._distributed_c10d import HashStore, Store

from launcher.node_checks import Report
from launcher.preflight_verdict import Speed
from prism_lm.parallel.mesh import Ranks
from prism_lm.parallel.rendezvous import Unmet, name_node
from prism_lm.parallel.store import open_store

Fail = Callable[[dict[str, list[str]], list[Report]], None]
# Rank 0 speaks first; the others end by themselves where it could not.
_LATER_S = 10.0
_READ_S = 5.0


class Board:
    """Opening it waits for all ranks, as a run's rendezvous does, and raises Unmet like that."""

    def __init__(self, ranks: Ranks, *, within_s: float) -> None:
        self.ranks, self._within_s = ranks, within_s
        self._store: Store = HashStore() if ranks.world_size == 1 else open_store(ranks, purpose="preflight")
        self._began_s = time.monotonic()
        self._say = threading.Lock()
        self._phase = "start"
        self._store.set(f"phase/{ranks.rank}", json.dumps([name_node(), self._phase]))

    def enter(self, phase: str) -> None:
        """This rank begins a check that may hang."""
        self._phase = phase
        self._store.set(f"phase/{self.ranks.rank}", json.dumps([name_node(), phase]))

    def hand_in(self, report: Report) -> None:
        """This rank has found all it can by itself."""
        self._store.set(f"report/{self.ranks.rank}", json.dumps(asdict(report)))
        self.enter("waiting for the other ranks' reports")

    def agree(self, judge: Callable[[Sequence[Report]], dict[str, list[str]]], fail: Fail) -> list[Report] | None:
        """All reports, on every rank; None where rank 0, which has said why, finds a node that is bad or silent."""
        if self.ranks.is_main:
            self._wait("report")
            reports = self._read_reports()
            problems = judge(reports)
            for node, texts in self._explain_missing("report").items():
                problems.setdefault(node, []).extend(texts)
            if problems:
                self._fail(fail, problems)
            self._publish("reports", None if problems else [asdict(report) for report in reports])
        answer = cast("list[dict[str, Any]] | None", self._read("reports"))
        return None if answer is None else [Report(**fields) for fields in answer]

    def measure(self, measure: Callable[[], Speed], reports: list[Report], fail: Fail) -> dict[int, Speed] | None:
        """What every rank measured, by rank; None where a rank failed, which rank 0 has said."""
        mine: Speed | str
        try:
            mine = measure()
        except RuntimeError as error:
            mine = str(error).splitlines()[0]
        value = mine if isinstance(mine, str) else asdict(mine)
        self._store.set(f"speed/{self.ranks.rank}", json.dumps(value))
        if self.ranks.is_main:
            self._wait("speed", at_most_s=_READ_S if isinstance(mine, str) else None)
            problems = self._explain_failed(reports)
            if problems:
                self._fail(fail, problems)
            self._publish("speeds", None if problems else self._gather("speed"))
        answer = cast("dict[str, dict[str, float | None]] | None", self._read("speeds"))
        return None if answer is None else {int(rank): Speed(**fields) for rank, fields in answer.items()}

    @contextmanager
    def ending_in_time(self, fail: Fail) -> Generator[None, None, None]:
        """Ends this process with exit code 1 where the block takes longer than it may, whatever it hangs in. Raises
        Unmet where rank 0 is lost."""
        timer = threading.Timer(self._within_s + (0 if self.ranks.is_main else _LATER_S), self._end, [fail])
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, Unmet) or self.ranks.is_main:
                raise
            text = f"rank {self.ranks.rank} on {name_node()} lost rank 0 in {self._phase}; its own lines say why"
            raise Unmet(text, is_said_here=True) from error
        finally:
            timer.cancel()

    def _end(self, fail: Fail) -> None:
        if self.ranks.is_main:
            self._fail(fail, self._explain_missing("speed") or {name_node(): [self._spell_silence(0, self._phase)]})
        else:
            text = self._spell_silence(self.ranks.rank, self._phase)
            print(f"bad  {name_node()}: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    def _fail(self, fail: Fail, problems: dict[str, list[str]]) -> None:
        """Once only, though the time may end meanwhile."""
        if self._say.acquire(blocking=False):
            fail(problems, self._read_reports())

    def _left_s(self) -> float:
        return self._within_s - (time.monotonic() - self._began_s)

    def _wait(self, kind: str, at_most_s: float | None = None) -> None:
        """For every rank's entry of a kind, for the time that is left but a second, or less."""
        names = [f"{kind}/{rank}" for rank in range(self.ranks.world_size)]
        left_s = self._left_s() - 1.0
        end_s = time.monotonic() + (left_s if at_most_s is None else min(left_s, at_most_s))
        while not self._store.check(names) and time.monotonic() < end_s:
            time.sleep(0.05)

    def _gather(self, kind: str) -> dict[int, object]:
        names = {rank: f"{kind}/{rank}" for rank in range(self.ranks.world_size)}
        return {rank: json.loads(self._store.get(name)) for rank, name in names.items() if self._store.check([name])}

    def _read_reports(self) -> list[Report]:
        return [Report(**cast(dict[str, Any], fields)) for fields in self._gather("report").values()]

    def _publish(self, key: str, value: object) -> None:
        """Rank 0 may serve the store: it stays until the others have read this."""
        self._store.set(key, json.dumps(value))
        end_s = time.monotonic() + _READ_S
        while self._store.add(f"{key}_read", 0) < self.ranks.world_size - 1 and time.monotonic() < end_s:
            time.sleep(0.02)

    def _read(self, key: str) -> object:
        while not self._store.check([key]):
            time.sleep(0.02)
        value: object = json.loads(self._store.get(key))
        if not self.ranks.is_main:
            self._store.add(f"{key}_read", 1)
        return value

    def _explain_missing(self, kind: str) -> dict[str, list[str]]:
        """By node: ranks without an entry of a kind, and the check that each is in."""
        given, phases = self._gather(kind), self._gather("phase")
        missing: dict[str, list[str]] = {}
        for rank, (node, phase) in cast(dict[int, list[str]], phases).items():
            if rank not in given:
                missing.setdefault(node, []).append(self._spell_silence(rank, phase))
        return missing

    def _spell_silence(self, rank: int, phase: str) -> str:
        rule = f"must end within --within-s={self._within_s:g} but did not: {phase}"
        return f"rank {rank} {rule}; look at that node, or leave it out with sbatch --exclude"

    def _explain_failed(self, reports: list[Report]) -> dict[str, list[str]]:
        nodes = {report.rank: report.node for report in reports}
        failed = {rank: text for rank, text in self._gather("speed").items() if isinstance(text, str)}
        problems: dict[str, list[str]] = {}
        for rank, text in failed.items():
            remedy = "run with NCCL_DEBUG=INFO to see more"
            problems.setdefault(nodes[rank], []).append(f"rank {rank} must reach the others but met: {text}; {remedy}")
        for node, texts in self._explain_missing("speed").items():
            problems.setdefault(node, []).extend(texts)
        return problems
