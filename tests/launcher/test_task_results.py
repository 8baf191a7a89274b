from dataclasses import replace
from pathlib import Path

import pytest

from launcher.task_results import TABLE_NAME, Evaluation, find_finished, write_evaluation


@pytest.fixture
def evaluation(tmp_path: Path) -> Evaluation:
    """Of one task, whose file lies in a folder of its own."""
    (tmp_path / "tasks" / "__pycache__").mkdir(parents=True)
    (tmp_path / "tasks" / "mine.yaml").write_text("task: mine\n")
    return Evaluation(
        run_dir=tmp_path / "run",
        step=3,
        tokens=9,
        suite="",
        tasks=["mine"],
        task_data=[str(tmp_path / "tasks")],
        num_fewshot=None,
        limit=None,
        bootstrap_iters=0,
        max_length_tokens=64,
        precision="float32",
    )


RESULTS = {"results": {}, "n-shot": {}, "higher_is_better": {}, "versions": {}}


def test_results_stand_until_a_file_of_the_tasks_changes(evaluation: Evaluation, tmp_path: Path) -> None:
    folder = write_evaluation(evaluation, RESULTS)
    (tmp_path / "tasks" / "__pycache__" / "rows.pyc").write_bytes(b"of an import")
    assert find_finished(replace(evaluation), with_samples=False) == folder
    (tmp_path / "tasks" / "mine.yaml").write_text("task: mine \n")
    assert find_finished(replace(evaluation), with_samples=False) is None
    assert find_finished(evaluation, with_samples=False) == folder, "what was scored is what was read at its start"
    other = write_evaluation(replace(evaluation), RESULTS)
    assert other != folder and folder.is_dir()


def test_results_without_their_table_are_scored_anew(evaluation: Evaluation) -> None:
    folder = write_evaluation(evaluation, RESULTS)
    (folder / TABLE_NAME).unlink()
    assert find_finished(evaluation, with_samples=False) is None
    assert write_evaluation(evaluation, RESULTS) == folder == find_finished(evaluation, with_samples=False)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_results_that_lack_a_task_are_scored_anew_in_their_place(evaluation: Evaluation) -> None:
    folder = write_evaluation(evaluation, RESULTS, failed={"mine": "KeyError"})
    assert "without mine, which failed" in (folder / TABLE_NAME).read_text()
    assert find_finished(evaluation, with_samples=False) is None
    assert write_evaluation(evaluation, RESULTS) == folder == find_finished(evaluation, with_samples=False)


def test_results_file_of_another_kind_holds_none(evaluation: Evaluation) -> None:
    folder = write_evaluation(evaluation, RESULTS)
    for content in ("[]", "3", '{"prism": 3}', "{"):
        (folder / "results.json").write_text(content)
        assert find_finished(evaluation, with_samples=False) is None
