"""What breaks in mid-run ends the run on every rank with one error that names the file, soon, and with an exit code."""

import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader, build_loader
from tests.data_pipeline.disks import fill, full_disk, make_read_only
from tests.data_pipeline.test_preflight import flip, truncate

LIMIT_S = 60.0
SHARD = "train/alpha/shard.000006.mds.zstd"
FORK = multiprocessing.get_context("fork")


def load(folder: Path, cache_dir: Path, workers: int, **keys: Any) -> Loader:
    """A loader that reads in stored order, so that SHARD comes long after the first batch."""
    config = DataConfig(path=str(folder), row_tokens=64, workers=workers, shuffle=False, timeout_s=20.0)
    keys = {"rank": 0, "world_size": 1, "micro_batch_rows": 4, **keys}
    return build_loader(config, split="train", seed=7, cache_dir=cache_dir, endless=True, **keys)


def read_like_a_trainer(loader: Loader, pipe: Connection, world_size: int) -> None:
    """Read for ever, in step with the other ranks, which agree each step whether one of them failed."""
    batches = iter(loader)
    message = ""
    for step in itertools.count():
        try:
            next(batches)
        except DataError as error:
            message = str(error)
        failed = torch.tensor([bool(message)], dtype=torch.int32)
        if world_size > 1:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failed.item():
            raise DataError(message or loader.failure() or "another rank failed")
        if step == 0:
            pipe.send("reading")
            assert pipe.recv() == "go on"


def run_rank(pipe: Connection, port: int, folder: Path, cache: Path, workers: int, rank: int, world_size: int) -> None:
    """Body of a rank: a process group as the trainer has it, a loader, and an exit code."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    if world_size > 1:
        dist.init_process_group("gloo")
    try:
        loader = load(folder, cache, workers, rank=rank, world_size=world_size)
        read_like_a_trainer(loader, pipe, world_size)
    except DataError as error:
        pipe.send(str(error))
        raise SystemExit(1) from error


def fail_in_mid_run(folder: Path, cache: Path, workers: int, world_size: int, harm: Callable[[int], None]) -> list[str]:
    """Start the ranks, harm them after their first batch (called with each process id), and return each one's error."""
    port = find_free_port()
    pipes = [FORK.Pipe() for _ in range(world_size)]
    processes = [
        FORK.Process(target=run_rank, args=(pipes[rank][1], port, folder, cache, workers, rank, world_size))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        assert [receive(ours) for ours, _ in pipes] == ["reading"] * world_size
        for process in processes:
            assert process.pid is not None
            harm(process.pid)
        begin_s = time.monotonic()
        for ours, _ in pipes:
            ours.send("go on")
        messages = [receive(ours) for ours, _ in pipes]
        for process in processes:
            process.join(LIMIT_S - (time.monotonic() - begin_s))
        assert [process.exitcode for process in processes] == [1] * world_size
        return messages
    finally:
        for process in processes:
            process.kill()


def receive(pipe: Connection) -> str:
    assert pipe.poll(LIMIT_S), "nothing was heard of a rank in time"
    return pipe.recv()


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    with full_disk(tmp_path / "disk", free_bytes=1 << 20) as folder:
        yield folder


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_shard_ends_every_rank_with_its_name(prepared_copy, tmp_path, damage, workers, world_size) -> None:
    done: list[int] = []

    def harm(pid: int) -> None:
        if not done:
            damage(prepared_copy / SHARD)
        done.append(pid)

    for message in fail_in_mid_run(prepared_copy, tmp_path / "cache", workers, world_size, harm):
        assert f"{prepared_copy}/{SHARD}" in message and "\n" not in message


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("spoil", [fill, make_read_only])
def test_a_cache_disk_that_fills_up_or_turns_read_only_ends_every_rank_with_its_name(
    prepared, disk, spoil, workers, world_size
) -> None:
    messages = fail_in_mid_run(prepared, disk, workers, world_size, lambda pid: spoil(disk, pid=pid))
    for message in messages:
        assert str(disk) in message and "\n" not in message
        assert any(reason in message for reason in ("No space left", "Read-only", "File too large"))


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
