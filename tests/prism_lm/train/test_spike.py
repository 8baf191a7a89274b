"""The threshold follows the losses before; a step above it leaves no trace but its count."""

import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prism_lm.checkpoint.folder import WEIGHTS_NAME, step_folder
from prism_lm.parallel.collectives import RunFailed
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.spike import SpikeGuard
from tests.harness import ListLoader, TinyModel, build_run, read_ranks, read_records, run_on

GLOBAL_ROWS, MICRO_ROWS, STEPS, SPIKE_TOKEN = 8, 2, 10, 63
# Losses of these random rows differ by some 0.1 nats; a spike adds several.
GUARD: dict[str, Any] = {"spike_window_steps": 3, "spike_deviations": 30.0, "zero_stage": 2, "max_skipped_steps": 2}
LOSSES = st.lists(st.floats(0.5, 12.0), min_size=1, max_size=30)


@given(LOSSES, st.integers(1, 40), st.floats(0.5, 20.0))
def test_threshold_is_infinite_until_the_window_is_full_and_then_at_least_its_least_scale_above_the_median(
    losses: list[float], window_steps: int, deviations: float
) -> None:
    threshold = SpikeGuard(window_steps=window_steps, deviations=deviations, losses=losses).threshold()
    if len(losses) < window_steps:
        assert threshold == float("inf")
    else:
        assert threshold >= statistics.median(losses[-window_steps:]) + 0.02 * deviations


def test_threshold_is_the_median_and_the_scaled_median_deviation() -> None:
    losses = [9.0, 2.0, 3.0, 2.5, 4.0, 2.0]
    guard = SpikeGuard(window_steps=5, deviations=2.0, losses=losses)
    assert guard.threshold() == pytest.approx(2.5 + 2.0 * 1.4826 * 0.5)
    still = SpikeGuard(window_steps=3, deviations=8.0, losses=[2.0, 2.0, 2.0])
    assert still.threshold() == pytest.approx(2.16)


@given(LOSSES, st.integers(1, 8))
def test_window_holds_the_newest_losses_alone(losses: list[float], window_steps: int) -> None:
    window: list[float] = []
    for loss_nats in losses:
        window = SpikeGuard(window_steps=window_steps, deviations=8.0, losses=window).extend(loss_nats)
    assert window == losses[-window_steps:]


def test_guard_that_is_off_keeps_nothing_and_has_no_threshold() -> None:
    guard = SpikeGuard(window_steps=0, deviations=8.0, losses=[1.0, 2.0])
    assert guard.threshold() == float("inf")
    assert guard.extend(3.0) == []


class SpikyModel(TinyModel):
    """A loss ten times as large where a micro-batch begins with token 63."""

    def forward(self, input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor | None) -> Tensor:
        returned = super().forward(input_ids_BT, document_start_BT, labels_BT)
        return returned * 10 if labels_BT is not None and int(input_ids_BT[0, 0]) == SPIKE_TOKEN else returned


def train_with_spikes(folder: str, spikes: list[int], stop_at: int | None, settings: dict[str, Any]) -> str:
    """How the run ended. In the steps (0-based) given, the first of rank 1's two micro-batches is a spike; as rank 0
    takes the one of stop_at, it is sent SIGTERM."""
    met: list[int] = []

    def spoil(step: int, batch: dict[str, Tensor]) -> None:
        rank = read_ranks().rank
        if step in spikes and rank == 1 and step not in met:
            batch["input_ids_BT"][0, 0] = SPIKE_TOKEN
        if step == stop_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        met.append(step)

    train = TrainConfig(
        steps=STEPS,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=MICRO_ROWS,
        log_every_steps=1,
        schedule=ScheduleConfig(warmup_steps=1),
        **{**GUARD, **settings},
    )

    def build_loader(ranks: Any) -> ListLoader:
        return ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=MICRO_ROWS, spoil=spoil)

    try:
        return run_training(build_run(Path(folder), train, build_model=SpikyModel, loader=build_loader))
    except RunFailed as error:
        return str(error)


def train(folder: Path, spikes: list[int], stop_at: int | None = None, **settings: Any) -> str:
    first, second = run_on(2, train_with_spikes, str(folder), spikes, stop_at, settings)
    assert first == second
    return first


def read_curve(folder: Path) -> list[tuple[int, float, float, int, str]]:
    tags = ("step", "train/loss_nats", "optim/grad_norm", "train/skipped_steps", "data/order_hash")
    return [tuple(record[tag] for tag in tags) for record in read_records(folder)]


def read_weights(folder: Path) -> bytes:
    return (step_folder(folder, STEPS) / WEIGHTS_NAME).read_bytes()


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_planted_spike_is_counted_and_left_out_and_a_resume_with_its_window_changes_no_bit(
    zero_stage: int, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(whole, [1, 5, 8], zero_stage=zero_stage) == "finished"
    assert train(stopped, [1, 5, 8], stop_at=7, zero_stage=zero_stage) == "preempted"
    assert train(stopped, [1, 5, 8], zero_stage=zero_stage) == "finished"
    assert read_curve(stopped) == read_curve(whole)
    assert read_weights(stopped) == read_weights(whole)
    # In step 2 the window is not full yet, so that its spike is applied.
    assert [skipped for _, _, _, skipped, _ in read_curve(whole)] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    losses = [loss for _, loss, _, _, _ in read_curve(whole)]
    assert min(losses[5], losses[8]) > 1.5 * losses[4]


def test_spikes_in_a_row_end_the_run_with_loss_and_threshold(tmp_path: Path) -> None:
    words = train(tmp_path, [5, 6])
    loss_nats = read_records(tmp_path)[-1]["train/loss_nats"]
    assert words.startswith(f"the loss of {loss_nats:.4f} nats is above the spike threshold of ")
    assert "in step 7, the last of 2 steps in a row that were not applied (train.max_skipped_steps=2)" in words


def test_guard_that_no_loss_offends_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    off, on = tmp_path / "off", tmp_path / "on"
    assert train(off, [], spike_window_steps=0) == "finished"
    assert train(on, [], spike_deviations=1000.0) == "finished"
    assert read_curve(off) == read_curve(on)
    assert read_weights(off) == read_weights(on)
    assert torch.tensor([loss for _, loss, _, _, _ in read_curve(on)]).isfinite().all()
