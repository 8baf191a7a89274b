"""What a run leaves in its folder about itself: how it was set up, each start, and how it ended."""

import hashlib
import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prism_lm.checkpoint.folder import read_json, write_json, write_whole
from prism_lm.parallel.collectives import RunFailed, call_together, describe_error
from prism_lm.train.state import Status, TrainRun, TrainState

RESULT_NAME = "result.json"
LINEAGE_NAME = "lineage.jsonl"
_CLAIM_NAME = f".{RESULT_NAME}.claim"


@dataclass(kw_only=True)
class Ending:
    """What result.json will say, filled in while the run goes on."""

    status: Status = "preempted"
    "How the run ended, unless an error is raised."
    state: TrainState
    "Where it stands."
    losses: dict[str, float]
    "The last training and validation losses."


def read_status(run_dir: Path) -> str | None:
    """finished, preempted or failed; None where no ending was written."""
    path = run_dir / RESULT_NAME
    return cast(str, read_json(path, remedy="remove the file")["status"]) if path.is_file() else None


def write_start(run: TrainRun, state: TrainState) -> None:
    """Rank 0 writes config.yaml, environment.json, run.files and a line of lineage.jsonl, and removes the last result.

    To be called once nothing can refuse the start any more. An error is raised on all ranks.
    """
    call_together(lambda: _write_start(run, state) if run.ranks.is_main else None)


def _write_start(run: TrainRun, state: TrainState) -> None:
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "event": "resume" if state.step else "start",
        "step": state.step,
        "former_end": read_status(run.run_dir) or ("killed" if state.step else None),
        "world_size": run.ranks.world_size,
        "sequence_degree": run.ranks.sequence_degree,
        "config_sha256": hashlib.sha256(run.config_yaml.encode()).hexdigest(),
    }
    for name, content in {**run.files, "config.yaml": run.config_yaml.encode()}.items():
        write_whole(run.run_dir / name, content)
    write_json(run.run_dir / "environment.json", dict(run.environment))
    with (run.run_dir / LINEAGE_NAME).open("a") as file:
        file.write(json.dumps(line) + "\n")
    for name in (RESULT_NAME, _CLAIM_NAME):
        (run.run_dir / name).unlink(missing_ok=True)


@contextmanager
def reporting(run: TrainRun, ending: Ending) -> Generator[None, None, None]:
    """Writes result.json when the block ends, with status failed and the error's words when it raises.

    Rank 0 writes, and so does a rank that fails alone; the first to write is believed, since what other ranks meet
    after that is only the loss of a partner.
    """
    began_s = time.monotonic()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if run.ranks.is_main or not isinstance(error, RunFailed):
            _write_once(run.run_dir, _describe(ending, began_s) | {"status": "failed", "error": describe_error(error)})
        raise
    if run.ranks.is_main:
        _write_once(run.run_dir, _describe(ending, began_s))


def _describe(ending: Ending, began_s: float) -> dict[str, Any]:
    state = ending.state
    return {
        "status": ending.status,
        "step": state.step,
        "tokens": state.tokens,
        "skipped_steps": state.skipped_steps,
        **ending.losses,
        "wall_s": round(time.monotonic() - began_s, 1),
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
        write_json(path, result)
    claim.unlink()
