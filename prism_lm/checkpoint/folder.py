"""Checkpoint folders on disk: names, the manifest that marks a complete one, publishing, pruning.

A checkpoint is written into `checkpoints/.partial_step_<n>/`, renamed to `checkpoints/step_<n>/`, and complete once
`manifest.json`, which lists every file's size and hash, appears in it. A folder without a manifest is what a killed
save left behind; one whose files are not what its manifest says is damaged, which is an error and never ignored. Knows
no processes: who writes what, and when, is the manager's.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "model.safetensors"
TRAINER_NAME = "trainer.json"
_STEP_PATTERN = re.compile(r"step_(\d+)")
PARTIAL_PREFIX = ".partial_"
_READ_BYTES = 1 << 20


class FileEntry(TypedDict):
    """One file of a checkpoint in its manifest."""

    bytes: int
    sha256: str


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step stands once it is published."""
    return run_dir / "checkpoints" / f"step_{step}"


def partial_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is being written."""
    return run_dir / "checkpoints" / f"{PARTIAL_PREFIX}step_{step}"


def rank_file(folder: Path, rank: int) -> Path:
    """One rank's generators and place in the data."""
    return folder / "ranks" / f"rank_{rank}.pt"


def read_step(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    match = _STEP_PATTERN.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_files(folder: Path) -> list[str]:
    """Every file below the folder but the manifest, as sorted relative names."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST_NAME)


def describe_file(path: Path) -> FileEntry:
    """Size and hash of a file, after forcing it to the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_whole(path: Path, content: bytes) -> None:
    """Writes the file whole or not at all, and forces it to the disk. One process at a time."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes the value as JSON, whole or not at all, and forces it to the disk."""
    write_whole(path, json.dumps(value, indent=1).encode())


def read_json(path: Path, *, remedy: str) -> Any:
    """Raises ValueError naming the file, and the remedy, when it holds no JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must hold JSON; {error}; {remedy}") from error


def publish(partial: Path, folder: Path, entries: dict[str, FileEntry]) -> None:
    """Gives the folder its name, then writes its manifest; only after that does the checkpoint exist."""
    if folder.exists():
        remove_folder(folder)
    for inner in [path for path in partial.rglob("*") if path.is_dir()] + [partial]:
        _sync_folder(inner)
    partial.rename(folder)
    _sync_folder(folder.parent)
    write_json(folder / MANIFEST_NAME, {"files": entries})


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file, by its name relative to the folder. Raises ValueError for a damaged manifest."""
    path, remedy = folder / MANIFEST_NAME, describe_remedy(folder)
    try:
        files = cast(dict[str, Any], read_json(path, remedy=remedy)["files"])
        return {name: {"bytes": int(of["bytes"]), "sha256": str(of["sha256"])} for name, of in files.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must list the checkpoint's files; {remedy}") from error


def describe_remedy(folder: Path) -> str:
    """What to do about a damaged file of a checkpoint."""
    return f"restore it, or remove {folder} to go on from the checkpoint before, or from the start if there is none"


def check_sizes(folder: Path) -> None:
    """Raises ValueError naming the first file that is missing, not in the manifest or not as long as it says; hashes
    are not read."""
    entries = read_manifest(folder)
    unlisted = next((name for name in list_files(folder) if name not in entries), None)
    if unlisted is not None:
        raise ValueError(f"{folder / MANIFEST_NAME} must list {unlisted}, which is there; {describe_remedy(folder)}")
    for name, entry in entries.items():
        path = folder / name
        found = f"{path.stat().st_size} bytes" if _exists(path) else "no file"
        if found != f"{entry['bytes']} bytes":
            rule = f"must be the {entry['bytes']} bytes that {MANIFEST_NAME} names, not {found}"
            raise ValueError(f"{path} {rule}; {describe_remedy(folder)}")


def list_published(run_dir: Path) -> list[Path]:
    """A run's checkpoints, those with a manifest, oldest step first; whether they match it is not looked at."""
    folders = [folder for folder in _list_folders(run_dir) if read_step(folder) is not None]
    return sorted((folder for folder in folders if _is_published(folder)), key=lambda folder: read_step(folder) or 0)


def remove_incomplete(run_dir: Path) -> list[Path]:
    """Removes what a killed save left behind, never a folder with a manifest; returns what it removed."""
    left = [
        folder
        for folder in _list_folders(run_dir)
        if folder.name.startswith(PARTIAL_PREFIX) or (read_step(folder) is not None and not _is_published(folder))
    ]
    for folder in left:
        remove_folder(folder)
    return left


def remove_folder(folder: Path) -> None:
    """Removes the marker first, so that a kill in the middle leaves an incomplete folder and not a broken one."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)


def choose_removals(steps: Sequence[int], *, keep_last: int, keep_every_steps: int) -> list[int]:
    """Which of the complete checkpoints' steps to remove: neither the newest keep_last (at least one) nor multiples
    of keep_every_steps (0: none are kept for that)."""
    newest = set(sorted(steps)[-max(1, keep_last) :])
    return [
        step for step in sorted(steps) if step not in newest and not (keep_every_steps and step % keep_every_steps == 0)
    ]


def check_hashes(folder: Path, names: Iterable[str]) -> None:
    """Raises ValueError naming the first of the files whose size or hash is not the manifest's."""
    damaged = find_damaged(folder, names)
    if damaged is not None:
        raise ValueError(f"{folder / damaged} must match its hash in {MANIFEST_NAME}; {describe_remedy(folder)}")


def find_damaged(folder: Path, names: Iterable[str]) -> str | None:
    """The first of the files whose size or hash is not the manifest's; None when all are whole."""
    entries = read_manifest(folder)
    for name in names:
        path = folder / name
        if not path.is_file() or describe_file(path) != entries.get(name):
            return name
    return None


def _list_folders(run_dir: Path) -> list[Path]:
    parent = run_dir / "checkpoints"
    return [path for path in parent.iterdir() if path.is_dir()] if _exists(parent) else []


def _is_published(folder: Path) -> bool:
    return _exists(folder / MANIFEST_NAME)


def _exists(path: Path) -> bool:
    """Unlike Path.exists and Path.glob, takes nothing that cannot be looked at for absent: an OSError is raised."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
