import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard.writer import SummaryWriter

from launcher.__main__ import EXIT_FAILED, EXIT_USAGE, main
from tests.harness import run_on
from tests.launcher.trained_folders import TASK_FOLDER, write_trained_run

TASKS = "choice_of_two,rolling_words,generate_until_words"
OPTIONS = ["--task-data", str(TASK_FOLDER), "--batch-tokens", "512"]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for two."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def scored(run_dir: Path) -> Path:
    """The folder of results of three tasks, one of each kind of request, through the command line."""
    with mock.patch.dict(os.environ):
        assert main(["evaluate", str(run_dir), "--tasks", TASKS, "--log-samples", *OPTIONS]) == 0
    return run_dir / "evaluations" / "tasks_step_12"


def read_results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_results_are_in_the_harness_own_form_and_say_of_what(scored: Path) -> None:
    results = read_results(scored)
    assert set(results["results"]) == set(TASKS.split(","))
    assert 0 <= results["results"]["choice_of_two"]["acc,none"] <= 1
    assert results["results"]["rolling_words"]["word_perplexity,none"] > 1
    assert results["n-samples"]["choice_of_two"] == {"original": 8, "effective": 8}
    assert (results["model_source"], results["model_name"]) == ("prism", "small_step_12")
    assert (results["config"]["step"], results["config"]["tokens"]) == (12, 12000)
    assert results["prism"]["versions"]["lm-eval"] == results["lm_eval_version"]
    assert results["prism"]["settings"]["max_length_tokens"] == 64


def test_table_and_samples_lie_beside_the_results(scored: Path) -> None:
    assert "|choice_of_two" in (scored / "table.md").read_text()
    samples = [json.loads(line) for line in (scored / "samples_choice_of_two.jsonl").read_text().splitlines()]
    assert [sample["doc_id"] for sample in samples] == list(range(8))
    assert set(samples[0]["arguments"]["gen_args_1"]) == {"arg_0", "arg_1"}
    accuracy = sum(sample["acc"] for sample in samples) / len(samples)
    assert read_results(scored)["results"]["choice_of_two"]["acc,none"] == pytest.approx(accuracy)
    assert {file.suffix for file in scored.iterdir()} == {".json", ".md", ".jsonl"}


def test_what_is_there_is_not_scored_again(scored: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("prism_lm.eval.lm_eval_adapter.score_tasks", side_effect=AssertionError("scored again")):
        assert main(["evaluate", str(run_dir), "--tasks", TASKS, *OPTIONS]) == 0
    said = capsys.readouterr().out
    assert f"{scored} holds these results already; nothing is scored again" in said
    assert "|choice_of_two" in said


def test_other_settings_leave_the_first_results_as_they_are(scored: Path, run_dir: Path) -> None:
    before = read_results(scored)
    assert (
        main(["evaluate", str(run_dir), "--tasks", "choice_of_two", "--limit", "3", "--bootstrap-iters", "2", *OPTIONS])
        == 0
    )
    assert read_results(scored) == before
    (other,) = [folder for folder in scored.parent.iterdir() if folder != scored]
    assert other.name.startswith("tasks_step_12_")
    assert read_results(other)["n-samples"]["choice_of_two"]["effective"] == 3
    assert 0 < read_results(other)["results"]["choice_of_two"]["acc_stderr,none"] < 1
    assert "only the first 3 documents" in (other / "table.md").read_text()


def test_tensorboard_shows_the_figures_at_the_checkpoints_step_beside_the_runs_own(scored: Path, run_dir: Path) -> None:
    with SummaryWriter(str(run_dir / "tensorboard")) as board:
        board.add_scalar("train/loss_nats", 3.0, 13)
    own = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert own.Tags()["scalars"] == ["train/loss_nats"]
    beside = EventAccumulator(str(run_dir / "tensorboard" / "tasks")).Reload()
    (event,) = beside.Scalars("eval/choice_of_two/acc")
    assert (event.step, event.value) == (
        12,
        pytest.approx(read_results(scored)["results"]["choice_of_two"]["acc,none"]),
    )


def test_two_processes_write_what_one_writes(scored: Path, run_dir: Path, tmp_path: Path) -> None:
    shared = write_trained_run(tmp_path / "small")
    assert run_on(2, main, ["evaluate", str(shared), "--tasks", TASKS, *OPTIONS]) == [0, 0]
    together = read_results(shared / "evaluations" / "tasks_step_12")["results"]
    for task, figures in read_results(scored)["results"].items():
        for name, value in figures.items():
            assert together[task][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def test_suite_names_its_tasks_and_its_folder(run_dir: Path, tmp_path: Path) -> None:
    suite = tmp_path / "brief.yaml"
    suite.write_text("tasks: [choice_of_three]\nmax_length_tokens: 56\n")
    assert main(["evaluate", str(run_dir), "--suite", str(suite), *OPTIONS]) == 0
    results = read_results(run_dir / "evaluations" / "tasks_step_12_brief")
    assert list(results["results"]) == ["choice_of_three"]
    assert results["prism"]["settings"]["max_length_tokens"] == 56
    assert (run_dir / "tensorboard" / "tasks_brief").is_dir()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "RUN= must be the folder of a run"),
        (["RUN", "--limit", "3"], "--limit=3 must be given with --tasks or --suite"),
        (["RUN", "--num-fewshot", "0"], "--num-fewshot=0 must be given with --tasks or --suite"),
        (["RUN", "--log-samples"], "--log-samples must be given with --tasks or --suite"),
        (["RUN", "--precision", "bf16"], "--precision=bf16 must be given with"),
        (["RUN", "--tasks", "a", "--suite", "b"], "--suite=b must be left out where --tasks is given"),
        (["RUN", "--tasks", "a", "--split", "test"], "--split=test must be left out"),
        (["RUN", "--tasks", "a", "--sequence-degree", "1"], "--sequence-degree=1 must be left out"),
        (["RUN", "--tasks", "a", "--limit", "0"], "--limit=0 must be at least 1"),
        (["RUN", "--tasks", "a", "--bootstrap-iters", "1"], "--bootstrap-iters=1 must be at least 2"),
        (["RUN", "--tasks", "a", "--max-length", "1"], "--max-length=1 must be at least 2"),
        (["RUN", "--tasks", "a", "--batch-tokens", "0"], "--batch-tokens=0 must be at least 1"),
        (["RUN", "--tasks", ","], "--tasks=, must name at least one task"),
        (["RUN", "--tasks", "a", "--task-data", "nowhere"], "--task-data=nowhere must be an existing folder"),
        (["RUN", "--suite", "nowhere.yaml"], "nowhere.yaml must be an existing YAML file"),
        (["RUN", "--fetch-data", "folder"], "must be left out where --fetch-data is given"),
        (["nowhere", "--tasks", "a"], "RUN=nowhere must be the folder of a run"),
    ],
)
def test_what_does_not_fit_is_one_line_before_any_process_group_starts(
    options: list[str], words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(run_dir) if option == "RUN" else option for option in options]
    with mock.patch("torch.distributed.init_process_group", side_effect=AssertionError("a group was started")):
        assert main(["evaluate", *given]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert words in error


def test_fetch_data_needs_no_run(tmp_path: Path) -> None:
    with mock.patch("launcher.eval_data.fetch") as fetch:
        assert main(["evaluate", "--fetch-data", str(tmp_path)]) == 0
    fetch.assert_called_once_with(tmp_path)


def test_a_task_whose_file_is_missing_says_how_to_get_it(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "choice_of_two.yaml").write_text((TASK_FOLDER / "choice_of_two.yaml").read_text())
    assert main(["evaluate", str(run_dir), "--tasks", "choice_of_two", "--task-data", str(tmp_path)]) == EXIT_FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "choice_of_two" in error


def test_solved_examples_from_the_scored_split_are_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run_dir), "--tasks", "choice_of_three", "--num-fewshot", "2", *OPTIONS]) == EXIT_FAILED
    assert "num_fewshot=2 must be 0 for task choice_of_three" in capsys.readouterr().err
