"""Input files and the documents in them: SlimPajama's *.jsonl.zst and plain text.

Errors are DataError with the file (and line) named; nothing is skipped silently.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.config import PrepareConfig
from data_pipeline.errors import DataError
from data_pipeline.manifest import SPLITS, Split

READ_BYTES = 1 << 20
RECORD_PATTERNS = ("*.jsonl", "*.jsonl.zst")
UNREADABLE = "look at its permissions and its disk, or leave it out of the inputs"


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file to read documents from."""

    path: str
    """File on disk."""
    name: str
    """`<input name>/<path below the input>`: identifies the file whatever the machine."""
    source: str
    """Source of its documents, where a record does not say."""
    bytes: int
    """Size on disk."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text with its source and its split."""

    text: str
    source: str
    split: Split


def list_input_files(config: PrepareConfig) -> list[InputFile]:
    """Return all input files sorted by name. Raises ValueError for an input that is missing or holds no such file."""
    if not config.inputs:
        raise ValueError("inputs={} must name at least one file or folder; use inputs.NAME=PATH")
    patterns = RECORD_PATTERNS if config.format == "slimpajama" else tuple(config.text_patterns)
    files: list[InputFile] = []
    for source, location in sorted(config.inputs.items()):
        files.extend(list_one_input(source, Path(location), patterns))
    return files


def list_one_input(source: str, root: Path, patterns: tuple[str, ...]) -> list[InputFile]:
    """Return the files of one input, sorted by path."""
    if safe_source_name(source) != source:
        raise ValueError(
            f"inputs.{source} must be named with letters, digits, `_`, `-` and `.` alone; "
            f"use inputs.{safe_source_name(source)}"
        )
    if root.is_file():
        paths = [root]
    else:
        paths = sorted({path for pattern in patterns for path in root.rglob(pattern) if path.is_file()})
    if not paths:
        missing = "hold" if root.exists() else "exist and hold"
        raise ValueError(
            f"inputs.{source}={root} must {missing} files matching {' '.join(patterns)}; check the path and the format"
        )
    return [
        InputFile(
            path=str(path),
            name=f"{source}/{path.relative_to(root).as_posix() if path != root else path.name}",
            source=source,
            bytes=path.stat().st_size,
        )
        for path in paths
    ]


def read_documents(file: InputFile, config: PrepareConfig) -> Iterator[Document]:
    """Read the non-empty documents of a file in order."""
    texts = read_records(file) if config.format == "slimpajama" else read_plain_text(file, config)
    for text, source in texts:
        if text:
            yield Document(text=text, source=source, split=choose_split(text, file, config))


def choose_split(text: str, file: InputFile, config: PrepareConfig) -> Split:
    """Return a document's split: by the hash of its text, so that equal documents share one, or by the file's
    folder."""
    if config.split_by == "folder":
        folder = file.name.split("/")[1]
        for split in SPLITS:
            if folder == split:
                return split
        raise ValueError(
            f"split_by=folder must find train, validation or test below the input, not {file.path}; use split_by=hash"
        )
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    position = int.from_bytes(digest, "big") / 2**64
    if position < config.validation_fraction:
        return "validation"
    return "test" if position < config.validation_fraction + config.test_fraction else "train"


def read_plain_text(file: InputFile, config: PrepareConfig) -> Iterator[tuple[str, str]]:
    """Yield (text, source) of a UTF-8 file, cut as config.text_document says."""
    try:
        text = Path(file.path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path} is not UTF-8 at byte {error.start}; convert it or leave it out") from error
    except OSError as error:
        raise DataError(f"{file.path} cannot be read ({error.strerror}); {UNREADABLE}") from error
    match config.text_document:
        case "file":
            texts = [text]
        case "paragraph":
            texts = re.split(r"\n[ \t\r]*\n\s*", text)
        case "line":
            texts = text.splitlines()
    for part in texts:
        yield part if config.text_document == "file" else part.strip("\r\n"), file.source


def read_records(file: InputFile) -> Iterator[tuple[str, str]]:
    """Yield (text, source) of JSON records, one a line."""
    for number, line in enumerate(read_lines(Path(file.path)), start=1):
        if not line.strip():
            continue
        try:
            record: dict[str, Any] = json.loads(line)
            text = record["text"]
            text.encode("utf-8")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{file.path} line {number} is not a record with a `text` ({error!r}); fetch the file again"
            ) from error
        yield text, source_of_record(record, file.source)


def source_of_record(record: dict[str, Any], default: str) -> str:
    """Return meta.redpajama_set_name as a folder name; `meta` may be an object or a string of JSON, or be missing."""
    meta: Any = record.get("meta")
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except ValueError:
            meta = None
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    return safe_source_name(name) if isinstance(name, str) and name else default


def safe_source_name(name: str) -> str:
    """Replace what may not stand in a folder name or a configuration key."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "_"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a plain or zstandard-compressed file."""
    rest = b""
    for chunk in read_chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's content, decompressed where its name ends in .zst."""
    try:
        with path.open("rb") as stream:
            raw = iter(lambda: stream.read(READ_BYTES), b"")
            yield from decompress_frames(raw, path) if path.suffix == ".zst" else raw
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {UNREADABLE}") from error


def decompress_frames(raw: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Decompress all frames of a .zst file; a file may hold several, with or without their sizes.

    The library's own stream reader ends quietly where a file is cut off, hence the frame-by-frame reading.
    """
    import zstandard

    frame = None
    for chunk in raw:
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise DataError(f"{path} is damaged ({error}); fetch the file again") from error
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{path} ends in the middle of a zstandard frame; fetch the file again")
