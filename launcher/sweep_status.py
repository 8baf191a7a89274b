"""`prism sweep status FOLDER [--watch S]`: how each run of a study stands, here and in SLURM's queue."""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.run_folder import align, spell_age
from launcher.run_jobs import ask_queue
from launcher.study import PlannedRun, expand_study
from launcher.sweep_records import VALIDATION_LOSS, Record, read_record, read_study, run_folder

COLUMNS = ["run", "state", "step", "loss", "validation", "tokens/s", "ETA", "error"]
MOVING = ("running", "queued", "starting")
_CLEAR = "\033[H\033[J"
_MOST_LETTERS = 100


def show_status(folder: Path, watch_s: float | None, *, is_json: bool) -> int:
    """Prints the table once, or every `watch_s` seconds until Ctrl-C or until all runs have finished."""
    if watch_s is not None and not watch_s > 0:
        raise ValueError(f"--watch={watch_s:g} must be seconds above 0; for example --watch 10")
    while True:
        records = read_records(folder, expand_study(read_study(folder)))
        if is_json:
            print("\n".join(json.dumps(asdict(record)) for record in records), flush=True)
        else:
            clear = _CLEAR if watch_s and sys.stdout.isatty() else ""
            print(clear + "\n".join(describe_records(records)), flush=True)
        if not watch_s or all(record.status == "finished" for record in records):
            return 0
        try:
            time.sleep(watch_s)
        except KeyboardInterrupt:
            return 0


def read_records(folder: Path, plan: Sequence[PlannedRun]) -> list[Record]:
    """How these runs of a folder stand, with SLURM's word for those that wait in its queue."""
    jobs = ask_queue([run_folder(folder, run.name) for run in plan])
    return [read_record(folder, run, jobs or ()) for run in plan]


def describe_records(records: Sequence[Record]) -> list[str]:
    """A line for each run, then how many stand how."""
    counts = Counter(record.status for record in records)
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    return [*align([COLUMNS, *map(_describe, records)]), "", f"{len(records)} runs: {total}"]


def _describe(record: Record) -> list[str]:
    validation, train = record.losses.get(VALIDATION_LOSS), record.losses.get("train/loss_nats")
    error = record.error.splitlines()[0] if record.error else ""
    return [
        record.name,
        record.status,
        f"{record.step:,}/{record.config.train.steps:,}",
        "-" if train is None else f"{train:.4f}",
        "-" if validation is None else f"{validation:.4f}",
        "-" if record.tokens_per_s is None else f"{record.tokens_per_s:,.0f}",
        "-" if record.eta_s is None else spell_age(record.eta_s),
        error if len(error) <= _MOST_LETTERS else f"{error[: _MOST_LETTERS - 3]}...",
    ]
