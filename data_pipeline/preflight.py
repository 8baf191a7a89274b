"""Checks before the first row is read, and of a whole prepared folder (`prism inspect --verify`)."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import Verify
from data_pipeline.errors import DataError
from data_pipeline.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    Split,
    StoredFile,
    check_tokenizer,
    hash_file,
    read_manifest,
)
from data_pipeline.streaming_parts import importing_parts
from data_pipeline.tokenizer import load_tokenizer

AUTO_HASH_BYTES = 256 << 20
REMEDY = "copy that file again or prepare the data anew"
ROOM = "make room there, or set data.cache_dir to a folder on another disk"


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A prepared folder that passed its checks, and the folder that caches it."""

    location: str
    """Folder or URL of the prepared data."""
    manifest: Manifest
    cache: Path
    """Folder of this data set alone inside the run's cache folder; holds verified copies of the index files."""


def is_url(location: str) -> bool:
    """Whether a location is in an object store rather than a folder."""
    return "://" in location


def open_prepared_data(
    location: str, split: Split, *, cache_dir: Path, verify: Verify, timeout_s: float
) -> PreparedData:
    """Check manifest, tokenizer, indices and, in a local folder, the split's shards; make the cache folder ready.

    Raises DataError naming the first file that is missing, damaged or cannot be written; ValueError for an empty path.
    """
    if not location:
        raise ValueError("data.path= must be a folder written by `prism prepare`; use data.path=data/NAME")
    make_cache_folder(cache_dir)
    manifest = fetch_manifest(location, cache_dir, timeout_s)
    data = PreparedData(location=location, manifest=manifest, cache=cache_dir / manifest.fingerprint[:16])
    sources = manifest.sources(split)
    try:
        tokenizer = fetch_file(location, TOKENIZER_NAME, data.cache, timeout_s)
        check_tokenizer(manifest, load_tokenizer(tokenizer), name=f"{location.rstrip('/')}/{TOKENIZER_NAME}")
        for held in sources.values():
            fetch_index(data, held.index, timeout_s)
    except OSError as error:
        raise DataError(describe_cache_error(error, data.cache)) from error
    shards = [shard for held in sources.values() for shard in held.shards]
    if not is_url(location):
        hashes = verify == "hashes" or (verify == "auto" and sum(shard.bytes for shard in shards) <= AUTO_HASH_BYTES)
        for problem in find_damage(Path(location), shards, hashes=hashes):
            raise DataError(problem)
    check_free_space(data, max(shard.bytes for shard in shards))
    return data


def process_name() -> str:
    """A name no other process has that may share a cache folder, whatever its node."""
    return f"{os.uname().nodename}-{os.getpid()}"


def make_cache_folder(cache_dir: Path) -> None:
    """Create the folder and prove that it can be written. Raises DataError naming it."""
    probe = cache_dir / f".probe-{process_name()}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise DataError(describe_cache_error(error, cache_dir)) from error


def describe_cache_error(error: OSError, folder: Path) -> str:
    """Say which cache folder failed and why."""
    return f"the cache folder {folder} cannot be written ({error.strerror}); {ROOM}"


def check_free_space(data: PreparedData, shard_bytes: int) -> None:
    """Raise DataError when the cache disk has no room for one more shard."""
    free_bytes = shutil.disk_usage(data.cache).free
    if free_bytes < 2 * shard_bytes:
        raise DataError(
            f"the cache folder {data.cache} has {free_bytes / 2**20:.1f} MiB free and needs "
            f"{2 * shard_bytes / 2**20:.1f} MiB; {ROOM}"
        )


def fetch_manifest(location: str, cache_dir: Path, timeout_s: float) -> Manifest:
    """Read the manifest of a folder or URL; that of a URL is fetched anew at each start."""
    if not is_url(location):
        return read_manifest(Path(location) / MANIFEST_NAME)
    target = cache_dir / f".manifest-{process_name()}.json"
    target.unlink(missing_ok=True)
    try:
        download(location, MANIFEST_NAME, target, timeout_s)
        return read_manifest(target)
    finally:
        target.unlink(missing_ok=True)


def fetch_index(data: PreparedData, index: StoredFile, timeout_s: float) -> None:
    """Bring an index.json into the cache, or find it there, checked against the manifest."""
    cached = data.cache / index.name
    origin = f"{data.location.rstrip('/')}/{index.name}"
    if not is_url(data.location):
        for problem in find_damage(Path(data.location), [index], hashes=True):
            raise DataError(problem)
    if not cached.exists() or hash_file(cached) != index.sha256:
        cached = fetch_file(data.location, index.name, data.cache, timeout_s)
    if hash_file(cached) != index.sha256:
        raise DataError(f"{origin} does not match the manifest's sha256; {REMEDY}")


def fetch_file(location: str, name: str, cache: Path, timeout_s: float) -> Path:
    """Copy a small file into the cache anew, published by rename, and return its path there."""
    target = cache / name
    beside = target.with_name(f".{target.name}.{process_name()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if is_url(location):
            download(location, name, beside, timeout_s)
        else:
            copy_local(Path(location) / name, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def copy_local(origin: Path, target: Path) -> None:
    """Copy a file of the prepared folder. Raises DataError naming it when it cannot be read."""
    try:
        content = origin.read_bytes()
    except OSError as error:
        raise DataError(f"{origin} cannot be read ({error.strerror}); {REMEDY}") from error
    target.write_bytes(content)


def download(location: str, name: str, target: Path, timeout_s: float) -> None:
    """Fetch a small file from an object store. Raises DataError naming its address."""
    with importing_parts():
        from streaming.base.storage import CloudDownloader

    address = f"{location.rstrip('/')}/{name}"
    try:
        CloudDownloader.get(location).download(address, str(target), timeout_s)
    except Exception as error:
        raise DataError(f"{address} cannot be fetched ({error}); check data.path and your credentials") from error


def find_damage(folder: Path, files: list[StoredFile], *, hashes: bool) -> Iterator[str]:
    """Yield a message for each file that is missing, of another size or (with `hashes`) of other content than
    recorded."""
    for stored in files:
        file = folder / stored.name
        try:
            size = file.stat().st_size
            if size != stored.bytes:
                yield f"{file} has {size} bytes instead of {stored.bytes}; {REMEDY}"
            elif hashes and hash_file(file) != stored.sha256:
                yield f"{file} does not match its sha256 in {MANIFEST_NAME}; {REMEDY}"
        except FileNotFoundError:
            yield f"{file} is missing; {REMEDY}"
        except OSError as error:
            yield f"{file} cannot be read ({error.strerror}); {REMEDY}"


def verify_folder(folder: Path) -> int:
    """Check every file of a prepared folder against sizes and hashes and return how many. Raises DataError naming
    all bad ones."""
    manifest = read_manifest(folder / MANIFEST_NAME)
    check_tokenizer(manifest, load_tokenizer(folder / TOKENIZER_NAME), name=str(folder / TOKENIZER_NAME))
    held = [source for sources in manifest.splits.values() for source in sources.values()]
    files = [file for source in held for file in (source.index, *source.shards)]
    problems = list(find_damage(folder, files, hashes=True))
    if problems:
        raise DataError("\n".join(problems))
    return len(files) + 1
