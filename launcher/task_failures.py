"""Tasks whose own code fails on the model's answers: they are named, and the other tasks' results stay."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.task import Task

AGGREGATE = "_compute_task_aggregations"
"""The harness's function that makes a task's figures of those of its documents; the task is its first argument. It is
no part of its interface: a harness without it is left as it is."""
BY_TASK = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
"What of the harness's result has an entry for each task or group; `samples` has one too, where they are kept."


@contextmanager
def noting_failures(tasks: Mapping[str, "Task"]) -> Generator[dict[str, str], None, None]:
    """In the block an error of a task's own code, where answers are filtered, compared and put together, leaves that
    task without figures and ends nothing. It is noted in the mapping that is given: the task and what it said."""
    from lm_eval import evaluator_utils

    failures: dict[str, str] = {}
    former: Callable[..., Any] | None = getattr(evaluator_utils, AGGREGATE, None)
    for task in tasks.values():
        vars(task)["apply_filters"] = _guard(task.apply_filters, None, failures, task)
        vars(task)["process_results"] = _guard(task.process_results, {}, failures, task)
    if former is not None:
        setattr(evaluator_utils, AGGREGATE, _guard(former, ({}, 0), failures))
    try:
        yield failures
    finally:
        if former is not None:
            setattr(evaluator_utils, AGGREGATE, former)
        for task in tasks.values():
            del vars(task)["apply_filters"], vars(task)["process_results"]


def drop_failed(results: Mapping[str, Any], failed: Mapping[str, str]) -> dict[str, Any]:
    """The harness's result without those tasks, and without the groups whose figures they belong to."""
    dropped = set(failed)
    members: Mapping[str, list[str]] = results.get("group_subtasks", {})
    while groups := {group for group, names in members.items() if dropped & set(names)} - dropped:
        dropped |= groups
    kept = dict(results)
    for key in {*BY_TASK, "samples"} & results.keys():
        kept[key] = {name: value for name, value in results[key].items() if name not in dropped}
    return kept


def _guard(
    function: Callable[..., Any], instead: Any, failures: dict[str, str], task: "Task | None" = None
) -> Callable[..., Any]:
    """The function, which returns `instead` where it fails; the first error of the task, or of its first argument, is
    noted."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0]
            name = (task or arguments[0]).task_name
            failures.setdefault(name, f"{type(error).__name__}: {words}".removesuffix(": "))
            return instead

    return call
