"""Which rank this process is, from torchrun, from srun, or alone; and the device it uses.

Everything downstream (torch.distributed, DeepSpeed, streaming) reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, so those are the one form that the three launchers are brought to.
"""

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prism_lm.parallel.mesh import Ranks

Launcher = Literal["torchrun", "srun", "single"]


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """How this process was started, and the variables that say so to torch."""

    launcher: Launcher
    variables: dict[str, str]

    @property
    def ranks(self) -> Ranks:
        """This process's place in the world."""
        return Ranks(
            rank=int(self.variables["RANK"]),
            local_rank=int(self.variables["LOCAL_RANK"]),
            world_size=int(self.variables["WORLD_SIZE"]),
        )


def detect_environment(environ: Mapping[str, str]) -> ProcessEnvironment:
    """Read the launcher's variables; raises ValueError where they are incomplete or two whole runs would start."""
    if "RANK" in environ:
        return ProcessEnvironment(launcher="torchrun", variables=_read_torchrun(environ))
    if int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in environ:
        return ProcessEnvironment(launcher="srun", variables=_read_srun(environ))
    return ProcessEnvironment(launcher="single", variables=_alone())


def apply_environment(environment: ProcessEnvironment) -> None:
    """Export the variables, before anything that reads them is imported."""
    os.environ.update(environment.variables)


def _read_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if missing:
        rule = f"must come with {', '.join(missing)}"
        raise ValueError(f"RANK={environ['RANK']} {rule}; start with torchrun, or unset RANK")
    _check_one_run(environ)
    return {name: environ[name] for name in names}


def _check_one_run(environ: Mapping[str, str]) -> None:
    """Several tasks of one srun that each start a torchrun of their own would be whole runs, in one folder."""
    tasks = environ.get("SLURM_NTASKS", "1") if "SLURM_STEP_ID" in environ else "1"
    if int(tasks) > 1 and environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"]:
        raise ValueError(
            f"SLURM_NTASKS={tasks} must be 1 where torchrun starts all WORLD_SIZE={environ['WORLD_SIZE']} ranks on one "
            "node; use srun --ntasks-per-node=1, and torchrun --nnodes for several nodes"
        )


def _read_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """One task a rank. The port is below the ephemeral range and differs per job and per restart."""
    job, restarts = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_RESTART_COUNT", "0"))
    tasks_here = environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0]
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks_here,
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _find_first_node_address(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(10000 + (7 * job + restarts) % 20000),
    }


def _find_first_node_address(nodelist: str) -> str:
    """NodeAddr rather than the name: names in a node list need not resolve."""
    first = _scontrol("show", "hostnames", nodelist).splitlines()[0]
    fields = dict(item.split("=", 1) for item in _scontrol("show", "node", first).split() if "=" in item)
    return fields.get("NodeAddr", first)


def _scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


def _alone() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
