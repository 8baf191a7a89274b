"""What a run folder tells without torch: who runs it now, its checkpoints as they lie on the disk, its last records."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prism_lm.checkpoint.folder import (
    MANIFEST_NAME,
    TRAINER_NAME,
    check_sizes,
    list_published,
    read_step,
)
from prism_lm.checkpoint.ownership import OWNER_NAME, OwnerRecord, read_owner
from prism_lm.train.lineage import parse_lines

METRICS_NAME = "metrics.jsonl"
# An owner touches its file every 10 s.
SILENT_AFTER_S = 60.0
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint folder as it lies on the disk; contents are not hashed."""

    folder: Path
    problem: str | None
    "Why nothing resumes from it: it is incomplete, or a file's size is not the manifest's. None where it is sound."
    bytes: int
    "Of all its files."
    age_s: float
    "Since it was completed, or last written to."
    trainer: dict[str, Any]
    "What trainer.json holds; empty where it cannot be read."

    @property
    def step(self) -> int | None:
        """None for a folder that has not got its name yet."""
        return read_step(self.folder)


def find_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_folder(run_dir: Path) -> None:
    """Raises ValueError where RUN is no folder."""
    if not run_dir.is_dir():
        raise ValueError(f"RUN={run_dir} must be the folder of a run; `prism train` makes one at its run_dir")


def find_owner(run_dir: Path) -> OwnerRecord | None:
    """Who runs the folder now; None where nobody does, or nobody says so.

    A process that cannot be seen from here, on another host or in a container, counts as running while its last sign
    of life is less than SILENT_AFTER_S old by this host's clock: enough to look at a run, not to take it over.
    """
    try:
        owner, beat_s = read_owner(run_dir), (run_dir / OWNER_NAME).stat().st_mtime
    except (OSError, ValueError):
        return None
    if owner is None:
        return None
    is_alive = owner.process.is_alive()
    return owner if is_alive or (is_alive is None and abs(time.time() - beat_s) < SILENT_AFTER_S) else None


def spell_owner(owner: OwnerRecord) -> str:
    """process 12 on node7 since 2026-12-01T10:00:00+0000."""
    return f"process {owner.process.pid} on {owner.process.host} since {owner.started}"


def list_saved(run_dir: Path) -> list[SavedCheckpoint]:
    """Every checkpoint folder of the run, what a killed save left included, oldest step first."""
    published, parent = list_published(run_dir), run_dir / "checkpoints"
    others = [path for path in parent.iterdir() if path.is_dir() and path not in published] if parent.is_dir() else []
    found = [describe_saved(folder) for folder in [*published, *others]]
    return sorted(filter(None, found), key=lambda saved: (saved.step is None, saved.step or 0, saved.folder.name))


def find_newest_sound(run_dir: Path) -> SavedCheckpoint | None:
    """The checkpoint with the highest step whose files all have the manifest's sizes."""
    for folder in reversed(list_published(run_dir)):
        saved = describe_saved(folder)
        if saved is not None and saved.problem is None:
            return saved
    return None


def describe_saved(folder: Path) -> SavedCheckpoint | None:
    """Looks at one checkpoint folder; None where the run removes it meanwhile."""
    manifest = folder / MANIFEST_NAME
    try:
        return SavedCheckpoint(
            folder=folder,
            problem=_find_problem(folder),
            bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            age_s=_measure_age(manifest if manifest.is_file() else folder),
            trainer=_read_trainer(folder),
        )
    except FileNotFoundError:
        return None


def _read_trainer(folder: Path) -> dict[str, Any]:
    try:
        trainer = json.loads((folder / TRAINER_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], trainer) if isinstance(trainer, dict) else {}


def _find_problem(folder: Path) -> str | None:
    if not (folder / MANIFEST_NAME).is_file():
        return "incomplete"
    try:
        check_sizes(folder)
    except ValueError as error:
        rule = str(error).partition(";")[0]
        return f"damaged: {rule.removeprefix(f'{folder}/')}"
    return None


def _measure_age(path: Path) -> float:
    """Seconds since the path was written; 0 where it is from the clock's future."""
    return max(0.0, time.time() - path.stat().st_mtime)


@dataclass(frozen=True, kw_only=True)
class LastRecords:
    """The end of a run's metrics.jsonl."""

    lines: list[dict[str, Any]]
    "Its last whole lines, oldest first."
    age_s: float
    "Seconds since the file was written."

    def find(self, tag: str) -> Any:
        """The newest value of a figure; None where none of the lines has it."""
        return next((line[tag] for line in reversed(self.lines) if line.get(tag) is not None), None)


def read_last_records(run_dir: Path) -> LastRecords | None:
    """The end of metrics.jsonl, at most 64 KiB of it; None where no whole line was written yet."""
    path = run_dir / METRICS_NAME
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = [line for line in parse_lines(file.read()) if "step" in line]
    return LastRecords(lines=lines, age_s=_measure_age(path)) if lines else None


def spell_bytes(size: float) -> str:
    """21.3 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(len(units)) if size < 1000 * 1024**power), len(units) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {units[power]}"


def spell_age(seconds: float) -> str:
    """12 s, 5 min, 3.4 h, 2.0 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def align(rows: list[list[str]]) -> list[str]:
    """Lines of a table, columns as wide as their longest entry; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
