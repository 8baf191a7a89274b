"""How a run stands, from its folder and its jobs; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.job_record import spell_job
from launcher.run_folder import (
    LastRecords,
    SavedCheckpoint,
    find_newest_sound,
    find_owner,
    read_last_records,
    spell_owner,
)
from launcher.run_jobs import RunJobs, find_jobs
from launcher.slurm_jobs import PastJob, SlurmJob
from prism_lm.checkpoint.folder import list_published
from prism_lm.train.lineage import LINEAGE_NAME, read_lineage, read_result


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands; what it has not written yet is None."""

    run: str
    state: str
    detail: str | None
    "Who runs it, or the error that ended it."
    step: int
    total_steps: int | None
    tokens: int
    loss_nats: float | None
    validation_loss_nats: float | None
    tokens_per_s: float | None
    eta_s: float | None
    "To the last step at the speed of the last record; only while it runs."
    last_record_age_s: float | None
    checkpoint: dict[str, Any] | None
    "The newest one whose files have the manifest's sizes: step, bytes, age_s."
    damaged_checkpoints: list[str]
    "Newer ones that are not so."
    starts: int
    lineage: list[dict[str, Any]]
    "The lines of lineage.jsonl: starts, resumes, endings."
    jobs: list[SlurmJob]
    "Its jobs in SLURM's queue, those that run first."
    past_jobs: list[PastJob]
    "Jobs of its last submission that ended, one each time that a job ran; only when one run is asked for."
    log: str | None
    "Of its newest job."


def read_run(run_dir: Path, jobs: Sequence[SlurmJob] = (), *, with_past: bool = False) -> RunStatus:
    """Reads a run's folder, which a running, killed or never started run may have left in any state. `jobs` are those
    in the queue, of any run."""
    lineage, records, saved = read_lineage(run_dir), read_last_records(run_dir), find_newest_sound(run_dir)
    result = _read_result(run_dir)
    own = find_jobs(run_dir, jobs, with_past=with_past)
    state, detail = _find_state(run_dir, result, own)
    reached = result if result and "step" in result else _find_reached(records, saved)
    return RunStatus(
        run=str(run_dir),
        state=state,
        detail=detail,
        step=int(reached.get("step", 0)),
        total_steps=_read_total_steps(run_dir),
        tokens=int(reached.get("tokens", 0)),
        **_read_figures(records, is_running=state == "running"),
        checkpoint=saved and {"step": saved.step, "bytes": saved.bytes, "age_s": round(saved.age_s, 1)},
        damaged_checkpoints=_list_damaged(run_dir, saved),
        starts=sum(line.get("event") != "end" for line in lineage),
        lineage=lineage,
        jobs=own.queued,
        past_jobs=own.past,
        log=own.log,
    )


def _read_result(run_dir: Path) -> dict[str, Any] | None:
    try:
        return read_result(run_dir)
    except ValueError as error:
        return {"status": "unknown", "error": str(error)}


def _find_state(run_dir: Path, result: dict[str, Any] | None, jobs: RunJobs) -> tuple[str, str | None]:
    if owner := find_owner(run_dir):
        return "running", spell_owner(owner)
    ending, error = _find_ending(run_dir, result)
    if jobs.queued and ending != "finished":
        first = jobs.queued[0]
        former = "" if ending == "never started" else f", after {ending}"
        return "queued" if first.is_pending else "starting", f"job {spell_job(first)}{former}"
    return ending, error or (_spell_end(jobs.past) if ending in ("killed", "never started") else None)


def _find_ending(run_dir: Path, result: dict[str, Any] | None) -> tuple[str, str | None]:
    """How the last start ended, and the error that ended it."""
    if result is not None:
        return str(result.get("status")), result.get("error")
    return "killed" if (run_dir / LINEAGE_NAME).is_file() else "never started", None


def _spell_end(past: Sequence[PastJob]) -> str | None:
    """The word of SLURM, for a run that left none."""
    return f"job {past[-1].job_id} {past[-1].state}, exit code {past[-1].exit_code}; see its log" if past else None


def _find_reached(records: LastRecords | None, saved: SavedCheckpoint | None) -> dict[str, Any]:
    """Step and tokens: those of the last record or of the newest checkpoint, whichever is further."""
    known = ([records.lines[-1]] if records else []) + ([saved.trainer] if saved else [])
    return max(known, key=lambda one: one.get("step", 0), default={})


def _read_figures(records: LastRecords | None, *, is_running: bool) -> dict[str, float | None]:
    tags = {
        "loss_nats": "train/loss_nats",
        "validation_loss_nats": "validation/loss_nats",
        "tokens_per_s": "speed/tokens_per_s",
        "eta_s": "speed/eta_s",
    }
    found = {name: records.find(tag) if records else None for name, tag in tags.items()}
    age_s = round(records.age_s, 1) if records else None
    return found | {"eta_s": found["eta_s"] if is_running else None, "last_record_age_s": age_s}


def _read_total_steps(run_dir: Path) -> int | None:
    """train.steps of config.yaml."""
    path = run_dir / "config.yaml"
    try:
        return int(yaml.safe_load(path.read_text())["train"]["steps"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def _list_damaged(run_dir: Path, sound: SavedCheckpoint | None) -> list[str]:
    published = list_published(run_dir)
    newer = published[published.index(sound.folder) + 1 :] if sound and sound.folder in published else published
    return [folder.name for folder in newer]
