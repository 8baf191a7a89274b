"""Whether a partition can take what a job asks for, before SLURM is asked."""

from collections.abc import Sequence

from launcher.job_request import Request
from launcher.slurm_partitions import NodeGroup, find_defaults, spell_time


def check_partition(groups: Sequence[NodeGroup], request: Request) -> None:
    """Raises ValueError for a partition that does not exist or takes no jobs, and for a time, a number of nodes or GPUs
    that none of the partitions asked for has."""
    known = {group.partition for group in groups}
    names = request.partition.split(",") if request.partition else find_defaults(groups)
    if not names:
        raise ValueError(f"--partition must be given, for there is no default; use one of {_spell_names(known)}")
    problems: list[str] = []
    for name in names:
        if name not in known:
            raise ValueError(f"--partition={name} must be one of sinfo's; use {_spell_names(known)}")
        problems += _find_problem([group for group in groups if group.partition == name], request)
    if len(problems) == len(names):
        raise ValueError(problems[0])


def _spell_names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none: sinfo lists no partition"


def _find_problem(groups: Sequence[NodeGroup], request: Request) -> list[str]:
    """At most one: why the partition cannot take the job."""
    first = groups[0]
    name, limit_s, most = first.partition, first.limit_s, first.most_nodes
    if not first.is_up:
        return [f"--partition={name} must be up to take jobs, and sinfo says that it is not; use another"]
    if limit_s is not None and request.time_s > limit_s:
        asked = f"--time={spell_time(request.time_s)}"
        return [
            f"{asked} must be at most the {spell_time(limit_s)} of partition {name}; use that: the job goes "
            "back into the queue before its limit, and --chain N goes on where a cluster forbids this"
        ]
    if most is not None and request.nodes > most:
        return [
            f"--nodes={request.nodes} must be at most the {most} that a job may have in partition {name}; use fewer"
        ]
    fitting = sum(group.num_nodes for group in groups if group.count_gpus(request.gpu_type) >= request.gpus_per_node)
    if fitting < request.nodes:
        return [_spell_shortage(groups, request, fitting)]
    cpus = request.cpus_per_rank * request.ranks_per_node
    most_cpus = max(group.cpus for group in groups)
    if cpus > most_cpus:
        return [
            f"--cpus-per-rank={request.cpus_per_rank} must give {request.ranks_per_node} ranks at most the {most_cpus} "
            f"CPUs of a node of partition {name}; use {max(1, most_cpus // request.ranks_per_node)}"
        ]
    return []


def _spell_shortage(groups: Sequence[NodeGroup], request: Request, fitting: int) -> str:
    name = groups[0].partition
    if not request.gpus_per_node:
        return f"--nodes={request.nodes} must be at most the {fitting} nodes of partition {name}; use fewer"
    kind = f"{request.gpu_type}:" if request.gpu_type else ""
    has = sorted({",".join(f"{k}:{n}".lstrip(":") for k, n in group.gpus.items()) or "0" for group in groups})
    return (
        f"--nodes={request.nodes} with --gpus-per-node={kind}{request.gpus_per_node} must fit partition {name}, which "
        f"has {fitting} such nodes ({' or '.join(has)} GPUs a node); ask for less, or use another partition"
    )
