"""`prism preflight CONFIG [key=value ...]`: look at every node of a run before training does.

On each node: GPUs and a product they must get right, free disk, commit, packages; between all ranks: an all-reduce of
64 MB. Start it as the training is started: `srun` with one task a rank, or with one task a node, which then starts a
rank for each GPU (or --ranks-per-node); torchrun; or alone, on one machine. Exit code 0: a line a node, the bandwidth.
Exit code 1: one line for each bad node, within PRISM_RENDEZVOUS_S for the ranks to come and --within-s for the checks.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from launcher.config import RunConfig, load_config
from launcher.environment import apply_environment, detect_environment
from launcher.local_ranks import build_environments, count_to_start, start_and_wait
from launcher.preflight_verdict import find_problems, find_slow, spell_nodes, spell_problems
from prism_lm.parallel.mesh import Ranks, choose_device

if TYPE_CHECKING:
    from launcher.node_checks import Report
    from launcher.preflight_verdict import Speed

_MIB = 64


def main(arguments: list[str]) -> int:
    """0 where a run can start on these nodes, otherwise 1."""
    options = build_parser().parse_intermixed_args(arguments)
    config = load_config(RunConfig, options.config, options.overrides)
    _check(options)
    num_ranks = count_to_start(os.environ, options.ranks_per_node)
    if num_ranks > 1:
        return start_and_wait(["preflight", *arguments], build_environments(os.environ, num_ranks))
    environment = detect_environment(os.environ)
    apply_environment(environment)
    return preflight(config, environment.ranks, options)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override one key of the file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, also where a node is bad")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="with one task a node (default: its GPUs, or 1)"
    )
    words = "GiB free on every disk, run_dir's a checkpoint more (default %(default)s)"
    parser.add_argument("--min-free-gib", type=float, default=1.0, metavar="X", help=words)
    words = "seconds for all checks once the ranks have met (default %(default)s)"
    parser.add_argument("--within-s", type=float, default=180.0, metavar="S", help=words)
    words = "least bandwidth of the all-reduce, GB/s, over all ranks (default: none)"
    parser.add_argument("--min-gb-s", type=float, default=0.0, metavar="X", help=words)
    words = "least bandwidth of the same within a node, GB/s (default: none)"
    parser.add_argument("--min-node-gb-s", type=float, default=0.0, metavar="X", help=words)
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.within_s <= 0:
        raise ValueError(f"--within-s={options.within_s:g} must be positive; use 180")
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node={options.ranks_per_node} must be at least 1; leave it out for one a GPU")


def preflight(config: RunConfig, ranks: Ranks, options: argparse.Namespace) -> int:
    """This rank's part of the checks; rank 0 prints what all of them found."""
    from launcher.node_checks import examine
    from launcher.preflight_board import Board

    board = Board(ranks, within_s=options.within_s)

    def fail(problems: dict[str, list[str]], reports: "list[Report]") -> None:
        show(reports, {}, problems, None, as_json=options.json)

    with board.ending_in_time(fail):
        board.hand_in(examine(config, ranks, min_free_gib=options.min_free_gib, enter=board.enter))
        reports = board.agree(find_problems, fail)
        if reports is None:
            return 1
        board.enter(f"all-reduce of {_MIB} MB over {ranks.world_size} ranks")
        speeds = board.measure(lambda: measure_all_reduce(ranks, reports, options.within_s), reports, fail)
        if speeds is None:
            return 1
        slow = find_slow(reports, speeds, options.min_gb_s, options.min_node_gb_s)
        if ranks.is_main:
            show(reports, speeds, slow, spell_bandwidth(ranks, speeds), as_json=options.json)
        return 1 if slow else 0


def show(
    reports: "list[Report]",
    speeds: "dict[int, Speed]",
    problems: dict[str, list[str]],
    bandwidth: str | None,
    *,
    as_json: bool,
) -> None:
    """Bad nodes on stderr, one line each; where there is none, every node and the bandwidth."""
    if as_json:
        nodes = [asdict(report) for report in reports]
        found = {str(rank): asdict(speed) for rank, speed in speeds.items()}
        print(json.dumps({"good": not problems, "problems": problems, "ranks": nodes, "speeds": found}), flush=True)
    print("\n".join(spell_problems(problems)), file=sys.stderr, end="\n" if problems else "", flush=True)
    if not problems and not as_json:
        print("\n".join([*spell_nodes(reports, speeds), bandwidth or ""]), flush=True)


def spell_bandwidth(ranks: Ranks, speeds: "dict[int, Speed]") -> str:
    """`bus` is what a link of a ring would carry: 2 (n - 1) / n times as much."""
    if ranks.world_size == 1:
        return "one process: no other rank to reach, so no all-reduce was measured"
    slowest_gb_s = min(speed.all_gb_s for speed in speeds.values() if speed.all_gb_s is not None)
    bus_gb_s = slowest_gb_s * 2 * (ranks.world_size - 1) / ranks.world_size
    took_ms = _MIB * 2**20 / slowest_gb_s / 1e6
    backend = "nccl" if choose_device(ranks).type == "cuda" else "gloo"
    size = f"all-reduce of {_MIB} MB over {ranks.world_size} ranks ({backend})"
    return f"{size}: {took_ms:.2f} ms, {slowest_gb_s:.2f} GB/s (bus {bus_gb_s:.2f} GB/s)"


def measure_all_reduce(ranks: Ranks, reports: "list[Report]", timeout_s: float) -> "Speed":
    """Over all ranks, then within each node. Raises RuntimeError for a sum that is wrong."""
    import torch.distributed as dist

    from launcher.preflight_verdict import Speed
    from prism_lm.parallel.mesh import process_group

    if ranks.world_size == 1:
        return Speed(all_gb_s=None, node_gb_s=None)
    with process_group(ranks, timeout_s=timeout_s):
        all_gb_s = _time_sums(ranks, list(range(ranks.world_size)), None)
        node_gb_s: float | None = None
        nodes = dict.fromkeys(report.node for report in reports)
        for node in nodes:
            members = [report.rank for report in reports if report.node == node]
            if len(nodes) == 1 or len(members) == 1:
                continue
            group = dist.new_group(members)
            if ranks.rank in members:
                node_gb_s = _time_sums(ranks, members, group)
        dist.barrier()
    return Speed(all_gb_s=all_gb_s, node_gb_s=node_gb_s)


def _time_sums(ranks: Ranks, members: list[int], group: object) -> float:
    """GB/s by the median time of some sums of the members' numbers, after two that warm the links up."""
    import torch
    import torch.distributed as dist

    device = choose_device(ranks)
    tensor = torch.empty(_MIB * 2**18, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    num_warm, num_timed = (2, 10) if device.type == "cuda" else (1, 3)
    seconds: list[float] = []
    for _ in range(num_warm + num_timed):
        tensor.fill_(ranks.rank + 1)
        wait()
        began_s = time.perf_counter()
        dist.all_reduce(tensor, group=group)  # pyright: ignore[reportArgumentType]
        wait()
        seconds.append(time.perf_counter() - began_s)
        expected = sum(member + 1 for member in members)
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"all-reduce over {len(members)} ranks must give {expected} everywhere but did not")
    return _MIB * 2**20 / sorted(seconds[num_warm:])[num_timed // 2] / 1e9
