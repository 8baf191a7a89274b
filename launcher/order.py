"""`prism order PATH --world-size N`: which rank reads which rows at which step, computed without reading a row.

`--compare M` checks that every step of the epoch holds the same set of rows with M ranks.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.order import BatchGrid, RowOrder

EXAMPLE = """\
example:
  prism order data/plain_text --world-size 4 --global-batch-rows 16 --steps 3
  prism order data/plain_text --world-size 4 --global-batch-rows 16 --compare 2
"""


def main(arguments: list[str]) -> int:
    """Print the order; with --compare, 1 where the world sizes differ."""
    parsed = build_parser().parse_args(arguments)
    check_counts(parsed)
    sizes = [parsed.world_size, *([parsed.compare] if parsed.compare else [])]
    global_batch_rows = parsed.global_batch_rows or math.lcm(*sizes)
    order = build_order(parsed)
    grids = [build_grid(order, size, global_batch_rows, parsed) for size in sizes]
    rows = order.compute_epoch(parsed.epoch)
    print_order(order, grids[0], rows, parsed.epoch, parsed.steps)
    return compare(grids[0], grids[1], rows) if parsed.compare else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this verb."""
    parser = argparse.ArgumentParser(
        prog="prism order", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE
    )
    parser.add_argument("path", metavar="PATH", help="folder or URL written by `prism prepare`")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks (default: 1)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks of a node (default: all)")
    parser.add_argument("--global-batch-rows", type=int, metavar="N", help="rows of a step (default: one a rank)")
    parser.add_argument("--micro-batch-rows", type=int, metavar="N", help="rows of a rank's micro-batch (default: all)")
    parser.add_argument("--seed", type=int, default=1234, help="the run's seed (default: 1234)")
    parser.add_argument("--epoch", type=int, default=0, metavar="N", help="epoch (default: 0)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps to print (default: 4)")
    parser.add_argument("--weights", nargs="*", default=[], metavar="SOURCE=WEIGHT", help="mixture (default: natural)")
    parser.add_argument("--no-shuffle", action="store_true", help="rows in the order they are stored")
    parser.add_argument("--compare", type=int, metavar="M", help="world size to compare with")
    return parser


def check_counts(parsed: argparse.Namespace) -> None:
    """Raise ValueError for a count below 1."""
    for name in ("world_size", "ranks_per_node", "global_batch_rows", "micro_batch_rows", "compare"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}={value} must be at least 1; use {option} 1 or leave it out")


def build_order(parsed: argparse.Namespace) -> "RowOrder":
    """Read the manifest and build the training split's order with the defaults of data.*."""
    from data_pipeline.config import DataConfig
    from data_pipeline.order import build_row_order
    from data_pipeline.preflight import fetch_manifest

    config = DataConfig(path=parsed.path, weights=parse_weights(parsed.weights))
    with tempfile.TemporaryDirectory(prefix="prism-order-") as folder:
        manifest = fetch_manifest(parsed.path, Path(folder), config.timeout_s)
    return build_row_order(
        manifest,
        "train",
        weights=config.weights,
        seed=parsed.seed,
        shuffle=not parsed.no_shuffle,
        num_canonical_nodes=config.num_canonical_nodes,
        shuffle_block_rows=config.shuffle_block_rows,
    )


def parse_weights(texts: list[str]) -> dict[str, float]:
    """Read SOURCE=WEIGHT arguments. Raises ValueError for another form."""
    weights: dict[str, float] = {}
    for text in texts:
        source, _, weight = text.partition("=")
        try:
            weights[source] = float(weight)
        except ValueError as error:
            raise ValueError(f"--weights {text} must have the form SOURCE=NUMBER; use --weights books=0.5") from error
    return weights


def build_grid(order: "RowOrder", world_size: int, global_batch_rows: int, parsed: argparse.Namespace) -> "BatchGrid":
    """Return how `world_size` ranks share the order; fewer ranks than the run's may fill less than a node."""
    from data_pipeline.order import BatchGrid

    ranks_per_node = parsed.ranks_per_node or world_size
    return BatchGrid(
        epoch_rows=order.epoch_rows(),
        world_size=world_size,
        micro_batch_rows=parsed.micro_batch_rows or max(1, global_batch_rows // world_size),
        global_batch_rows=global_batch_rows,
        ranks_per_node=min(ranks_per_node, world_size) if world_size < parsed.world_size else ranks_per_node,
        endless=True,
    )


def print_order(order: "RowOrder", grid: "BatchGrid", rows: Any, epoch: int, steps: int) -> None:
    """Print the rows of the first steps, a line a rank."""
    total_steps = grid.batches_per_epoch // grid.batches_per_step
    left_out = grid.epoch_rows - total_steps * grid.global_batch_rows
    quotas = ", ".join(f"{source} {quota}" for source, quota in order.quotas().items())
    steps_text = f"{total_steps} steps of {grid.global_batch_rows} rows"
    rest_text = f", {left_out} rows left out" if left_out else ""
    print(f"epoch {epoch}: {grid.epoch_rows} rows ({quotas}), {steps_text}{rest_text}")
    for step in range(min(steps, total_steps)):
        for rank in range(grid.world_size):
            print(f"step {step}  rank {rank}  {' '.join(str(row) for row in grid.rows_of_step(rows, rank, step))}")


def compare(one: "BatchGrid", other: "BatchGrid", rows: Any) -> int:
    """Print whether each step of the epoch holds the same set of rows for both; 0 if so."""
    total_steps = one.batches_per_epoch // one.batches_per_step
    for step in range(total_steps):
        if one.step_set(rows, step) != other.step_set(rows, step):
            print(f"world sizes {one.world_size} and {other.world_size} differ at step {step}")
            return 1
    print(f"world sizes {one.world_size} and {other.world_size} hold the same rows in each of {total_steps} steps")
    return 0
