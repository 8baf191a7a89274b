"""The batch script of a submission: the lines that sbatch reads, the variables of slurm/body.sh, and that body."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.job_request import Request
from launcher.slurm_partitions import spell_time

# In sbatch's lines and in its file names these have meanings of their own, or end the line.
REFUSED_CHARACTERS = "%\"'\\#\n\r\t"


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """What the script is written from. Every path is absolute."""

    name: str
    "The job's name: prism-tiny."
    comment: Path
    "By which status knows the job: the run's folder, or the sweep's."
    log: str
    "sbatch's pattern for the file of its output."
    request: Request
    runs: Sequence[Path]
    "Run folders, each with its slurm/config.yaml; several are an array."
    at_once: int | None = None
    "How many tasks of an array run at one time; None is no limit."
    is_array: bool = False
    root: Path
    "The project's folder, with slurm/body.sh."
    commit: str | None
    launch: str
    setup: str
    "Bash that is run before Python in the batch shell and in each task."
    max_restarts: int
    grace_s: int
    "From the notice before the time limit to the limit."
    extra: Sequence[str] = ()
    "More options of sbatch, such as --qos=high."

    def render(self) -> str:
        """The whole script."""
        directives = [f"#SBATCH {line}" for line in self._list_directives()]
        parts = [
            ["#!/usr/bin/env bash", f"# Written by `prism submit` at commit {self.commit or 'unknown'}.", *directives],
            [f"{name}={shlex.quote(value)}" for name, value in self._list_variables().items()],
            self._choose_run(),
            _END_IF_DONE.splitlines(),
            ['source "$PRISM_ROOT/slurm/body.sh"'],
        ]
        return "\n\n".join("\n".join(part) for part in parts) + "\n"

    def _list_directives(self) -> list[str]:
        request, tasks = self.request, self.request.ranks_per_node if self.launch == "srun" else 1
        kind = f"{request.gpu_type}:" if request.gpu_type else ""
        limit = f"%{self.at_once}" if self.at_once else ""
        given = {
            "job-name": self.name,
            "nodes": request.nodes,
            "gpus-per-node": f"{kind}{request.gpus_per_node}" if request.gpus_per_node else "",
            "ntasks-per-node": tasks,
            "cpus-per-task": request.cpus_per_rank * request.ranks_per_node // tasks,
            "time": spell_time(request.time_s),
            "partition": request.partition,
            "account": request.account,
            "array": f"0-{len(self.runs) - 1}{limit}" if self.is_array else "",
            "signal": f"B:USR1@{self.grace_s}",
            "open-mode": "append",
            "comment": f'"{self.comment}"',
            "output": f'"{self.log}"',
        }
        return [*(f"--{name}={value}" for name, value in given.items() if value != ""), "--requeue", *self.extra]

    def _list_variables(self) -> dict[str, str]:
        return {
            "PRISM_ROOT": str(self.root),
            "PRISM_SETUP": self.setup,
            "PRISM_LAUNCH": self.launch,
            "PRISM_RANKS_PER_NODE": str(self.request.ranks_per_node),
            "PRISM_MAX_RESTARTS": str(self.max_restarts),
            "PRISM_GRACE_S": str(self.grace_s),
            "commit": (self.commit or "").partition("+")[0],
        }

    def _choose_run(self) -> list[str]:
        """The run folder, its configuration as it was submitted, and for a task of an array its own log."""
        lines = [f"PRISM_RUN_DIR={shlex.quote(str(self.runs[0]))}"]
        if self.is_array:
            log = '"$PRISM_RUN_DIR/slurm/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.log"'
            lines = [
                "runs=(",
                *(f"    {shlex.quote(str(run))}" for run in self.runs),
                ")",
                "PRISM_RUN_DIR=${runs[${SLURM_ARRAY_TASK_ID:-0}]:?}",
                f"[[ -z ${{SLURM_ARRAY_TASK_ID:-}} ]] || exec >> {log} 2>&1",
            ]
        return [*lines, "PRISM_CONFIG=$PRISM_RUN_DIR/slurm/config.yaml", "PRISM_OVERRIDES=()"]


_END_IF_DONE = """\
# The configuration is as old as the submission: an ending that is newer is that of an earlier job of it.
result=$PRISM_RUN_DIR/result.json
if [[ $result -nt $PRISM_CONFIG ]]; then
    case $(sed -n 's/.*"status": *"\\([a-z]*\\)".*/\\1/p' "$result") in
        finished) echo "prism: the run is finished; nothing is left to do for job ${SLURM_JOB_ID:-}"; exit 0 ;;
        failed)
            if [[ -z ${SLURM_RESTART_COUNT:-} ]]; then
                echo "error: the job before this one failed; see $result, and submit again once that is mended" >&2
                exit 1
            fi ;;
    esac
fi
now=$(git -C "$PRISM_ROOT" rev-parse HEAD 2> /dev/null)
[[ -z $commit || -z $now || $now == "$commit" ]] ||
    echo "warning: $PRISM_ROOT is at commit $now now, and was at $commit when this was submitted" >&2"""
