"""lm-eval's tasks for the training loop: what can be wrong with them is found before the run starts, all but an answer
longer than a row."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from data_pipeline.tokenizer import Tokenizer
from launcher.config import RunConfig
from launcher.run_data import read_tokenizer
from prism_lm.model.operators import Operators
from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from torch import nn

    from prism_lm.train.tasks import TaskScorer


def open_task_scorer(config: RunConfig, operators: Operators, ranks: Ranks) -> "TaskScorer | None":
    """The scorer of train.tasks, its tasks and their data loaded; None where none are scored. `operators` read whole
    rows.

    Raises ValueError for a task that is unknown, whose data are missing or whose texts do not fit a row, and where
    lm-eval is not installed.
    """
    tasks = config.train.tasks
    if not tasks.every_steps:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"train.tasks.names=[{','.join(tasks.names)}] must be scored with lm-eval, which is not installed; "
            "pip install 'prism-lm[eval]', or use train.tasks.every_steps=0"
        )
    return _Scorer(
        config=config,
        operators=operators,
        ranks=Ranks(rank=ranks.rank, local_rank=ranks.local_rank, world_size=ranks.world_size),
        tokenizer=Tokenizer(read_tokenizer(config), name="tokenizer.model"),
        tasks=load_tasks(
            tasks.names,
            [Path(folder) for folder in tasks.data],
            num_fewshot=tasks.num_fewshot,
            row_tokens=config.data.row_tokens,
        ),
    )


class LoadedTasks:
    """What the harness asks of its index of tasks, with all of them in memory: nothing that happens to their files
    later can end a run."""

    def __init__(self, manager: "TaskManager", names: Sequence[str]) -> None:
        """Raises ValueError, which names the task, for one that cannot be loaded, and for one that is named twice."""
        self.task_index: Mapping[str, Any] = manager.task_index
        built = [item for name in names for item in _load_alone(manager, name)]
        try:
            self._loaded = manager.load(built)
        except ValueError as error:
            raise ValueError(
                f"tasks {','.join(names)} must not hold a task twice ({error}); leave out the group, or the task"
            ) from error
        self.tasks: Mapping[str, Any] = self._loaded["tasks"]

    def load(self, task_list: Sequence[str]) -> Mapping[str, Any]:
        """All of them."""
        return self._loaded


def load_tasks(
    names: Sequence[str], folders: Sequence[Path], *, num_fewshot: int | None, row_tokens: int
) -> LoadedTasks:
    """The tasks with their data. Raises ValueError, in the words of the keys of train.tasks."""
    from launcher.eval_suite import build_task_manager, refuse_leaking_examples
    from prism_lm.eval.lm_eval_adapter import check_generation

    try:
        loaded = LoadedTasks(build_task_manager(names, folders), names)
        refuse_leaking_examples(loaded.tasks, num_fewshot)
        check_generation(loaded.tasks, row_tokens)
    except ValueError as error:
        raise ValueError(_spell_keys(str(error))) from error
    return loaded


def _load_alone(manager: "TaskManager", name: str) -> "list[Task | Group]":
    """The task or the group of that name, or the tasks of that tag, with their data."""
    from launcher.eval_suite import explain_task_failure

    try:
        found = manager.load([name])
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            explain_task_failure(name, error)
            or f"task {name} must be one that lm-eval can load ({reason}); look at its YAML and its data"
        ) from error
    group = found.get("groups", {}).get(name)
    return list(found["tasks"].values()) if group is None else [group]


def _spell_keys(text: str) -> str:
    """What `prism evaluate` is told by options, training is told by keys."""
    text = text.replace("--task-data FOLDER", "train.tasks.data=[FOLDER]").replace("--task-data", "train.tasks.data")
    text = text.replace("max_length_tokens=", "data.row_tokens=")
    return re.sub(r"(?<![\w.])num_fewshot=", "train.tasks.num_fewshot=", text)


@dataclass(frozen=True, kw_only=True)
class _Scorer:
    """Scores on a twin of the trained model, which shares its weights and reads whole rows, uncompiled: the harness's
    rows have any number of tokens. At most as many tokens are read at once as a process reads in training."""

    config: RunConfig
    operators: Operators
    ranks: Ranks
    tokenizer: Tokenizer
    tasks: LoadedTasks

    def __call__(self, model: "nn.Module", /, *, look: Callable[[], None]) -> dict[str, float]:
        from launcher.trained_run import share_weights
        from prism_lm.eval.lm_eval_adapter import PrismLM, read_metrics, score_tasks
        from prism_lm.model.lm import LanguageModel

        tasks, row_tokens = self.config.train.tasks, self.config.data.row_tokens
        lm = PrismLM(
            share_weights(cast(LanguageModel, model), self.operators),
            self.tokenizer,
            max_length_tokens=row_tokens,
            batch_tokens=self.config.train.micro_batch_rows * row_tokens // self.config.parallel.sequence_degree,
            ranks=self.ranks,
            progress=_Looking(look),
        )
        results = score_tasks(
            lm,
            tasks.names,
            cast("TaskManager", self.tasks),
            num_fewshot=tasks.num_fewshot,
            limit=tasks.limit_documents or None,
            describes_machine=False,
        )
        return read_metrics(results)


class _Looking:
    """Progress that nobody is shown, and at each step of which a look is taken."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def begin(self, name: str, num_requests: int, num_tokens: int, /) -> None:
        """A share of the work starts."""
        self._look()

    def advance(self, num_requests: int, num_tokens: int, /) -> None:
        """A batch is done."""
        self._look()

    def end(self) -> None:
        """The share is done."""
        self._look()
