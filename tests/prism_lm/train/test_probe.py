"""A loaded model is held to the logits that were stored, and what differs is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prism_lm.checkpoint.folder import WEIGHTS_NAME
from prism_lm.checkpoint.share import PROBE_NAME
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import process_group
from prism_lm.train.config import TrainConfig
from prism_lm.train.engine import Engine, build_engine
from prism_lm.train.probe import NUM_POSITIONS, check_probe, cut_row, take_probe
from prism_lm.train.schedule import ScheduleConfig
from tests.harness import ROW_TOKENS, VOCAB, TinyModel, build_batch, read_ranks, run_on


def open_engine(folder: str, stage: int) -> Engine:
    rows = {"global_batch_rows": 2 * read_ranks().world_size, "micro_batch_rows": 2}
    train = TrainConfig(zero_stage=stage, schedule=ScheduleConfig(warmup_steps=0), **rows)
    torch.manual_seed(0)
    return build_engine(TinyModel(), train, ParallelConfig(), read_ranks(), Path(folder) / "deepspeed.log")


@torch.no_grad()
def spoil(engine: Engine, name: str) -> None:
    dict(engine.model.named_parameters())[name].mul_(1.01)


def store(engine: Engine, folder: Path) -> None:
    ranks = read_ranks()
    probe, weights = take_probe(engine, cut_row(build_batch(2, seed=ranks.rank)), ranks), engine.gather_weights()
    assert probe["input_ids_BT"].shape == (1, ROW_TOKENS) and probe["logits"].shape == (NUM_POSITIONS, VOCAB)
    assert torch.equal(probe["input_ids_BT"], build_batch(2, seed=0)["input_ids_BT"][:1])
    if ranks.is_main:
        save_file(probe, folder / PROBE_NAME)
        save_file(weights, folder / WEIGHTS_NAME)
    torch.distributed.barrier()


def probe_all(folder: str) -> list[str]:
    """What is said of an untouched model, of one with a parameter changed, and of one that computes otherwise."""
    ranks, texts = read_ranks(), list[str]()
    with process_group(ranks):
        for stage in (0, 1, 3):
            engine = open_engine(folder, stage)
            store(engine, Path(folder))
            check_probe(engine, Path(folder), ranks, precision="fp32", is_same=True)
            engine.close()
        engine = open_engine(folder, 1)
        spoils: list[Callable[[], None]] = [
            lambda: spoil(engine, "blocks.1.up.weight"),
            lambda: spoil(engine, "head.weight"),
        ]
        for change in spoils:
            change()
            with pytest.raises(RunFailed) as caught:
                check_probe(engine, Path(folder), ranks, precision="fp32", is_same=False)
            texts.append(str(caught.value))
        engine.close()
    return texts


def test_parameter_that_is_not_the_files_stops_the_run_and_is_named(tmp_path: Path) -> None:
    first, second = run_on(2, probe_all, str(tmp_path))
    assert first == second
    assert "does not compute what it did when it was saved: logits differ by" in first[0]
    assert "parameters that differ from the file: blocks.1.up; load with" in first[0]
    assert "parameters that differ from the file: blocks.1.up, head; load with" in first[1]


def compute_otherwise(folder: str) -> str:
    ranks = read_ranks()
    with process_group(ranks):
        engine = open_engine(folder, 1)
        store(engine, Path(folder))
        engine.model.blocks[0].forward = lambda x_BTD: 2 * x_BTD  # pyright: ignore
        with pytest.raises(RunFailed) as caught:
            check_probe(engine, Path(folder), ranks, precision="fp32", is_same=True)
        engine.close()
    return str(caught.value)


def test_program_that_computes_otherwise_is_told_from_parameters_that_differ(tmp_path: Path) -> None:
    (text,) = run_on(1, compute_otherwise, str(tmp_path))
    assert "all parameters are those of the file, so the program computes otherwise" in text


def test_checkpoint_without_a_probe_is_taken_as_it_is(tmp_path: Path) -> None:
    run_on(1, check_nothing, str(tmp_path))


def check_nothing(folder: str) -> None:
    with process_group(read_ranks()):
        engine = open_engine(folder, 0)
        check_probe(engine, Path(folder), read_ranks(), precision="fp32", is_same=True)
        engine.close()
