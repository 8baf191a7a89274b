"""Which start a run's folder belongs to, so that two never write into one folder.

Rank 0 of a start claims the folder before any process group starts: it writes `owner.json`, with a token of its own,
and touches that file every BEAT_S from then on. A start that finds an owner takes the folder over where the owner is
dead, or where SLURM has replaced it, and is refused where it lives. The loser of a takeover, say on a node that was
cut off and came back, finds another token at its next check and ends without writing.

Files' times are compared with themselves alone, never with a clock: hosts' clocks differ, and go backwards.
"""

import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from prism_lm.checkpoint.folder import read_json, write_json
from prism_lm.parallel.process_identity import ProcessIdentity, identify_process

OWNER_NAME = "owner.json"
LOCK_NAME = ".owner.lock"
BEAT_S = 10.0
WATCH_S = 45.0
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class OwnerRecord:
    """What owner.json says."""

    token: str
    process: ProcessIdentity
    started: str
    "When, by its own host's clock."
    slurm_job_id: str = ""
    slurm_restart_count: int = 0

    def describe(self) -> dict[str, Any]:
        """The fields of owner.json."""
        slurm = {"slurm_job_id": self.slurm_job_id, "slurm_restart_count": self.slurm_restart_count}
        held = {"token": self.token, **asdict(self.process), "started": self.started}
        return held | (slurm if self.slurm_job_id else {})


def read_owner(run_dir: Path) -> OwnerRecord | None:
    """Who holds the folder; None where nobody does. Raises ValueError for a damaged owner.json."""
    path, remedy = run_dir / OWNER_NAME, "remove the file once no process writes into the folder"
    try:
        fields = cast(dict[str, Any], read_json(path, remedy=remedy))
    except FileNotFoundError:
        return None
    try:
        process = ProcessIdentity(
            host=str(fields["host"]),
            boot_id=str(fields["boot_id"]),
            pid_namespace=str(fields.get("pid_namespace", "")),
            pid=int(fields["pid"]),
            process_start_time=int(fields["process_start_time"]),
        )
        return OwnerRecord(
            token=str(fields["token"]),
            process=process,
            started=str(fields["started"]),
            slurm_job_id=str(fields.get("slurm_job_id", "")),
            slurm_restart_count=int(fields.get("slurm_restart_count", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must name an owner; {error!r} is wrong or missing; {remedy}") from error


class Owner:
    """A start's hold on its run folder. Every rank may hold one, by its token; rank 0's keeps the folder claimed."""

    def __init__(self, run_dir: Path, token: str) -> None:
        self._run_dir = run_dir
        self.token = token
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raises RunFailed where another start has taken the folder over. A file system that does not answer, or a
        file that cannot be read, raises OSError or ValueError."""
        from prism_lm.parallel.collectives import RunFailed

        found = read_owner(self._run_dir)
        if found is not None and found.token == self.token:
            return
        taken = "took this run over and has ended since"
        if found is not None:
            taken = f"took this run over at {found.started} on {found.process}"
        raise RunFailed(f"another start {taken}; this one ends without publishing (run_dir={self._run_dir})")

    def start_beating(self, beat_s: float = BEAT_S) -> None:
        """Touches owner.json every beat_s seconds, until released or taken over, in a thread that keeps no process
        alive."""
        self._thread = threading.Thread(target=self._beat, args=(beat_s,), name="owner", daemon=True)
        self._thread.start()

    def _beat(self, beat_s: float) -> None:
        path = self._run_dir / OWNER_NAME
        while not self._ended.wait(beat_s):
            try:
                with path.open("rb") as file:
                    if json.loads(file.read())["token"] != self.token:
                        return
                    os.utime(file.fileno())
            except (OSError, ValueError, KeyError):
                continue

    def release(self) -> None:
        """Gives the folder back; does nothing where another start has it. No error: a folder left claimed is taken over
        by the next start all the same."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        try:
            with _locked(self._run_dir):
                found = read_owner(self._run_dir)
                if found is not None and found.token == self.token:
                    (self._run_dir / OWNER_NAME).unlink()
        except (OSError, ValueError):
            return


def claim(run_dir: Path, *, watch_s: float = WATCH_S, beat_s: float = BEAT_S) -> Owner:
    """Makes the folder this start's own; call it at rank 0, before any process group starts. Raises ValueError, with
    every file as it was, where another start holds the folder and lives.

    A silent owner on another host is watched for watch_s seconds, which must be several times its beat.
    """
    watched: tuple[str, int] | None = None
    while True:
        with _locked(run_dir):
            held = read_owner(run_dir)
            seen = None if held is None else (held.token, _read_touch(run_dir))
            if held is None or (watched is not None and seen == watched):
                return _take(run_dir, beat_s)
            match _judge(held, os.environ):
                case "free":
                    return _take(run_dir, beat_s)
                case "alive":
                    raise ValueError(_refuse(run_dir, held))
                case "unknown":
                    if watched is not None:
                        raise ValueError(_refuse(run_dir, held))
        watched = seen
        _watch(run_dir, held, watch_s)


def _judge(held: OwnerRecord, environ: Mapping[str, str]) -> Literal["free", "alive", "unknown"]:
    """What can be said at once of an owner that has not released the folder."""
    job, restarts = environ.get("SLURM_JOB_ID", ""), int(environ.get("SLURM_RESTART_COUNT") or 0)
    if job and job == held.slurm_job_id and restarts > held.slurm_restart_count:
        return "free"
    alive = held.process.is_alive()
    return "unknown" if alive is None else ("alive" if alive else "free")


def _watch(run_dir: Path, held: OwnerRecord, watch_s: float) -> None:
    """Returns once owner.json is touched or gone, or after watch_s seconds."""
    first, end_s = _read_touch(run_dir), time.monotonic() + watch_s
    print(
        f"run_dir={run_dir} names process {held.process.pid} on {held.process.host} as its owner; watching up to "
        f"{watch_s:.0f} s for its sign of life",
        flush=True,
    )
    while time.monotonic() < end_s and _read_touch(run_dir) == first:
        time.sleep(min(_LOOK_S, watch_s / 4))


def _read_touch(run_dir: Path) -> int:
    """When owner.json was last touched, in ns of the file system's clock; 0 where it is gone. Opening the file makes a
    network file system ask its server."""
    try:
        with (run_dir / OWNER_NAME).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _take(run_dir: Path, beat_s: float) -> Owner:
    owner = Owner(run_dir, uuid.uuid4().hex)
    record = OwnerRecord(
        token=owner.token,
        process=identify_process(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        slurm_job_id=os.environ.get("SLURM_JOB_ID", ""),
        slurm_restart_count=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    )
    write_json(run_dir / OWNER_NAME, record.describe())
    owner.start_beating(beat_s)
    return owner


def _refuse(run_dir: Path, held: OwnerRecord) -> str:
    process = held.process
    rule = f"is in use by process {process.pid} on {process.host} since {held.started}"
    return f"run_dir={run_dir} {rule}; stop it, or choose another run_dir"


@contextmanager
def _locked(run_dir: Path) -> Generator[None, None, None]:
    """One process at a time. On a file system without locks the last of two starts in one moment wins, and the other
    learns it at its next check."""
    with (run_dir / LOCK_NAME).open("ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
