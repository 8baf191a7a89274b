"""Rows of a split, read through a cache of decompressed shards: mosaicml-streaming's Stream fetches, checks and unpacks
a shard, its MDS reader reads rows, and this file decides when and says what went wrong.

streaming's own StreamingDataset is not used: where a shard or the cache disk fails it ends an epoch silently or waits
for ever, and its shared memory outlives a killed run. Here processes share nothing but files: a shard is fetched by
whoever holds its lock, and locks end with their process.
"""

import fcntl
import os
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.manifest import Split
from data_pipeline.order import RowOrder
from data_pipeline.packing import TokenRow
from data_pipeline.preflight import REMEDY, ROOM, PreparedData, process_name
from data_pipeline.shards import COLUMN
from data_pipeline.streaming_parts import importing_parts

HASH = "xxh64"
FETCH_THREADS = 2
LOCK_FILES = 64
TOUCH_EVERY_S = 10.0
ATTEMPTS = 4


@contextmanager
def hold_lock(file: Path) -> Generator[None]:
    """Hold an exclusive lock that dies with the process. Threads exclude one another too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would not do where a fork copied the descriptor


@dataclass(frozen=True)
class Shard:
    """A shard of the split: its reader and stream (streaming's), and where it comes from."""

    number: int
    source: int
    reader: Any
    stream: Any
    origin: str
    file: Path
    zip_file: Path | None
    raw_hash: str
    disk_bytes: int


def list_shards(data: PreparedData, split: Split, timeout_s: float) -> list[Shard]:
    """Return the shards of a split in the order of their rows, from the checked index files in the cache."""
    import json

    with importing_parts():
        from streaming.base.format import reader_from_json
        from streaming.base.stream import Stream

    shards: list[Shard] = []
    for number, source in enumerate(data.manifest.sources(split)):
        name = f"{split}/{source}"
        stream: Any = Stream(
            remote=data.location, local=str(data.cache), split=name, validate_hash=HASH,
            download_retry=2, download_timeout=timeout_s / 4, keep_zip=False,
        )  # fmt: skip
        for entry in json.loads((data.cache / name / "index.json").read_text())["shards"]:
            reader: Any = reader_from_json(str(data.cache), name, entry)
            stored = reader.zip_data or reader.raw_data
            shards.append(
                Shard(
                    number=len(shards),
                    source=number,
                    reader=reader,
                    stream=stream,
                    origin=f"{data.location.rstrip('/')}/{name}/{stored.basename}",
                    file=data.cache / name / reader.raw_data.basename,
                    zip_file=data.cache / name / reader.zip_data.basename if reader.zip_data else None,
                    raw_hash=reader.raw_data.hashes[HASH],
                    disk_bytes=reader.raw_data.bytes + (reader.zip_data.bytes if reader.zip_data else 0),
                )
            )
    return shards


class ShardCache:
    """Reads rows of a split by number. Processes that share the cache folder share its shards; create one object a
    process."""

    def __init__(self, data: PreparedData, split: Split, *, cache_limit_bytes: int, timeout_s: float) -> None:
        """cache_limit_bytes: most that decompressed shards may take, 0 for no limit. Raises ValueError below four
        shards' worth."""
        self.folder = data.cache
        self.cache_limit_bytes = cache_limit_bytes
        self.timeout_s = timeout_s
        self.shards = list_shards(data, split, timeout_s)
        self.shard_ends = np.cumsum([shard.reader.samples for shard in self.shards])
        self.futures: dict[int, Future[None]] = {}
        self.touched_s: dict[int, float] = {}
        self.requests: queue.SimpleQueue[tuple[int, Future[None]] | None] = queue.SimpleQueue()
        largest = max(shard.disk_bytes for shard in self.shards)
        if cache_limit_bytes and cache_limit_bytes < 4 * largest:
            raise ValueError(
                f"data.cache_limit_gib={cache_limit_bytes / 2**30:.3g} must hold four shards of "
                f"{largest / 2**30:.3g} GiB; use {4 * largest / 2**30 * 1.05:.2g} or more, or 0 for no limit"
            )
        for _ in range(FETCH_THREADS):  # daemons, so that a download that hangs cannot keep a failed process alive
            threading.Thread(target=self.serve_requests, daemon=True).start()

    def read_row(self, row: int) -> TokenRow:
        """Return stored row `row` (T+1 tokens). Raises DataError naming the shard or the cache folder within
        timeout_s."""
        number = self.find_shard(row)
        shard = self.shards[number]
        within = row - int(self.shard_ends[number]) + shard.reader.samples
        for _ in range(ATTEMPTS):
            self.wait_for(number)
            try:
                return shard.reader[within][COLUMN]
            except FileNotFoundError:  # evicted by another process since
                self.futures.pop(number, None)
            except OSError as error:
                raise DataError(
                    f"{shard.file} cannot be read ({error.strerror}); set data.cache_dir to a folder on a sound disk"
                ) from error
        raise DataError(f"{shard.file} is evicted again and again before it is read; raise data.cache_limit_gib")

    def find_shard(self, row: int) -> int:
        """Return the number of the shard that holds a row."""
        return int(np.searchsorted(self.shard_ends, row, side="right"))

    def find_source(self, row: int) -> int:
        """Return which of the split's sources, sorted by name, a row is of."""
        return self.shards[self.find_shard(row)].source

    def fetch_ahead(self, rows: Iterable[int]) -> None:
        """Begin to fetch the shards of these rows in the background."""
        for number in dict.fromkeys(np.searchsorted(self.shard_ends, list(rows), side="right").tolist()):
            self.request(number)

    def request(self, number: int) -> Future[None]:
        """Return the future of a shard's presence; asks for it at first, and keeps it from eviction while it is
        used."""
        now_s = time.monotonic()
        if number not in self.futures:
            self.futures[number] = Future()
            self.requests.put((number, self.futures[number]))
        elif self.cache_limit_bytes and now_s - self.touched_s.get(number, 0.0) > TOUCH_EVERY_S:
            self.touched_s[number] = now_s
            if self.shards[number].file.exists():
                os.utime(self.shards[number].file)
        return self.futures[number]

    def wait_for(self, number: int) -> None:
        """Wait until a shard is there and checked."""
        try:
            self.request(number).result(timeout=self.timeout_s)
        except TimeoutError as error:
            raise DataError(
                f"{self.shards[number].origin} did not arrive in data.timeout_s={self.timeout_s:g} seconds; "
                "look at the connection to data.path, or raise data.timeout_s"
            ) from error

    def serve_requests(self) -> None:
        """Body of a fetching thread."""
        while True:
            request = self.requests.get()
            if request is None:
                return
            number, future = request
            try:
                self.ensure(self.shards[number])
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def close(self) -> None:
        """End the fetching threads once they are through with what was asked for."""
        for _ in range(FETCH_THREADS):
            self.requests.put(None)

    def ensure(self, shard: Shard) -> None:
        """Bring a shard into the cache, or find it there, and check the hash of what will be read. Raises DataError."""
        try:
            with hold_lock(self.folder / "locks" / f"shard_{shard.number % LOCK_FILES:02}"):
                if shard.file.exists() and not self.is_sound(shard):
                    shard.file.unlink()
                if not shard.file.exists():
                    self.make_room(shard)
                    self.fetch(shard)
        except DataError:
            raise
        except OSError as error:
            raise DataError(self.describe(shard, error)) from error
        except Exception as error:
            raise DataError(f"{shard.origin} is damaged or cannot be fetched ({error}); {REMEDY}") from error

    def fetch(self, shard: Shard) -> None:
        """Fetch, check and unpack. What a killed or failed attempt left is removed first, and after a failure again."""
        leftovers = [file for file in (shard.zip_file, shard.file) if file is not None]
        try:
            for file in leftovers:
                file.unlink(missing_ok=True)
            shard.stream.prepare_shard(shard.reader)
            if not self.is_sound(shard):
                raise DataError(
                    f"{shard.origin} was unpacked to {shard.file} with a wrong hash; {REMEDY}, or change the cache disk"
                )
        except BaseException:
            for file in leftovers:
                for name in (file, Path(f"{file}.tmp")):
                    name.unlink(missing_ok=True)
            raise

    def describe(self, shard: Shard, error: OSError) -> str:
        """Say whether the data or the cache disk failed, with the file's name."""
        if isinstance(error, FileNotFoundError) and error.filename == shard.origin:
            return f"{shard.origin} is missing; {REMEDY}"
        where = error.filename2 or error.filename or shard.file  # the second is the target where a copy fails
        return (
            f"{where} failed ({error.strerror or error}) while {shard.origin} was brought into the cache folder "
            f"{self.folder}; {ROOM}"
        )

    def is_sound(self, shard: Shard) -> bool:
        """Whether the unpacked shard in the cache has its recorded hash."""
        with importing_parts():
            from streaming.base.hashing import get_hash

        return get_hash(HASH, shard.file.read_bytes()) == shard.raw_hash

    def make_room(self, shard: Shard) -> None:
        """Delete the shards used longest ago until this one fits under the limit."""
        if not self.cache_limit_bytes:
            return
        with hold_lock(self.folder / "locks" / "evict"):
            held = sorted((stat.st_mtime, stat.st_size, file) for file, stat in list_cached(self.folder))
            total = sum(size for _, size, _ in held) + shard.disk_bytes
            for _, size, file in held:
                if total <= self.cache_limit_bytes:
                    break
                file.unlink(missing_ok=True)
                total -= size


def list_cached(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the unpacked shards of all splits in a cache folder; one that vanishes meanwhile is left out."""
    for file in folder.rglob("*.mds"):
        try:
            yield file, file.stat()
        except FileNotFoundError:
            continue


class OrderCache:
    """The order of each epoch, computed by one process of those that share the folder and mapped from a file by the
    others."""

    def __init__(self, order: RowOrder, folder: Path) -> None:
        self.order = order
        self.folder = folder

    def file(self, epoch: int) -> Path:
        """Path of an epoch's order."""
        return self.folder / f"epoch_{epoch:06}.npy"

    def load(self, epoch: int) -> NDArray[Any]:
        """Return the row numbers of an epoch in order; computes them if nobody has. Raises DataError when they
        cannot be written."""
        file = self.file(epoch)
        try:
            if not file.exists():
                with hold_lock(self.folder / "lock"):
                    if not file.exists():
                        self.compute(epoch)
            return np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{file}, the order of epoch {epoch}, failed ({error}); delete it, make room there, or set "
                "data.cache_dir to a folder on another disk"
            ) from error

    def compute(self, epoch: int) -> None:
        """Write an epoch's order, published by rename, and drop the one of two epochs before."""
        rows = self.order.compute_epoch(epoch)
        beside = self.folder / f".{process_name()}.npy"
        try:
            np.save(beside, rows.astype(np.uint32) if rows.max(initial=0) < 2**32 else rows)
            beside.replace(self.file(epoch))
        finally:
            beside.unlink(missing_ok=True)
        self.file(epoch - 2).unlink(missing_ok=True)

    def load_ahead(self, epoch: int) -> None:
        """Begin to compute an epoch's order in the background; an error is met, and named, when it is needed."""

        def compute_quietly() -> None:
            try:
                self.load(epoch)
            except DataError:
                return

        threading.Thread(target=compute_quietly, daemon=True).start()
