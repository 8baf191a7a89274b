"""Continuations of a file of prompts, a JSON line each, written as batches finish; a file that was begun is gone on
with."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from launcher.continuation import Continuation

WINDOW_BATCHES = 8
"Prompts of so many batches are sorted by length together, so that a batch is hardly padded."
WRITTEN_KEYS = ("text", "num_new_tokens", "finish_reason")

Record = dict[str, Any]
ContinueBatch = Callable[[list[str], list[int]], "list[Continuation]"]
"Prompts and their places in the file to their continuations."


def read_prompts(path: Path) -> list[Record]:
    """A record with the key `prompt` for each line: JSON objects in a .jsonl file, else the lines themselves.

    Raises ValueError naming the file, and the line that does not fit.
    """
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ValueError(f"--prompts={path} must be a text file ({reason}); give lines, or .jsonl objects") from error
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise ValueError(f"--prompts={path} must hold at least one prompt; give a line for each")
    if path.suffix != ".jsonl":
        return [{"prompt": line.removesuffix("\r")} for line in lines]
    return [_read_record(line, f"--prompts={path} line {number}") for number, line in enumerate(lines, 1)]


def _read_record(line: str, name: str) -> Record:
    record = _parse_object(line)
    if record is None or not isinstance(record.get("prompt"), str):
        raise ValueError(f'{name} must be an object with a text "prompt"; write {{"prompt": "It was"}}')
    taken = [key for key in WRITTEN_KEYS if key in record]
    if taken:
        raise ValueError(f"{name} must not have the key {taken[0]}, which the output has; rename it")
    return record


def _parse_object(line: str) -> Record | None:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is refused here
    except (ValueError, RecursionError):
        return None
    return cast(Record, value) if isinstance(value, dict) else None


def begin_output(path: Path, records: Sequence[Record], settings: Record) -> int:
    """How many continuations a file already holds, after cutting off a line that was not finished.

    What decides them is kept beside the file. Raises ValueError where the file is not the beginning of this work, and
    where it cannot be written.
    """
    try:
        return _begin(path, records, settings)
    except OSError as error:
        raise ValueError(
            f"--output={path} must be a file that can be written, with {_settings_file(path).name} beside it "
            f"({error.strerror or error}); give another file"
        ) from error


def _begin(path: Path, records: Sequence[Record], settings: Record) -> int:
    with path.open("a+b") as file:
        file.seek(0)
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        done = whole.decode(errors="replace").split("\n")[:-1]
        if done:
            _check_is_beginning(path, done, records)
            _check_settings(path, settings)
        else:
            _settings_file(path).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        file.truncate(len(whole))
    return len(done)


def _settings_file(path: Path) -> Path:
    return path.with_name(path.name + ".settings.json")


def _check_is_beginning(path: Path, done: Sequence[str], records: Sequence[Record]) -> None:
    remedy = "give another file, or remove it"
    if len(done) > len(records):
        raise ValueError(f"--output={path} must not have more lines than --prompts, {len(records)}; {remedy}")
    for number, (line, record) in enumerate(zip(done, records, strict=False), 1):
        written = _parse_object(line)
        if written is None or {key: written.get(key) for key in record} != record:
            raise ValueError(f"--output={path} line {number} must continue that line of --prompts; {remedy}")


def _check_settings(path: Path, settings: Record) -> None:
    kept = _settings_file(path)
    if not kept.is_file():
        raise ValueError(f"--output={path} must be new, or have {kept.name} beside it; give another file, or remove it")
    before = _parse_object(kept.read_bytes().decode(errors="surrogateescape"))
    if before is None:
        raise ValueError(
            f"--output={path} must be new, or have beside it, in {kept.name}, what it was begun with, as JSON in "
            "UTF-8; give another file, or remove it"
        )
    for key, value in settings.items():
        if before.get(key) != value:
            raise ValueError(
                f"{key}={value} must be {before.get(key)}, with which --output={path} was begun; "
                "give another file, or remove it"
            )


def plan_batches(lengths: Sequence[int], *, first: int, batch_size: int) -> Iterator[list[int]]:
    """Places of the prompts that form a batch, longest prompt first: those from `first` on, sorted by length within
    windows of the file; every place once, every batch but the last one full."""
    window = WINDOW_BATCHES * batch_size
    for begin in range(first, len(lengths), window):
        places = range(begin, min(begin + window, len(lengths)))
        ordered = sorted(places, key=lambda place: (-lengths[place], place))
        for start in range(0, len(ordered), batch_size):
            yield ordered[start : start + batch_size]


def continue_file(
    records: Sequence[Record],
    lengths: Sequence[int],
    output: Path,
    *,
    first: int,
    batch_size: int,
    continue_batch: ContinueBatch,
) -> None:
    """Append the continuations from the record `first` on, in the order of the records."""
    waiting: dict[int, Record] = {}
    next_place = first
    with output.open("a", encoding="utf-8") as file:
        for places in plan_batches(lengths, first=first, batch_size=batch_size):
            prompts = [str(records[place]["prompt"]) for place in places]
            continuations = continue_batch(prompts, places)
            for place, continuation in zip(places, continuations, strict=True):
                waiting[place] = {**records[place], **asdict(continuation)}
            while next_place in waiting:
                file.write(json.dumps(waiting.pop(next_place), ensure_ascii=False) + "\n")
                next_place += 1
            file.flush()
