"""Configuration of data preparation (`prism prepare`) and of the loader (`data.*` in a training run)."""

from dataclasses import dataclass, field
from typing import Literal

Verify = Literal["auto", "sizes", "hashes"]


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What `prism prepare` reads and writes."""

    output: str
    """Folder to write: tokenizer.model, <split>/<source>/ MDS shards, manifest.json (last)."""
    inputs: dict[str, str] = field(default_factory=dict[str, str])
    """Source name -> file or folder, e.g. inputs.books=/data/books. Each name becomes a source of its own to weigh;
    SlimPajama records carry their own source name (meta.redpajama_set_name), which goes before this one."""
    format: Literal["text", "slimpajama"] = "text"
    """`text`: plain UTF-8 files matching text_patterns. `slimpajama`: *.jsonl and *.jsonl.zst records with `text`
    and `meta`."""
    text_patterns: list[str] = field(default_factory=lambda: ["*.txt", "*.text", "*.md", "*.rst"])
    """File name patterns searched below a folder of plain text; a file given directly is always read."""
    text_document: Literal["file", "paragraph", "line"] = "file"
    """What a document is in plain text: a whole file, a block between blank lines, or a line."""
    tokenizer: str = ""
    """SentencePiece model to use, which must stand for text byte by byte: byte fallback, identity normalisation,
    spaces kept, no dummy prefix. Empty trains one of vocab_size pieces on a sample of the training split."""
    vocab_size: int = 32000
    """Pieces of the trained tokenizer (unused when `tokenizer` is given). At least 300; up to 65536 is stored in 2
    bytes a token."""
    tokenizer_sample_mib: int = 128
    """Text for training the tokenizer, MiB, taken evenly from all input files."""
    row_tokens: int = 2048
    """Tokens a row is trained on (T); a stored row has T+1. data.row_tokens of a run must agree."""
    validation_fraction: float = 0.005
    """Share of documents (by hash of their text) held out for validation, 0 to 1."""
    test_fraction: float = 0.005
    """Share of documents (by hash of their text) held out for the test split, 0 to 1."""
    split_by: Literal["hash", "folder"] = "hash"
    """`hash`: by hash of the document's text. `folder`: the first folder below an input, which must be train,
    validation or test (SlimPajama's own split); the two fractions are not used then."""
    compression: str = "zstd:3"
    """Shard compression as mosaicml-streaming names it; empty stores shards uncompressed."""
    shard_mib: float = 64.0
    """Largest size of an uncompressed shard, MiB. data.cache_limit_gib must hold four of them."""
    part_mib: float = 64.0
    """Input files are grouped into parts of about this size, MiB: the unit of parallel work, of resuming after a
    kill, and of packing (each part ends in one padded row per source and split)."""
    workers: int = 0
    """Worker processes; 0 takes one a CPU core, 1 works in this process. Does not change what is written."""

    def __post_init__(self) -> None:
        check(bool(self.output), "output=", "name the folder to write", "use output=data/NAME")
        check(
            self.vocab_size >= 300,
            f"vocab_size={self.vocab_size}",
            "be at least 300 (256 bytes and the control pieces)",
            "use 32000",
        )
        check(self.row_tokens >= 1, f"row_tokens={self.row_tokens}", "be at least 1", "use 2048")
        for name in ("tokenizer_sample_mib", "shard_mib", "part_mib"):
            value = getattr(self, name)
            check(value > 0, f"{name}={value}", "be positive", f"leave {name} out for its default")
        check(self.workers >= 0, f"workers={self.workers}", "be at least 0", "use 0 for one a core")
        for name in ("validation_fraction", "test_fraction"):
            check(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)}", "lie in [0, 1)", "use 0.005")
        held_out = self.validation_fraction + self.test_fraction
        check(held_out < 1, f"validation_fraction + test_fraction={held_out}", "stay below 1", "use 0.005 for each")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads, and how (`data.*`)."""

    path: str = ""
    """Folder written by `prism prepare`, or its copy in an object store (s3://, gs://, oci://, hf://, azure://).
    Must be set."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    """Source name -> weight in the training mixture, any positive scale. Empty: every row once an epoch. Otherwise
    every source of the data set must be named (0 leaves one out); an epoch keeps its number of rows. Validation and
    test are never weighed."""
    row_tokens: int = 2048
    """Tokens in a row (T). Must equal row_tokens of the prepared data."""
    shuffle: bool = True
    """Shuffle the training rows, anew each epoch, from the run's seed. Validation and test are read in order."""
    shuffle_block_rows: int = 65536
    """Rows over which neighbours are mixed within a canonical node; larger mixes better and keeps more shards in the
    cache."""
    num_canonical_nodes: int = 16
    """Independent paths through the shards. Part of the order: fixed for a run whatever its world size; a multiple
    of the number of nodes keeps the shards a node fetches apart from the others'."""
    workers: int = -1
    """Loader processes a rank: 0 reads in the training process, -1 derives (0 when a rank has two cores or fewer,
    else up to 4)."""
    prefetch_batches: int = -1
    """Micro-batches each worker keeps ready, at least 1; -1 derives (2). Shards are fetched ahead for twice as many."""
    cache_dir: str = ""
    """Folder for this node's copies of shards, lock files and notes; empty: <run_dir>/cache/<host name>. A fast local
    disk is best."""
    cache_limit_gib: float = 0.0
    """Most disk, GiB, that decompressed shards may take in data.cache_dir on a node: at least four shards' worth; 0
    is no limit."""
    verify: Verify = "auto"
    """Check at start, of a local folder: every shard's size, or its hash too; `auto` hashes a split of up to 256
    MiB. A shard's hash is checked again when it is read, always."""
    timeout_s: float = 45.0
    """Longest wait for a micro-batch or for a download, seconds, before the run ends with an error."""

    def __post_init__(self) -> None:
        for name in ("row_tokens", "shuffle_block_rows", "num_canonical_nodes"):
            check(
                getattr(self, name) >= 1,
                f"data.{name}={getattr(self, name)}",
                "be at least 1",
                f"leave data.{name} out for its default",
            )
        check(self.workers >= -1, f"data.workers={self.workers}", "be at least -1", "use -1 to derive it")
        good_prefetch = self.prefetch_batches == -1 or self.prefetch_batches >= 1
        check(
            good_prefetch,
            f"data.prefetch_batches={self.prefetch_batches}",
            "be -1 or at least 1",
            "use -1 to derive it",
        )
        check(
            self.cache_limit_gib >= 0,
            f"data.cache_limit_gib={self.cache_limit_gib}",
            "be at least 0",
            "use 0 for no limit",
        )
        check(self.timeout_s > 0, f"data.timeout_s={self.timeout_s}", "be positive", "use 45")
        for source, weight in self.weights.items():
            check(
                0 <= weight < float("inf"),
                f"data.weights.{source}={weight}",
                "be finite and at least 0",
                "use 0 to leave a source out",
            )
        positive = not self.weights or any(weight > 0 for weight in self.weights.values())
        check(
            positive, f"data.weights={dict(self.weights)}", "hold a positive weight", "use {} for natural proportions"
        )


def check(holds: bool, key_value: str, rule: str, remedy: str) -> None:
    """Raise ValueError `key=value must rule; remedy` unless `holds`."""
    if not holds:
        raise ValueError(f"{key_value} must {rule}; {remedy}")
