"""The loop: what ends a run, on which ranks, and what it leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prism_lm.checkpoint.ownership import OWNER_NAME
from prism_lm.model.lm import LanguageModel
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.state import TrainRun
from tests.harness import (
    ListLoader,
    TinyModel,
    build_language_config,
    build_run,
    read_losses,
    read_ranks,
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
    return ListLoader(ranks, **{"global_rows": GLOBAL_ROWS, "micro_rows": MICRO_ROWS, **settings})


def read_result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


PLAIN, AGAIN = ParallelConfig(), ParallelConfig(activation_checkpointing=True)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One way to run the same training."""

    num_processes: int
    parallel: ParallelConfig = PLAIN
    settings: dict[str, Any]


def train_language_model(folder: str, curve: Curve) -> int:
    """The fewest weights that stood gathered between two steps of the run."""
    model = LanguageModel(build_language_config())
    gathered: list[int] = []

    def count(step: int, batch: dict[str, Tensor]) -> None:
        if step > 0:
            gathered.append(sum(parameter.numel() for parameter in model.parameters()))

    config = build_config(eval_every_steps=3, eval_rows=GLOBAL_ROWS, histogram_every_steps=4, **curve.settings)
    run = build_run(
        Path(folder),
        config,
        parallel=curve.parallel,
        build_model=lambda: model,
        loader=lambda ranks: build_loader(ranks, micro_rows=config.micro_batch_rows, spoil=count),
    )
    with pytest.MonkeyPatch.context() as patch:
        # Every weight of a model this small would be one of those that stage 3 keeps whole.
        patch.setattr("prism_lm.train.engine._PERSISTENT_ELEMENTS", 0)
        assert run_training(run) == "finished"
    return min(gathered)


FP32_CURVES = [
    Curve(num_processes=1, settings={"zero_stage": 0}),
    Curve(num_processes=2, settings={"zero_stage": 0}),
    Curve(num_processes=1, settings={"zero_stage": 1}, parallel=AGAIN),
    Curve(num_processes=2, settings={"zero_stage": 2}, parallel=AGAIN),
    Curve(num_processes=2, settings={"zero_stage": 3}, parallel=AGAIN),
    Curve(num_processes=4, settings={"zero_stage": 3}),
    Curve(num_processes=1, settings={"zero_stage": 3, "micro_batch_rows": 8}),
]
BF16_CURVES = [
    Curve(num_processes=1, settings={"precision": "bf16", "zero_stage": 1, "micro_batch_rows": 8}),
    Curve(num_processes=2, settings={"precision": "bf16", "zero_stage": 2}, parallel=AGAIN),
    Curve(num_processes=2, settings={"precision": "bf16", "zero_stage": 3}),
]


def read_curve(folder: Path) -> Tensor:
    """Six training losses and two validation losses, fp64."""
    validation = [record["validation/loss_nats"] for record in read_records(folder) if "validation/loss_nats" in record]
    losses = list(read_losses(folder).values())
    assert (len(losses), len(validation)) == (6, 2)
    return torch.tensor(losses + validation, dtype=torch.float64)


def train_curves(folder: Path, curves: list[Curve]) -> Tensor:
    """The curves as rows."""
    for number, curve in enumerate(curves):
        least = run_on(curve.num_processes, train_language_model, str(folder / str(number)), curve)
        assert [count == 0 for count in least] == [curve.settings["zero_stage"] == 3] * curve.num_processes, curve
    return torch.stack([read_curve(folder / str(number)) for number in range(len(curves))])


@pytest.fixture(scope="module")
def fp32_curves(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return train_curves(tmp_path_factory.mktemp("fp32"), FP32_CURVES)


def test_language_model_has_one_loss_curve_for_all_processes_and_stages(fp32_curves: Tensor) -> None:
    # Sums of some thousand fp32 terms in another order differ by a few 2^-24. Adam can turn such a difference in a
    # gradient near 0 into a whole step of that weight, learning rate 3e-4, which moves the loss in second order only.
    assert ((fp32_curves / fp32_curves[0] - 1).abs().max(dim=1).values <= 2**-20).all(), fp32_curves - fp32_curves[0]
    assert fp32_curves[0, :6].diff().abs().min() > 1e-3


def test_bf16_has_one_loss_curve_too_near_that_of_fp32(fp32_curves: Tensor, tmp_path: Path) -> None:
    curves = train_curves(tmp_path, BF16_CURVES)
    # Within bf16 a sum in another order moves an activation to the next of its values, 2^-8 of it at most; over a row's
    # tokens these cancel. Against fp32 every weight and activation differs by up to 2^-9, in a loss of four layers.
    assert ((curves / curves[0] - 1).abs() <= 2**-9).all(), curves - curves[0]
    assert ((curves / fp32_curves[0] - 1).abs() <= 2**-7).all(), curves - fp32_curves[0]
    # What three updates gain on the same rows is small beside the losses, and would be 0 without updates.
    gained, gained_in_fp32 = curves[:, 6] - curves[:, 7], fp32_curves[0, 6] - fp32_curves[0, 7]
    assert ((gained / gained_in_fp32 - 1).abs() <= 0.25).all(), (gained, gained_in_fp32)


def train_compiled(folder: str) -> None:
    """The same run, plain and compiled, of a real model small enough that its compilation takes seconds."""
    sizes = {"model_width": 32, "num_layers": 1, "num_heads": 1, "key_width": 16, "value_width": 16, "mlp_width": 32}
    model_config = build_language_config(**sizes, solver_steps=1, chunk_tokens=32)
    for compiled in (False, True):
        run = build_run(
            Path(folder) / str(compiled),
            build_config(steps=3, histogram_every_steps=2),
            parallel=ParallelConfig(compile=compiled, activation_checkpointing=compiled),
            build_model=lambda: LanguageModel(model_config),
        )
        assert run_training(run) == "finished"


def test_compiled_run_has_the_losses_of_the_plain_one(tmp_path: Path) -> None:
    run_on(1, train_compiled, str(tmp_path))
    plain, compiled = (read_records(tmp_path / name) for name in ("False", "True"))
    assert len(plain) == len(compiled) == 3
    for tag in ("train/loss_nats", "optim/grad_norm"):
        # Compiled code fuses and reorders sums of some hundred fp32 terms.
        assert [record[tag] for record in compiled] == pytest.approx([record[tag] for record in plain], rel=2**-18)


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
        (
            {"end_at": 4},
            "the training loader ended in step 3 and must be endless; pass one that begins again (rank 1 of 2)",
        ),
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
        if step in bad_steps and read_ranks().rank == 1:
            batch["input_ids_BT"][0, 0] = 63

    config = build_config(max_skipped_steps=2)
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
    assert first.startswith(
        "the loss of rank 1 is not finite in step 4, the last of 2 steps in a row that were not applied"
    )
    assert read_result(tmp_path)["error"] == first


def lose_folder(folder: str, at: int) -> str:
    """As rank 0 takes micro-batch `at`, another start takes the folder over."""
    path = Path(folder) / OWNER_NAME

    def take_over(step: int, batch: dict[str, Tensor]) -> None:
        if step == at and read_ranks().is_main:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"token": "another"}))

    with pytest.raises(RunFailed) as caught:
        run_training(build_run(Path(folder), build_config(), loader=lambda ranks: build_loader(ranks, spoil=take_over)))
    return str(caught.value)


def test_rank_that_lost_the_folder_records_nothing_more(tmp_path: Path) -> None:
    said = run_on(1, lose_folder, str(tmp_path), 4)[0]
    assert said.startswith("another start took this run over")
    steps = [record["step"] for record in read_records(tmp_path)]
    assert steps == [1, 2, 3, 4]
    assert not (tmp_path / "result.json").exists()


def train_with_signal(folder: str, at: int | None) -> str:
    """Rank 1 alone is sent SIGTERM as it takes micro-batch `at`."""

    def signal_rank_1(step: int, batch: dict[str, Tensor]) -> None:
        if step == at and read_ranks().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return run_training(
        build_run(Path(folder), build_config(), loader=lambda ranks: build_loader(ranks, spoil=signal_rank_1))
    )


def test_stop_signal_to_one_rank_ends_all_with_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run_on(2, train_with_signal, str(whole), None) == ["finished"] * 2
    assert run_on(2, train_with_signal, str(stopped), 2) == ["preempted"] * 2
    assert (read_result(stopped)["status"], read_result(stopped)["step"]) == ("preempted", 2)
    assert run_on(2, train_with_signal, str(stopped), None) == ["finished"] * 2
    assert read_losses(stopped) == read_losses(whole)
    assert [path.name for path in sorted((stopped / "checkpoints").iterdir())] == ["step_2", "step_6"]


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


def read_everything(run_dir: Path) -> dict[Path, bytes]:
    """Every file of a run but the engine's log and lock files."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".log"]
    return {path.relative_to(run_dir): path.read_bytes() for path in files}


class RefusingLoader(ListLoader):
    """Refuses the place it is given, as a loader does whose settings changed."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("data.shuffle=False must equal data.shuffle=True of the checkpoint; restore data.shuffle")


def build_other_run(folder: str) -> TrainRun:
    """A longer run with another configuration and tokenizer."""
    run = build_run(Path(folder), build_config(steps=9, zero_stage=2))
    return replace(run, config_yaml="steps: more\n", files={"tokenizer.model": b"other"})


def refuse(folder: str, what: str) -> str:
    """What this rank says of a place that does not fit, or of data that is missing."""

    def miss() -> Any:
        raise OSError(f"{what} data is missing")

    def refuse_place() -> Any:
        return RefusingLoader(read_ranks(), global_rows=GLOBAL_ROWS, micro_rows=MICRO_ROWS)

    run = build_other_run(folder)
    runs = {
        "place": replace(run, build_train_loader=refuse_place),
        "train": replace(run, build_train_loader=miss),
        "validation": replace(run, train=replace(run.train, eval_every_steps=2), build_validation_loader=miss),
    }
    with pytest.raises(RunFailed) as caught:
        run_training(runs[what])
    return str(caught.value)


REFUSALS = {
    "place": "data.shuffle=False must equal data.shuffle=True of the checkpoint",
    "train": "train data is missing",
    "validation": "validation data is missing",
}


def test_refused_start_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    assert run_on(2, train_for, str(tmp_path), 4) == ["finished"] * 2
    before = read_everything(tmp_path)
    for what, words in REFUSALS.items():
        first, second = run_on(2, refuse, str(tmp_path), what)
        assert first == second and first.startswith(words)
        assert read_everything(tmp_path) == before
    run_on(2, train_other, str(tmp_path))
    assert (tmp_path / "config.yaml").read_text() == "steps: more\n"
    assert (tmp_path / "tokenizer.model").read_bytes() == b"other"
    assert len(read_losses(tmp_path)) == 9


def train_other(folder: str) -> str:
    return run_training(build_other_run(folder))


def test_short_checkpoint_file_is_named_and_nothing_is_thrown_away(tmp_path: Path) -> None:
    run_on(1, train_for, str(tmp_path), 2)
    trainer = tmp_path / "checkpoints" / "step_2" / "trainer.json"
    trainer.write_bytes(trainer.read_bytes()[:-1])
    before = read_everything(tmp_path)
    with pytest.raises(ValueError, match=r"step_2/trainer\.json must be the \d+ bytes .*; restore it, or remove"):
        train_for(str(tmp_path), 4)
    assert read_everything(tmp_path) == before
    shutil.rmtree(trainer.parent)
    assert run_on(1, train_for, str(tmp_path), 4) == ["finished"]
