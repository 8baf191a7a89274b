"""manifest.json: what a prepared folder holds, written last, and the checks that need nothing else."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import DataError
from data_pipeline.tokenizer import Tokenizer

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.model"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of the prepared folder."""

    name: str
    """Path below the prepared folder, with forward slashes."""
    bytes: int
    """Size on disk."""
    sha256: str
    """Hash of the file on disk."""
    rows: int = 0
    """Rows of T+1 tokens in it; 0 for an index."""


@dataclass(frozen=True, kw_only=True)
class SourceSplit:
    """What one source holds in one split."""

    documents: int
    """Documents packed; empty ones are left out."""
    tokens: int
    """Tokens with BOS and EOS of each document, without padding."""
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    rows: int
    """Rows of T+1 tokens."""
    index: StoredFile
    """index.json of the MDS stream."""
    shards: tuple[StoredFile, ...]
    """Shard files in the order of their rows."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a prepared folder holds."""

    tokenizer_sha256: str
    """Hash of tokenizer.model, by which the rows were written."""
    vocab_size: int
    """Pieces of that tokenizer; a model's vocabulary must be at least as large."""
    bos_id: int
    """Id that starts a document and pads a row."""
    eos_id: int
    """Id that ends a document."""
    row_tokens: int
    """Tokens in a row (T); stored rows have T+1."""
    dtype: str
    """uint16 or uint32."""
    splits: dict[str, dict[str, SourceSplit]] = field(default_factory=dict[str, dict[str, SourceSplit]])
    """Split -> source -> what it holds; sources without a row are left out."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything above: two data sets with one fingerprint hold the same rows in the same files."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def describe(self) -> str:
        """What it holds, in words that differ where fingerprints do."""
        held = [
            f"{split} {sum(len(of.shards) for of in sources.values())} shards "
            f"{sum(of.rows for of in sources.values())} rows"
            for split, sources in sorted(self.splits.items())
        ]
        return ", ".join([self.fingerprint[:12], *held, f"tokenizer {self.tokenizer_sha256[:12]}"])

    def sources(self, split: str) -> dict[str, SourceSplit]:
        """Return source -> contents, sorted by name. Raises DataError when the split holds no rows."""
        sources = self.splits.get(split, {})
        if not sources:
            held = ", ".join(name for name in SPLITS if self.splits.get(name)) or "nothing"
            raise DataError(
                f"the prepared data has no rows in its {split} split (it holds {held}); "
                f"prepare it with a larger {split}_fraction"
            )
        return dict(sorted(sources.items()))


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write manifest.json beside the shards, atomically."""
    content = {**asdict(manifest), "fingerprint": manifest.fingerprint}
    replace_file(folder / MANIFEST_NAME, json.dumps(content, indent=1, sort_keys=True).encode())


def read_manifest(file: Path) -> Manifest:
    """Read a manifest file. Raises DataError naming it when it is missing, damaged or altered."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        fingerprint = content.pop("fingerprint")
        splits: dict[str, dict[str, Any]] = content.pop("splits")
        parsed = {
            split: {source: parse_source_split(entry) for source, entry in sources.items()}
            for split, sources in splits.items()
        }
        manifest = Manifest(**content, splits=parsed)
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing; data.path must be a folder that `prism prepare` finished") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); look at its permissions and its disk") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is damaged ({error}); copy the prepared folder again or prepare it anew") from error
    if manifest.fingerprint != fingerprint:
        raise DataError(f"{file} does not match its own fingerprint; copy the prepared folder again or prepare it anew")
    return manifest


def parse_source_split(entry: dict[str, Any]) -> SourceSplit:
    """Build the dataclass from its JSON form."""
    shards = tuple(StoredFile(**shard) for shard in entry.pop("shards"))
    index = StoredFile(**entry.pop("index"))
    return SourceSplit(**entry, index=index, shards=shards)


def replace_file(file: Path, content: bytes) -> None:
    """Write `content` beside `file` and rename it into place, so that a reader sees the old file or the new one."""
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_bytes(content)
    beside.replace(file)


def check_vocabulary(manifest: Manifest, vocab_size: int) -> None:
    """Raise ValueError when a model of `vocab_size` ids cannot read this data."""
    if manifest.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} must be at least the tokenizer's vocab_size={manifest.vocab_size}; "
            f"use model.vocab_size={-(-manifest.vocab_size // 64) * 64}"
        )


def check_row_tokens(manifest: Manifest, row_tokens: int) -> None:
    """Raise ValueError when data.row_tokens is not what the rows were cut to."""
    if manifest.row_tokens != row_tokens:
        raise ValueError(
            f"data.row_tokens={row_tokens} must equal row_tokens={manifest.row_tokens} of the prepared data; "
            f"use data.row_tokens={manifest.row_tokens}"
        )


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, *, name: str) -> None:
    """Raise DataError when `tokenizer` (read from `name`) is not the one the rows were written with."""
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DataError(
            f"{name} (sha256 {tokenizer.sha256[:12]}) is not the tokenizer of the shards "
            f"(sha256 {manifest.tokenizer_sha256[:12]}); put back the tokenizer.model that `prism prepare` wrote"
        )


def hash_file(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
