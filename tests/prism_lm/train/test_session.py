"""Opening a run: killed runs go on to the bit, on the real model and real shards; what does not fit is refused."""

import json
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from data_pipeline.config import DataConfig
from data_pipeline.loader import build_loader
from data_pipeline.synthetic import write_synthetic_dataset
from prism_lm.checkpoint.folder import WEIGHTS_NAME, step_folder
from prism_lm.checkpoint.load import load_weights, newest_checkpoint
from prism_lm.checkpoint.manager import CheckpointConfig
from prism_lm.model.lm import LanguageModel
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks, process_group
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.session import Start, agree_on_start, choose_start
from prism_lm.train.state import TrainRun, TrainState
from tests.harness import (
    Group,
    ListLoader,
    build_language_config,
    build_run,
    read_losses,
    read_ranks,
    read_records,
    run_on,
)

VOCAB_SIZE, ROW_TOKENS, STEPS = 320, 64, 16


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "data"
    write_synthetic_dataset(folder, vocab_size=VOCAB_SIZE, row_tokens=ROW_TOKENS, documents=200, seed=0)
    return folder


def build_text_run(run_dir: Path, data_dir: Path, **settings: Any) -> TrainRun:
    """The real model on real shards through the real loader."""
    train = TrainConfig(
        **{"steps": STEPS, **settings},
        global_batch_rows=4,
        micro_batch_rows=2,
        log_every_steps=1,
        eval_every_steps=5,
        eval_rows=8,
        schedule=ScheduleConfig(kind="constant", warmup_steps=4),
        checkpoint=CheckpointConfig(save_every_steps=3, keep_last=2),
    )
    model_config = build_language_config(vocab_size=VOCAB_SIZE)
    run = build_run(run_dir, train, build_model=lambda: LanguageModel(model_config))
    data_config = DataConfig(path=str(data_dir), row_tokens=ROW_TOKENS, workers=0)

    def open_loader(split: Any) -> Any:
        return build_loader(
            data_config,
            split=split,
            rank=run.ranks.rank,
            world_size=run.ranks.world_size,
            micro_batch_rows=train.micro_batch_rows,
            global_batch_rows=train.global_batch_rows,
            seed=run.seed,
            cache_dir=run_dir / "cache",
            endless=split == "train",
        )

    return replace(
        run,
        build_train_loader=lambda: open_loader("train"),
        build_validation_loader=lambda: open_loader("validation"),
    )


def train_on_text(run_dir: str, data_dir: str, settings: dict[str, Any]) -> str:
    return run_training(build_text_run(Path(run_dir), Path(data_dir), **settings))


def count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def kill_after(group: Group, metrics: Path, lines: int, delay_s: float) -> bool:
    """SIGKILL to all ranks, delay_s after that many lines stand in the file; False if the run ended before."""
    end_s = time.monotonic() + 120
    while count_lines(metrics) < lines and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(delay_s)
    was_running = group.is_alive()
    group.send_signal(signal.SIGKILL)
    group.kill()
    return was_running


@pytest.mark.parametrize(
    ("num_processes", "settings"),
    [(1, {"zero_stage": 2, "precision": "bf16"}), (2, {"zero_stage": 3, "precision": "bf16"})],
    ids=["1-stage2-bf16", "2-stage3-bf16"],
)
def test_killed_run_goes_on_with_the_losses_of_the_uninterrupted_one(
    num_processes: int, settings: dict[str, Any], data_dir: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert set(run_on(num_processes, train_on_text, str(whole), str(data_dir), settings)) == {"finished"}
    seed = random.SystemRandom().randrange(10**6)
    generator = random.Random(seed)
    kills = 0
    for lines in sorted(generator.sample(range(1, STEPS - 2), 2)):
        group = Group(num_processes, train_on_text, str(killed), str(data_dir), settings)
        kills += kill_after(group, killed / "metrics.jsonl", lines, generator.uniform(0.0, 0.1))
    assert set(run_on(num_processes, train_on_text, str(killed), str(data_dir), settings)) == {"finished"}
    assert kills >= 1, f"seed {seed}: the run was never killed"
    assert read_losses(killed) == read_losses(whole), f"seed {seed}"
    weights = [(step_folder(run_dir, STEPS) / WEIGHTS_NAME).read_bytes() for run_dir in (whole, killed)]
    assert weights[0] == weights[1], f"seed {seed}"


@pytest.fixture(scope="module")
def finished_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes, stage 3, that ended."""
    run_dir = tmp_path_factory.mktemp("run")
    run_on(2, train_on_text, str(run_dir), str(data_dir), {"zero_stage": 3})
    return run_dir


def test_weights_of_a_split_run_load_into_an_ordinary_model(finished_run: Path, data_dir: Path) -> None:
    folder = newest_checkpoint(finished_run)
    assert folder is not None and folder.name == f"step_{STEPS}"
    model = LanguageModel(build_language_config(vocab_size=VOCAB_SIZE))
    load_weights(model, folder)
    assert model.head.weight is model.embedding.weight
    config = DataConfig(path=str(data_dir), row_tokens=ROW_TOKENS, workers=0)
    given = {"rank": 0, "world_size": 1, "micro_batch_rows": 8, "seed": 7, "endless": False}
    loader = build_loader(config, split="validation", cache_dir=finished_run / "cache", **given)
    batch = next(iter(loader))
    loss = model(batch["input_ids_BT"], batch["document_start_BT"], batch["labels_BT"]).item() / int(
        (batch["labels_BT"] != -100).sum()
    )
    result = json.loads((finished_run / "result.json").read_text())
    # Means of some hundred fp32 terms summed in another order.
    assert result["validation/loss_nats"] == pytest.approx(loss, rel=2**-20)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"precision": "bf16"},
            r"^train\.precision=bf16 must equal train\.precision=fp32 of .* set train\.precision=fp32",
        ),
        (
            {"global_batch_rows": 8},
            r"^train\.global_batch_rows=8 must equal train\.global_batch_rows=4 of the checkpoint",
        ),
    ],
)
def test_run_that_differs_from_its_checkpoint_is_refused_before_it_starts(
    settings: dict[str, Any], text: str, finished_run: Path, data_dir: Path
) -> None:
    run = build_text_run(finished_run, data_dir, zero_stage=3)
    with pytest.raises(ValueError, match=text):
        choose_start(replace(run, train=replace(run.train, **settings)))
    assert choose_start(run).state.step == STEPS


def read_order_hashes(run_dir: Path) -> list[str]:
    return [record["data/order_hash"] for record in read_records(run_dir) if "train/loss_nats" in record]


# Sums of some hundred fp32 gradients in another order, over eight steps of a model that divides by their moments.
ELASTIC_BOUND = 2**-14


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, {"zero_stage": 1}), (2, {"zero_stage": 2})), ((2, {"zero_stage": 3}), (1, {"zero_stage": 0}))],
    ids=["1-stage1-to-2-stage2", "2-stage3-to-1-stage0"],
)
def test_run_goes_on_with_other_processes_and_stages_in_the_same_order_of_samples(
    before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], data_dir: Path, tmp_path: Path
) -> None:
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    run_on(before[0], train_on_text, str(whole), str(data_dir), before[1])
    run_on(before[0], train_on_text, str(changed), str(data_dir), {**before[1], "steps": 8})
    assert set(run_on(after[0], train_on_text, str(changed), str(data_dir), after[1])) == {"finished"}
    assert len(read_order_hashes(whole)) == STEPS and read_order_hashes(changed) == read_order_hashes(whole)
    expected, actual = read_losses(whole), read_losses(changed)
    assert {step: actual[step] for step in range(1, 8)} == {step: expected[step] for step in range(1, 8)}
    for step, loss in expected.items():
        assert actual[step] == pytest.approx(loss, rel=ELASTIC_BOUND), step


def start_apart(run_dir: str, data_dir: str) -> str:
    """What each rank says where rank 1 does not see the checkpoint that rank 0 found."""
    run, ranks = build_text_run(Path(run_dir), Path(data_dir)), read_ranks()
    start = Start(state=TrainState(), folder=step_folder(run.run_dir, 3) if ranks.rank == 0 else None)
    with process_group(ranks), pytest.raises(RunFailed) as caught:
        agree_on_start(run, start)
    return str(caught.value)


def test_ranks_that_found_different_checkpoints_do_not_start(data_dir: Path, tmp_path: Path) -> None:
    first, second = run_on(2, start_apart, str(tmp_path), str(data_dir))
    assert first == second and "the newest is step_3 for rank 0 and none for rank 1; use a run_dir on" in first


class CountingLoader(ListLoader):
    """Counts passes, and the rows of each that are still referred to when the next batch is asked for."""

    def __init__(self) -> None:
        super().__init__(Ranks(), global_rows=4, micro_rows=2, end_at=6)
        self.passes, self.alive = 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        batches: list[weakref.ref[Any]] = []
        for batch in super().__iter__():
            batches.append(weakref.ref(batch["input_ids_BT"]))
            yield batch
            del batch
            self.alive = max(self.alive, sum(kept() is not None for kept in batches))


@pytest.mark.parametrize(("eval_rows", "passes", "alive"), [(0, 3, 1), (8, 1, 3)], ids=["all", "some"])
def test_whole_validation_split_is_never_held_in_memory(
    eval_rows: int, passes: int, alive: int, tmp_path: Path
) -> None:
    loader = CountingLoader()
    train = TrainConfig(
        steps=6,
        global_batch_rows=4,
        micro_batch_rows=2,
        eval_every_steps=2,
        eval_rows=eval_rows,
        log_every_steps=1,
        schedule=ScheduleConfig(warmup_steps=1),
    )
    with mock.patch.dict(os.environ):
        run_training(replace(build_run(tmp_path, train), build_validation_loader=lambda: loader))
    assert loader.passes == passes and loader.alive <= alive


def test_validation_without_a_loader_is_refused(data_dir: Path, tmp_path: Path) -> None:
    run = replace(build_text_run(tmp_path, data_dir), build_validation_loader=None)
    with pytest.raises(ValueError, match=r"train\.eval_every_steps=5 must be 0 without validation data"):
        choose_start(run)


def resume_damaged(run_dir: str, data_dir: str) -> str:
    with pytest.raises(RunFailed) as caught:
        run_training(build_text_run(Path(run_dir), Path(data_dir), zero_stage=3))
    return str(caught.value)


def test_damaged_checkpoint_is_named_on_every_rank(finished_run: Path, data_dir: Path) -> None:
    (finished_run / "result.json").unlink()
    weights = step_folder(finished_run, STEPS) / WEIGHTS_NAME
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    first, second = run_on(2, resume_damaged, str(finished_run), str(data_dir))
    assert first == second and f"step_{STEPS}/model.safetensors must match its hash" in first
    weights.write_bytes(whole)
