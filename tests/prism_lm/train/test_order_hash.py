"""One hash for one order of rows, whatever the processes; another for any other order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.batch import build_batch
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.order_hash import SUM_MASK, extend, hash_batch
from prism_lm.train.schedule import ScheduleConfig
from tests.harness import ListLoader, build_run, read_ranks, read_records, run_on

HASHES = st.integers(0, SUM_MASK)
Parts = list[list[torch.Tensor]]


@st.composite
def draw_split(draw: st.DrawFn) -> tuple[list[int], Parts]:
    """Row hashes, and the same shared out over ranks and micro-batches in any order."""
    hashes = draw(st.lists(HASHES, min_size=1, max_size=12))
    num_ranks, num_micro = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parts: list[list[list[int]]] = [[[] for _ in range(num_micro)] for _ in range(num_ranks)]
    for value in draw(st.permutations(hashes)):
        parts[draw(st.integers(0, num_ranks - 1))][draw(st.integers(0, num_micro - 1))].append(value)
    return hashes, [[torch.tensor(micro, dtype=torch.int64) for micro in rank] for rank in parts]


@given(draw_split())
def test_every_split_over_ranks_and_micro_batches_has_the_sum_of_the_whole(drawn: tuple[list[int], Parts]) -> None:
    hashes, parts = drawn
    local_sums = torch.tensor([hash_batch(rank) for rank in parts], dtype=torch.int64)
    wrapped = int(local_sums.sum())
    assert wrapped & SUM_MASK == hash_batch([torch.tensor(hashes)]) == sum(hashes) % 2**63


@given(st.lists(HASHES, min_size=2, max_size=6, unique=True), st.data())
def test_swapping_two_steps_changes_the_running_hash(sums: list[int], data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.lists(st.sampled_from(range(len(sums))), min_size=2, max_size=2, unique=True)))
    swapped = [*sums]
    swapped[first], swapped[second] = sums[second], sums[first]
    assert run_through(swapped) != run_through(sums)


def run_through(sums: list[int]) -> str:
    running = ""
    for batch_sum in sums:
        running = extend(running, batch_sum)
        assert len(running) == 16 and int(running, 16) >= 0
    return running


@given(st.lists(st.lists(st.integers(0, 99), min_size=5, max_size=5), min_size=1, max_size=4), st.data())
def test_one_other_token_changes_the_hash_of_its_step(rows: list[list[int]], data: st.DataObject) -> None:
    row, place = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 4))
    other = [list(tokens) for tokens in rows]
    other[row][place] = data.draw(st.integers(0, 99).filter(lambda token: token != rows[row][place]))
    before, after = (hash_batch([hash_stored(stored)]) for stored in (rows, other))
    assert extend("", before) != extend("", after)


def hash_stored(rows: list[list[int]]) -> torch.Tensor:
    stored = [np.array(row, dtype=np.uint16) for row in rows]
    size = {"batch_rows": len(rows), "row_tokens": len(rows[0]) - 1}
    return build_batch(stored, [0] * len(rows), **size, bos_id=1)["row_hash_B"]


def train_cut(folder: str, settings: dict[str, Any], sequence_degree: int) -> str:
    """Three steps of eight rows."""
    train = TrainConfig(
        steps=3, global_batch_rows=8, log_every_steps=1, schedule=ScheduleConfig(warmup_steps=0), **settings
    )
    run = build_run(Path(folder), train, parallel=ParallelConfig(sequence_degree=sequence_degree))
    ranks = replace(read_ranks(), sequence_degree=sequence_degree)

    def build_loader() -> ListLoader:
        return ListLoader(ranks, global_rows=8, micro_rows=train.micro_batch_rows)

    return run_training(replace(run, ranks=ranks, build_train_loader=build_loader))


def test_run_has_one_order_hash_for_all_processes_stages_and_micro_batches(tmp_path: Path) -> None:
    variants: list[tuple[int, dict[str, Any], int]] = [
        (1, {"micro_batch_rows": 8, "zero_stage": 0}, 1),
        (1, {"micro_batch_rows": 2, "zero_stage": 1}, 1),
        (2, {"micro_batch_rows": 2, "zero_stage": 3}, 1),
        (4, {"micro_batch_rows": 2, "zero_stage": 2}, 2),
    ]
    hashes = []
    for number, (num_processes, settings, sequence_degree) in enumerate(variants):
        folder = tmp_path / str(number)
        assert set(run_on(num_processes, train_cut, str(folder), settings, sequence_degree)) == {"finished"}
        hashes.append([record["data/order_hash"] for record in read_records(folder)])
    assert len({*hashes[0]}) == 3
    assert hashes == [hashes[0]] * len(variants)


@pytest.mark.parametrize("count", [1, 3])
def test_sum_that_wrapped_around_is_taken_modulo_2_to_the_63(count: int) -> None:
    largest = torch.full((count,), SUM_MASK, dtype=torch.int64)
    assert hash_batch([largest]) == (count * SUM_MASK) % 2**63
