"""Several ranks of one node, started by the node's only task, as torchrun would."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType

from launcher import slurm_step
from launcher.node_limits import count_expected_gpus
from launcher.provenance import ROOT

# What the other ranks of a node get to end by themselves once one has failed.
_GRACE_S = 15.0


def count_to_start(environ: Mapping[str, str], ranks_per_node: int | None) -> int:
    """How many ranks this process should start: 1, itself, where its launcher starts one for each rank; otherwise
    ranks_per_node, PRISM_RANKS_PER_NODE, or one for each GPU of the node.

    Raises ValueError for a PRISM_RANKS_PER_NODE that is no number.
    """
    if "RANK" in environ:
        return 1
    if slurm_step.count_tasks(environ) > 1:
        slurm_step.check_complete(environ)
        if slurm_step.count_tasks_here(environ) > 1:
            return 1
    text = environ.get("PRISM_RANKS_PER_NODE", "")
    if text and not text.isdecimal():
        raise ValueError(f"PRISM_RANKS_PER_NODE={text} must be a number of ranks; unset it for one a GPU")
    return max(1, ranks_per_node or int(text or "0") or count_expected_gpus(environ))


def build_environments(environ: Mapping[str, str], num_ranks: int) -> list[dict[str, str]]:
    """The variables of each of this node's ranks; every node of the step starts as many."""
    num_nodes = slurm_step.count_tasks(environ)
    node = int(environ["SLURM_PROCID"]) if num_nodes > 1 else 0
    address, port = ("127.0.0.1", _find_free_port()) if num_nodes == 1 else _find_meeting_place(environ)
    return [
        {
            "RANK": str(node * num_ranks + local_rank),
            "WORLD_SIZE": str(num_nodes * num_ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for local_rank in range(num_ranks)
    ]


def start_and_wait(arguments: list[str], environments: list[dict[str, str]]) -> int:
    """Runs `prism` with these arguments as each rank; the first exit code but 0, else 0. None is left behind."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "launcher", *arguments]
    former = signal.signal(signal.SIGTERM, _end)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for variables in environments:
            processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **variables}))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, former)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    failed_at_s: float | None = None
    code = 0
    while any(process.poll() is None for process in processes):
        code = code or next((process.returncode for process in processes if process.returncode), 0)
        if code and failed_at_s is None:
            failed_at_s = time.monotonic()
        if failed_at_s is not None and time.monotonic() - failed_at_s > _GRACE_S:
            break
        time.sleep(0.05)
    code = code or next((process.returncode for process in processes if process.returncode), 0)
    return code if code >= 0 else 1


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _find_meeting_place(environ: Mapping[str, str]) -> tuple[str, int]:
    address = environ.get("MASTER_ADDR") or slurm_step.find_first_address(environ)
    return address, int(environ.get("MASTER_PORT") or slurm_step.choose_port(environ))


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
