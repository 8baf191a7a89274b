"""What SLURM says of jobs: those in its queue, and those that have ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.slurm_commands import SlurmAbsent, SlurmError, ask

JOB_PREFIX = "prism-"
# The comment comes last: a path may hold the separator.
_QUEUE_FIELDS = "%i|%A|%T|%r|%N|%D|%L|%P|%j|%k"
_PAST_FIELDS = "JobID,State,Start,End,ExitCode,NodeList"
_ENDED_FIELDS = "JobArrayID:|,State:|,StartTime:|,EndTime:|,exit_code:|,NodeList:|"
_LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "STOPPED", "SIGNALING")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job that is queued, running or ending: a line of squeue. Of an array, one task."""

    job_id: str
    "12, or 12_3 for task 3 of array 12."
    own_id: str
    "SLURM_JOB_ID in the job: another than job_id for a task of an array."
    state: str
    "PENDING, RUNNING, COMPLETING and SLURM's other words."
    reason: str
    "Why it waits, such as Resources or Dependency, or None."
    nodes: str
    "node[1-2]; empty while it waits."
    num_nodes: int
    time_left: str
    "As squeue spells it: 3:59:00."
    partition: str
    name: str
    comment: str
    "What prism submit wrote: the folder of the run, or that of the sweep."

    @property
    def is_pending(self) -> bool:
        return self.state == "PENDING"


@dataclass(frozen=True, kw_only=True)
class PastJob:
    """One stretch of a job as the accounting holds it; a requeued job has several."""

    job_id: str
    state: str
    start: str
    end: str
    exit_code: str
    "3:0: the script's own, then the signal that ended it."
    nodes: str


def list_jobs(job_ids: Sequence[str] | None = None) -> list[SlurmJob]:
    """The jobs of these numbers, or all of this user's, that have not ended. Raises SlurmError."""
    if job_ids is not None and not job_ids:
        return []
    whose = ["--me"] if job_ids is None else [f"--jobs={','.join(job_ids)}"]
    try:
        answer = ask("squeue", "--noheader", "--array", *whose, f"--format={_QUEUE_FIELDS}")
    except SlurmAbsent:
        raise
    except SlurmError as error:
        if "Invalid job id" in str(error):  # the only one asked for ended long ago
            return []
        raise
    return [_parse_job(line) for line in answer.splitlines() if line.count("|") >= _QUEUE_FIELDS.count("|")]


def _parse_job(line: str) -> SlurmJob:
    job_id, own_id, state, reason, nodes, count, left, partition, name, comment = line.split("|", 9)
    return SlurmJob(
        job_id=job_id.strip(),
        own_id=own_id.strip(),
        state=state,
        reason=reason,
        nodes=nodes,
        num_nodes=int(count) if count.isdigit() else 0,
        time_left=left,
        partition=partition,
        name=name,
        comment="" if comment in ("(null)", "") else comment,
    )


def list_past(job_ids: Sequence[str]) -> list[PastJob]:
    """Every stretch of these jobs that has ended, oldest first, by the accounting. Where there is none, by squeue: the
    last stretch of those that ended minutes ago (MinJobAge)."""
    if not job_ids:
        return []
    jobs = f"--jobs={','.join(job_ids)}"
    try:
        options = ("--noheader", "--parsable2", "--allocations", "--duplicates")
        answer = ask("sacct", *options, jobs, f"--format={_PAST_FIELDS}")
    except SlurmError:
        try:
            answer = ask("squeue", "--noheader", "--array", "--states=all", jobs, f"--Format={_ENDED_FIELDS}")
        except SlurmError:
            return []
    rows = [line.split("|")[:6] for line in answer.splitlines() if line.count("|") >= 5]
    past = [
        PastJob(job_id=job_id, state=state, start=start, end=end, exit_code=_spell_exit(exit_code), nodes=nodes)
        for job_id, state, start, end, exit_code, nodes in rows
        if state.partition(" ")[0] not in _LIVE
    ]
    return sorted(past, key=lambda job: (job.start[:1].isdigit(), job.start))


def _spell_exit(code: str) -> str:
    """squeue's number, which is that of wait(), as sacct spells it."""
    return f"{int(code) >> 8}:{int(code) & 127}" if code.isdigit() else code
