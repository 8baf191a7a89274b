"""Rows to MDS shards: a part's documents into shards of its own, and the parts' shards into one stream a source and
split.

A part is written to a folder beside, published by one rename, and never touched again: what a kill leaves is either a
whole part or nothing. Joining moves shard files by rename, in an order that depends on the parts alone, and can be
repeated.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.manifest import SourceSplit, StoredFile, hash_file, replace_file
from data_pipeline.packing import RowPacker, TokenRow, row_dtype
from data_pipeline.sources import Document
from data_pipeline.streaming_parts import importing_parts
from data_pipeline.tokenizer import SPACE_MARK, Tokenizer

COLUMN = "tokens"
SHARD_HASHES = ["sha256", "xxh64"]
PART_RECORD = "part.json"


@dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """How rows and shards are cut: tokens a row, compression, most bytes of an unpacked shard."""

    row_tokens: int
    compression: str
    shard_bytes: int


@dataclass(kw_only=True)
class Count:
    """What a source holds in a split of a part."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    rows: int = 0


class StreamWriter:
    """Packs the documents of one source and split of a part and writes their MDS shards."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_format: ShardFormat) -> None:
        with importing_parts():
            from streaming.base.format import MDSWriter

        dtype = row_dtype(tokenizer.vocab_size)
        self.packer = RowPacker(
            row_tokens=shard_format.row_tokens, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, dtype=dtype
        )
        self.writer: Any = MDSWriter(
            out=str(folder),
            columns={COLUMN: f"ndarray:{dtype}:{shard_format.row_tokens + 1}"},
            compression=shard_format.compression or None,
            hashes=SHARD_HASHES,
            size_limit=shard_format.shard_bytes,
            max_workers=1,
        )
        self.tokenizer = tokenizer
        self.count = Count()

    def add(self, text: str) -> None:
        """Tokenise and pack one document. Raises DataError when its tokens stand for other text."""
        pieces = self.tokenizer.encode(text)
        self.check_bytes(text, pieces)
        self.count.documents += 1
        self.count.tokens += len(pieces) + 2
        self.count.text_bytes += len(text.encode())
        self.write(self.packer.add(pieces))

    def check_bytes(self, text: str, pieces: list[int]) -> None:
        """Raise DataError when the pieces do not stand for as many bytes as the text has; a space mark is a space."""
        expected = len(text.replace(SPACE_MARK, " ").encode())
        if int(self.tokenizer.token_bytes_V[pieces].sum()) != expected:
            difference = self.tokenizer.explain_difference(text) or f"its {expected} bytes do not add up"
            raise DataError(
                f"the tokenizer changes the document that begins {text[:40]!r}: {difference}; "
                "leave tokenizer out to train one that does not, and choose another output"
            )

    def write(self, rows: list[TokenRow]) -> None:
        """Hand complete rows to the shard writer."""
        for row in rows:
            self.writer.write({COLUMN: row})
        self.count.rows += len(rows)

    def finish(self) -> None:
        """Write the last row and the shards' index."""
        self.write(self.packer.finish())
        self.writer.finish()


def write_part(documents: Iterable[Document], folder: Path, tokenizer: Tokenizer, shard_format: ShardFormat) -> None:
    """Write all documents of a part below `folder` (which must not exist), published whole at the end."""
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    writers: dict[str, StreamWriter] = {}
    for document in documents:
        name = f"{document.split}/{document.source}"
        if name not in writers:
            writers[name] = StreamWriter(beside / name, tokenizer, shard_format)
        writers[name].add(document.text)
    for writer in writers.values():
        writer.finish()
    record = {name: asdict(writer.count) for name, writer in sorted(writers.items())}
    replace_file(beside / PART_RECORD, json.dumps(record, sort_keys=True).encode())
    beside.rename(folder)


def read_part_record(folder: Path) -> dict[str, Count]:
    """Return `<split>/<source>` -> counts of a published part."""
    record: dict[str, dict[str, int]] = json.loads((folder / PART_RECORD).read_text())
    return {name: Count(**counts) for name, counts in record.items()}


def join_parts(parts: list[Path], output: Path) -> dict[str, dict[str, SourceSplit]]:
    """Move the parts' shards to `<output>/<split>/<source>/`, write each index.json and describe the result."""
    records = [read_part_record(part) for part in parts]
    splits: dict[str, dict[str, SourceSplit]] = {}
    for name in sorted({name for record in records for name in record}):
        split, source = name.split("/")
        holding = [(part, record[name]) for part, record in zip(parts, records, strict=True) if name in record]
        splits.setdefault(split, {})[source] = join_stream(name, holding, output)
    return splits


def join_stream(name: str, parts: list[tuple[Path, Count]], output: Path) -> SourceSplit:
    """Join one source of one split; numbers its shards through."""
    (output / name).mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    shards: list[StoredFile] = []
    for part, _ in parts:
        for entry in json.loads((part / name / "index.json").read_text())["shards"]:
            place_shard(entry, part / name, output / name, number=len(shards))
            shards.append(describe_shard(entry, name))
            entries.append(entry)
    index = output / name / "index.json"
    replace_file(index, json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode())
    counts = [count for _, count in parts]
    return SourceSplit(
        documents=sum(count.documents for count in counts),
        tokens=sum(count.tokens for count in counts),
        text_bytes=sum(count.text_bytes for count in counts),
        rows=sum(count.rows for count in counts),
        index=StoredFile(name=f"{name}/index.json", bytes=index.stat().st_size, sha256=hash_file(index)),
        shards=tuple(shards),
    )


def place_shard(entry: dict[str, Any], part: Path, folder: Path, *, number: int) -> None:
    """Rename a shard file to its final number, unless that is done, and rewrite its index entry in place."""
    origin = part / (entry["zip_data"] or entry["raw_data"])["basename"]
    for file in filter(None, (entry["raw_data"], entry["zip_data"])):
        _, _, *extensions = file["basename"].split(".")
        file["basename"] = ".".join(["shard", f"{number:06}", *extensions])
    target = folder / (entry["zip_data"] or entry["raw_data"])["basename"]
    if origin.exists():
        origin.rename(target)
    elif not target.exists():
        raise DataError(f"{origin} is missing; delete {folder.parent.parent} and prepare it anew")


def describe_shard(entry: dict[str, Any], name: str) -> StoredFile:
    """Return the manifest's record of a shard of the stream `name` from its index entry."""
    stored = entry["zip_data"] or entry["raw_data"]
    return StoredFile(
        name=f"{name}/{stored['basename']}",
        bytes=stored["bytes"],
        sha256=stored["hashes"]["sha256"],
        rows=entry["samples"],
    )
