"""What a submission leaves in the run folder, RUN/slurm/job.json, and which of SLURM's jobs are a run's."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from launcher.slurm_jobs import JOB_PREFIX, SlurmJob
from prism_lm.checkpoint.folder import read_json, write_json

RECORD_NAME = "job.json"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One submission, of a run or of a sweep."""

    job_ids: list[str]
    "SLURM's numbers: a chain has several; 12_3 is task 3 of a sweep."
    submitted: str
    script: str
    log: str
    "Where the jobs' output goes; SLURM puts a job's number for %j."
    name: str = ""
    commit: str | None = None
    runs: list[str] | None = None
    "A sweep's run folders by their task's number; None for one run."

    def spell_log(self, job_id: str) -> str:
        """The log of one of the jobs."""
        return self.log.replace("%j", job_id)


def slurm_folder(run_dir: Path) -> Path:
    """Where a run's submissions, and the logs of their jobs, lie."""
    return run_dir / "slurm"


def write_record(folder: Path, record: JobRecord) -> None:
    """Whole or not at all."""
    write_json(folder / RECORD_NAME, asdict(record))


def read_record(folder: Path) -> JobRecord | None:
    """The newest submission; None where there was none, or its record is damaged."""
    try:
        fields = cast(dict[str, Any], read_json(folder / RECORD_NAME, remedy="remove the file"))
        return JobRecord(
            job_ids=[str(job_id) for job_id in fields["job_ids"]],
            submitted=str(fields["submitted"]),
            script=str(fields["script"]),
            log=str(fields["log"]),
            name=str(fields.get("name") or ""),
            commit=fields.get("commit"),
            runs=fields.get("runs"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_run_of(job: SlurmJob) -> Path | None:
    """The run folder of a job that prism submit queued, by the comment it gave it."""
    if not job.comment.startswith("/"):
        return None
    folder = Path(job.comment)
    sweep = read_record(folder)
    if sweep is None or sweep.runs is None:
        return folder
    task = job.job_id.partition("_")[2]
    return Path(sweep.runs[int(task)]) if task.isdigit() and int(task) < len(sweep.runs) else None


def choose_jobs(jobs: Sequence[SlurmJob], run_dir: Path, job_ids: Sequence[str]) -> list[SlurmJob]:
    """Those of the jobs that are the run's: by their comment, or by one of the numbers that the run folder names."""
    return [
        job
        for job in jobs
        if job.name.startswith(JOB_PREFIX)
        and (job.job_id in job_ids or job.own_id in job_ids or find_run_of(job) == run_dir.absolute())
    ]


def spell_job(job: SlurmJob) -> str:
    """`12 RUNNING on node[1-2], 3:59:00 left`, or `13 PENDING (Dependency)`."""
    if job.is_pending:
        return f"{job.job_id} {job.state} ({job.reason})"
    return f"{job.job_id} {job.state} on {job.nodes or 'no node'}, {job.time_left} left"
