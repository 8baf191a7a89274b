"""Text to a prepared folder, in parallel and resumable: the work behind `prism prepare`.

The folder grows in this order: settings.json, tokenizer.model, parts/ (one folder a finished part), <split>/<source>/
(parts joined), manifest.json; parts/ is removed then. Each step is published by a rename and found done when run again.
"""

import ctypes
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.config import PrepareConfig
from data_pipeline.errors import DataError
from data_pipeline.manifest import (
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    Manifest,
    read_manifest,
    replace_file,
    write_manifest,
)
from data_pipeline.packing import row_dtype
from data_pipeline.shards import ShardFormat, join_parts, read_part_record, write_part
from data_pipeline.sources import InputFile, list_input_files, read_documents
from data_pipeline.streaming_parts import importing_parts
from data_pipeline.tokenizer import Tokenizer, check_gives_text_back, load_tokenizer, train_tokenizer

Report = Callable[[str], None]
SETTINGS_NAME = "settings.json"
MIB = 1 << 20
TAKEN_SAMPLE_MIB = 1


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """All that a worker process needs to write one part."""

    files: tuple[InputFile, ...]
    folder: str
    tokenizer: str
    config: PrepareConfig


def run_prepare(config: PrepareConfig, report: Report) -> Manifest:
    """Prepare `config.output`, or find it done. Progress goes to `report`, a line a call.

    Raises ValueError for settings that cannot work or differ from those the folder was begun with; DataError for bad
    files.
    """
    output = Path(config.output)
    files = list_input_files(config)
    output.mkdir(parents=True, exist_ok=True)
    with lock_folder(output):
        settle_settings(config, files, output)
        if (output / MANIFEST_NAME).exists():
            report(f"{output} is prepared already; nothing to do")
            return read_manifest(output / MANIFEST_NAME)
        tokenizer = settle_tokenizer(config, files, output, report)
        parts = write_parts(config, files, output, report)
        manifest = finish(config, tokenizer, parts, output)
    return manifest


@contextmanager
def lock_folder(output: Path) -> Generator[None]:
    """Hold the folder against a second `prism prepare`; the lock dies with this process and is not its workers'."""
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"output={output} must not be in use by another `prism prepare`; wait for it or choose another"
            ) from error
        yield


def settle_settings(config: PrepareConfig, files: list[InputFile], output: Path) -> None:
    """Write settings.json at the first start; at a later one compare and raise ValueError at a difference."""
    settings = describe_settings(config, files)
    record = output / SETTINGS_NAME
    if not record.exists():
        unknown = [path.name for path in output.iterdir() if path.name != ".lock"]
        if unknown:
            raise ValueError(
                f"output={output} must be empty or begun by `prism prepare`, but holds {unknown[0]}; "
                "choose another output"
            )
        replace_file(record, json.dumps(settings, indent=1, sort_keys=True).encode())
        return
    before: dict[str, Any] = json.loads(record.read_text())
    for key in sorted({*settings, *before}):
        if settings.get(key) != before.get(key):
            now, then = shorten(settings.get(key)), shorten(before.get(key))
            raise ValueError(
                f"{key}={now} must equal {key}={then}, with which {output} was begun; "
                "choose another output or delete that folder"
            )


def describe_settings(config: PrepareConfig, files: list[InputFile]) -> dict[str, Any]:
    """Return what decides the content of the prepared folder, as JSON values; locations on this machine do not."""
    settings = asdict(config)
    for key in ("output", "inputs", "workers"):
        del settings[key]
    settings["tokenizer"] = load_tokenizer(config.tokenizer).sha256 if config.tokenizer else ""
    settings["inputs"] = {file.name: file.bytes for file in files}
    return settings


def shorten(value: object) -> str:
    """Return a value for an error message, cut to a readable length."""
    text = f"{len(value)} files {value}" if isinstance(value, dict) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def settle_tokenizer(config: PrepareConfig, files: list[InputFile], output: Path, report: Report) -> Tokenizer:
    """Return the folder's tokenizer; take or train it first if there is none yet."""
    target = output / TOKENIZER_NAME
    if not target.exists():
        if config.tokenizer:
            taken = load_tokenizer(config.tokenizer)
            sample = sample_texts(replace(config, tokenizer_sample_mib=TAKEN_SAMPLE_MIB), files)
            check_gives_text_back(taken, sample, name=config.tokenizer)
            model = taken.model
        else:
            report(f"training a tokenizer of {config.vocab_size} pieces on up to {config.tokenizer_sample_mib} MiB")
            model = train_tokenizer(sample_texts(config, files), vocab_size=config.vocab_size)
        replace_file(target, model)
    return load_tokenizer(target)


def sample_texts(config: PrepareConfig, files: list[InputFile]) -> Iterator[str]:
    """Yield training-split documents up to an equal share of the sample from every file, of at most 1,000 files
    spread evenly."""
    chosen = files[:: -(-len(files) // 1000)]
    share = config.tokenizer_sample_mib * MIB / len(chosen)
    budget = 0.0
    for file in chosen:
        budget += share
        for document in read_documents(file, config):
            if document.split == "train":
                yield document.text[: int(budget)]
                budget -= len(document.text.encode())
            if budget <= 0:
                break


def group_files(files: list[InputFile], part_bytes: float) -> list[tuple[InputFile, ...]]:
    """Cut the sorted files into consecutive parts that end once they reach `part_bytes`."""
    parts: list[tuple[InputFile, ...]] = []
    current: list[InputFile] = []
    current_bytes = 0
    for file in files:
        current.append(file)
        current_bytes += file.bytes
        if current_bytes >= part_bytes:
            parts.append(tuple(current))
            current, current_bytes = [], 0
    return [*parts, tuple(current)] if current else parts


def write_parts(config: PrepareConfig, files: list[InputFile], output: Path, report: Report) -> list[Path]:
    """Write every part that is not there yet and return all their folders in order."""
    (output / "parts").mkdir(exist_ok=True)
    jobs = [
        PartJob(
            files=group,
            folder=str(output / "parts" / f"part_{number:06}"),
            tokenizer=str(output / TOKENIZER_NAME),
            config=config,
        )
        for number, group in enumerate(group_files(files, config.part_mib * MIB))
    ]
    missing = [job for job in jobs if not Path(job.folder).exists()]
    if len(missing) < len(jobs):
        report(f"resuming: {len(jobs) - len(missing)} of {len(jobs)} parts are done already")
    progress = Progress(missing, report)
    for job in run_jobs(missing, config.workers or os.cpu_count() or 1):
        progress.finished(job)
    return [Path(job.folder) for job in jobs]


def run_jobs(jobs: list[PartJob], workers: int) -> Iterator[PartJob]:
    """Run the jobs and yield each when it is done, in this process or in `workers` others."""
    with importing_parts():  # once, before the workers are forked
        from streaming.base.format import MDSWriter  # pyright: ignore[reportUnusedImport]  # noqa: F401

    if workers == 1 or len(jobs) <= 1:
        for job in jobs:
            run_job(job)
            yield job
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context, initializer=die_with_parent) as pool:
        futures = {pool.submit(run_job, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process of `prism prepare` was killed (out of memory?); run it again with fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def die_with_parent() -> None:
    """Have the kernel kill this worker when its parent dies; it would wait for ever, or write beside a new run."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def run_job(job: PartJob) -> None:
    """Write one part; the body of a worker process."""
    config = job.config
    shard_format = ShardFormat(
        row_tokens=config.row_tokens, compression=config.compression, shard_bytes=int(config.shard_mib * MIB)
    )
    documents = (document for file in job.files for document in read_documents(file, config))
    try:
        write_part(documents, Path(job.folder), load_tokenizer(job.tokenizer), shard_format)
    except OSError as error:
        raise DataError(
            f"{error.filename or job.folder} cannot be written ({error.strerror}); make room and run again"
        ) from error


class Progress:
    """Reports finished parts with rate and remaining time."""

    def __init__(self, jobs: list[PartJob], report: Report) -> None:
        self.report = report
        self.total_bytes = sum(file.bytes for job in jobs for file in job.files)
        self.total_parts = len(jobs)
        self.done_bytes = 0
        self.done_parts = 0
        self.tokens = 0
        self.begin_s = time.monotonic()

    def finished(self, job: PartJob) -> None:
        """Count one part and report."""
        self.done_parts += 1
        self.done_bytes += sum(file.bytes for file in job.files)
        self.tokens += sum(count.tokens for count in read_part_record(Path(job.folder)).values())
        elapsed_s = time.monotonic() - self.begin_s
        left_s = elapsed_s * (self.total_bytes - self.done_bytes) / max(self.done_bytes, 1)
        self.report(
            f"part {self.done_parts}/{self.total_parts}  {self.done_bytes / MIB:.1f}/{self.total_bytes / MIB:.1f} MiB  "
            f"{self.tokens:,} tokens  {self.tokens / max(elapsed_s, 1e-9):,.0f} tokens/s  {left_s:.0f} s left"
        )


def finish(config: PrepareConfig, tokenizer: Tokenizer, parts: list[Path], output: Path) -> Manifest:
    """Join the parts, write the manifest and remove what only a resume needed."""
    manifest = Manifest(
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        row_tokens=config.row_tokens,
        dtype=row_dtype(tokenizer.vocab_size),
        splits=join_parts(parts, output),
    )
    write_manifest(manifest, output)
    shutil.rmtree(output / "parts")
    return manifest


def summarize(manifest: Manifest) -> str:
    """Return a table of what was prepared: a line a split and source."""
    header = ("split", "source", "documents", "tokens", "rows", "MB text", "bytes/token", "MB stored")
    lines: list[tuple[str, ...]] = [header]
    for split in SPLITS:
        for source, held in sorted(manifest.splits.get(split, {}).items()):
            stored = sum(shard.bytes for shard in held.shards)
            per_token = held.text_bytes / max(held.tokens, 1)
            numbers = (f"{held.documents:,}", f"{held.tokens:,}", f"{held.rows:,}", f"{held.text_bytes / 1e6:.2f}")
            lines.append((split, source, *numbers, f"{per_token:.2f}", f"{stored / 1e6:.2f}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
