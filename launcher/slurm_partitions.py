"""What SLURM says of its partitions: limits, nodes, CPUs and GPUs; and how it spells times."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.slurm_commands import ask

_PARTITION_FIELDS = "%P|%a|%l|%s|%D|%c|%G"
_UNIT_S = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that are alike: a line of sinfo."""

    partition: str
    is_default: bool
    is_up: bool
    limit_s: int | None
    "Longest time of a job; None is no limit."
    most_nodes: int | None
    "Most nodes of a job; None is no limit."
    num_nodes: int
    cpus: int
    "Of one node."
    gpus: dict[str, int]
    "GPUs of one node by type; `` for those without one."

    def count_gpus(self, gpu_type: str = "") -> int:
        """GPUs of one node, of any type or of that one."""
        return self.gpus.get(gpu_type, 0) if gpu_type else sum(self.gpus.values())


def list_partitions() -> list[NodeGroup]:
    """The cluster's partitions, a group for each kind of node. Raises SlurmError, and SlurmAbsent off a cluster."""
    lines = ask("sinfo", "--noheader", "--exact", f"--format={_PARTITION_FIELDS}").splitlines()
    return [_parse_group(line) for line in lines if line.count("|") >= _PARTITION_FIELDS.count("|")]


def _parse_group(line: str) -> NodeGroup:
    name, state, limit, size, nodes, cpus, gres = (text.strip() for text in line.split("|", 6))
    most = size.rpartition("-")[2]
    return NodeGroup(
        partition=name.removesuffix("*"),
        is_default=name.endswith("*"),
        is_up=state == "up",
        limit_s=parse_time(limit),
        most_nodes=int(most) if most.isdigit() else None,
        num_nodes=int(nodes) if nodes.isdigit() else 0,
        cpus=int(cpus.removesuffix("+")) if cpus.removesuffix("+").isdigit() else 1,
        gpus=parse_gpus(gres),
    )


def parse_gpus(gres: str) -> dict[str, int]:
    """`gpu:h100:8(S:0-1),nvme:1` as {h100: 8}."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)(?=$|,|\()", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def find_defaults(groups: Sequence[NodeGroup]) -> list[str]:
    """The cluster's default partition, in a list of one; none where it has none."""
    return sorted({group.partition for group in groups if group.is_default})


def choose_groups(groups: Sequence[NodeGroup], partition: str) -> list[NodeGroup]:
    """The nodes of the partitions asked for: a list with commas, or empty for the default."""
    names = partition.split(",") if partition else find_defaults(groups)
    return [group for group in groups if group.partition in names]


def parse_time(text: str) -> int | None:
    """Seconds of SLURM's `minutes`, `m:s`, `h:m:s`, `d-h`, `d-h:m`, `d-h:m:s`; None for no limit. Raises ValueError."""
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(
            f"--time={text} must be a time as SLURM writes it; for example 12:00:00, or 2-00:00:00 for days"
        )
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        units = ["hours", "minutes", "seconds"]
    else:
        units = {1: ["minutes"], 2: ["minutes", "seconds"], 3: ["hours", "minutes", "seconds"]}[len(numbers)]
    return int(days or 0) * _UNIT_S["days"] + sum(n * _UNIT_S[unit] for n, unit in zip(numbers, units, strict=False))


def spell_time(seconds: int) -> str:
    """12:00:00, or 2-00:00:00 from a day on."""
    days, rest = divmod(seconds, _UNIT_S["days"])
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
