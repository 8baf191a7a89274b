"""Resumes: several in a row, at and beyond an epoch's end, and with other processes, stages and slices of the rows."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from data_pipeline.config import DataConfig
from data_pipeline.loader import build_loader
from data_pipeline.synthetic import write_synthetic_dataset
from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.fragments import INDEX_NAME, KINDS, OPTIMIZER_NAME, FragmentReader, read_index
from prism_lm.checkpoint.load import newest_checkpoint, read_rank_state
from prism_lm.checkpoint.manager import CheckpointConfig
from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import build_plain_operators
from prism_lm.parallel.apply import ParallelConfig, apply_to_operators
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.engine import Engine
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.state import TrainRun, capture_generators
from tests.harness import ListLoader, TinyModel, build_language_config, build_run, read_losses, read_records, run_on
from tests.soak.records import compare_checkpoints, compare_records, freeze

STEPS = 8
GLOBAL_ROWS, ROW_TOKENS, TEXT_VOCAB = 8, 32, 320
# Divides neither by 2 nor by 4 processes.
ODD_VOCAB = 67
# Sums of some hundred fp32 terms, each rounded by 2^-24, in another order.
ELASTIC_BOUND = 2**-17


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a part of a run is spread over processes."""

    num_processes: int = 1
    zero_stage: Any = 1
    sequence_degree: int = 1
    model: str = "tiny"


def build_config(arrangement: Arrangement, *, steps: int, micro_rows: int = 1) -> TrainConfig:
    """A checkpoint after every step, and all of them kept."""
    return TrainConfig(
        steps=steps,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=micro_rows,
        log_every_steps=1,
        zero_stage=arrangement.zero_stage,
        schedule=ScheduleConfig(kind="constant", warmup_steps=0),
        checkpoint=CheckpointConfig(save_every_steps=1, keep_last=99),
    )


class StepLoader(ListLoader):
    """Its place is a number of steps, which means the same to every arrangement."""

    @property
    def micro_batches(self) -> int:
        """Of one step."""
        return self.global_rows // (self.micro_rows * self.ranks.data_world_size)

    def state_dict(self) -> dict[str, Any]:
        step, rest = divmod(self.taken, self.micro_batches)
        assert not rest, "a place between steps"
        return {"step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["step"] * self.micro_batches


def build_listed_run(run_dir: Path, arrangement: Arrangement, *, steps: int = STEPS) -> TrainRun:
    """On the list loader, whose global batches are the same for every arrangement."""
    parallel = ParallelConfig(sequence_degree=arrangement.sequence_degree, kernels="plain")
    run = build_run(run_dir, build_config(arrangement, steps=steps), parallel=parallel)
    ranks = replace(run.ranks, sequence_degree=arrangement.sequence_degree)
    rows = {"global_rows": GLOBAL_ROWS, "micro_rows": 1, "row_tokens": ROW_TOKENS}
    build_model = {"tiny": lambda: TinyModel(vocab=ODD_VOCAB), "language": lambda: build_language_model(ranks)}
    return replace(
        run,
        ranks=ranks,
        build_model=build_model[arrangement.model],
        build_train_loader=lambda: StepLoader(ranks, **rows),
        build_validation_loader=None,
    )


def build_language_model(ranks: Ranks) -> nn.Module:
    operators = apply_to_operators(build_plain_operators(), ranks)
    return LanguageModel(build_language_config(vocab_size=ODD_VOCAB), operators=operators)


def load_and_compare(load: Callable[[Engine, Path], None], engine: Engine, folder: Path) -> None:
    """Loads; then every piece that this rank holds, and the whole weights, are those of the files."""
    load(engine, folder)
    staged = engine.stage()
    with FragmentReader(folder) as reader:
        assert staged.applied_steps == reader.index.applied_steps
        assert staged.pieces and dict(staged.shapes) == dict(reader.index.shapes)
        for piece in staged.pieces:
            for kind in KINDS:
                expected = reader.read(piece.name, kind, piece.start, piece.numel)
                assert torch.equal(staged.optimizer[f"{kind}/{piece.name}"], expected), (kind, piece)
    saved = load_file(folder / disk.WEIGHTS_NAME)
    assert all(torch.equal(weight, saved[name]) for name, weight in staged.weights.items())


def train_listed(run_dir: str, arrangement: Arrangement) -> tuple[str, list[str]]:
    """How the run ended, and the checkpoints that were loaded and compared."""
    loaded: list[str] = []
    load = Engine.load

    def watch(engine: Engine, folder: Path) -> None:
        load_and_compare(load, engine, folder)
        loaded.append(folder.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "load", watch)
        return run_training(build_listed_run(Path(run_dir), arrangement)), loaded


def rewind(run_dir: Path, step: int, copy: Path) -> Path:
    """A copy of the run as a kill left it after the checkpoint of that step."""
    shutil.copytree(run_dir, copy)
    (copy / "result.json").unlink()
    for folder in disk.list_published(copy):
        if (disk.read_step(folder) or 0) > step:
            disk.remove_folder(folder)
    newest = newest_checkpoint(copy)
    assert newest is not None and newest.name == f"step_{step}"
    return copy


def go_on(run_dir: Path, arrangement: Arrangement, *, at: int) -> None:
    """To the end, from the checkpoint of step `at` (0: from the start)."""
    outcomes = run_on(arrangement.num_processes, train_listed, str(run_dir), arrangement)
    assert outcomes == [("finished", [f"step_{at}"] if at else [])] * arrangement.num_processes


def assert_same_run(run_dir: Path, reference: Path, steps: int = STEPS) -> None:
    """Every record and the last checkpoint, to the bit."""
    compare_records(read_records(run_dir), read_records(reference))
    compare_checkpoints(disk.step_folder(run_dir, steps), disk.step_folder(reference, steps))


CHAINS = {
    "processes-1-4-2": [Arrangement(num_processes=number) for number in (1, 4, 2)],
    "stages-1-2-3-1": [Arrangement(num_processes=2, zero_stage=stage) for stage in (1, 2, 3, 1)],
    "stages-0-3-0-with-processes": [
        Arrangement(num_processes=2, zero_stage=0),
        Arrangement(num_processes=4, zero_stage=3),
        Arrangement(num_processes=1, zero_stage=0),
    ],
    "degrees-1-2-1": [Arrangement(num_processes=2, sequence_degree=degree, model="language") for degree in (1, 2, 1)],
    "everything-at-once": [
        Arrangement(num_processes=2, zero_stage=3, model="language"),
        Arrangement(num_processes=4, zero_stage=1, sequence_degree=2, model="language"),
        Arrangement(num_processes=1, zero_stage=2, model="language"),
    ],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_other_processes_stages_and_degrees_keep_the_order_and_the_state_and_the_losses(
    chain: list[Arrangement], tmp_path: Path
) -> None:
    whole = tmp_path / "0"
    go_on(whole, chain[0], at=0)
    run_dir = whole
    for number, arrangement in enumerate(chain[1:], start=1):
        run_dir = rewind(run_dir, 2 * number - 1, tmp_path / str(number))
        go_on(run_dir, arrangement, at=2 * number - 1)
    expected, actual = read_records(whole), read_records(run_dir)
    assert [record["data/order_hash"] for record in actual] == [record["data/order_hash"] for record in expected]
    assert len({record["data/order_hash"] for record in actual}) == STEPS
    for step, loss in read_losses(whole).items():
        assert read_losses(run_dir)[step] == pytest.approx(loss, rel=ELASTIC_BOUND), step


@pytest.mark.parametrize(
    "arrangement",
    [Arrangement(num_processes=2, zero_stage=2), Arrangement(num_processes=4, zero_stage=3)],
    ids=lambda arrangement: f"{arrangement.num_processes}-stage{arrangement.zero_stage}",
)
def test_vocabulary_that_divides_over_no_processes_resumes_to_the_bit(arrangement: Arrangement, tmp_path: Path) -> None:
    go_on(tmp_path / "whole", arrangement, at=0)
    assert load_file(disk.step_folder(tmp_path / "whole", 3) / disk.WEIGHTS_NAME)["head.weight"].shape[0] == ODD_VOCAB
    resumed = rewind(tmp_path / "whole", 3, tmp_path / "resumed")
    go_on(resumed, arrangement, at=3)
    assert_same_run(resumed, tmp_path / "whole")


def forge_applied_steps(folder: Path, applied_steps: int) -> None:
    """Another count of updates in a checkpoint that is whole otherwise."""
    path = folder / OPTIMIZER_NAME / INDEX_NAME
    disk.write_json(path, {**json.loads(path.read_text()), "applied_steps": applied_steps})
    name = path.relative_to(folder).as_posix()
    disk.write_json(
        folder / disk.MANIFEST_NAME, {"files": {**disk.read_manifest(folder), name: disk.describe_file(path)}}
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_bias_correction_goes_on_counting_after_a_load(zero_stage: int, tmp_path: Path) -> None:
    arrangement, whole = Arrangement(num_processes=2, zero_stage=zero_stage), tmp_path / "whole"
    go_on(whole, arrangement, at=0)
    assert [read_index(folder).applied_steps for folder in disk.list_published(whole)] == [*range(1, STEPS + 1)]
    resumed, forged = (rewind(whole, 1, tmp_path / name) for name in ("resumed", "forged"))
    go_on(resumed, arrangement, at=1)
    assert_same_run(resumed, whole)
    forge_applied_steps(disk.step_folder(forged, 1), 0)
    go_on(forged, arrangement, at=1)
    assert read_losses(forged)[2] == read_losses(whole)[2] and read_losses(forged)[3] != read_losses(whole)[3]


@dataclass(frozen=True, kw_only=True)
class Text:
    """Prepared data small enough to be read more than once."""

    folder: Path
    steps_per_epoch: int


def open_text(folder: Path, ranks: Ranks, cache: Path) -> Any:
    return build_loader(
        DataConfig(path=str(folder), row_tokens=ROW_TOKENS, workers=0),
        split="train",
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch_rows=2,
        global_batch_rows=GLOBAL_ROWS,
        seed=7,
        cache_dir=cache,
        endless=True,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("text")
    write_synthetic_dataset(folder / "data", vocab_size=TEXT_VOCAB, row_tokens=ROW_TOKENS, documents=10, seed=0)
    micro_batches = open_text(folder / "data", Ranks(), folder / "cache").batches_per_pass
    steps, rest = divmod(2 * micro_batches, GLOBAL_ROWS)
    assert not rest and 3 <= steps <= 20, steps
    return Text(folder=folder / "data", steps_per_epoch=steps)


class DropoutModel(TinyModel):
    """Draws from the generator in training."""

    def __init__(self) -> None:
        super().__init__(vocab=TEXT_VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.1)) for block in self.blocks)


def build_text_run(run_dir: Path, folder: Path, *, steps: int) -> TrainRun:
    """A drawing model on real shards through the real loader."""
    run = build_run(run_dir, build_config(Arrangement(), steps=steps, micro_rows=2), build_model=DropoutModel)
    return replace(
        run,
        build_train_loader=lambda: open_text(folder, run.ranks, run_dir / "cache"),
        build_validation_loader=None,
    )


def train_text(run_dir: str, folder: str, steps: int) -> str:
    return run_training(build_text_run(Path(run_dir), Path(folder), steps=steps))


@pytest.fixture(scope="module")
def text_run(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes over two epochs and a step."""
    run_dir = tmp_path_factory.mktemp("text_run") / "whole"
    assert run_on(2, train_text, str(run_dir), str(text.folder), count_text_steps(text)) == ["finished"] * 2
    return run_dir


def count_text_steps(text: Text) -> int:
    return 2 * text.steps_per_epoch + 1


def go_on_with_text(run_dir: Path, text: Text, text_run: Path) -> None:
    """To the end, which is that of the run that was left alone."""
    steps = count_text_steps(text)
    assert run_on(2, train_text, str(run_dir), str(text.folder), steps) == ["finished"] * 2
    assert_same_run(run_dir, text_run, steps)


def test_second_and_third_resume_in_a_row_go_on_from_the_place_of_the_one_before(
    text: Text, text_run: Path, tmp_path: Path
) -> None:
    run_dir = text_run
    for number, step in enumerate((1, 2, 4)):
        run_dir = rewind(run_dir, step, tmp_path / str(number))
        go_on_with_text(run_dir, text, text_run)
    places = [read_place(disk.step_folder(run_dir, step)) for step in range(1, text.steps_per_epoch)]
    assert places == [(0, step * GLOBAL_ROWS) for step in range(1, text.steps_per_epoch)]


def read_place(folder: Path) -> tuple[int, int]:
    """Epoch and rows of it that were handed out."""
    loader = json.loads((folder / disk.TRAINER_NAME).read_text())["loader"]
    return loader["epoch"], loader["rows_in_epoch"]


@pytest.mark.parametrize(("epoch", "offset"), [(1, -1), (1, 0), (1, 1), (2, 0)])
def test_resume_around_the_end_of_an_epoch_reads_the_next_sample(
    epoch: int, offset: int, text: Text, text_run: Path, tmp_path: Path
) -> None:
    step = epoch * text.steps_per_epoch + offset
    resumed = rewind(text_run, step, tmp_path / "resumed")
    assert read_place(disk.step_folder(resumed, step)) == (
        step // text.steps_per_epoch,
        step % text.steps_per_epoch * GLOBAL_ROWS,
    )
    go_on_with_text(resumed, text, text_run)


class WatchingLoader:
    """A loader that takes down this process's generators as its first batch is asked for, and once it is there."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.seen.append(freeze(capture_generators()))
        for batch in self.inner:
            self.seen.append(freeze(capture_generators()))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def resume_watching(run_dir: str, folder: str, steps: int, draws: bool) -> list[bool]:
    """Whether the generators were those of the checkpoint: before the first batch, and after it. `draws`: the loader's
    construction draws numbers, as a torch loader with workers does."""
    run = build_text_run(Path(run_dir), Path(folder), steps=steps)
    saved = newest_checkpoint(Path(run_dir))
    assert saved is not None
    loaders: list[WatchingLoader] = []

    def open_loader() -> WatchingLoader:
        if draws:
            torch.rand(5), np.random.rand(5), random.random()
        loaders.append(WatchingLoader(run.build_train_loader()))
        return loaders[0]

    expected = freeze(read_rank_state(saved, run.ranks.rank))
    assert run_training(replace(run, build_train_loader=open_loader)) == "finished"
    return [seen == expected for seen in loaders[0].seen[:2]]


@pytest.mark.parametrize("draws", [False, True], ids=["real", "drawing"])
def test_building_the_loader_consumes_nothing_of_the_generators_that_were_restored(
    draws: bool, text: Text, text_run: Path, tmp_path: Path
) -> None:
    steps = count_text_steps(text)
    resumed = rewind(text_run, 2, tmp_path / "resumed")
    assert run_on(2, resume_watching, str(resumed), str(text.folder), steps, draws) == [[True, True]] * 2
    assert_same_run(resumed, text_run, steps)
