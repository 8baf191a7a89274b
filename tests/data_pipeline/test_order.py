"""The order of rows: every row once an epoch, and the same set in a step whatever the world size."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.order import BatchGrid, RowOrder, interleave

shards = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple), min_size=1
)


@settings(max_examples=60)
@given(
    shard_rows=shards,
    seed=st.integers(0, 1000),
    nodes=st.integers(1, 20),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_holds_every_row_exactly_once(shard_rows, seed, nodes, epoch, shuffle) -> None:
    order = RowOrder(
        shard_rows=shard_rows, seed=seed, num_canonical_nodes=nodes, shuffle=shuffle, shuffle_block_rows=16
    )
    rows = order.compute_epoch(epoch)
    assert sorted(rows.tolist()) == list(range(order.epoch_rows()))
    assert shuffle or rows.tolist() == sorted(rows.tolist())


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    keys: dict[str, Any] = {"shard_rows": {"a": (50, 50)}}
    first = RowOrder(seed=1, **keys).compute_epoch(0).tolist()
    assert first == RowOrder(seed=1, **keys).compute_epoch(0).tolist()
    assert first != RowOrder(seed=2, **keys).compute_epoch(0).tolist()
    assert first != RowOrder(seed=1, **keys).compute_epoch(1).tolist()


def test_weights_set_the_share_of_each_source_in_an_epoch() -> None:
    order = RowOrder(shard_rows={"a": (60, 40), "b": (50,)}, weights={"a": 1.0, "b": 3.0}, seed=1)
    rows = order.compute_epoch(0)
    assert len(rows) == 150 and (rows < 100).sum() in (37, 38)


@pytest.mark.parametrize(("limit_rows", "rows"), [(0, [*range(8)]), (4, [0, 1, 2, 6]), (1, [0]), (9, [*range(8)])])
def test_limited_order_takes_the_first_rows_of_every_source_by_its_share(limit_rows: int, rows: list[int]) -> None:
    order = RowOrder(shard_rows={"a": (4, 2), "b": (2,)}, shuffle=False, limit_rows=limit_rows)
    assert order.compute_epoch(0).tolist() == rows and order.epoch_rows() == len(rows)


def make_grid(world_size: int, micro: int, global_rows: int, epoch_rows: int, **keys: Any) -> BatchGrid:
    keys = {"ranks_per_node": world_size, "endless": True, **keys}
    return BatchGrid(
        epoch_rows=epoch_rows, world_size=world_size, micro_batch_rows=micro, global_batch_rows=global_rows, **keys
    )


@given(epoch_rows=st.integers(16, 200), data=st.data())
def test_each_step_holds_the_same_set_for_every_world_size_and_micro_batch(epoch_rows, data) -> None:
    order = np.random.default_rng(epoch_rows).permutation(epoch_rows)
    expected = [sorted(order[step * 16 : step * 16 + 16].tolist()) for step in range(epoch_rows // 16)]
    for world_size in (1, 2, 4, 8):
        micro = data.draw(st.sampled_from([rows for rows in (1, 2, 4, 8, 16) if 16 % (rows * world_size) == 0]))
        per_node = data.draw(st.sampled_from([ranks for ranks in (1, 2, 4, 8) if world_size % ranks == 0]))
        grid = make_grid(world_size, micro, 16, epoch_rows, ranks_per_node=per_node)
        assert grid.batches_per_epoch == epoch_rows // 16 * grid.batches_per_step
        assert [grid.step_set(order, step) for step in range(epoch_rows // 16)] == expected


@given(epoch_rows=st.integers(1, 60), world_size=st.integers(1, 4), micro=st.integers(1, 5))
def test_a_pass_that_ends_reads_each_row_once_and_gives_all_ranks_as_many_batches(
    epoch_rows, world_size, micro
) -> None:
    grid = make_grid(world_size, micro, world_size * micro, epoch_rows, endless=False)
    order = np.arange(epoch_rows)
    batches = range(grid.batches_per_epoch)
    rows = [row for rank in range(world_size) for batch in batches for row in grid.rows(order, rank, batch)]
    assert sorted(rows) == list(range(epoch_rows))


def test_nodes_read_canonical_nodes_of_their_own() -> None:
    order = np.arange(64)[interleave(64, 4)]  # four stretches of 16 rows, one row of each in turn
    grid = make_grid(4, 4, 16, 64, ranks_per_node=2)
    read = {rank: {row // 16 for batch in range(4) for row in grid.rows(order, rank, batch)} for rank in range(4)}
    assert (read[0] | read[1]).isdisjoint(read[2] | read[3])


@given(count=st.integers(1, 100), nodes=st.integers(1, 100))
def test_interleaving_takes_from_each_stretch_in_turn_and_leaves_nothing_out(count, nodes) -> None:
    nodes = min(nodes, count)
    positions = interleave(count, nodes)
    assert sorted(positions.tolist()) == list(range(count))
    stretch = np.searchsorted(np.arange(1, nodes) * count // nodes, positions[:nodes], side="right")
    assert stretch.tolist() == list(range(nodes))


def test_batches_that_do_not_divide_name_a_micro_batch_that_does() -> None:
    with pytest.raises(
        ValueError, match=r"train\.micro_batch_rows=3 times world size 2 must divide train\.global_batch_rows=8"
    ):
        make_grid(2, 3, 8, 100)
    with pytest.raises(ValueError, match=r"use at most 8 ranks"):
        make_grid(16, 1, 8, 100)
    with pytest.raises(ValueError, match=r"train\.global_batch_rows=8 must not exceed the 5 rows of an epoch"):
        make_grid(2, 4, 8, 5)


def test_ranks_that_do_not_fill_their_nodes_are_refused_instead_of_reading_the_same_rows() -> None:
    with pytest.raises(ValueError, match="ranks_per_node=3 must divide world_size=4; use 1 or 2 or 4"):
        make_grid(4, 1, 4, 100, ranks_per_node=3)
