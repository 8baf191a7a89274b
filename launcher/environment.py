"""Which rank this process is, from torchrun, from srun, or alone; and what its libraries read of it.

Everything downstream (torch.distributed, DeepSpeed, streaming) reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, so those are the one form that the three launchers are brought to.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher import slurm_step
from launcher.node_limits import count_threads, find_gloo_interface, is_gpu_bound
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
        launcher, variables = "torchrun", _read_torchrun(environ)
    elif slurm_step.count_tasks(environ) > 1:
        launcher, variables = "srun", _read_srun(environ)
    else:
        launcher, variables = "single", _alone()
    return ProcessEnvironment(launcher=launcher, variables={**variables, **_derive(environ, variables)})


def apply_environment(environment: ProcessEnvironment) -> None:
    """Export the variables, before anything that reads them is imported."""
    os.environ.update(environment.variables)


def _derive(environ: Mapping[str, str], ranks: Mapping[str, str]) -> dict[str, str]:
    """What follows from the ranks and this node; a variable that is set already stays as it is."""
    derived = {
        "OMP_NUM_THREADS": count_threads(environ, int(ranks["LOCAL_WORLD_SIZE"])),
        "GLOO_SOCKET_IFNAME": _find_interface(ranks),
        "PRISM_NODES": _spell_nodes(environ, ranks),
    }
    return {name: value for name, value in derived.items() if value and name not in environ}


def _find_interface(ranks: Mapping[str, str]) -> str | None:
    """Only where ranks are on several nodes does gloo need an address that the others can reach."""
    one_node = ranks["WORLD_SIZE"] == ranks["LOCAL_WORLD_SIZE"]
    return None if one_node else find_gloo_interface(ranks["MASTER_ADDR"], int(ranks["MASTER_PORT"]))


def _spell_nodes(environ: Mapping[str, str], ranks: Mapping[str, str]) -> str | None:
    """The nodes of the step with their numbers of ranks, `node7:2,node8:2`, for rank 0 to name those that are missing.
    None outside SLURM, and where SLURM's tools are not at hand."""
    if ranks["RANK"] != "0" or ranks["WORLD_SIZE"] == "1":
        return None
    ranks_per_task = int(ranks["LOCAL_WORLD_SIZE"]) if "RANK" in environ else 1
    tasks = slurm_step.list_tasks(environ)
    return ",".join(f"{node}:{count * ranks_per_task}" for node, count in tasks.items()) or None


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
    tasks = slurm_step.count_tasks(environ)
    if tasks > 1 and environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"]:
        raise ValueError(
            f"SLURM_NTASKS={tasks} must be 1 where torchrun starts all WORLD_SIZE={environ['WORLD_SIZE']} ranks on one "
            "node; use srun --ntasks-per-node=1, and torchrun --nnodes for several nodes"
        )


def _read_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """One task a rank. LOCAL_RANK, which picks the GPU, is 0 where srun shows each task only the GPU it is bound to."""
    slurm_step.check_complete(environ)
    local_world_size = slurm_step.count_tasks_here(environ)
    is_bound = is_gpu_bound(environ, local_world_size)
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(slurm_step.count_tasks(environ)),
        "LOCAL_RANK": "0" if is_bound else environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or slurm_step.find_first_address(environ),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(slurm_step.choose_port(environ)),
        **({"PRISM_GPU_BOUND": "1"} if is_bound else {}),
    }


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
