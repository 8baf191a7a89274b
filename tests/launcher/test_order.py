"""`prism order` prints what the loader reads, and compares world sizes."""

import itertools
from pathlib import Path

import pytest

from data_pipeline.config import DataConfig
from data_pipeline.dataset import ShardCache
from data_pipeline.loader import build_loader
from data_pipeline.order import BatchGrid
from data_pipeline.synthetic import write_synthetic_dataset
from launcher.__main__ import main


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_dataset(tmp_path_factory.mktemp("order") / "data", vocab_size=400, documents=40)


def test_the_rows_printed_are_those_the_loader_reads(prepared, tmp_path, capsys) -> None:
    options = ["--world-size", "2", "--global-batch-rows", "8", "--micro-batch-rows", "2", "--seed", "5"]
    assert main(["order", str(prepared), *options, "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 * 2 and "steps of 8 rows" in lines[0]
    keys = {"split": "train", "world_size": 2, "micro_batch_rows": 2, "global_batch_rows": 8, "seed": 5}
    config = DataConfig(path=str(prepared), row_tokens=64, workers=0)
    for rank in range(2):
        printed = [int(row) for line in lines[1:] if f"rank {rank}" in line for row in line.split()[4:]]
        loader = build_loader(config, rank=rank, cache_dir=tmp_path, endless=True, **keys)
        read = [row for batch in itertools.islice(loader, 6) for row in batch["input_ids_BT"].tolist()]
        shards = ShardCache(loader.batches.data, "train", cache_limit_bytes=0, timeout_s=20)
        assert [shards.read_row(row)[:-1].tolist() for row in printed] == read


def test_world_sizes_that_hold_the_same_rows_are_told_so(prepared, capsys) -> None:
    assert main(["order", str(prepared), "--world-size", "4", "--global-batch-rows", "8", "--compare", "2"]) == 0
    assert "world sizes 4 and 2 hold the same rows in each of" in capsys.readouterr().out


def test_a_world_smaller_than_a_node_is_compared_as_one_node(prepared, capsys) -> None:
    options = ["--world-size", "4", "--ranks-per-node", "4", "--compare", "2"]
    assert main(["order", str(prepared), *options, "--global-batch-rows", "8"]) == 0
    assert "world sizes 4 and 2 hold the same rows in each of" in capsys.readouterr().out


def test_a_step_that_differs_is_found(prepared, capsys, monkeypatch) -> None:
    positions = BatchGrid.positions
    monkeypatch.setattr(BatchGrid, "positions", lambda grid, *rest: positions(grid, *rest) % (9 - grid.world_size))
    assert main(["order", str(prepared), "--world-size", "2", "--compare", "1"]) == 1
    assert "world sizes 2 and 1 differ at step" in capsys.readouterr().out


def test_weights_change_the_rows_of_each_source(prepared, capsys) -> None:
    assert main(["order", str(prepared), "--weights", "alpha=1", "beta=1"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    alpha, beta = (int(header.split(f"{source} ")[1].split(",")[0].rstrip(")")) for source in ("alpha", "beta"))
    assert abs(alpha - beta) <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "3", "--global-batch-rows", "8"], "train.micro_batch_rows=2 times world size 3 must divide"),
        (["--world-size", "0"], "--world-size=0 must be at least 1"),
        (["--world-size", "4", "--ranks-per-node", "3"], "ranks_per_node=3 must divide world_size=4; use 1 or 2 or 4"),
        (["--world-size", "2", "--ranks-per-node", "4"], "ranks_per_node=4 must divide world_size=2; use 1 or 2"),
        (["--world-size", "4", "--ranks-per-node", "0"], "--ranks-per-node=0 must be at least 1"),
        (["--weights", "alpha"], "--weights alpha must have the form SOURCE=NUMBER"),
        (["--weights", "alpha=1"], "data.weights must name every source of the data, and beta is missing"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(prepared, capsys, options, message) -> None:
    assert main(["order", str(prepared), *options]) == 2
    assert f"error: {message}" in capsys.readouterr().err
