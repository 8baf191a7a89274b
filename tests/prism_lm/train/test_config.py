"""Settings that cannot run are refused by name, with the remedy."""

from typing import Any

import pytest

from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig, check_parallel, compute_accumulation_steps
from prism_lm.train.optim import OptimConfig
from prism_lm.train.schedule import ScheduleConfig


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"precision": "bf16", "zero_stage": 0},
            r"train\.precision=bf16 must go with train\.zero_stage=1, 2 or 3.*use",
        ),
        ({"steps": 0}, r"train\.steps=0 must be at least 1"),
        ({"max_grad_norm": -1.0}, r"train\.max_grad_norm=-1\.0 must be at least 0; use 0 to turn it off"),
        ({"max_skipped_steps": 0}, r"train\.max_skipped_steps=0 must be at least 1"),
        ({"spike_window_steps": -1}, r"train\.spike_window_steps=-1 must be at least 0; use 0 to turn it off"),
        (
            {"spike_deviations": 0.0},
            r"train\.spike_deviations=0\.0 must be above 0; use 8, or train\.spike_window_steps=0",
        ),
        (
            {"steps": 10, "schedule": ScheduleConfig(warmup_steps=10)},
            r"train\.schedule\.warmup_steps=10 must be below train\.steps=10; use at most 9",
        ),
    ],
)
def test_settings_that_cannot_run_are_refused_with_the_remedy(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learning_rate": 0.0}, r"train\.optim\.learning_rate=0\.0 must be above 0"),
        ({"beta2": 1.0}, r"train\.optim\.beta2=1\.0 must lie in \[0, 1\)"),
        ({"weight_decay": -0.1}, r"train\.optim\.weight_decay=-0\.1 must be at least 0"),
    ],
)
def test_optimizer_settings_out_of_range_are_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OptimConfig(**settings)


def test_accumulation_follows_from_rows_and_processes() -> None:
    config = TrainConfig(global_batch_rows=24, micro_batch_rows=2)
    assert [compute_accumulation_steps(config, Ranks(world_size=size)) for size in (1, 2, 4, 12)] == [12, 6, 3, 1]
    cut = [Ranks(world_size=12, sequence_degree=degree) for degree in (1, 2, 3, 12)]
    assert [compute_accumulation_steps(config, ranks) for ranks in cut] == [1, 2, 3, 12]


def test_rows_that_do_not_divide_are_refused_with_rows_that_do() -> None:
    config = TrainConfig(global_batch_rows=10, micro_batch_rows=2)
    text = r"train\.global_batch_rows=10 must be a multiple of train\.micro_batch_rows=2 x 4 processes; use 8 or 16"
    with pytest.raises(ValueError, match=text):
        compute_accumulation_steps(config, Ranks(world_size=4))
    text = r"train\.micro_batch_rows=2 x 8 processes / parallel\.sequence_degree=2; use 8 or 16"
    with pytest.raises(ValueError, match=text):
        compute_accumulation_steps(config, Ranks(world_size=8, sequence_degree=2))


def test_compiling_with_split_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.compile=true must not go with train\.zero_stage=3"):
        check_parallel(TrainConfig(zero_stage=3), ParallelConfig(compile=True), Ranks())


def test_degree_of_the_settings_must_be_that_of_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"parallel\.sequence_degree=2 must equal the sequence_degree=1 of the ranks"):
        check_parallel(TrainConfig(), ParallelConfig(sequence_degree=2), Ranks(world_size=2))
    with pytest.raises(ValueError, match=r"parallel\.sequence_degree=0 must be at least 1; leave it out"):
        ParallelConfig(sequence_degree=0)
