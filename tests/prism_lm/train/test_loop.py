"""The loop: what ends a run, on which ranks, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prism_lm.model.lm import LanguageModel
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.state import RunFailed
from tests.harness import (
    ListLoader,
    TinyModel,
    build_language_config,
    build_run,
    read_losses,
    read_records,
    run_on,
)

GLOBAL_ROWS, MICRO_ROWS = 8, 2


def build_config(**settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "steps": 6,
        "global_batch_rows": GLOBAL_ROWS,
        "micro_batch_rows": MICRO_ROWS,
        "log_every_steps": 1,
        "schedule": ScheduleConfig(warmup_steps=1),
    }
    return TrainConfig(**{**defaults, **settings})


def build_loader(ranks: Ranks, **settings: Any) -> ListLoader:
    return ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=MICRO_ROWS, **settings)


def read_result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def train_language_model(folder: str, parallel: ParallelConfig, settings: dict[str, Any]) -> str:
    def build_model() -> LanguageModel:
        return LanguageModel(build_language_config())

    config = build_config(eval_every_steps=3, eval_rows=GLOBAL_ROWS, histogram_every_steps=4, **settings)
    return run_training(build_run(Path(folder), config, parallel=parallel, build_model=build_model))


PLAIN = ParallelConfig()
CURVES = [
    (1, PLAIN, {"zero_stage": 0}),
    (2, PLAIN, {"zero_stage": 0}),
    (1, ParallelConfig(activation_checkpointing=True), {"zero_stage": 1}),
    (4, PLAIN, {"zero_stage": 1}),
    (2, ParallelConfig(activation_checkpointing=True), {"zero_stage": 2}),
    (2, ParallelConfig(activation_checkpointing=True), {"zero_stage": 3}),
    (4, PLAIN, {"zero_stage": 3}),
    (1, PLAIN, {"zero_stage": 3, "micro_batch_rows": 8}),
]


def test_language_model_has_one_loss_curve_for_all_processes_and_stages(tmp_path: Path) -> None:
    curves, validations = [], []
    for number, (num_processes, parallel, settings) in enumerate(CURVES):
        folder = tmp_path / str(number)
        assert set(run_on(num_processes, train_language_model, str(folder), parallel, settings)) == {"finished"}
        curves.append(torch.tensor(list(read_losses(folder).values()), dtype=torch.float64))
        records = read_records(folder)
        validations.append([record["validation/loss_nats"] for record in records if "validation/loss_nats" in record])
    # Sums of some thousand fp32 terms in another order differ by a few 2^-24. Adam can turn such a difference in a
    # gradient near 0 into a whole step of that weight, learning rate 3e-4, which moves the loss in second order only.
    for other, (num_processes, _, settings) in zip(curves, CURVES, strict=True):
        assert torch.allclose(other, curves[0], rtol=2**-20, atol=0), (num_processes, settings, other - curves[0])
    assert len(curves[0]) == 6 and curves[0].diff().abs().min() > 1e-3
    for validation in validations:
        assert validation == pytest.approx(validations[0], rel=2**-20) and len(validation) == 2
    assert {path.name for path in (tmp_path / "0").iterdir()} >= {"config.yaml", "environment.json", "tensorboard"}


def fail_to_load(folder: str, settings: dict[str, int]) -> tuple[str, float]:
    """The error's text on this rank; only rank 1 is given the settings."""

    def build(ranks: Ranks) -> ListLoader:
        return build_loader(ranks, **(settings if ranks.rank == 1 else {}))

    began_s = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        run_training(build_run(Path(folder), build_config(), loader=build))
    return str(caught.value), time.monotonic() - began_s


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"fail_at": 5}, "shard.00003.mds is truncated (rank 1 of 2)"),
        ({"end_at": 4}, "the training loader ended in step 3; it must be endless (rank 1 of 2)"),
    ],
    ids=["error", "end"],
)
def test_loader_that_fails_on_one_rank_ends_all_ranks_with_its_words(
    settings: dict[str, int], text: str, tmp_path: Path
) -> None:
    outcomes = run_on(2, fail_to_load, str(tmp_path), settings)
    assert [words for words, _ in outcomes] == [text, text]
    assert max(seconds for _, seconds in outcomes) < 60
    assert (read_result(tmp_path)["status"], read_result(tmp_path)["error"]) == ("failed", text)
    assert read_result(tmp_path)["step"] == 2


class NanModel(TinyModel):
    """A NaN loss where a row begins with token 63."""

    def forward(self, input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor) -> Tensor:
        loss = super().forward(input_ids_BT, document_start_BT, labels_BT)
        return loss * torch.nan if int(input_ids_BT[0, 0]) == 63 else loss


def train_with_nans(folder: str, bad_steps: list[int]) -> str:
    """How the run ended; rank 1 meets NaN in the steps (0-based) given."""

    def spoil(step: int, batch: dict[str, Tensor]) -> None:
        if step in bad_steps and Ranks.from_environment().rank == 1:
            batch["input_ids_BT"][0, 0] = 63

    config = build_config(max_nonfinite_steps=2)
    run = build_run(Path(folder), config, build_model=NanModel, loader=lambda ranks: build_loader(ranks, spoil=spoil))
    try:
        return run_training(run)
    except RunFailed as error:
        return str(error)


def test_run_survives_single_nans_and_counts_them(tmp_path: Path) -> None:
    assert run_on(2, train_with_nans, str(tmp_path), [1, 3]) == ["finished", "finished"]
    records = read_records(tmp_path)
    assert [record["train/skipped_steps"] for record in records] == [0, 1, 1, 2, 2, 2]
    assert [record["train/loss_nats"] is None for record in records] == [False, True, False, True, False, False]
    assert read_result(tmp_path)["skipped_steps"] == 2


def test_nans_in_a_row_end_the_run_with_step_ranks_and_cause(tmp_path: Path) -> None:
    first, second = run_on(2, train_with_nans, str(tmp_path), [2, 3])
    assert first == second
    assert first.startswith("the loss of rank 1 is not finite in step 4, the last of 2 such steps in a row")
    assert read_result(tmp_path)["error"] == first


def train_with_signal(folder: str, at: int | None) -> str:
    """Rank 1 alone is sent SIGTERM as it takes micro-batch `at`."""

    def signal_rank_1(step: int, batch: dict[str, Tensor]) -> None:
        if step == at and Ranks.from_environment().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return run_training(
        build_run(Path(folder), build_config(), loader=lambda ranks: build_loader(ranks, spoil=signal_rank_1))
    )


def test_stop_signal_to_one_rank_ends_all_with_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run_on(2, train_with_signal, str(whole), None) == ["finished"] * 2
    assert run_on(2, train_with_signal, str(stopped), 2) == ["preempted"] * 2
    assert (read_result(stopped)["status"], read_result(stopped)["step"]) == ("preempted", 3)
    assert run_on(2, train_with_signal, str(stopped), None) == ["finished"] * 2
    assert read_losses(stopped) == read_losses(whole)
    assert [path.name for path in sorted((stopped / "checkpoints").iterdir())] == ["step_3", "step_6"]


def test_finished_run_ends_at_once_and_longer_one_goes_on(tmp_path: Path) -> None:
    assert run_on(1, train_for, str(tmp_path), 4) == ["finished"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run_on(1, train_for, str(tmp_path), 4) == ["finished"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert run_on(1, train_for, str(tmp_path), 5) == ["finished"]
    assert list(read_losses(tmp_path)) == [1, 2, 3, 4, 5]


def train_for(folder: str, steps: int) -> str:
    return run_training(build_run(Path(folder), build_config(steps=steps, zero_stage=2)))


def test_console_shows_nothing_but_the_run(tmp_path: Path) -> None:
    program = (
        "from tests.prism_lm.train.test_loop import train_for\n"
        f"train_for({str(tmp_path)!r}, 2)\ntrain_for({str(tmp_path)!r}, 3)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=Path.cwd(), timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    starts = [line.split()[0] for line in done.stdout.splitlines()]
    assert starts == ["step", "step", "resuming", "step"], done.stdout
