"""Which process on which machine: what tells a live process from a dead one whose number was given out again."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """One process, for as long as it lives."""

    host: str
    "Name of its host."
    boot_id: str
    "The host's boot; empty where the system does not tell it."
    pid_namespace: str
    "Where its number counts: containers of one host have namespaces of their own."
    pid: int
    "Its number."
    process_start_time: int
    "Clock ticks from the boot to its start; 0 where the system does not tell it."

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"

    def is_alive(self) -> bool | None:
        """Whether it still runs; None where this process cannot see it: another host, another boot, a container."""
        here = identify_process()
        if not here.boot_id or not here.process_start_time:
            return None
        if (self.boot_id, self.pid_namespace) != (here.boot_id, here.pid_namespace):
            return None
        return self.process_start_time > 0 and read_start_time(self.pid) == self.process_start_time


def identify_process() -> ProcessIdentity:
    """This process."""
    return ProcessIdentity(
        host=platform.node(),
        boot_id=_read_boot_id(),
        pid_namespace=_read_namespace(),
        pid=os.getpid(),
        process_start_time=read_start_time(os.getpid()),
    )


def read_start_time(pid: int) -> int:
    """Clock ticks from the boot to the process's start; 0 where it has ended, its parent told of it or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
