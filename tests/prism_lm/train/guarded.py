"""Shared by tests of a run's guard: processes in a guard of short limits, their exit codes, and what they leave."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prism_lm.parallel.collectives import RunFailed, describe_error
from prism_lm.parallel.mesh import process_group
from prism_lm.train.guard import Guard, guarding
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.watchdog import Limits
from tests.harness import Group, read_ranks

INTERVAL_S = 0.2
MARKS = ["rank_0", "rank_1"]


def run_guarded(run_dir: Path, body: Callable[[Guard, StopSignal], Any], **limits: float) -> Any:
    """The body in a guard and a process group, as a run's loop is; what it returned, or the words of its failure."""
    ranks = read_ranks()

    def on_end(error: str) -> None:
        write_once(run_dir / "result.json", error)

    with StopSignal() as stop:
        try:
            guard = guarding(run_dir, ranks, stop, limits=Limits(**limits), on_end=on_end, interval_s=INTERVAL_S)
            with guard as held, process_group(ranks):
                try:
                    return body(held, stop)
                except RuntimeError as error:
                    on_end(describe_error(error))
                    raise
        except RunFailed as error:
            return f"failed: {error}"


def write_once(path: Path, error: str) -> None:
    try:
        with path.open("x") as file:
            json.dump({"status": "failed", "error": error}, file)
    except FileExistsError:
        return


def read_error(run_dir: Path) -> str:
    return json.loads((run_dir / "result.json").read_text())["error"]


def wait_for_exits(group: Group, ranks: list[int], within_s: float) -> list[int | None]:
    """Exit codes of these ranks, None for one that still runs after the time."""
    end_s = time.monotonic() + within_s
    processes = [group._processes[rank] for rank in ranks]
    for process in processes:
        process.join(timeout=max(0.0, end_s - time.monotonic()))
    return [process.exitcode for process in processes]


def wait_for_files(folder: Path, names: list[str], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < end_s, f"{names} did not appear"
        time.sleep(0.05)


def mark() -> None:
    (Path(os.environ["MARKS"]) / f"rank_{read_ranks().rank}").touch()
