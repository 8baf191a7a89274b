"""Carries a plan out: the deaths, what they leave, the start that goes on, and the comparison with a run left alone."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from prism_lm.checkpoint import folder as disk
from tests.harness import Group
from tests.soak.plan import STEPS, Kill, Plan, Setting
from tests.soak.records import compare_runs
from tests.soak.training import train

START_S, LEAVE_S = 120.0, 30.0
"The longest a start may take to its end or death; the longest that others may stay after the death of a rank."


class Victims(Group):
    """The ranks of a start, of which some die."""

    def read_exit_codes(self) -> list[int | None]:
        """By rank; None for one that runs."""
        return [process.exitcode for process in self._processes]

    def list_running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it was over within that time; looked at whenever a process ends."""
        end_s = time.monotonic() + timeout_s
        while not is_over():
            sentinels = [process.sentinel for process in self._processes if process.is_alive()]
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not sentinels:
                return is_over()
            connection.wait(sentinels, timeout=left_s)
        return True


class References:
    """Runs left alone, one for all settings that differ only in when and how they save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, setting: Setting) -> Path:
        """The run's folder; it is trained at the first call."""
        run_dir = self.folder / setting.describe()
        if not (run_dir / "result.json").exists():
            plain = Setting(**{**vars(setting), "asynchronous": False, "save_every_steps": STEPS})
            go_on(run_dir, plain, self.folder / f"{setting.describe()}_attempt")
        return run_dir


def run_plan(plan: Plan, folder: Path, references: References) -> None:
    """Fails unless the run that dies as planned has the numbers of the one left alone, each step once."""
    reference, run_dir = references.get(plan.setting), folder / "run"
    resumes: list[int] = []
    for number, kill in enumerate(plan.kills):
        die(run_dir, plan.setting, kill, folder / f"attempt_{number}")
        resumes.append(check_what_is_left(run_dir, plan.setting))
    assert plan.point != "after_resume" or min(resumes) > 0, f"a start of {plan} resumed nothing"
    go_on(run_dir, plan.setting, folder / "attempt_last")
    begun = read_start_steps(run_dir)
    # A death in the first seconds of a start can come before its line.
    assert begun[-1] == resumes[-1], f"the last of the starts {begun} must go on from step {resumes[-1]}"
    compare_runs(run_dir, reference, plan.setting)


def go_on(run_dir: Path, setting: Setting, attempt: Path) -> None:
    """A start that nobody kills; it must come to the end."""
    attempt.mkdir(parents=True)
    statuses = Group(setting.num_processes, train, str(run_dir), setting, None, str(attempt)).wait(START_S)
    assert set(statuses) == {"finished"}, statuses


def die(run_dir: Path, setting: Setting, kill: Kill, attempt: Path) -> None:
    """A start in which the kill must happen, and after which nobody may stay for long."""
    attempt.mkdir(parents=True)
    group = Victims(setting.num_processes, train, str(run_dir), setting, kill, str(attempt))
    try:
        assert group.wait_until(lambda: -signal.SIGKILL in group.read_exit_codes(), START_S), describe_alive(group)
        if kill.agent:
            group.send_signal(signal.SIGTERM)
        left = group.wait_until(lambda: not group.list_running(), LEAVE_S)
        words = f"ranks {group.list_running()} still ran {LEAVE_S:.0f} s after another was killed"
        # torchrun's agent kills those that do not leave; without one they must leave by themselves.
        assert left or kill.agent, words
    finally:
        group.kill()


def describe_alive(group: Victims) -> str:
    """Why no rank died."""
    return f"no rank came to the planned moment; exit codes {group.read_exit_codes()}"


def check_what_is_left(run_dir: Path, setting: Setting) -> int:
    """The step of the newest complete checkpoint, 0 for none, which must be whole and no older than what is recorded
    allows."""
    published = disk.list_published(run_dir)
    for folder in published:
        damaged = disk.find_damaged(folder, sorted(disk.read_manifest(folder)))
        assert damaged is None, f"{folder / str(damaged)} is not what its manifest says"
    newest = max((disk.read_step(folder) or 0 for folder in published), default=0)
    # A later step is recorded after the save of a former one; an asynchronous save may be on its way until the next.
    every, recorded = setting.save_every_steps, read_last_step(run_dir)
    saved = (recorded - 1) // every * every - (every if setting.asynchronous else 0)
    assert newest >= saved, f"step {recorded} is recorded, but the newest checkpoint is of step {newest}"
    return newest


def read_last_step(run_dir: Path) -> int:
    """Of metrics.jsonl; 0 where there is none. A last line cut short is not looked at."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def read_start_steps(run_dir: Path) -> list[int]:
    """The steps from which the starts in lineage.jsonl went on."""
    lines: list[dict[str, Any]] = []
    for line in (run_dir / "lineage.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [int(line["step"]) for line in lines if line["event"] in ("start", "resume")]


def clear(folder: Path) -> None:
    """Removes what a plan that passed has left."""
    shutil.rmtree(folder, ignore_errors=True)
