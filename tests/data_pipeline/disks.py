"""Folders on disks that are really full or really read-only."""

import os
import resource
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(folder: Path, free_bytes: int) -> Generator[Path]:
    """A folder with room for `free_bytes`: a small tmpfs, or, without the right to mount, files limited to that
    size."""
    folder.mkdir()
    if mount(folder, f"size={free_bytes}"):
        try:
            yield folder
        finally:
            unmount(folder)
    else:
        with limited_file_size(free_bytes):
            yield folder


@contextmanager
def read_only(folder: Path) -> Generator[None]:
    """Make a mounted folder read-only, or without a mount, unwritable: by its mode, for root by refusing any byte."""
    if is_mounted(folder):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    elif os.geteuid():
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
    else:
        with limited_file_size(0):
            yield


@contextmanager
def limited_file_size(limit_bytes: int) -> Generator[None]:
    """Refuse (EFBIG) to let any file of this process and those it starts grow beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mount(folder: Path, options: str) -> bool:
    """Mount a tmpfs, if this process may."""
    if os.geteuid():
        return False
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def unmount(folder: Path) -> None:
    """Detach, even while a process still has a file open there."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def is_mounted(folder: Path) -> bool:
    """Whether a file system is mounted at the folder."""
    return os.path.ismount(folder)


def fill(folder: Path, *, pid: int) -> None:
    """Leave no room on a mounted folder's disk; without a mount, refuse any byte to process `pid` and those it
    started."""
    if is_mounted(folder):
        with (folder / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(b"\0" * 4096):
                    continue
            except OSError:
                return
    forbid_writes(pid)


def make_read_only(folder: Path, *, pid: int) -> None:
    """Make a mounted folder's disk read-only; otherwise as `fill`."""
    if is_mounted(folder):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        forbid_writes(pid)


def forbid_writes(pid: int) -> None:
    """Limit the file size of a process and its descendants, already running, to nothing."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            forbid_writes(int(child))
