"""What SLURM tells a task of the step it belongs to: its tasks, their nodes, and where they can meet."""

import re
import subprocess
from collections.abc import Mapping

# srun's variables for each task; without any of them the ranks cannot be told apart.
REQUIRED = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
_FIRST_PORT, _PORTS = 10000, 20000


def count_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of the step that started this process; 1 outside a step. A step may have fewer than its allocation."""
    if "SLURM_STEP_ID" not in environ:
        return 1
    return int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1")


def check_complete(environ: Mapping[str, str]) -> None:
    """Raises ValueError naming the variables that srun sets and that are missing here."""
    missing = [name for name in REQUIRED if name not in environ]
    if missing:
        raise ValueError(
            f"SLURM_NTASKS={count_tasks(environ)} must come with {', '.join(missing)}; start with srun --export=ALL, "
            "let a container pass SLURM_* on, or unset SLURM_STEP_ID to run one process"
        )


def count_tasks_here(environ: Mapping[str, str]) -> int:
    """The step's tasks on this node. Raises ValueError where SLURM_NODEID is not one of its nodes."""
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = int(environ.get("SLURM_NODEID", "0"))
    if node >= len(counts):
        raise ValueError(
            f"SLURM_NODEID={node} must be below the {len(counts)} nodes of "
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']}; unset both and start anew with srun"
        )
    return counts[node]


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` as 2, 2, 2, 1: SLURM's form of one number a node."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    found = [match for match in matches if match is not None]
    if len(found) < len(matches):
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={text} must be numbers such as 2(x3),1; unset it and start anew with srun"
        )
    return [int(match[1]) for match in found for _ in range(int(match[2] or "1"))]


def choose_port(environ: Mapping[str, str]) -> int:
    """Below the ephemeral range, and another one for each job and for each of its restarts."""
    job, restarts = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_RESTART_COUNT") or "0")
    return _FIRST_PORT + (7 * job + restarts) % _PORTS


def find_first_address(environ: Mapping[str, str]) -> str:
    """NodeAddr of the step's first node rather than its name: names in a node list need not resolve.

    Raises ValueError where SLURM's tools are not at hand or its controller does not answer.
    """
    try:
        first = _scontrol("show", "hostnames", environ["SLURM_STEP_NODELIST"]).splitlines()[0]
        fields = dict(item.split("=", 1) for item in _scontrol("show", "node", first).split() if "=" in item)
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ValueError(
            f"MASTER_ADDR= must be set where `scontrol show node` gives no answer ({type(error).__name__}), as inside "
            "a container; export it in the batch script: NodeAddr of the job's first node"
        ) from error
    return fields.get("NodeAddr", first)


def list_tasks(environ: Mapping[str, str]) -> dict[str, int]:
    """The step's tasks by node name; empty outside a step and where `scontrol` is not at hand."""
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return {}
    try:
        names = _scontrol("show", "hostnames", environ["SLURM_STEP_NODELIST"]).split()
    except (OSError, subprocess.SubprocessError):
        return {}
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    return dict(zip(names, counts, strict=False))


def _scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout
