"""Writing a submission into the run folders and handing it to sbatch; refusing one whose run has a job already."""

import fcntl
import shlex
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.batch_script import BatchScript
from launcher.job_record import (
    JobRecord,
    choose_jobs,
    read_record,
    slurm_folder,
    spell_job,
    write_record,
)
from launcher.job_request import OVERRULING
from launcher.planned_run import PlannedRun
from launcher.provenance import ROOT
from launcher.run_folder import find_owner, spell_owner
from launcher.slurm_commands import SlurmError, submit_script
from launcher.slurm_jobs import list_jobs
from prism_lm.checkpoint.folder import write_whole

SCRIPT_NAME = "job.sh"
_LOCK_NAME = ".submit.lock"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything that is to be written, and how many jobs it becomes."""

    folder: Path
    "Where script, record and log lie: RUN/slurm, or the sweep's folder."
    script: BatchScript
    plan: Sequence[PlannedRun]
    num_jobs: int
    "More than one is a chain."
    dependency: str | None = None
    "What the first job waits for, as sbatch spells it."

    def describe_plan(self) -> list[str]:
        """What submit would do, and the script."""
        written = [str(run.slurm_folder / "config.yaml") for run in self.plan]
        path = self.folder / SCRIPT_NAME
        waits = [self.dependency, *["afterany:JOB"] * (self.num_jobs - 1)]
        options = ["--parsable " + (f"--dependency={wait} " if wait else "") for wait in waits]
        steps = [
            *(f"would write {file}" for file in [*written, path]),
            *(f"would run   sbatch {words}{shlex.quote(str(path))}" for words in options),
        ]
        return [*steps, "", self.script.render()]

    def submit(self) -> JobRecord:
        """Writes and queues; the record is written after each job, so that none is forgotten. Raises SlurmError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for run in self.plan:
            run.slurm_folder.mkdir(parents=True, exist_ok=True)
            write_whole(run.slurm_folder / "config.yaml", run.config_yaml.encode())
            write_changes(run.slurm_folder, self.script.commit)
        path = self.folder / SCRIPT_NAME
        write_whole(path, self.script.render().encode())
        record = JobRecord(
            job_ids=[],
            submitted=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            script=str(path),
            log=self.script.log,
            name=self.script.name,
            commit=self.script.commit,
            runs=[str(run.run_dir) for run in self.plan] if self.script.is_array else None,
        )
        for _ in range(self.num_jobs):
            record = replace(record, job_ids=[*record.job_ids, self._queue_next(record, path)])
            self._write_records(record)
        return record

    def _queue_next(self, record: JobRecord, path: Path) -> str:
        last = record.job_ids[-1] if record.job_ids else None
        try:
            return submit_script(path, dependency=f"afterany:{last}" if last else self.dependency, ignored=OVERRULING)
        except SlurmError as error:
            if last is None:
                raise
            queued = " ".join(record.job_ids)
            raise SlurmError(f"{error}; {queued} of the chain are queued: leave them, or scancel {queued}") from error

    def _write_records(self, record: JobRecord) -> None:
        write_record(self.folder, record)
        if not self.script.is_array:
            return
        for task, run in enumerate(self.plan):
            job_id = f"{record.job_ids[0]}_{task}"
            log = str(run.slurm_folder / f"{record.name}-%j.log")
            write_record(run.slurm_folder, replace(record, job_ids=[job_id], log=log, runs=None))


def refuse_active(run_dirs: Sequence[Path]) -> None:
    """Raises ValueError naming the job, or the process, that has one of the runs already."""
    records = {run_dir: read_record(slurm_folder(run_dir)) for run_dir in run_dirs}
    known = {run_dir: record.job_ids if record else [] for run_dir, record in records.items()}
    jobs = {job.job_id: job for job in [*list_jobs(), *list_jobs([one for ids in known.values() for one in ids])]}
    for run_dir, job_ids in known.items():
        active = choose_jobs(list(jobs.values()), run_dir, job_ids)
        if active:
            named = " ".join(job.job_id for job in active)
            raise ValueError(
                f"run_dir={run_dir} must have no job in the queue, and has {', '.join(map(spell_job, active))}; follow "
                f"it with prism status, or end it with scancel {named}"
            )
        if owner := find_owner(run_dir):
            raise ValueError(f"run_dir={run_dir} is in use by {spell_owner(owner)}; stop it, or choose another run_dir")


@contextmanager
def hold_folders(run_dirs: Sequence[Path]) -> Generator[None, None, None]:
    """One submission of a run at a time. Raises ValueError where another is under way."""
    with ExitStack() as stack:
        for run_dir in sorted(run_dirs):
            slurm_folder(run_dir).mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((slurm_folder(run_dir) / _LOCK_NAME).open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"run_dir={run_dir} is being submitted by another process; wait for it") from error
            except OSError:
                continue  # a file system without locks
        yield


def list_changes() -> list[str]:
    """A warning that names the files which differ from the commit; empty where none does."""
    changed = [line[3:] for line in _git("status", "--porcelain", "--untracked-files=no").splitlines()]
    if not changed:
        return []
    named = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    return [f"{named} differ from the commit; the job runs them as they are when it starts (slurm/changes.patch)"]


def write_changes(folder: Path, commit: str | None) -> None:
    """The commit, and what differs from it, beside the configuration."""
    write_whole(folder / "commit", f"{commit or 'unknown'}\n".encode())
    write_whole(folder / "changes.patch", _git("diff", "HEAD", "--binary").encode())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
