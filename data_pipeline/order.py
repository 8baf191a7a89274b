"""The order of rows: which row of which epoch goes to which rank at which step. Pure; no process knows more than these
functions.

Rows are numbered through all shards of a split, sources in alphabetical order. An epoch's order is one list of row
numbers; each optimizer step takes the next `global_batch_rows` of it and each micro-batch of all ranks together the
next part of those, so that a step holds the same set of rows for every world size.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.manifest import Manifest, Split
from data_pipeline.mixture import Span, apportion, compute_quotas, select_spans
from data_pipeline.streaming_parts import importing_parts


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """All that decides the order of a split's rows."""

    shard_rows: dict[str, tuple[int, ...]]
    """Source -> rows of each of its shards, sources sorted."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """Mixture; empty for natural proportions."""
    seed: int = 0
    """Of the shuffle."""
    shuffle: bool = True
    """False: rows in the order they are stored."""
    num_canonical_nodes: int = 16
    """Independent paths through the shards."""
    shuffle_block_rows: int = 65536
    """Rows mixed with one another."""
    limit_rows: int = 0
    """Most rows in an epoch, of which each source has its share; 0 for no limit."""

    def quotas(self) -> dict[str, int]:
        """Source -> rows in an epoch."""
        quotas = compute_quotas({source: sum(rows) for source, rows in self.shard_rows.items()}, self.weights)
        if 0 < self.limit_rows < sum(quotas.values()):
            return apportion(self.limit_rows, quotas)
        return quotas

    def epoch_rows(self) -> int:
        """Rows in an epoch."""
        return sum(self.quotas().values())

    def compute_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the epoch's row numbers in order; without weights each row of the split exactly once."""
        spans = self.select_epoch_spans(epoch)
        rows: NDArray[np.int64] = np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in spans])
        if not self.shuffle:
            return rows
        sizes = np.asarray([end - begin for begin, end in spans], dtype=np.int64)
        canonical_nodes = min(self.num_canonical_nodes, len(rows))
        shuffled = shuffle_within_nodes(sizes, canonical_nodes, self.seed, epoch, self.shuffle_block_rows)
        return rows[shuffled[interleave(len(rows), canonical_nodes)]]

    def select_epoch_spans(self, epoch: int) -> list[Span]:
        """Return the row ranges of the epoch, each within a shard."""
        spans: list[Span] = []
        first_row = 0
        quotas = self.quotas()
        for number, (source, shard_rows) in enumerate(sorted(self.shard_rows.items())):
            ends = np.cumsum(shard_rows) + first_row
            shard_spans = [(int(end) - rows, int(end)) for end, rows in zip(ends, shard_rows, strict=True)]
            seed = [self.seed, number]
            spans += select_spans(shard_spans, quotas[source], epoch=epoch, seed=seed, shuffle=self.shuffle)
            first_row = int(ends[-1])
        return spans


def build_row_order(
    manifest: Manifest,
    split: Split,
    *,
    weights: dict[str, float],
    seed: int,
    shuffle: bool,
    num_canonical_nodes: int,
    shuffle_block_rows: int,
    limit_rows: int = 0,
) -> RowOrder:
    """Return the order of a split of prepared data. Raises ValueError for weights that do not fit its sources."""
    sources = manifest.sources(split)
    order = RowOrder(
        shard_rows={source: tuple(shard.rows for shard in held.shards) for source, held in sources.items()},
        weights={source: float(weight) for source, weight in sorted(weights.items())},
        seed=seed,
        shuffle=shuffle,
        num_canonical_nodes=num_canonical_nodes,
        shuffle_block_rows=shuffle_block_rows,
        limit_rows=limit_rows,
    )
    order.quotas()
    return order


def shuffle_within_nodes(
    sizes: NDArray[np.int64], nodes: int, seed: int, epoch: int, block_rows: int
) -> NDArray[np.int64]:
    """mosaicml-streaming's shard-aware shuffle: canonical node after canonical node, mixing `block_rows` neighbours."""
    import warnings

    with importing_parts():
        from streaming.base.shuffle import get_shuffle

    with warnings.catch_warnings():  # a block smaller than a shard is our users' choice of cache size, not a mistake
        warnings.simplefilter("ignore")
        shuffled: Any = get_shuffle("py1e", sizes, nodes, seed, epoch, block_rows)
    return np.asarray(shuffled, dtype=np.int64)


def interleave(count: int, nodes: int) -> NDArray[np.int64]:
    """Return positions 0..count-1, taking one from each of `nodes` equal stretches in turn; a shorter stretch is
    skipped last."""
    bounds = np.arange(nodes + 1) * count // nodes
    longest = int(np.max(np.diff(bounds)))
    grid = bounds[:-1, None] + np.arange(longest)[None, :]
    return grid.T[(grid < bounds[1:, None]).T]


@dataclass(frozen=True, kw_only=True)
class BatchGrid:
    """How the ranks share an epoch's order. One unit is the micro-batches of all ranks: world_size x
    micro_batch_rows rows."""

    epoch_rows: int
    world_size: int
    micro_batch_rows: int
    global_batch_rows: int
    ranks_per_node: int
    endless: bool
    """True: rows that do not fill a global batch are left out of the epoch. False: the last units are filled with
    padding."""

    def __post_init__(self) -> None:
        if self.world_size % self.ranks_per_node:
            good = " or ".join(str(count) for count in range(1, self.world_size + 1) if not self.world_size % count)
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} must divide world_size={self.world_size}; use {good}"
            )
        unit = self.world_size * self.micro_batch_rows
        if self.global_batch_rows % unit:
            per_rank = self.global_batch_rows // self.world_size
            good = [rows for rows in range(1, per_rank + 1) if not self.global_batch_rows % (self.world_size * rows)]
            remedy = (
                f"use train.micro_batch_rows={good[-1]} or a divisor of it"
                if good
                else f"use at most {self.global_batch_rows} ranks"
            )
            raise ValueError(
                f"train.micro_batch_rows={self.micro_batch_rows} times world size {self.world_size} must divide "
                f"train.global_batch_rows={self.global_batch_rows}; {remedy}"
            )
        if self.endless and self.epoch_rows < self.global_batch_rows:
            raise ValueError(
                f"train.global_batch_rows={self.global_batch_rows} must not exceed the {self.epoch_rows} rows of an "
                f"epoch; use {self.epoch_rows} or less, or prepare more text"
            )

    @property
    def unit_rows(self) -> int:
        """Rows of one micro-batch of every rank."""
        return self.world_size * self.micro_batch_rows

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches each rank gets in an epoch."""
        if self.endless:
            return self.epoch_rows // self.global_batch_rows * self.global_batch_rows // self.unit_rows
        return -(-self.epoch_rows // self.unit_rows)

    def positions(self, rank: int, batch: int) -> NDArray[np.int64]:
        """Return the places in the epoch's order of a rank's micro-batch; those from epoch_rows on are padding.

        Neighbours go to different nodes, so that with canonical nodes a multiple of the nodes each node reads shards of
        its own.
        """
        nodes = self.world_size // self.ranks_per_node
        node, local_rank = divmod(rank, self.ranks_per_node)
        within = (np.arange(self.micro_batch_rows) * self.ranks_per_node + local_rank) * nodes + node
        return batch * self.unit_rows + within

    def rows(self, order: NDArray[Any], rank: int, batch: int) -> list[int]:
        """Return the row numbers of a rank's micro-batch, padding left out."""
        positions = self.positions(rank, batch)
        return [int(order[position]) for position in positions if position < self.epoch_rows]

    @property
    def batches_per_step(self) -> int:
        """Micro-batches each rank reads for one optimizer step."""
        return self.global_batch_rows // self.unit_rows

    def rows_of_step(self, order: NDArray[Any], rank: int, step: int) -> list[int]:
        """Return the rows of all micro-batches of a rank in a step of the epoch."""
        first = step * self.batches_per_step
        return [row for batch in range(first, first + self.batches_per_step) for row in self.rows(order, rank, batch)]

    def step_set(self, order: NDArray[Any], step: int) -> list[int]:
        """Return the rows of all ranks in a step, sorted."""
        return sorted(row for rank in range(self.world_size) for row in self.rows_of_step(order, rank, step))
