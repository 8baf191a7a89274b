"""What is left of a result without the tasks that failed."""

from launcher.task_failures import drop_failed

RESULTS = {
    "results": {"whole": 1, "part": 2, "inner": 3, "a": 4, "b": 5},
    "groups": {"whole": 1, "inner": 3},
    "group_subtasks": {"whole": ["part", "inner"], "inner": ["a", "b"]},
    "samples": {"part": [1], "a": [2], "b": [3]},
    "config": {"a": "not a task's"},
}


def test_groups_of_a_failed_task_have_no_figures_and_what_is_not_of_a_task_stays() -> None:
    kept = drop_failed(RESULTS, {"a": "ZeroDivisionError"})
    assert kept == {
        "results": {"part": 2, "b": 5},
        "groups": {},
        "group_subtasks": {},
        "samples": {"part": [1], "b": [3]},
        "config": {"a": "not a task's"},
    }


def test_result_without_a_failure_stays_as_it_is() -> None:
    assert drop_failed(RESULTS, {}) == RESULTS
