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
from prism_lm.eval import lm_eval_adapter
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


def test_a_text_longer_than_a_row_is_refused_before_the_weights_are_read(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch("launcher.evaluate_tasks.load_model", side_effect=AssertionError("weights were read")):
        arguments = ["--tasks", TASKS, "--max-length", "16", *OPTIONS]
        assert main(["evaluate", str(run_dir), *arguments]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith("error: task generate_until_words: max_gen_toks=24 must be above 0 and below")
    assert "max_length_tokens=16" in error and error.count("\n") == 1


def evaluate_noting_who_describes(run_dir: str, notes: str) -> None:
    score_tasks = lm_eval_adapter.score_tasks

    def note(*arguments, describes_machine=True, **options):
        (Path(notes) / os.environ["RANK"]).write_text(str(describes_machine))
        return score_tasks(*arguments, describes_machine=False, **options)

    with mock.patch("prism_lm.eval.lm_eval_adapter.score_tasks", note):
        assert main(["evaluate", run_dir, "--tasks", "choice_of_two", "--limit", "2", *OPTIONS]) == 0


def test_main_rank_alone_asks_what_machine_this_is(tmp_path: Path) -> None:
    run_on(2, evaluate_noting_who_describes, str(write_trained_run(tmp_path / "small")), str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "False"]


def test_task_that_cannot_be_loaded_is_loaded_once_and_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    load, asked = TaskManager.load, []

    def note(manager: TaskManager, names: list[Any]) -> Any:
        asked.extend(name for name in names if isinstance(name, str))
        return load(manager, names)

    (tmp_path / "lost.yaml").write_text(
        (TASK_FOLDER / "choice_of_two.yaml").read_text().replace("choice_of_two", "lost")
    )
    tasks = ["--tasks", "choice_of_three,lost,choice_of_two", *OPTIONS, "--task-data", str(tmp_path)]
    with mock.patch.object(TaskManager, "load", note):
        assert main(["evaluate", str(run_dir), *tasks]) == EXIT_FAILED
    assert asked == ["choice_of_three", "lost"]
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: task lost must ") and "; " in error


@pytest.mark.parametrize("name", ["evaluations", "tensorboard"])
def test_file_in_the_place_of_the_results_is_one_line_before_anything_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_trained_run(tmp_path / "small")
    (run_dir / name).write_text("")
    with mock.patch("launcher.evaluate_tasks.build_task_manager", side_effect=AssertionError("tasks were looked up")):
        assert main(["evaluate", str(run_dir), "--tasks", TASKS, *OPTIONS]) == EXIT_USAGE
    rule = "must be a folder, for results are written into it; move the file elsewhere"
    assert capsys.readouterr().err == f"error: {run_dir / name} {rule}\n"


def test_run_folder_that_cannot_be_written_is_one_line_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_trained_run(tmp_path / "small")
    refused = PermissionError(13, "Permission denied")
    with (
        mock.patch("launcher.task_results.tempfile.TemporaryFile", side_effect=refused),
        mock.patch("launcher.evaluate_tasks.build_task_manager", side_effect=AssertionError("tasks were looked up")),
    ):
        assert main(["evaluate", str(run_dir), "--tasks", TASKS, *OPTIONS]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"error: RUN={run_dir} must be a folder in which results can be written")
    assert "(Permission denied); change its permissions" in error and error.count("\n") == 1


CODE = """
def divide(items):
    return 1 / 0

def lose(doc, results):
    raise KeyError("gold")
"""


def write_failing_tasks(folder: Path) -> Path:
    """`adds` fails where its figures are put together, `compares` at each document; both, and a sound one, in a group
    of two levels."""
    folder.mkdir()
    (folder / "failing.py").write_text(CODE)
    text = (TASK_FOLDER / "choice_of_two.yaml").read_text()
    text = text.replace("${task_folder}", str(TASK_FOLDER)).replace("task: choice_of_two", "task: NAME")
    adds = text.replace("aggregation: mean", "aggregation: !function failing.divide", 1)
    compares = text.replace("output_type", "process_results: !function failing.lose\noutput_type")
    for name, definition in (("adds", adds), ("compares", compares), ("sound", text)):
        (folder / f"{name}.yaml").write_text(definition.replace("NAME", name))
    listed = "aggregate_metric_list:\n  - metric: acc\n"
    (folder / "inner.yaml").write_text(f"group: inner\ntask: [adds, compares]\n{listed}")
    (folder / "outer.yaml").write_text(f"group: outer\ntask: [inner, sound]\n{listed}")
    return folder


@pytest.mark.parametrize("names", ["choice_of_three,adds,compares,sound", "choice_of_three,outer"])
@pytest.mark.parametrize("options", [[], ["--log-samples"], ["--bootstrap-iters", "2"]], ids=["", "samples", "bars"])
def test_tasks_whose_own_code_fails_are_named_and_the_others_results_kept(
    names: str, options: list[str], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run_dir = write_failing_tasks(tmp_path / "tasks"), write_trained_run(tmp_path / "small")
    arguments = [*OPTIONS, "--task-data", str(folder), *options]
    for _ in range(2):
        assert main(["evaluate", str(run_dir), "--tasks", names, *arguments]) == EXIT_FAILED
        said = capsys.readouterr()
        error = said.err.splitlines()[-1]
        assert error.startswith("error: task ") and "ZeroDivisionError: division by zero" in error
        assert "compares: KeyError: 'gold'" in error and str(run_dir / "evaluations" / "tasks_step_12") in error
        assert "which failed" in said.out and "|choice_of_three" in said.out
    results = read_results(run_dir / "evaluations" / "tasks_step_12")
    assert set(results["results"]) == {"choice_of_three", "sound"} and not results.get("groups")
    assert set(results["prism"]["failed"]) == {"adds", "compares"}
    assert {file.name for file in (run_dir / "evaluations").iterdir()} == {"tasks_step_12"}
    assert main(["evaluate", str(run_dir), "--tasks", "choice_of_three,sound", *arguments]) == 0
    (alone,) = (run_dir / "evaluations").glob("tasks_step_12_*")
    assert read_results(alone)["results"] == results["results"]
