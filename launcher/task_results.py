"""What tasks came to, on disk: lm-eval's own JSON and table, its samples, and scalars for TensorBoard.

RUN/evaluations/tasks_step_<n>[_<suite>]/ appears whole or not at all: results.json, table.md, samples_<task>.jsonl.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.provenance import find_version, read_commit
from launcher.run_folder import find_existing

RESULTS_NAME, TABLE_NAME = "results.json", "table.md"
SETTINGS_KEY = "prism"
PACKAGES = ("prism-lm", "torch", "lm-eval", "datasets", "transformers", "sentencepiece")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Of what the results are: equal ones would give equal results."""

    run_dir: Path
    step: int
    tokens: int
    suite: str
    tasks: list[str]
    task_data: list[str]
    num_fewshot: int | None
    limit: int | None
    bootstrap_iters: int
    max_length_tokens: int
    precision: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that makes a difference, as it stands in results.json: the tasks' files as they are when first asked for;
        where the run folder lies makes none."""
        held = {name: value for name, value in asdict(self).items() if name != "run_dir"}
        return {**held, "task_files": hash_files(map(Path, self.task_data))}

    @property
    def folders(self) -> list[Path]:
        """Where the results belong: the plain name, or where that holds other ones, with the settings' hash."""
        name = "_".join(["tasks_step", str(self.step), *([self.suite] if self.suite else [])])
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        return [self.run_dir / "evaluations" / folder for folder in (name, f"{name}_{digest}")]

    @property
    def board_name(self) -> str:
        """The name under which TensorBoard shows the scalars, one for each way of scoring."""
        parts = ["tasks", self.suite]
        parts += [f"{self.num_fewshot}_shot" if self.num_fewshot else "", f"limit_{self.limit}" if self.limit else ""]
        return "_".join(part for part in parts if part)

    def describe_model(self) -> dict[str, Any]:
        """What joins the harness's own record of the model."""
        return {"run": str(self.run_dir), "step": self.step, "tokens": self.tokens}


def hash_files(folders: Iterable[Path]) -> str:
    """Of the names and contents of every file below the folders, but what Python leaves there."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"):
            digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode(errors="surrogateescape"))
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def check_place(run_dir: Path) -> None:
    """Raises ValueError where results cannot be written below the run folder; tried, since a mount or a quota may be
    what forbids it."""
    for folder in (run_dir / "evaluations", run_dir / "tensorboard"):
        nearest = find_existing(folder)
        if not nearest.is_dir():
            raise ValueError(f"{nearest} must be a folder, for results are written into it; move the file elsewhere")
        try:
            tempfile.TemporaryFile(dir=nearest).close()
        except OSError as error:
            raise ValueError(
                f"RUN={run_dir} must be a folder in which results can be written, and {nearest} is none "
                f"({error.strerror}); change its permissions, or evaluate a copy of the run"
            ) from error


def find_finished(evaluation: Evaluation, *, with_samples: bool) -> Path | None:
    """The folder that holds these results already, of every task, with samples where they are wanted."""
    for folder in evaluation.folders:
        record = _read_record(folder)
        is_whole = (folder / TABLE_NAME).is_file() and (not with_samples or any(folder.glob("samples_*.jsonl")))
        if record.get("settings") == evaluation.settings and is_whole and not record.get("failed"):
            return folder
    return None


def _read_record(folder: Path) -> dict[str, Any]:
    """What write_evaluation wrote under a key of ours; empty where there is nothing."""
    try:
        return dict(json.loads((folder / RESULTS_NAME).read_text(encoding="utf-8"))[SETTINGS_KEY])
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return {}


def read_table(folder: Path) -> str:
    """The table of a folder of results, with the line that says of what."""
    return (folder / TABLE_NAME).read_text(encoding="utf-8").rstrip("\n")


def write_evaluation(
    evaluation: Evaluation, results: Mapping[str, Any], *, failed: Mapping[str, str] | None = None
) -> Path:
    """Write the folder of results and return it; other results of that step stay as they are. `failed`: tasks that the
    results lack and why, for which they are scored again when they are asked for."""
    plain, named = evaluation.folders
    is_other = plain.exists() and _read_record(plain).get("settings") not in (None, evaluation.settings)
    folder = named if is_other else plain
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = results.get("samples", {})
    for task, documents in samples.items():
        lines = (_dump(_clean_sample(sample), indent=None) + "\n" for sample in documents)
        (beside / f"samples_{task}.jsonl").write_text("".join(lines), encoding="utf-8")
    (beside / TABLE_NAME).write_text(spell_tables(evaluation, results, failed or {}), encoding="utf-8")
    whole = _complete(evaluation, results, failed or {})
    (beside / RESULTS_NAME).write_text(_dump(whole, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.replace(folder)
    return folder


def spell_tables(evaluation: Evaluation, results: Mapping[str, Any], failed: Mapping[str, str]) -> str:
    """lm-eval's tables of tasks and groups, in markdown, and which tasks they lack."""
    from lm_eval.utils import make_table

    limited = f"  only the first {evaluation.limit} documents of each task" if evaluation.limit else ""
    lacking = f"  without {', '.join(failed)}, which failed" if failed else ""
    title = f"{evaluation.run_dir}  step {evaluation.step}  {evaluation.tokens:,} tokens{limited}{lacking}"
    tables = [make_table(results, column) for column in ("results", "groups") if results.get(column)]
    return "\n".join([title, "", *tables])


def write_scalars(evaluation: Evaluation, results: Mapping[str, Any]) -> None:
    """Every figure at the checkpoint's step, in a folder of its own below RUN/tensorboard: of a folder's files
    TensorBoard follows the latest alone, and the run's own may still grow."""
    from torch.utils.tensorboard.writer import SummaryWriter

    from prism_lm.eval.lm_eval_adapter import read_metrics

    with SummaryWriter(str(evaluation.run_dir / "tensorboard" / evaluation.board_name)) as board:
        for tag, value in read_metrics(results).items():
            board.add_scalar(tag, value, evaluation.step)


def _complete(evaluation: Evaluation, results: Mapping[str, Any], failed: Mapping[str, str]) -> dict[str, Any]:
    """The harness's result as its own tracker would write it, and our settings under one key."""
    from lm_eval.utils import hash_string, sanitize_model_name

    name = f"{evaluation.run_dir.resolve().name}_step_{evaluation.step}"
    hashes = {
        task: hash_string("".join(one["doc_hash"] + one["prompt_hash"] + one["target_hash"] for one in documents))
        for task, documents in results.get("samples", {}).items()
    }
    versions = {package: find_version(package) for package in PACKAGES}
    ours = {"settings": evaluation.settings, "versions": versions, "commit": read_commit()}
    return {
        **{key: value for key, value in results.items() if key != "samples"},
        "task_hashes": hashes,
        "model_source": "prism",
        "model_name": name,
        "model_name_sanitized": sanitize_model_name(name),
        "system_instruction": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": None,
        "chat_template": None,
        "chat_template_sha": None,
        SETTINGS_KEY: {**ours, "failed": dict(failed)} if failed else ours,
    }


def _clean_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample in the form in which the harness keeps them, which `datasets` can read."""
    from lm_eval.utils import sanitize_list

    arguments = {
        f"gen_args_{place}": {f"arg_{index}": value for index, value in enumerate(given)}
        for place, given in enumerate(sample["arguments"])
    }
    texts = {name: sanitize_list(sample[name]) for name in ("resps", "filtered_resps")}
    return {**sample, **texts, "arguments": arguments, "target": str(sample["target"])}


def _dump(value: Any, *, indent: int | None) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)
