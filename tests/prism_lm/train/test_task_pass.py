"""Tasks and validation of sources between steps: what they see, and that training does not notice them."""

import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from launcher.trained_run import share_weights
from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.manager import CheckpointConfig
from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import build_plain_operators
from prism_lm.parallel.apply import ParallelConfig, apply_to_operators
from prism_lm.parallel.collectives import RunFailed, call_together, sum_tensor
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.state import TrainRun, TrainState
from prism_lm.train.step import MODEL_INPUTS
from prism_lm.train.task_pass import describe_scores
from prism_lm.train.tasks import TaskConfig
from tests.harness import ListLoader, build_batch, build_language_config, build_run, read_ranks, read_records, run_on
from tests.soak.records import compare_checkpoints

STEPS, GLOBAL_ROWS, ROW_TOKENS = 6, 8, 32
TRAINED = ("train/loss_nats", "optim/grad_norm", "optim/learning_rate", "data/order_hash")
SOURCES = ("first", "second")
FIGURE = "eval/rows/loss"


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a run is spread over processes."""

    num_processes: int = 1
    sequence_degree: int = 1
    precision: Any = "fp32"
    zero_stage: Any = 1


class RowScorer:
    """The loss sum of a row a rank, summed over the ranks, by a twin on whole rows. Like the harness it seeds every
    generator and looks up between batches; it notes each scoring in a file of its own. `at_look` is told which."""

    def __init__(self, ranks: Ranks, notes: Path, at_look: Callable[[int], None]) -> None:
        self.ranks, self.notes, self.at_look = ranks, notes, at_look
        self.looks = 0

    def __call__(self, model: nn.Module, /, *, look: Callable[[], None]) -> dict[str, float]:
        with self.notes.open("a") as notes:
            notes.write("scored\n")
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        twin = share_weights(model, build_plain_operators())
        share = call_together(lambda: self.score_share(twin, look))
        return {FIGURE: float(sum_tensor(share))}

    def score_share(self, model: LanguageModel, look: Callable[[], None]) -> torch.Tensor:
        look()
        total = compute_loss(model, self.ranks.rank)
        self.at_look(self.looks)
        self.looks += 1
        look()
        return total


def compute_loss(model: LanguageModel, row: int) -> torch.Tensor:
    """Of one row that no training saw, fp64."""
    batch = build_batch(1, seed=1000 + row, row_tokens=ROW_TOKENS)
    return model(**batch).double()


def build_scored_run(
    run_dir: Path,
    arrangement: Arrangement,
    *,
    steps: int = STEPS,
    is_evaluated: bool = True,
    at_look: Callable[[int], None] = lambda look: None,
) -> TrainRun:
    """Two scorings and the last, three passes over two sources, a checkpoint after every second step."""
    every_steps = 2 if is_evaluated else 0
    train = TrainConfig(
        steps=steps,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=2,
        log_every_steps=1,
        eval_every_steps=every_steps,
        eval_rows=16,
        precision=arrangement.precision,
        zero_stage=arrangement.zero_stage,
        tasks=TaskConfig(every_steps=every_steps, names=["rows"]),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0),
        checkpoint=CheckpointConfig(save_every_steps=2, keep_last=99),
    )
    ranks = replace(read_ranks(), sequence_degree=arrangement.sequence_degree)
    rows = {"global_rows": GLOBAL_ROWS, "micro_rows": 2, "row_tokens": ROW_TOKENS}
    parallel = ParallelConfig(sequence_degree=arrangement.sequence_degree, kernels="plain")
    return replace(
        build_run(run_dir, train, parallel=parallel),
        ranks=ranks,
        build_model=lambda: build_model(ranks),
        build_train_loader=lambda: ListLoader(ranks, **rows),
        build_validation_loader=lambda: ListLoader(ranks, **rows, end_at=8 // ranks.data_world_size),
        validation_sources=SOURCES,
        task_scorer=RowScorer(ranks, Path(f"{run_dir}_rank_{ranks.rank}.txt"), at_look),
    )


def build_model(ranks: Ranks) -> LanguageModel:
    return LanguageModel(build_language_config(), operators=apply_to_operators(build_plain_operators(), ranks))


def train(run: TrainRun) -> str:
    with pytest.MonkeyPatch.context() as patch:
        # Every weight of a model this small would be one of those that stage 3 keeps whole.
        patch.setattr("prism_lm.train.engine._PERSISTENT_ELEMENTS", 0)
        return run_training(run)


def train_both(folder: str, arrangement: Arrangement) -> None:
    """The same run, with everything that may come between its steps and with nothing."""
    for name in ("off", "on"):
        assert train(build_scored_run(Path(folder) / name, arrangement, is_evaluated=name == "on")) == "finished"


ARRANGEMENTS = {
    "1-stage0": Arrangement(zero_stage=0),
    "2-stage1-bf16": Arrangement(num_processes=2, precision="bf16"),
    "2-stage2-slices": Arrangement(num_processes=2, sequence_degree=2, zero_stage=2),
    "2-stage3": Arrangement(num_processes=2, zero_stage=3),
}


@pytest.fixture(scope="module")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with both runs of an arrangement, by its name."""

    @cache
    def train_named(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        run_on(ARRANGEMENTS[name].num_processes, train_both, str(folder), ARRANGEMENTS[name])
        return folder

    return train_named


@pytest.fixture(params=ARRANGEMENTS)
def trained(request: pytest.FixtureRequest, train_once: Callable[[str], Path]) -> tuple[Path, Arrangement]:
    return train_once(request.param), ARRANGEMENTS[request.param]


def test_training_is_the_same_to_the_bit_with_tasks_and_sources_evaluated(trained: tuple[Path, Arrangement]) -> None:
    folder, _ = trained
    on, off = (read_records(folder / name) for name in ("on", "off"))
    assert [[record[tag] for tag in TRAINED] for record in on] == [[record[tag] for tag in TRAINED] for record in off]
    assert [FIGURE in record for record in on] == [False, True] * 3 and not any(FIGURE in record for record in off)
    for step in (2, 4, 6):
        compare_checkpoints(disk.step_folder(folder / "on", step), disk.step_folder(folder / "off", step))


def test_tasks_see_the_whole_weights_of_their_step(trained: tuple[Path, Arrangement]) -> None:
    folder, arrangement = trained
    for step in (2, 6):
        model = build_model(Ranks()).to(torch.bfloat16 if arrangement.precision == "bf16" else torch.float32)
        model.load_state_dict(load_file(disk.step_folder(folder / "on", step) / disk.WEIGHTS_NAME), strict=False)
        with torch.no_grad():
            losses = [compute_loss(model, row) for row in range(arrangement.num_processes)]
        assert read_records(folder / "on")[step - 1][FIGURE] == float(sum(losses))


def test_losses_of_the_sources_are_those_of_their_rows_and_add_up_to_that_of_all(
    trained: tuple[Path, Arrangement],
) -> None:
    folder, arrangement = trained
    ranks = Ranks()
    model = build_model(ranks).to(torch.bfloat16 if arrangement.precision == "bf16" else torch.float32)
    model.load_state_dict(load_file(disk.step_folder(folder / "on", 4) / disk.WEIGHTS_NAME), strict=False)
    sums, tokens = np.zeros(2), np.zeros(2)
    for batch in ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=GLOBAL_ROWS, row_tokens=ROW_TOKENS, end_at=2):
        with torch.no_grad():
            loss_BT = model(**{name: batch[name] for name in MODEL_INPUTS}, reduction="none")
        for source in range(2):
            sums[source] += float(loss_BT[batch["source_B"] == source].double().sum())
            tokens[source] += int((batch["labels_BT"][batch["source_B"] == source] != -100).sum())
    record = read_records(folder / "on")[3]
    bound = 2**-7 if arrangement.precision == "bf16" else 2**-18
    assert [record[f"validation/{name}/loss_nats"] for name in SOURCES] == pytest.approx(sums / tokens, rel=bound)
    assert record["validation/loss_nats"] == pytest.approx(sums.sum() / tokens.sum(), rel=bound)


def train_and_stop(folder: str, name: str, stop_at: int | None, steps: int) -> str:
    """The last rank alone is sent SIGTERM in its scoring number `stop_at`."""

    def send(look: int) -> None:
        if look == stop_at and read_ranks().rank == read_ranks().world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return train(build_scored_run(Path(folder), ARRANGEMENTS[name], steps=steps, at_look=send))


def go_on(run_dir: Path, name: str, *, stop_at: int | None = None, steps: int = STEPS) -> str:
    """How the run ended, on all ranks alike."""
    endings = run_on(ARRANGEMENTS[name].num_processes, train_and_stop, str(run_dir), name, stop_at, steps)
    assert len(set(endings)) == 1
    return endings[0]


def count_scorings(run_dir: Path) -> set[int]:
    """By each rank."""
    notes = run_dir.parent.glob(f"{run_dir.name}_rank_*.txt")
    return {len(path.read_text().splitlines()) for path in notes}


@pytest.mark.parametrize(("name", "stop_at", "step"), [("2-stage3", 1, 4), ("1-stage0", 2, 6)])
def test_stop_during_a_scoring_leaves_it_to_the_resumed_run(
    name: str, stop_at: int, step: int, train_once: Callable[[str], Path], tmp_path: Path
) -> None:
    stopped, whole = tmp_path / "run", train_once(name) / "on"
    assert go_on(stopped, name, stop_at=stop_at) == "preempted"
    before = read_records(stopped)
    assert len(before) == step and FIGURE not in before[-1]
    trainer = json.loads((disk.step_folder(stopped, step) / disk.TRAINER_NAME).read_text())
    assert (trainer["tasks_due"], trainer["validation_due"]) == (True, False)
    assert go_on(stopped, name) == "finished"
    compare_figures(stopped, whole)
    assert count_scorings(stopped) == {4}
    weights = [disk.step_folder(run_dir, STEPS) / disk.WEIGHTS_NAME for run_dir in (stopped, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def compare_figures(run_dir: Path, reference: Path) -> None:
    """Every step once, with the same figures but for what is measured."""
    ours, theirs = (
        [
            {tag: value for tag, value in record.items() if not tag.startswith(("speed/", "memory/"))}
            for record in read_records(folder)
        ]
        for folder in (run_dir, reference)
    )
    assert ours == theirs


def test_resume_after_a_scoring_neither_repeats_nor_skips_one(
    train_once: Callable[[str], Path], tmp_path: Path
) -> None:
    run_dir, name = tmp_path / "run", "1-stage0"
    assert go_on(run_dir, name, steps=4) == "finished"
    assert count_scorings(run_dir) == {2}
    assert go_on(run_dir, name) == "finished"
    assert count_scorings(run_dir) == {3}
    compare_figures(run_dir, train_once(name) / "on")
    checkpoints = [disk.step_folder(folder, STEPS) for folder in (run_dir, train_once(name) / "on")]
    compare_checkpoints(*checkpoints)


def train_badly(folder: str) -> str:
    def fail(look: int) -> None:
        if look == 1 and read_ranks().rank == 1:
            raise OSError("task rows lost its data")

    with pytest.raises(RunFailed) as caught:
        train(build_scored_run(Path(folder), Arrangement(num_processes=2, zero_stage=3), at_look=fail))
    return str(caught.value)


def test_scoring_that_fails_on_one_rank_ends_all_with_its_words(tmp_path: Path) -> None:
    words = "task rows lost its data (rank 1 of 2)"
    assert run_on(2, train_badly, str(tmp_path)) == [words] * 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"], result["error"]) == ("failed", 4, words)


def test_checkpoint_from_before_tasks_were_scored_has_none_due() -> None:
    trainer = {name: value for name, value in vars(TrainState(step=3, tokens=9)).items() if name != "tasks_due"}
    assert TrainState.from_trainer(trainer) == TrainState(step=3, tokens=9)


def test_console_names_the_tasks_asked_for_and_not_the_members_of_a_group() -> None:
    figures = {"train/loss_nats": 2.0, "eval/mmlu/acc": 0.25, "eval/mmlu_law/acc": 0.5, "eval/piqa/acc": 0.5}
    figures["eval/piqa/acc_norm"] = 1 / 3
    assert describe_scores(figures, ["piqa", "mmlu", "boolq"]) == "piqa acc 0.5 acc_norm 0.3333, mmlu acc 0.25"
    assert describe_scores({"train/loss_nats": 2.0}, ["piqa"]) == ""
