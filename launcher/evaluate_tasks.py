"""`prism evaluate RUN --tasks ...`: lm-eval's tasks with a run's newest checkpoint, on one process or on several."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.eval_suite import build_task_manager, hushing, read_suite, refuse_leaking_examples
from launcher.help_text import Precision
from launcher.task_failures import drop_failed, noting_failures
from launcher.task_results import (
    Evaluation,
    check_place,
    find_finished,
    read_table,
    write_evaluation,
    write_scalars,
)
from launcher.task_scorer import LoadedTasks
from launcher.trained_run import SavedRun, all_ranks, choose_dtype, find_run, load_model
from prism_lm.model.kernels import Kernels
from prism_lm.model.peer_rules import refuse_peer
from prism_lm.parallel.collectives import RunFailed, broadcast_object, call_together
from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    import torch
    from lm_eval.tasks import TaskManager

BATCH_TOKENS = {"cuda": 65536, "cpu": 8192}
"Read at once by default, by the type of device."


@dataclass(frozen=True, kw_only=True)
class TaskRequest:
    """What was asked for; None where the run or each task decides."""

    names: tuple[str, ...]
    suite: str = ""
    task_data: tuple[Path, ...] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    max_length_tokens: int | None = None
    batch_tokens: int | None = None
    bootstrap_iters: int = 0
    log_samples: bool = False
    kernels: Kernels = "auto"
    precision: Precision = "auto"


def read_request(parsed: argparse.Namespace) -> TaskRequest:
    """The options of `prism evaluate`, those given going before the suite's. Raises ValueError for what is no suite,
    for no task, and where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--tasks must be scored with lm-eval, which is not installed; pip install -e '.[eval]'")
    suite = read_suite(parsed.suite) if parsed.suite else None
    names = suite.tasks if suite else [name.strip() for name in parsed.tasks.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--tasks={parsed.tasks} must name at least one task; for example --tasks piqa,arc_easy")
    return TaskRequest(
        names=tuple(dict.fromkeys(names)),
        suite=suite.name if suite else "",
        task_data=tuple(Path(folder) for folder in parsed.task_data),
        limit=parsed.limit,
        num_fewshot=suite.num_fewshot if suite and parsed.num_fewshot is None else parsed.num_fewshot,
        max_length_tokens=suite.max_length_tokens if suite and parsed.max_length is None else parsed.max_length,
        batch_tokens=parsed.batch_tokens,
        bootstrap_iters=parsed.bootstrap_iters or 0,
        log_samples=parsed.log_samples,
        kernels=parsed.kernels,
        precision=parsed.precision,
    )


def evaluate_tasks(run_dir: Path, request: TaskRequest, ranks: Ranks) -> Path:
    """Score the tasks, keep the results, print the table; returns the folder of results. Every process of the run calls
    it.

    Raises ValueError for what was typed before any process group starts, RunFailed for what fails later: where one
    task's own code fails after the others' results are kept.
    """
    run = find_run(run_dir, kernels=request.kernels, ranks=ranks)
    refuse_peer(run.config.model, f"tasks of {run_dir}", "leave out --tasks and --suite for bits per byte")
    dtype = choose_dtype(run, request.precision)
    evaluation = describe_evaluation(run_dir, run, request, dtype)
    finished = find_finished(evaluation, with_samples=request.log_samples)
    manager, failed = None, dict[str, str]()
    if finished is None:
        check_place(run_dir)
        manager = build_task_manager(request.names, request.task_data)
    with all_ranks(ranks):
        finished = broadcast_object(finished)
        if finished is None:
            manager = manager or build_task_manager(request.names, request.task_data)
            tasks = _load_in_turn(request, evaluation, manager, ranks)
            results, failed = _score(run, request, evaluation, dtype, tasks, ranks)
            finished = call_together(lambda: _keep(evaluation, results, failed) if ranks.is_main else Path())
        elif ranks.is_main:
            print(f"{finished} holds these results already; nothing is scored again")
    if ranks.is_main:
        print(read_table(finished))
    if failed:
        raise RunFailed(_spell_failures(failed, finished))
    return finished


def describe_evaluation(run_dir: Path, run: SavedRun, request: TaskRequest, dtype: "torch.dtype") -> Evaluation:
    """What the results are of, and where they belong."""
    return Evaluation(
        run_dir=run_dir,
        step=run.step,
        tokens=run.tokens,
        suite=request.suite,
        tasks=list(request.names),
        task_data=[str(folder.resolve()) for folder in request.task_data],
        num_fewshot=request.num_fewshot,
        limit=request.limit,
        bootstrap_iters=request.bootstrap_iters,
        max_length_tokens=request.max_length_tokens or run.config.data.row_tokens,
        precision=str(dtype).removeprefix("torch."),
    )


def _load_in_turn(request: TaskRequest, evaluation: Evaluation, manager: "TaskManager", ranks: Ranks) -> LoadedTasks:
    """Every task with its data: first on rank 0, which may have to fetch or convert them, then on the others."""

    def load() -> LoadedTasks:
        return _load_tasks(request, manager, evaluation.max_length_tokens)

    loaded = call_together(lambda: load() if ranks.is_main else None)
    others = call_together(lambda: None if ranks.is_main else load())
    return cast(LoadedTasks, loaded or others)


def _load_tasks(request: TaskRequest, manager: "TaskManager", max_length_tokens: int) -> LoadedTasks:
    """Raises ValueError for a task that cannot be loaded, or not be scored as it was asked for."""
    from prism_lm.eval.lm_eval_adapter import check_generation, quieting

    with quieting(), hushing("huggingface_hub", "datasets"):
        loaded = LoadedTasks(manager, request.names)
    refuse_leaking_examples(loaded.tasks, request.num_fewshot)
    check_generation(loaded.tasks, max_length_tokens)
    return loaded


def _score(
    run: SavedRun,
    request: TaskRequest,
    evaluation: Evaluation,
    dtype: "torch.dtype",
    tasks: LoadedTasks,
    ranks: Ranks,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The harness's result, and the tasks whose own code failed, each with what it said: the same on every rank."""
    from prism_lm.eval.lm_eval_adapter import PrismLM, score_tasks
    from prism_lm.eval.progress import ProgressLine

    trained = call_together(lambda: load_model(run, dtype=dtype))
    lm = PrismLM(
        trained.model,
        run.tokenizer,
        max_length_tokens=evaluation.max_length_tokens,
        batch_tokens=request.batch_tokens or BATCH_TOKENS[run.device.type],
        ranks=ranks,
        progress=ProgressLine(sys.stderr if ranks.is_main else None),
        info=evaluation.describe_model(),
    )
    started = time.perf_counter()
    with noting_failures(tasks.tasks) as failures:
        results = score_tasks(
            lm,
            request.names,
            cast("TaskManager", tasks),
            num_fewshot=request.num_fewshot,
            limit=request.limit,
            log_samples=request.log_samples,
            bootstrap_iters=request.bootstrap_iters,
            describes_machine=ranks.is_main,
        )
    timed = {**results, "total_evaluation_time_seconds": str(time.perf_counter() - started)}
    return timed, broadcast_object(failures)


def _keep(evaluation: Evaluation, results: dict[str, Any], failed: Mapping[str, str]) -> Path:
    kept = drop_failed(results, failed)
    folder = write_evaluation(evaluation, kept, failed=failed)
    write_scalars(evaluation, kept)
    return folder


def _spell_failures(failed: Mapping[str, str], folder: Path) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    return (
        f"task {', '.join(failed)} must give figures, but its own code fails on the model's answers ({reasons}); mend "
        f"it, or leave it out; {folder} holds the other tasks' results"
    )
