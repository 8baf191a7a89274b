"""What breaks in mid-run is raised by the loader, soon, as one error that names the file; whole runs are ended in
test_failures_in_training.py."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader, build_loader
from tests.data_pipeline.disks import REFUSALS, fill, full_disk, make_read_only
from tests.data_pipeline.test_preflight import flip, truncate

LIMIT_S, TIMEOUT_S = 60.0, 20.0
SHARD = "train/alpha/shard.000006.mds.zstd"
FORK = multiprocessing.get_context("fork")


def load(folder: Path, cache_dir: Path, workers: int, **keys: Any) -> Loader:
    """A loader that reads in stored order, so that SHARD comes long after the first batch."""
    config = DataConfig(path=str(folder), row_tokens=64, workers=workers, shuffle=False, timeout_s=TIMEOUT_S)
    keys = {"rank": 0, "world_size": 1, "micro_batch_rows": 4, **keys}
    return build_loader(config, split="train", seed=7, cache_dir=cache_dir, endless=True, **keys)


def read_for_ever(pipe: Connection, folder: Path, cache: Path, workers: int) -> None:
    """Body of a reading process: says when its first batch is there, waits to go on, and says how it ended."""
    try:
        for step, _ in enumerate(load(folder, cache, workers)):
            if step == 0:
                pipe.send("reading")
                assert pipe.recv() == "go on"
    except DataError as error:
        pipe.send(str(error))


def fail_in_mid_run(folder: Path, cache: Path, workers: int, harm: Callable[[], None]) -> str:
    """Start to read, do the harm after the first batch, and return the error."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=read_for_ever, args=(theirs, folder, cache, workers))
    process.start()
    try:
        assert receive(ours) == "reading"
        harm()
        ours.send("go on")
        message = receive(ours)
        process.join(LIMIT_S)
        assert process.exitcode == 0
        return message
    finally:
        process.kill()


def receive(pipe: Connection) -> str:
    assert pipe.poll(LIMIT_S), "nothing was heard of a rank in time"
    return pipe.recv()


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    with full_disk(tmp_path / "disk", free_bytes=1 << 20) as folder:
        yield folder


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_shard_is_raised_with_its_name(prepared_copy, tmp_path, damage, workers) -> None:
    message = fail_in_mid_run(prepared_copy, tmp_path / "cache", workers, lambda: damage(prepared_copy / SHARD))
    assert f"{prepared_copy}/{SHARD}" in message and "\n" not in message


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("spoil", [fill, make_read_only])
def test_a_cache_disk_that_fills_up_or_turns_read_only_is_named(prepared, disk, spoil, workers) -> None:
    message = fail_in_mid_run(prepared, disk, workers, lambda: spoil(disk))
    assert message.startswith(str(disk)) and "data.cache_dir" in message and "\n" not in message
    assert any(reason in message for reason in REFUSALS)


def test_a_rank_that_needs_no_bad_shard_fails_at_its_next_fetch_with_the_same_error(prepared_copy, tmp_path) -> None:
    one, other = (load(prepared_copy, tmp_path / "cache", 0, rank=rank, world_size=2) for rank in range(2))
    healthy = iter(other)
    next(healthy)
    flip(prepared_copy / SHARD)
    with pytest.raises(DataError) as first:
        list(one)
    with pytest.raises(DataError) as second:
        next(healthy)
    assert str(first.value) == str(second.value) == one.failure() == other.failure()


def test_the_failure_of_an_earlier_start_does_not_stop_a_repaired_run(prepared_copy, tmp_path) -> None:
    whole = (prepared_copy / SHARD).read_bytes()
    loader = load(prepared_copy, tmp_path / "cache", 0, world_size=2)
    flip(prepared_copy / SHARD)
    with pytest.raises(DataError):
        list(loader)
    (prepared_copy / SHARD).write_bytes(whole)
    again = load(prepared_copy, tmp_path / "cache", 0, world_size=2)
    assert again.failure() is None and len(list(itertools.islice(again, again.batches_per_pass))) > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_loader_process_is_reported_and_not_waited_for(prepared, tmp_path, workers) -> None:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=read_with_a_killed_worker, args=(theirs, prepared, tmp_path, workers))
    process.start()
    message = receive(ours)
    assert "loader process" in message or "DataLoader worker" in message
    process.join()


def read_with_a_killed_worker(pipe: Connection, folder: Path, cache: Path, workers: int) -> None:
    try:
        for step, _ in enumerate(load(folder, cache, workers)):
            if step == 1:
                os.kill(max(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)
    except RuntimeError as error:  # torch may raise its own from a signal handler, wherever the process is
        pipe.send(str(error))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_process_killed_under_a_reading_thread_is_reported_long_before_the_timeout(
    prepared, tmp_path, workers
) -> None:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=read_in_a_thread, args=(theirs, prepared, tmp_path, workers))
    process.start()
    seconds, message = json.loads(receive(ours))
    assert "loader process" in message and "exited unexpectedly" in message
    assert seconds < TIMEOUT_S / 2
    process.join()


def read_in_a_thread(pipe: Connection, folder: Path, cache: Path, workers: int) -> None:
    reader = threading.Thread(target=time_a_killed_worker, args=(pipe, folder, cache, workers))
    reader.start()
    reader.join()


def time_a_killed_worker(pipe: Connection, folder: Path, cache: Path, workers: int) -> None:
    killed_s = 0.0
    try:
        for step, _ in enumerate(load(folder, cache, workers)):
            if step == 1:
                killed_s = time.monotonic()
                os.kill(max(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)
    except RuntimeError as error:
        pipe.send(json.dumps([time.monotonic() - killed_s, str(error)]))


def test_a_killed_run_starts_again_in_the_same_place_and_leaves_nothing_behind(prepared, tmp_path) -> None:
    memory_before = set(Path("/dev/shm").iterdir())
    expected = [batch["input_ids_BT"] for batch in itertools.islice(load(prepared, tmp_path / "other", 0), 60)]
    reader = FORK.Process(target=read_until_killed, args=(prepared, tmp_path / "cache"))
    reader.start()
    deadline_s = time.monotonic() + 30
    while len(list((tmp_path / "cache").rglob("*.mds"))) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert reader.pid is not None
    os.killpg(reader.pid, signal.SIGKILL)
    reader.join()
    for workers in (0, 2):
        again = itertools.islice(load(prepared, tmp_path / "cache", workers), 60)
        assert all(torch.equal(batch["input_ids_BT"], known) for batch, known in zip(again, expected, strict=True))
    left = {file for file in set(Path("/dev/shm").iterdir()) - memory_before if "torch" not in file.name}
    assert not {file for file in left if file.exists()}, "no shared memory of streaming's outlives the run"
    shutil.rmtree(tmp_path / "cache")
    assert len(list(itertools.islice(load(prepared, tmp_path / "cache", 1), 3))) == 3


def read_until_killed(folder: Path, cache: Path) -> None:
    os.setpgid(0, 0)
    for _ in load(folder, cache, 2):
        time.sleep(0.005)
