"""What SLURM knows of a run: its jobs in the queue, those that have ended, and the log of the one to look at."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.job_record import JobRecord, choose_jobs, read_record, slurm_folder
from launcher.slurm_commands import SlurmAbsent, SlurmError
from launcher.slurm_jobs import PastJob, SlurmJob, list_jobs, list_past
from prism_lm.train.lineage import read_lineage


@dataclass(frozen=True, kw_only=True)
class RunJobs:
    """A run's jobs; nothing of a run that SLURM never had."""

    queued: list[SlurmJob]
    "Those that run, then those that wait."
    past: list[PastJob]
    log: str | None


def ask_queue(run_dirs: Sequence[Path]) -> list[SlurmJob] | None:
    """This user's jobs, and those whose numbers the run folders name, whoever's; None where SLURM does not answer."""
    named = [job_id for run_dir in run_dirs for job_id in _list_job_ids(run_dir)]
    try:
        jobs = list_jobs()
        known = {number for job in jobs for number in (job.job_id, job.own_id)}
        return jobs + list_jobs([job_id for job_id in named if job_id not in known])
    except SlurmError as error:
        if not isinstance(error, SlurmAbsent):
            print(f"note: jobs are not shown: {error}", file=sys.stderr)
        return None


def find_jobs(run_dir: Path, jobs: Sequence[SlurmJob], *, with_past: bool) -> RunJobs:
    """The run's of `jobs`, which are those in the queue. SLURM is asked for ended ones `with_past`."""
    record = read_record(slurm_folder(run_dir))
    queued = sorted(choose_jobs(jobs, run_dir, _list_job_ids(run_dir)), key=lambda job: job.is_pending)
    past = list_past(record.job_ids) if record and with_past else []
    return RunJobs(queued=queued, past=past, log=_find_log(record, queued))


def _list_job_ids(run_dir: Path) -> list[str]:
    """Numbers of jobs that may be the run's: its last submission's, and that of its newest start."""
    record = read_record(slurm_folder(run_dir))
    newest = next((line for line in reversed(read_lineage(run_dir)) if line.get("slurm_job_id")), {})
    return [*(record.job_ids if record else []), *([str(newest["slurm_job_id"])] if newest else [])]


def _find_log(record: JobRecord | None, queued: Sequence[SlurmJob]) -> str | None:
    """That of the job which runs, or else of the newest that may have run."""
    if record is None or not record.job_ids:
        return None
    waiting = {job.job_id for job in queued if job.is_pending}
    begun = [job_id for job_id in record.job_ids if job_id not in waiting] or record.job_ids[:1]
    running = [job.job_id for job in queued if not job.is_pending and job.job_id in begun]
    return record.spell_log((running or begun[-1:])[0])
