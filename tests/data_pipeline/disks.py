"""Folders on disks that are really full or really read-only, where this process may mount them (root, with the right).

Elsewhere full and read-only disks are stood in for by a refused write, which tests the same path of our code with
another error number (EFBIG, EACCES); a warning in the test report says so.
"""

import os
import resource
import subprocess
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

REFUSALS = ("No space left", "Read-only", "Permission denied", "Operation not permitted")


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
    """Mount a tmpfs, if this process may; warn where it may not."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        warnings.warn("no right to mount: a refused write stands in for a full or read-only disk", stacklevel=2)
    return mounted


def unmount(folder: Path) -> None:
    """Detach, even while a process still has a file open there."""
    subprocess.run(["umount", "-l", str(folder)], check=True)


def is_mounted(folder: Path) -> bool:
    """Whether a file system is mounted at the folder."""
    return os.path.ismount(folder)


def fill(folder: Path) -> None:
    """Leave no room on a mounted folder's disk; without a mount, `put_out_of_reach`."""
    if not is_mounted(folder):
        put_out_of_reach(folder)
        return
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(b"\0" * 4096):
                continue
        except OSError:
            return


def make_read_only(folder: Path) -> None:
    """Make a mounted folder's disk read-only; without a mount, `put_out_of_reach`."""
    if is_mounted(folder):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        put_out_of_reach(folder)


def put_out_of_reach(folder: Path) -> None:
    """Point the shard folders of a cache to where nobody, not even root, can write a file."""
    for index in list(folder.rglob("index.json")):
        index.parent.rename(index.parent.with_name(f"{index.parent.name}-before"))
        index.parent.symlink_to("/sys")
