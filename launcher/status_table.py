"""How `prism status` shows runs: one in full, several as a table."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from launcher.job_record import spell_job
from launcher.run_folder import align, spell_age, spell_bytes
from launcher.run_status import RunStatus

OVERVIEW = ["run", "state", "step", "tokens", "loss", "tokens/s", "ETA", "record", "checkpoint", "starts"]
STARTS = ["#", "when", "event", "step", "from", "the one before", "commit", "processes", "host"]


def describe_run(status: RunStatus) -> list[str]:
    """One run in full: a fact a line, then a table of its starts."""
    facts = {
        "state": status.state + (f": {status.detail}" if status.detail else ""),
        "step": _spell_step(status, " of "),
        "tokens": f"{status.tokens:,}",
        "loss": _spell_losses(status),
        "speed": _spell_speed(status),
        "last record": _spell_or_dash(status.last_record_age_s, lambda age_s: f"{spell_age(age_s)} ago"),
        "checkpoint": _spell_checkpoint(status),
        "starts": _spell_starts(status),
    }
    state, *others = [(name, text) for name, text in facts.items()]
    lines = [status.run, *(f"  {name:<13}{text}" for name, text in [state, *_list_jobs(status), *others])]
    return lines + (["", *align([STARTS, *list_starts(status.lineage)])] if status.starts else [])


def _list_jobs(status: RunStatus) -> list[tuple[str, str]]:
    """A line for each job; none for a run that SLURM knows nothing of."""
    queued = [f"{spell_job(job)}, {job.num_nodes} nodes, {job.partition}" for job in status.jobs]
    ended = [
        f"{job.job_id} {job.state}, exit code {job.exit_code}, {job.start} to {job.end} on {job.nodes}"
        for job in status.past_jobs
    ]
    named = {"jobs": queued, "ended jobs": ended, "log": [status.log] if status.log else []}
    return [(name if not number else "", text) for name, texts in named.items() for number, text in enumerate(texts)]


def _spell_starts(status: RunStatus) -> str:
    """3: 2 after killed, 1 after preempted: the causes of all but the first."""
    causes = Counter(str(line["former_end"]) for line in status.lineage if line.get("former_end"))
    spelled = ", ".join(f"{count} after {cause}" for cause, count in causes.items())
    return str(status.starts) + (f": {spelled}" if spelled else "")


def _spell_step(status: RunStatus, between: str) -> str:
    return f"{status.step:,}" + (f"{between}{status.total_steps:,}" if status.total_steps else "")


def _spell_losses(status: RunStatus) -> str:
    validation = _spell_or_dash(status.validation_loss_nats, lambda nats: f", validation {nats:.4f}")
    return _spell_or_dash(status.loss_nats, lambda nats: f"{nats:.4f} nats") + validation.removeprefix("-")


def _spell_speed(status: RunStatus) -> str:
    eta = _spell_or_dash(status.eta_s, lambda eta_s: f", {spell_age(eta_s)} to go")
    return _spell_or_dash(status.tokens_per_s, lambda rate: f"{rate:,.0f} tokens/s") + eta.removeprefix("-")


def _spell_checkpoint(status: RunStatus) -> str:
    damaged = "".join(f"; {name} is damaged (prism checkpoint verify)" for name in status.damaged_checkpoints)
    if status.checkpoint is None:
        return "none complete" + damaged
    held = status.checkpoint
    return f"step_{held['step']}, {spell_bytes(held['bytes'])}, {spell_age(held['age_s'])} old{damaged}"


def list_starts(lineage: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each start: when, from which step, why the one before ended, commit, processes, host."""
    starts = [line for line in lineage if line.get("event") != "end"]
    return [[str(number), *_describe_start(line)] for number, line in enumerate(starts, start=1)]


def _describe_start(line: dict[str, Any]) -> list[str]:
    former, error = line.get("former_end") or "-", line.get("former_error")
    named = [line.get(name) for name in ("time", "event", "step", "resumed_from")]
    return [
        *("-" if value is None else str(value) for value in named),
        f"{former}: {_shorten(error)}" if error else former,
        _spell_commit(line.get("commit")),
        _spell_processes(line),
        str(line.get("host") or "-"),
    ]


def _shorten(text: str, limit: int = 60) -> str:
    first = " ".join(text.split())
    return first if len(first) <= limit else f"{first[: limit - 3]}..."


def _spell_commit(commit: str | None) -> str:
    return "-" if not commit else commit[:8] + ("+" if "+" in commit else "")


def _spell_processes(line: dict[str, Any]) -> str:
    """4 (2 x 2, ZeRO 1): data x sequence degree."""
    degree, world_size = line.get("sequence_degree", 1), line.get("world_size", 1)
    stage = f", ZeRO {line['zero_stage']}" if "zero_stage" in line else ""
    return f"{world_size} ({line.get('data_degree', world_size // degree)} x {degree}{stage})"


def describe_runs(statuses: list[RunStatus]) -> list[str]:
    """A table with a line for each run."""
    rows = [OVERVIEW, *(_describe_briefly(status) for status in statuses)]
    if any(status.jobs for status in statuses):
        jobs = ["; ".join(map(spell_job, status.jobs)) or "-" for status in statuses]
        rows = [[*row, text] for row, text in zip(rows, ["job", *jobs], strict=True)]
    return align(rows)


def _describe_briefly(status: RunStatus) -> list[str]:
    held = status.checkpoint
    return [
        status.run,
        status.state,
        _spell_step(status, "/"),
        f"{status.tokens:,}",
        _spell_or_dash(status.loss_nats, lambda nats: f"{nats:.4f}"),
        _spell_or_dash(status.tokens_per_s, lambda rate: f"{rate:,.0f}"),
        _spell_or_dash(status.eta_s, spell_age),
        _spell_or_dash(status.last_record_age_s, lambda age_s: f"{spell_age(age_s)} ago"),
        f"step_{held['step']}, {spell_age(held['age_s'])} old" if held else "none",
        str(status.starts),
    ]


def _spell_or_dash(value: float | None, spell: Callable[[float], str]) -> str:
    return "-" if value is None else spell(value)
