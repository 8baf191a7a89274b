"""Tasks scored in the training loop by lm-eval itself: refused at the start, or scored without a trace in training."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from data_pipeline.manifest import read_manifest
from data_pipeline.synthetic import write_synthetic_dataset
from launcher.__main__ import EXIT_USAGE, main
from launcher.curves import read_metrics
from prism_lm.checkpoint import folder as disk
from tests.harness import run_on
from tests.soak.records import compare_checkpoints

ROOT = Path(__file__).parent.parent.parent
TASKS = ROOT / "tests" / "eval_tasks"
NAMES = ["choice_of_two", "rolling_words", "generate_line"]
STEPS = 3
TRAINED = ("train/loss_nats", "optim/grad_norm", "data/order_hash")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=120, seed=0, held_out_fraction=0.2)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


SMALL = ["num_layers=2", "model_width=64", "num_heads=2", "key_width=16", "value_width=16", "mlp_width=96"]


def build_arguments(run_dir: Path, data: Path, *extra: str) -> list[str]:
    keys = [f"run_dir={run_dir}", f"data.path={data}", "data.row_tokens=64", "model.vocab_size=320"]
    keys += ["model.solver_rank=8", *(f"model.{key}" for key in SMALL)]
    training = [f"train.steps={STEPS}", "train.schedule.warmup_steps=1", "train.log_every_steps=1"]
    return ["train", str(ROOT / "configs/train/tiny.yaml"), *keys, *training, "train.eval_every_steps=0", *extra]


EVALUATED = [
    "train.eval_every_steps=2",
    "train.eval_rows=16",
    "train.tasks.every_steps=2",
    f"train.tasks.names=[{','.join(NAMES)}]",
    f"train.tasks.data=[{TASKS}]",
    "train.tasks.limit_documents=4",
]


def train_all(folder: str, data: str, stages: list[int]) -> None:
    """Runs with everything evaluated and with nothing; what a process printed goes into a file."""
    for stage, (name, keys) in product(stages, (("on", EVALUATED), ("off", []))):
        run_dir = Path(folder) / str(stage) / name
        run_dir.parent.mkdir(exist_ok=True)
        with Path(f"{run_dir}_{os.environ['RANK']}.txt").open("w") as text, contextlib.redirect_stdout(text):
            assert main(build_arguments(run_dir, Path(data), f"train.zero_stage={stage}", *keys)) == 0


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of runs by the number of processes."""
    folders = {number: tmp_path_factory.mktemp(f"runs_{number}") for number in (1, 2)}
    for number, stages in ((1, [2]), (2, [1, 3])):
        run_on(number, train_all, str(folders[number]), str(data), stages)
    return folders


@pytest.fixture(params=[(1, 2), (2, 1), (2, 3)], ids=["1-stage2", "2-stage1", "2-stage3"])
def trained(request: pytest.FixtureRequest, runs: dict[int, Path]) -> Path:
    num_processes, stage = request.param
    return runs[num_processes] / str(stage)


def test_scored_tasks_and_sources_leave_training_as_it_is_to_the_bit(trained: Path) -> None:
    on, off = (read_metrics(trained / name) for name in ("on", "off"))
    assert [[line[tag] for tag in TRAINED] for line in on] == [[line[tag] for tag in TRAINED] for line in off]
    compare_checkpoints(*(disk.step_folder(trained / name, STEPS) for name in ("on", "off")))


def test_every_task_has_its_metrics_at_each_scoring_and_the_console_names_them(trained: Path) -> None:
    lines = read_metrics(trained / "on")
    for step, line in enumerate(lines, start=1):
        scored = {tag.split("/")[1] for tag in line if tag.startswith("eval/")}
        assert scored == (set(NAMES) if step >= 2 else set())
    assert 0 <= lines[1]["eval/choice_of_two/acc"] <= 1 and lines[1]["eval/rolling_words/word_perplexity"] > 0
    said = [line for line in (trained / "on_0.txt").read_text().splitlines() if " tasks: " in line]
    assert [line.split(":")[0] for line in said] == ["step 2 tasks", "step 3 tasks"]
    assert all(re.search(rf"{name} \w+ \d", said[0]) for name in NAMES)


def test_each_source_of_the_validation_rows_has_its_share_and_its_loss(trained: Path, data: Path) -> None:
    assert list(read_manifest(data / "manifest.json").sources("validation")) == ["alpha", "beta"]
    line = read_metrics(trained / "on")[1]
    losses = [line[f"validation/{name}loss_nats"] for name in ("alpha/", "beta/", "")]
    assert losses[0] != losses[1] and min(losses[:2]) < losses[2] < max(losses[:2])


def test_last_scoring_gives_the_numbers_that_evaluate_gives_of_the_checkpoint(runs: dict[int, Path]) -> None:
    run_dir = runs[2] / "3" / "on"
    options = ["--tasks", ",".join(NAMES), "--task-data", str(TASKS), "--limit", "4"]
    assert main(["evaluate", str(run_dir), *options]) == 0
    (file,) = run_dir.glob("evaluations/tasks_*/results.json")
    results = json.loads(file.read_text())["results"]
    line = read_metrics(run_dir)[-1]
    compared = 0
    for tag in filter(lambda tag: tag.startswith("eval/"), line):
        _, task, metric = tag.split("/")
        # The same weights, read in batches of other sizes: some hundred fp32 terms are summed in another order, 2^-17
        # of a log-likelihood, and a word's perplexity is e to about 30 nats.
        assert line[tag] == pytest.approx(results[task][f"{metric},none"], rel=2**-11), tag
        compared += 1
    assert compared >= len(NAMES)


def write_task(folder: Path, name: str, *, data_files: Path, output_type: str = "loglikelihood_rolling") -> Path:
    folder.mkdir()
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data_files}\ntest_split: test\n"
        f"output_type: {output_type}\ndoc_to_text: ''\ndoc_to_target: '{{{{page}}}}'\n"
    )
    return folder


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["train.tasks.names=[]"], ["train.tasks.every_steps=2", "train.tasks.names=[]", "use train.tasks.names="]),
        (
            ["train.tasks.names=[choice_of_two,rolling_words,choice_of_two]"],
            ["names=[choice_of_two,rolling_words,choice_of_two] must hold each task once; name choice_of_two once"],
        ),
        (
            ["train.tasks.names=[pair,choice_of_two]"],
            ["task", "pair,choice_of_two must not hold a task twice", "leave"],
        ),
        (["train.tasks.limit_documents=-1"], ["train.tasks.limit_documents=-1 must be at least 0"]),
        (["train.tasks.data=[nowhere]"], ["train.tasks.data=nowhere must be an existing folder"]),
        (["train.tasks.names=[lost]"], ["task lost must "]),
        (["train.tasks.names=[choice_of_two]", "train.tasks.num_fewshot=2"], ["train.tasks.num_fewshot=2 must be 0"]),
        (
            ["train.tasks.names=[writes]"],
            ["task writes: max_gen_toks=256 must be above 0 and below data.row_tokens=64"],
        ),
    ],
    ids=["no-task", "twice", "in-a-group", "limit", "folder", "data", "leak", "long-text"],
)
def test_task_that_cannot_be_scored_is_one_line_before_any_process_group_starts(
    keys: list[str], words: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = write_task(tmp_path / "lost", "lost", data_files=tmp_path / "lost.jsonl")
    lines = TASKS / "rolling_words.jsonl"
    writes = write_task(tmp_path / "writes", "writes", data_files=lines, output_type="generate_until")
    (lost / "pair.yaml").write_text("group: pair\ntask: [choice_of_two, rolling_words]\n")
    folders = f"train.tasks.data=[{TASKS},{lost},{writes}]"
    with mock.patch("torch.distributed.init_process_group", side_effect=AssertionError("a group was started")):
        assert main(build_arguments(tmp_path / "run", data, *EVALUATED, folders, *keys)) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert [word for word in words if word not in error] == []
    assert not (tmp_path / "run" / "lineage.jsonl").exists()


def test_harness_that_is_not_installed_is_named_with_the_command_that_installs_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.task_scorer.importlib.util.find_spec", lambda name: None)
    assert main(build_arguments(tmp_path / "run", data, *EVALUATED)) == EXIT_USAGE
    assert "pip install 'prism-lm[eval]'" in capsys.readouterr().err
