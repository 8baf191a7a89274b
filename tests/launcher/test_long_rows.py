"""Rows cut over processes through the command line: train, resume with another degree, evaluate, generate."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from launcher import generate
from launcher.__main__ import EXIT_USAGE, main
from launcher.curves import read_metrics
from launcher.environment import detect_environment
from prism_lm.train.lineage import read_lineage
from tests.harness import build_rank_environment, run_on

CONFIG = Path(__file__).parent.parent.parent / "configs" / "train" / "tiny.yaml"
STEPS = 4


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=60, seed=0)


def build_arguments(run_dir: Path, data: Path, *extra: str) -> list[str]:
    """A run whose learning rate does not depend on its length."""
    keys = [
        f"run_dir={run_dir}",
        f"data.path={data}",
        "data.row_tokens=64",
        "model.vocab_size=320",
        "model.num_layers=2",
    ]
    rate = ["train.schedule.kind=constant", "train.schedule.warmup_steps=0", f"train.steps={STEPS}"]
    return ["train", str(CONFIG), *keys, *rate, "train.log_every_steps=1", "train.eval_every_steps=2", *extra]


def print_on_rank(arguments: list[str]) -> str:
    """What this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes with whole rows."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run_on(2, main, build_arguments(folder, data, "train.zero_stage=2")) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def resumed_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the same steps with whole rows, the other half with rows cut in two."""
    folder = tmp_path_factory.mktemp("runs") / "resumed"
    for steps, degree in ((STEPS // 2, 1), (STEPS, 2)):
        keys = ["train.zero_stage=2", f"train.steps={steps}", f"parallel.sequence_degree={degree}"]
        printed = run_on(2, print_on_rank, build_arguments(folder, data, *keys))
        assert printed[0].startswith(f"ranks: {2 // degree} data x {degree} sequence, kernels: plain")
    return folder


def test_run_resumed_with_another_degree_goes_on_as_if_it_had_not(whole_run: Path, resumed_run: Path) -> None:
    """Losses and norms are sums of some thousand fp32 terms in another order, after at most four updates, the first of
    which Adam makes from tiny gradients too."""
    for actual, expected in zip(read_metrics(resumed_run), read_metrics(whole_run), strict=True):
        assert (actual["step"], actual["tokens"]) == (expected["step"], expected["tokens"])
        assert actual.keys() == expected.keys()
        for tag in {"train/loss_nats", "validation/loss_nats", "optim/grad_norm"} & actual.keys():
            assert actual[tag] == pytest.approx(expected[tag], rel=2**-15)
    starts = [line for line in read_lineage(resumed_run) if line["event"] != "end"]
    assert [(line["event"], line["sequence_degree"]) for line in starts] == [("start", 1), ("resume", 2)]


def evaluate(run_dir: Path, num_processes: int, *options: str) -> dict[str, float]:
    """The figures that are kept, computed anew."""
    arguments = ["evaluate", str(run_dir), "--split", "validation", "--micro-batch-rows", "2", *options]
    assert run_on(num_processes, main, arguments) == [0] * num_processes
    (file,) = (run_dir / "evaluations").glob("validation_step_*.json")
    figures = json.loads(file.read_text())
    file.unlink()
    return figures


@pytest.mark.parametrize(("num_processes", "options"), [(2, []), (4, ["--sequence-degree", "2"])], ids=["1x2", "2x2"])
def test_several_processes_score_a_split_as_one_does(num_processes: int, options: list[str], whole_run: Path) -> None:
    alone, together = evaluate(whole_run, 1), evaluate(whole_run, num_processes, *options)
    assert {"num_tokens", "num_bytes", "loss_nats"} < set(alone) == set(together)
    assert all(together[name] == alone[name] for name in ("num_tokens", "num_bytes", "step"))
    # A sum over some thousand labels, each off by a few roundings of fp32.
    assert together["loss_nats"] == pytest.approx(alone["loss_nats"], rel=2**-20)


def test_evaluation_that_is_kept_is_printed_by_the_first_rank_alone(whole_run: Path) -> None:
    arguments = ["evaluate", str(whole_run), "--split", "validation"]
    printed = run_on(2, print_on_rank, arguments)
    assert printed[0].count("validation") == 1 and printed[1] == ""
    (file,) = (whole_run / "evaluations").glob("validation_step_*.json")
    written = file.stat().st_mtime_ns
    assert run_on(2, print_on_rank, arguments) == printed and file.stat().st_mtime_ns == written
    file.unlink()


@pytest.mark.parametrize(
    ("world_size", "degree", "words"),
    [
        (3, [], ["--sequence-degree=3 must divide row_tokens=64", "use 1"]),
        (4, ["--sequence-degree", "3"], ["--sequence-degree=3 must divide the WORLD_SIZE=4", "use 1, 2 or 4"]),
        (2, ["--sequence-degree", "0"], ["--sequence-degree=0 must divide the WORLD_SIZE=2", "use 1 or 2"]),
        (1, ["--sequence-degree", "2"], ["--sequence-degree=2 must be at most the WORLD_SIZE=1", "--nproc-per-node 2"]),
    ],
)
def test_degree_that_does_not_fit_is_refused_before_any_process_group_starts(
    world_size: int, degree: list[str], words: list[str], whole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ |= build_rank_environment(0, world_size, 1)
    with mock.patch("torch.distributed.init_process_group", side_effect=AssertionError("a group was started")):
        assert main(["evaluate", str(whole_run), *degree]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and [word for word in words if word not in error] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate"], ["--sequence-degree=2 must be 1 for model.mixer=ttt", "use --sequence-degree=1"]),
        (["generate", "--prompt", "a"], ["WORLD_SIZE=2 must be 1 for model.mixer=ttt"]),
    ],
    ids=["evaluate", "generate"],
)
def test_run_whose_mixer_reads_whole_rows_is_refused_before_any_process_group_starts(
    arguments: list[str], words: list[str], whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole_run, tmp_path / "run"))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("mixer: prism", "mixer: ttt"))
    os.environ |= build_rank_environment(0, 2, 1)
    with mock.patch("torch.distributed.init_process_group", side_effect=AssertionError("a group was started")):
        assert main([arguments[0], str(folder), *arguments[1:]]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and [word for word in words if word not in error] == []


def test_training_that_would_cut_rows_which_a_mixer_reads_whole_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["model.mixer=ttt", "parallel.sequence_degree=2"]
    assert main(build_arguments(tmp_path / "run", data, *keys)) == EXIT_USAGE
    assert "parallel.sequence_degree=2 must be 1 for model.mixer=ttt" in capsys.readouterr().err


def generate_on_rank(arguments: list[str]) -> list[str]:
    return generate.generate_texts(generate.build_parser().parse_args(arguments), detect_environment(os.environ).ranks)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_several_processes_read_a_prompt_and_continue_it_as_one_does(temperature: str, whole_run: Path) -> None:
    """The prompt of 39 tokens is padded to 40, 20 a process; the continuation needs every layer's state."""
    prompt = "abcabdabe" * 4 + "ab"
    arguments = [str(whole_run), "--prompt", prompt, "--samples", "2", "--max-new-tokens", "12"]
    (alone,) = run_on(1, generate_on_rank, [*arguments, "--temperature", temperature])
    first, second = run_on(2, generate_on_rank, [*arguments, "--temperature", temperature])
    assert first == second == alone
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in alone)
