"""Which nodes a run should not start on, from the reports of all ranks, and the lines that say so."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.node_checks import Report

_REMEDIES = {
    "commit": "check out the same commit on every node",
    "changes": "commit or undo the changes of that checkout",
}
_OTHER_REMEDY = "use one environment on every node: pip install -e . -c constraints.txt"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a rank measured."""

    all_gb_s: float | None
    "All-reduce over all ranks: bytes of the tensor over the median time, GB/s; None where there is one."
    node_gb_s: float | None
    "The same over the ranks of this rank's node; None where that is all ranks, or one."


def find_problems(reports: Sequence[Report]) -> dict[str, list[str]]:
    """By node: what its ranks found wrong, and what differs there from most nodes; nodes without problems left out."""
    found: dict[str, list[str]] = {}
    for report in reports:
        found.setdefault(report.node, []).extend(report.problems)
    for key in dict.fromkeys(key for report in reports for key in report.facts):
        for node, problem in _find_differences(reports, key).items():
            found[node].append(problem)
    return {node: list(dict.fromkeys(problems)) for node, problems in found.items() if problems}


def _find_differences(reports: Sequence[Report], key: str) -> dict[str, str]:
    """Nodes on which a fact is not that of most nodes; of rank 0's node where no value is on most."""
    values = {report.node: report.facts.get(key, "none") for report in reversed(reports)}
    counts = Counter(values[report.node] for report in {report.node: report for report in reports}.values())
    usual = max(counts, key=lambda value: counts[value])
    remedy = _REMEDIES.get(key, _OTHER_REMEDY)
    rule = f"must be {usual} as on {counts[usual]} of {len(values)} nodes; {remedy}"
    return {node: f"{key}={value} {rule}" for node, value in values.items() if value != usual}


def find_slow(
    reports: Sequence[Report], speeds: Mapping[int, Speed], min_gb_s: float, min_node_gb_s: float
) -> dict[str, list[str]]:
    """By node: bandwidth below what was asked for."""
    slow: dict[str, list[str]] = {}
    for node, (over_all, inside) in find_slowest(reports, speeds).items():
        remedy = "run with NCCL_DEBUG=INFO to see the links it uses, or leave that node out"
        for option, value, least in (("--min-gb-s", over_all, min_gb_s), ("--min-node-gb-s", inside, min_node_gb_s)):
            if value is not None and value < least:
                slow.setdefault(node, []).append(
                    f"all-reduce={value:.2f} GB/s must be at least {option}={least:g}; {remedy}"
                )
    return slow


def find_slowest(
    reports: Sequence[Report], speeds: Mapping[int, Speed]
) -> dict[str, tuple[float | None, float | None]]:
    """By node: the smallest bandwidths that its ranks measured, over all ranks and inside the node, GB/s."""
    slowest: dict[str, tuple[float | None, float | None]] = {}
    for node in dict.fromkeys(report.node for report in reports):
        here = [speeds[report.rank] for report in reports if report.node == node and report.rank in speeds]
        over_all = [speed.all_gb_s for speed in here if speed.all_gb_s is not None]
        inside = [speed.node_gb_s for speed in here if speed.node_gb_s is not None]
        slowest[node] = min(over_all, default=None), min(inside, default=None)
    return slowest


def spell_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """One line a node."""
    return [f"bad  {node}: {'; also '.join(texts)}" for node, texts in problems.items()]


def spell_nodes(reports: Sequence[Report], speeds: Mapping[int, Speed]) -> list[str]:
    """One line a node: ranks, device, what is free, and bandwidth."""
    slowest = find_slowest(reports, speeds)
    lines: list[str] = []
    for node in dict.fromkeys(report.node for report in reports):
        here = [report for report in reports if report.node == node]
        free = [report.free_device_gib for report in here if report.free_device_gib is not None]
        parts = [f"{len(here)} x {here[0].device}" + (f" with {min(free):.0f} GiB free" if free else "")]
        parts += [
            f"{name} {min(report.free_disk_gib[name] for report in here):.1f} GiB" for name in here[0].free_disk_gib
        ]
        named = zip(("all-reduce", "in node"), slowest[node], strict=True)
        parts += [f"{name} {value:.2f} GB/s" for name, value in named if value is not None]
        lines.append(f"ok   {node}: {', '.join(parts)}")
    return lines
