"""What a run leaves in its folder about itself: how it was set up, each start, and how it ended."""

import hashlib
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_lm.checkpoint.folder import step_folder, write_json, write_whole
from prism_lm.parallel.collectives import RunFailed, call_together, describe_error
from prism_lm.train.lineage import (
    LINEAGE_NAME,
    RESULT_NAME,
    append_line,
    count_starts,
    describe_former_end,
    read_result,
)
from prism_lm.train.state import Status, TrainRun, TrainState

_CLAIM_NAME = f".{RESULT_NAME}.claim"


def _accept() -> None:
    """The check of a folder that no other start can take over."""


@dataclass(kw_only=True)
class Ending:
    """What result.json will say, filled in while the run goes on."""

    status: Status = "preempted"
    "How the run ended, unless an error is raised."
    state: TrainState
    "Where it stands."
    losses: dict[str, float]
    "The last training and validation losses."
    check_owner: Callable[[], None] = _accept
    "Raises once another start has taken the run's folder over; no ending is written there then."
    began_s: float = field(default_factory=time.monotonic)
    "When this start began, on the clock of time.monotonic."


def read_status(run_dir: Path) -> str | None:
    """How the newest start ended: finished, preempted or failed; None where it left no ending."""
    result = read_result(run_dir)
    return None if result is None else str(result["status"])


def write_start(run: TrainRun, state: TrainState, resumed_from: Path | None = None) -> None:
    """Rank 0 writes config.yaml, environment.json, run.files and a line of lineage.jsonl, and removes the last result.

    resumed_from is the checkpoint that was loaded; by default that of state.step, none at step 0. To be called once
    nothing can refuse the start any more. An error is raised on all ranks.
    """
    call_together(lambda: _write_start(run, state, resumed_from) if run.ranks.is_main else None)


def _write_start(run: TrainRun, state: TrainState, resumed_from: Path | None) -> None:
    folder = resumed_from or (step_folder(run.run_dir, state.step) if state.step else None)
    for name, content in {**run.files, "config.yaml": run.config_yaml.encode()}.items():
        write_whole(run.run_dir / name, content)
    write_json(run.run_dir / "environment.json", dict(run.environment))
    append_line(run.run_dir / LINEAGE_NAME, _describe_start(run, state, folder))
    for name in (RESULT_NAME, _CLAIM_NAME):
        (run.run_dir / name).unlink(missing_ok=True)


def _describe_start(run: TrainRun, state: TrainState, folder: Path | None) -> dict[str, Any]:
    """The line of a start. SLURM's job is there where the run has one."""
    return {
        "time": _spell_now(),
        "event": "resume" if folder else "start",
        "step": state.step,
        "resumed_from": folder.name if folder else None,
        **describe_former_end(run.run_dir),
        "commit": run.environment.get("commit"),
        "world_size": run.ranks.world_size,
        "data_degree": run.ranks.data_world_size,
        "sequence_degree": run.ranks.sequence_degree,
        "zero_stage": run.train.zero_stage,
        "host": platform.node(),
        **{name: value for name, value in run.environment.items() if name.startswith("slurm_")},
        "config_sha256": hashlib.sha256(run.config_yaml.encode()).hexdigest(),
    }


@contextmanager
def reporting(run: TrainRun, ending: Ending) -> Generator[None, None, None]:
    """Writes result.json and the lineage's line when the block ends, with status failed and the error's words when it
    raises.

    Rank 0 writes, and so does a rank that fails alone; the first to write is believed, since what other ranks meet
    after that is only the loss of a partner. Raises what ending.check_owner raises, and writes nothing, where the
    folder is another start's by now.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if run.ranks.is_main or not isinstance(error, RunFailed):
            _try_to_write_failure(run.run_dir, ending, error)
        raise
    if run.ranks.is_main:
        ending.check_owner()
        _write_once(run.run_dir, _describe(ending))


def write_failure(run_dir: Path, ending: Ending, error: str) -> None:
    """Says in result.json and in the lineage that the run failed, in these words, unless an ending is written already
    or another start has taken the folder over. Any rank and any thread may call it. Raises OSError."""
    try:
        ending.check_owner()
    except RunFailed:
        return
    _write_once(run_dir, _describe(ending) | {"status": "failed", "error": error})


def _try_to_write_failure(run_dir: Path, ending: Ending, error: BaseException) -> None:
    """A disk that takes no record, perhaps the error's own cause, does not hide the error."""
    try:
        write_failure(run_dir, ending, describe_error(error))
    except OSError as refusal:
        error.add_note(f"{RESULT_NAME} and {LINEAGE_NAME} do not tell this ending: {refusal}")


def _describe(ending: Ending) -> dict[str, Any]:
    state = ending.state
    return {
        "status": ending.status,
        "step": state.step,
        "tokens": state.tokens,
        "skipped_steps": state.skipped_steps,
        **ending.losses,
        "wall_s": round(time.monotonic() - ending.began_s, 1),
        "error": None,
    }


def _write_once(run_dir: Path, result: dict[str, Any]) -> None:
    """The first to create the claim writes; a claim that a kill left behind goes at the next start."""
    path, claim = run_dir / RESULT_NAME, run_dir / _CLAIM_NAME
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return
    if not path.exists():
        write_json(path, result | {"starts": count_starts(run_dir)})
        said = {name: result[name] for name in ("status", "step", "error")}
        append_line(run_dir / LINEAGE_NAME, {"time": _spell_now(), "event": "end", **said})
    claim.unlink()


def _spell_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
