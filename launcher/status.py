"""`prism status RUN [RUN ...]`: how runs stand, read from their folders alone.

One run: its state, progress, newest checkpoint and every start. Several: one line each. The state is one of running,
finished, preempted (stopped by a signal, with a checkpoint), failed, killed (it left no ending), never started.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.run_folder import (
    LastRecords,
    SavedCheckpoint,
    align,
    check_folder,
    find_newest_sound,
    find_owner,
    read_last_records,
    spell_age,
    spell_bytes,
    spell_owner,
)
from prism_lm.checkpoint.folder import list_published
from prism_lm.train.lineage import LINEAGE_NAME, read_lineage, read_result

EXAMPLE = """\
example:
  prism status runs/tiny
  prism status runs/*
  prism status runs/tiny --json
"""
OVERVIEW = ["run", "state", "step", "tokens", "loss", "tokens/s", "ETA", "record", "checkpoint", "starts"]
STARTS = ["#", "when", "event", "step", "from", "the one before", "commit", "processes", "host"]


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


def main(arguments: list[str]) -> int:
    """Print one run in full, several as a table, or each as a line of JSON."""
    parsed = build_parser().parse_args(arguments)
    runs = [Path(run) for run in parsed.runs]
    for run_dir in runs:
        check_folder(run_dir)
    statuses = [read_run(run_dir) for run_dir in runs]
    if parsed.json:
        lines = [json.dumps(asdict(status)) for status in statuses]
    else:
        lines = describe_run(statuses[0]) if len(statuses) == 1 else describe_runs(statuses)
    print("\n".join(lines))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, on a line of its own")
    return parser


def read_run(run_dir: Path) -> RunStatus:
    """Reads a run's folder, which a running, killed or never started run may have left in any state."""
    lineage, records, saved = read_lineage(run_dir), read_last_records(run_dir), find_newest_sound(run_dir)
    result = _read_result(run_dir)
    state, detail = _find_state(run_dir, result)
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
    )


def _read_result(run_dir: Path) -> dict[str, Any] | None:
    try:
        return read_result(run_dir)
    except ValueError as error:
        return {"status": "unknown", "error": str(error)}


def _find_state(run_dir: Path, result: dict[str, Any] | None) -> tuple[str, str | None]:
    if owner := find_owner(run_dir):
        return "running", spell_owner(owner)
    if result is not None:
        return str(result.get("status")), result.get("error")
    return ("killed", None) if (run_dir / LINEAGE_NAME).is_file() else ("never started", None)


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


def describe_run(status: RunStatus) -> list[str]:
    """One run in full: a fact a line, then a table of its starts."""
    facts = {
        "state": status.state + (f": {status.detail}" if status.detail else ""),
        "step": _spell_step(status, " of "),
        "tokens": f"{status.tokens:,}",
        "loss": _spell_losses(status),
        "speed": _spell_speed(status),
        "last record": _spell_or_dash(status.last_record_age_s, lambda age_s: f"{spell_age(age_s)} ago"),
        "checkpoint": _spell_checkpoint(status),
        "starts": str(status.starts),
    }
    lines = [status.run, *(f"  {name:<13}{text}" for name, text in facts.items())]
    return lines + (["", *align([STARTS, *list_starts(status.lineage)])] if status.starts else [])


def _spell_step(status: RunStatus, between: str) -> str:
    return f"{status.step:,}" + (f"{between}{status.total_steps:,}" if status.total_steps else "")


def _spell_losses(status: RunStatus) -> str:
    validation = _spell_or_dash(status.validation_loss_nats, lambda nats: f", validation {nats:.4f}")
    return _spell_or_dash(status.loss_nats, lambda nats: f"{nats:.4f} nats") + validation.removeprefix("-")


def _spell_speed(status: RunStatus) -> str:
    eta = _spell_or_dash(status.eta_s, lambda eta_s: f", {spell_age(eta_s)} to go")
    return _spell_or_dash(status.tokens_per_s, lambda rate: f"{rate:,.0f} tokens/s") + eta.removeprefix("-")


def _spell_checkpoint(status: RunStatus) -> str:
    damaged = "".join(f"; {name} is damaged (prism checkpoint verify)" for name in status.damaged_checkpoints)
    if status.checkpoint is None:
        return "none complete" + damaged
    held = status.checkpoint
    return f"step_{held['step']}, {spell_bytes(held['bytes'])}, {spell_age(held['age_s'])} old{damaged}"


def list_starts(lineage: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each start: when, from which step, why the one before ended, commit, processes, host."""
    starts = [line for line in lineage if line.get("event") != "end"]
    return [[str(number), *_describe_start(line)] for number, line in enumerate(starts, start=1)]


def _describe_start(line: dict[str, Any]) -> list[str]:
    former, error = line.get("former_end") or "-", line.get("former_error")
    named = [line.get(name) for name in ("time", "event", "step", "resumed_from")]
    return [
        *("-" if value is None else str(value) for value in named),
        f"{former}: {_shorten(error)}" if error else former,
        _spell_commit(line.get("commit")),
        _spell_processes(line),
        str(line.get("host") or "-"),
    ]


def _shorten(text: str, limit: int = 60) -> str:
    first = " ".join(text.split())
    return first if len(first) <= limit else f"{first[: limit - 3]}..."


def _spell_commit(commit: str | None) -> str:
    return "-" if not commit else commit[:8] + ("+" if "+" in commit else "")


def _spell_processes(line: dict[str, Any]) -> str:
    """4 (2 x 2, ZeRO 1): data x sequence degree."""
    degree, world_size = line.get("sequence_degree", 1), line.get("world_size", 1)
    stage = f", ZeRO {line['zero_stage']}" if "zero_stage" in line else ""
    return f"{world_size} ({line.get('data_degree', world_size // degree)} x {degree}{stage})"


def describe_runs(statuses: list[RunStatus]) -> list[str]:
    """A table with a line for each run."""
    return align([OVERVIEW, *(_describe_briefly(status) for status in statuses)])


def _describe_briefly(status: RunStatus) -> list[str]:
    held = status.checkpoint
    return [
        status.run,
        status.state,
        _spell_step(status, "/"),
        f"{status.tokens:,}",
        _spell_or_dash(status.loss_nats, lambda nats: f"{nats:.4f}"),
        _spell_or_dash(status.tokens_per_s, lambda rate: f"{rate:,.0f}"),
        _spell_or_dash(status.eta_s, spell_age),
        _spell_or_dash(status.last_record_age_s, lambda age_s: f"{spell_age(age_s)} ago"),
        f"step_{held['step']}, {spell_age(held['age_s'])} old" if held else "none",
        str(status.starts),
    ]


def _spell_or_dash(value: float | None, spell: Callable[[float], str]) -> str:
    return "-" if value is None else spell(value)
