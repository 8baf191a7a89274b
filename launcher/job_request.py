"""What a job asks of the cluster, from what was typed, from sbatch's own variables, and from sinfo."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.slurm_partitions import NodeGroup, choose_groups, parse_time

# sbatch takes these before the lines of a script; they are read here, and kept from it.
OVERRULING = (
    "SBATCH_PARTITION",
    "SBATCH_ACCOUNT",
    "SBATCH_TIMELIMIT",
    "SBATCH_ARRAY_INX",
    "SBATCH_GPUS_PER_NODE",
    "SBATCH_JOB_NAME",
    "SBATCH_OUTPUT",
    "SBATCH_ERROR",
    "SBATCH_OPEN_MODE",
    "SBATCH_SIGNAL",
    "SBATCH_REQUEUE",
    "SBATCH_NO_REQUEUE",
    "SBATCH_WAIT",
)
_WITHOUT_LIMIT_S = 86400


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a job asks of the cluster."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    "0: ranks run on CPUs."
    gpu_type: str = ""
    "h100; empty is any."
    cpus_per_rank: int = 1
    time_s: int
    partition: str = ""
    "Empty is the cluster's default."
    account: str = ""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def choose_request(options: argparse.Namespace, groups: Sequence[NodeGroup]) -> Request:
    """Raises ValueError for what cannot be asked. `groups` is empty off a cluster."""
    partition = options.partition or os.environ.get("SBATCH_PARTITION", "")
    here = choose_groups(groups, partition)
    gpu_type, gpus = _parse_gpus(options.gpus_per_node, here, options.ranks_per_node)
    ranks = options.ranks_per_node or gpus
    if gpus and ranks > gpus:
        raise ValueError(
            f"--ranks-per-node={ranks} must be at most --gpus-per-node={gpus}, one for each; leave it out for that many"
        )
    return Request(
        nodes=options.nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        cpus_per_rank=options.cpus_per_rank or _share_cpus(here, gpus, ranks, gpu_type),
        time_s=_choose_time(options.time or os.environ.get("SBATCH_TIMELIMIT"), here),
        partition=partition,
        account=options.account or os.environ.get("SBATCH_ACCOUNT", ""),
    )


def _parse_gpus(typed: str | None, groups: Sequence[NodeGroup], ranks: int | None) -> tuple[str, int]:
    if typed is None:
        if ranks is None:
            most = max((group.count_gpus() for group in groups), default=0)
            use = f"--gpus-per-node={most}" if most else "--ranks-per-node=N: the partition's nodes have no GPUs"
            raise ValueError(f"--gpus-per-node, or --ranks-per-node for nodes without GPUs, must be given; use {use}")
        return "", 0
    match = re.fullmatch(r"(?:([\w.-]+):)?(\d+)", typed)
    if match is None or int(match[2]) < 1:
        raise ValueError(f"--gpus-per-node={typed} must be a number from 1 on, after a type if any; use 8, or h100:8")
    return match[1] or "", int(match[2])


def _share_cpus(groups: Sequence[NodeGroup], gpus: int, ranks: int, gpu_type: str) -> int:
    """A GPU's share of its node's CPUs, the least among the nodes that have enough; 1 for ranks without one."""
    fitting = [group for group in groups if gpus and group.count_gpus(gpu_type) >= gpus]
    shares = [group.cpus * gpus // group.count_gpus() // ranks for group in fitting]
    return max(1, min(shares, default=1))


def _choose_time(typed: str | None, groups: Sequence[NodeGroup]) -> int:
    if typed:
        time_s = parse_time(typed)
        if not time_s:
            raise ValueError(f"--time={typed} must be a limit above 0; for example 24:00:00")
        return time_s
    limits = [group.limit_s for group in groups if group.limit_s is not None]
    return min(limits, default=_WITHOUT_LIMIT_S)
