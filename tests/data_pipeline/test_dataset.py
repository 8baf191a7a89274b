"""The shard cache: rows as stored, bad copies replaced, room kept, and nothing that waits for ever."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.dataset import OrderCache, ShardCache, hold_lock
from data_pipeline.errors import DataError
from data_pipeline.order import RowOrder
from data_pipeline.preflight import PreparedData, open_prepared_data
from tests.data_pipeline.test_preflight import SHARD, flip


def open_data(folder: Path, cache: Path) -> PreparedData:
    return open_prepared_data(str(folder), "train", cache_dir=cache, verify="sizes", timeout_s=20.0)


def open_cache(data: PreparedData, **keys: Any) -> ShardCache:
    return ShardCache(data, "train", **{"cache_limit_bytes": 0, "timeout_s": 20.0, **keys})


def read_all(cache: ShardCache) -> np.ndarray:
    return np.stack([cache.read_row(row) for row in range(int(cache.shard_ends[-1]))])


@pytest.fixture(scope="module")
def rows(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return read_all(open_cache(open_data(prepared, tmp_path_factory.mktemp("cache"))))


def test_rows_chain_within_a_source(rows, prepared, tmp_path) -> None:
    manifest = open_data(prepared, tmp_path).manifest
    alpha = manifest.sources("train")["alpha"].rows
    assert rows.shape == (sum(held.rows for held in manifest.sources("train").values()), 65)
    assert (rows[1:alpha, 0] == rows[: alpha - 1, -1]).all()


@pytest.mark.parametrize("kind", ["flipped", "cut off", "half-fetched"])
def test_a_bad_copy_left_in_the_cache_is_replaced(prepared, tmp_path, rows, kind) -> None:
    data = open_data(prepared, tmp_path)
    read_all(open_cache(data))
    shard = open_cache(data).shards[2]
    if kind == "flipped":
        flip(shard.file)
    elif kind == "cut off":
        shard.file.write_bytes(shard.file.read_bytes()[:100])
    else:
        shard.file.unlink()
        assert shard.zip_file is not None
        shard.zip_file.write_bytes(b"what a killed process had fetched")
    assert (read_all(open_cache(data)) == rows).all()


def test_a_repaired_shard_is_read_after_its_failure_in_the_same_cache(prepared_copy, tmp_path, rows) -> None:
    data = open_data(prepared_copy, tmp_path / "cache")
    whole = (prepared_copy / SHARD).read_bytes()
    flip(prepared_copy / SHARD)
    with pytest.raises(DataError, match=f"{prepared_copy}/{SHARD} is damaged"):
        read_all(open_cache(data))
    (prepared_copy / SHARD).write_bytes(whole)
    assert (read_all(open_cache(data)) == rows).all()


def test_the_cache_keeps_within_its_limit_and_still_reads_every_row(prepared, tmp_path, rows) -> None:
    data = open_data(prepared, tmp_path)
    limit = int(4.5 * max(shard.disk_bytes for shard in open_cache(data).shards))
    cache = open_cache(data, cache_limit_bytes=limit)
    order = np.random.default_rng(0).permutation(len(rows))[:300]
    for row in order:
        assert (cache.read_row(int(row)) == rows[row]).all()
        assert sum(file.stat().st_size for file in data.cache.rglob("*.mds*")) <= limit
    assert len(list(data.cache.rglob("*.mds"))) < len(cache.shards)


def test_a_limit_below_four_shards_is_refused_with_one_that_fits(prepared, tmp_path) -> None:
    message = r"data\.cache_limit_gib=.* must hold four shards of .*; use [0-9.]+ or more, or 0 for no limit"
    with pytest.raises(ValueError, match=message):
        open_cache(open_data(prepared, tmp_path), cache_limit_bytes=1000)


def test_a_fetch_that_hangs_ends_at_the_timeout(prepared, tmp_path, monkeypatch) -> None:
    cache = open_cache(open_data(prepared, tmp_path), timeout_s=0.3)
    hang = threading.Event()
    monkeypatch.setattr(cache, "fetch", lambda shard: hang.wait(20))
    begin_s = time.monotonic()
    with pytest.raises(DataError, match=r"shard\.000000\.mds\.zstd did not arrive in data\.timeout_s=0\.3 seconds"):
        cache.read_row(0)
    hang.set()
    assert time.monotonic() - begin_s < 5


def test_two_processes_at_once_read_the_same_rows_from_one_cache(prepared, tmp_path, rows) -> None:
    data = open_data(prepared, tmp_path)
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        results = pool.map(read_fresh, [data, data], chunksize=1)
    assert all((result == rows).all() for result in results)


def read_fresh(data: PreparedData) -> np.ndarray:
    return read_all(open_cache(data))


def test_the_lock_of_a_killed_process_is_free(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=hold_for_ever, args=(tmp_path / "lock",))
    process.start()
    deadline_s = time.monotonic() + 20
    while not (tmp_path / "lock").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with hold_lock(tmp_path / "lock"):
        process.join()


def hold_for_ever(file: Path) -> None:
    with hold_lock(file):
        time.sleep(600)


def test_an_order_is_computed_once_kept_and_dropped_two_epochs_later(tmp_path) -> None:
    order = RowOrder(shard_rows={"a": (30, 30)}, seed=1)
    cache = OrderCache(order, tmp_path)
    first = cache.load(0)
    assert first.tolist() == order.compute_epoch(0).tolist()
    stored = cache.file(0).stat().st_ino
    assert OrderCache(order, tmp_path).load(0).tolist() == first.tolist() and cache.file(0).stat().st_ino == stored
    cache.load(2)
    assert not cache.file(0).exists() and first.tolist() == order.compute_epoch(0).tolist()


def test_an_order_that_cannot_be_read_is_named(tmp_path) -> None:
    cache = OrderCache(RowOrder(shard_rows={"a": (30,)}, seed=1), tmp_path)
    cache.file(0).write_bytes(json.dumps("no order").encode())
    with pytest.raises(DataError, match=f"{cache.file(0)}, the order of epoch 0, failed"):
        cache.load(0)
