"""The loader: exact to the micro-batch, in any number of processes and ranks, before and after a resume."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.batch import Batch, RowSlice
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.loader import FailureNote, Loader, build_loader, count_local_ranks, plan_workers
from data_pipeline.mixture import apportion
from data_pipeline.synthetic import write_synthetic_dataset


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of few rows, so that epochs end soon."""
    folder = tmp_path_factory.mktemp("small") / "data"
    return write_synthetic_dataset(folder, vocab_size=512, row_tokens=64, documents=24, shard_mib=0.004)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def load(folder: Path | str, cache_dir: Path, *, data: dict[str, Any] | None = None, **keys: Any) -> Loader:
    config = DataConfig(**{"path": str(folder), "row_tokens": 64, "workers": 0, **(data or {})})
    keys = {"split": "train", "rank": 0, "world_size": 1, "micro_batch_rows": 4, "seed": 7, "endless": True, **keys}
    return build_loader(config, cache_dir=cache_dir, **keys)


def take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def as_rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids_BT"].tolist()]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resuming_reads_the_next_batch_whatever_was_prefetched(small, cache_dir, workers) -> None:
    data = {"workers": workers}
    per_epoch = load(small, cache_dir).batches_per_pass
    whole = as_rows(take(load(small, cache_dir), 3 * per_epoch))
    for stop in (0, 1, 5, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
        first = load(small, cache_dir, data=data)
        before = as_rows(take(first, stop))
        second = load(small, cache_dir, data=data)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + as_rows(take(second, 5)) == whole[: 4 * (stop + 5)]
        assert second.state_dict() != first.state_dict()


def test_at_an_epochs_end_the_state_is_the_next_epochs_beginning(small, cache_dir) -> None:
    loader = load(small, cache_dir)
    take(loader, loader.batches_per_pass)
    assert (loader.state_dict()["epoch"], loader.state_dict()["rows_in_epoch"]) == (1, 0)


def test_the_state_counts_what_was_handed_out_at_that_moment(small, cache_dir) -> None:
    loader = load(small, cache_dir, data={"workers": 2, "prefetch_batches": 4})
    for count, _ in enumerate(itertools.islice(loader, 6), start=1):
        assert loader.state_dict()["rows_in_epoch"] == 4 * count
    assert [next(iter(loader))["input_ids_BT"].tolist()] == [
        batch["input_ids_BT"].tolist() for batch in take(load(small, cache_dir), 7)[6:]
    ]


@pytest.mark.parametrize(("split", "endless"), [("train", True), ("validation", False)])
def test_group_of_processes_reads_slices_of_the_rows_of_its_data_rank(small, cache_dir, split, endless) -> None:
    keys = {"world_size": 2, "split": split, "endless": endless, "micro_batch_rows": 2}
    for rank in range(2):
        whole = take(load(small, cache_dir, rank=rank, **keys), 3)
        slices = [RowSlice(index=index, count=4) for index in range(4)]
        parts = [take(load(small, cache_dir, rank=rank, row_slice=part, **keys), 3) for part in slices]
        assert whole and {len(part) for part in parts} == {len(whole)}
        for number, batch in enumerate(whole):
            of_rows = {"row_hash_B", "source_B"}
            assert all(part[number][name].equal(batch[name]) for part in parts for name in of_rows)
            for name in batch.keys() - of_rows:
                assert torch.cat([part[number][name] for part in parts], dim=1).equal(batch[name])
        assert len({json.dumps(load(small, cache_dir, row_slice=part).state_dict()) for part in slices}) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_limited_pass_name_their_sources_and_are_the_same_for_all_ranks(small, cache_dir, workers) -> None:
    keys = {"split": "validation", "endless": False, "micro_batch_rows": 2}
    loader = load(small, cache_dir, **keys)
    held = [source.rows for source in loader.manifest.sources("validation").values()]
    first_of_second = as_rows([*loader])[held[0]]
    limit = sum(held) - 1
    for world_size in (1, 2, 4):
        keys |= {"world_size": world_size, "limit_rows": limit, "data": {"workers": workers}}
        batches = [batch for rank in range(world_size) for batch in load(small, cache_dir, rank=rank, **keys)]
        sources = torch.cat([batch["source_B"] for batch in batches]).tolist()
        share = apportion(limit, {"0": held[0], "1": held[1]})
        assert Counter(sources) == Counter({0: share["0"], 1: share["1"], -1: len(sources) - limit})
        assert dict(zip(as_rows(batches), sources, strict=True))[first_of_second] == 1


def test_nodes_are_counted_in_data_ranks(monkeypatch) -> None:
    def count(local_processes: int, world_size: int, processes_per_rank: int) -> int:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_processes))
        return count_local_ranks(world_size, processes_per_rank)

    assert [count(8, 16, 1), count(8, 8, 2), count(8, 2, 8), count(8, 1, 16), count(3, 4, 1)] == [8, 4, 1, 1, 4]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert count_local_ranks(4, 2) == 4


def test_failure_of_one_process_of_a_group_reaches_the_others_and_not_a_later_start(tmp_path) -> None:
    first = FailureNote(tmp_path, is_first=True, shared=True)
    second = FailureNote(tmp_path, is_first=False, shared=True)
    second.write("shard.3 is truncated")
    assert first.read() == second.read() == "shard.3 is truncated"
    assert FailureNote(tmp_path, is_first=False, shared=True).read() == "shard.3 is truncated"
    assert FailureNote(tmp_path, is_first=True, shared=True).read() is None


def test_slice_of_a_data_rank_finds_the_note_that_its_own_group_left(small, tmp_path) -> None:
    groups = [load(small, tmp_path, row_slice=RowSlice(index=index, count=2)) for index in range(2)]
    groups[1].note.write("shard.3 is truncated")
    with pytest.raises(DataError, match=r"shard\.3 is truncated"):
        take(groups[0], 1)


def test_each_step_holds_the_same_rows_for_one_two_and_four_ranks_over_epoch_ends(small, cache_dir) -> None:
    steps = 3 * (load(small, cache_dir, micro_batch_rows=8).batches_per_pass)
    sets: list[list[Counter[tuple[int, ...]]]] = []
    for world_size, micro in ((1, 8), (1, 2), (2, 2), (4, 2), (4, 1)):
        keys = {"world_size": world_size, "micro_batch_rows": micro, "global_batch_rows": 8}
        per_step = 8 // (world_size * micro)
        ranks = [load(small, cache_dir, rank=rank, **keys) for rank in range(world_size)]
        rows = [as_rows(take(loader, steps * per_step)) for loader in ranks]
        share = 8 // world_size
        sets.append(
            [Counter(row for of_rank in rows for row in of_rank[s * share : (s + 1) * share]) for s in range(steps)]
        )
        assert len({json.dumps(loader.state_dict()) for loader in ranks}) == 1
    assert all(other == sets[0] for other in sets[1:])


@pytest.mark.parametrize("after_steps", [2, "epoch"])
def test_a_state_of_two_ranks_is_continued_by_four_with_the_same_rows(small, cache_dir, after_steps) -> None:
    keys = {"global_batch_rows": 8, "micro_batch_rows": 1}
    whole = load(small, cache_dir, global_batch_rows=8, micro_batch_rows=8)
    steps = whole.batches_per_pass if after_steps == "epoch" else after_steps
    expected = as_rows(take(whole, steps + 1))[-8:]
    before = load(small, cache_dir, world_size=2, **keys)
    take(before, 4 * steps)
    found: list[tuple[int, ...]] = []
    for rank in range(4):
        after = load(small, cache_dir, rank=rank, world_size=4, **keys)
        after.load_state_dict(before.state_dict())
        found += as_rows(take(after, 2))
    assert Counter(found) == Counter(expected)


def test_a_state_within_a_step_is_refused_where_the_ranks_cannot_share_it(small, cache_dir) -> None:
    one = load(small, cache_dir, micro_batch_rows=2, global_batch_rows=8)
    take(one, 1)
    with pytest.raises(ValueError, match=r"world size 4 must divide the 2 rows of the epoch"):
        load(small, cache_dir, world_size=4, micro_batch_rows=1, global_batch_rows=8).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("data", "keys", "name"),
    [
        ({}, {"seed": 8}, "seed=8 must equal seed=7"),
        ({}, {"micro_batch_rows": 2}, r"train\.global_batch_rows=2 must equal train\.global_batch_rows=4"),
        ({"shuffle": False}, {}, r"data\.shuffle=False must equal data\.shuffle=True"),
        ({"weights": {"alpha": 1.0, "beta": 1.0}}, {}, r"data\.weights={'alpha': 1\.0, 'beta': 1\.0} must equal"),
        ({"num_canonical_nodes": 2}, {}, r"data\.num_canonical_nodes=2 must equal data\.num_canonical_nodes=16"),
        ({"shuffle_block_rows": 9}, {}, r"data\.shuffle_block_rows=9 must equal"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(small, cache_dir, data, keys, name) -> None:
    state = load(small, cache_dir).state_dict()
    with pytest.raises(ValueError, match=f"{name}.* of the checkpoint"):
        load(small, cache_dir, data=data, **keys).load_state_dict(state)


def test_a_state_of_another_data_set_is_refused(small, prepared, cache_dir) -> None:
    with pytest.raises(ValueError, match=r"data fingerprint=.* must equal data fingerprint=.* of the checkpoint"):
        load(prepared, cache_dir).load_state_dict(load(small, cache_dir).state_dict())


def test_micro_batch_workers_and_prefetch_may_change_at_a_resume(small, cache_dir) -> None:
    one = load(small, cache_dir, global_batch_rows=8)
    expected = as_rows(take(load(small, cache_dir), 8))[8:]
    take(one, 2)
    other = load(small, cache_dir, micro_batch_rows=8, data={"workers": 2, "prefetch_batches": 3})
    other.load_state_dict(one.state_dict())
    assert as_rows(take(other, 3)) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_validation_pass_reads_each_row_once_and_again_the_next_time(small, cache_dir, world_size, workers) -> None:
    keys = {"split": "validation", "endless": False, "world_size": world_size, "data": {"workers": workers}}
    loaders = [load(small, cache_dir, rank=rank, **keys) for rank in range(world_size)]
    manifest = loaders[0].manifest
    tokens = sum(held.tokens - held.documents for held in manifest.sources("validation").values())
    for _ in range(2):
        passes = [list(loader) for loader in loaders]
        assert {len(batches) for batches in passes} == {loaders[0].batches_per_pass}
        assert {batch["input_ids_BT"].shape for batches in passes for batch in batches} == {torch.Size([4, 64])}
        labels = sum(int((batch["labels_BT"] != -100).sum()) for batches in passes for batch in batches)
        assert labels == tokens  # every token but each document's BOS
    next(iter(loaders[0]))
    assert len(list(loaders[0])) == loaders[0].batches_per_pass, "a pass given up is not continued by the next"


def test_a_mixture_keeps_its_weights_in_an_epoch(prepared, cache_dir) -> None:
    loader = load(prepared, cache_dir, data={"weights": {"alpha": 1, "beta": 3}}, micro_batch_rows=8)
    manifest = loader.manifest.sources("train")
    alpha = {tuple(row) for row in as_rows(list(load_source(prepared, cache_dir, manifest["alpha"].rows)))}
    rows = as_rows(take(loader, loader.batches_per_pass))
    share = sum(row in alpha for row in rows) / len(rows)
    assert abs(share - 0.25) < 8 / len(rows) + 1e-9  # the rows left out at the end are fewer than a batch


def load_source(folder: Path, cache_dir: Path, rows: int) -> list[Batch]:
    """The stored rows of the first source, alpha, in order."""
    return take(load(folder, cache_dir, micro_batch_rows=1, data={"shuffle": False}), rows)


def test_loading_leaves_the_runs_random_numbers_alone(small, cache_dir) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    take(load(small, cache_dir, data={"workers": 1}), 3)
    assert torch.equal(torch.rand(3), expected)


def test_batches_that_do_not_fit_are_refused_before_reading(small, cache_dir) -> None:
    with pytest.raises(ValueError, match=r"train\.micro_batch_rows=3 times world size 2 must divide"):
        load(small, cache_dir, world_size=2, micro_batch_rows=3, global_batch_rows=8)
    with pytest.raises(ValueError, match=r"data\.row_tokens=128 must equal row_tokens=64"):
        load(small, cache_dir, data={"row_tokens": 128})
    with pytest.raises(ValueError, match=r"data\.weights\.gamma=1\.0 must name a source of the data; use alpha, beta"):
        load(small, cache_dir, data={"weights": {"alpha": 1.0, "beta": 1.0, "gamma": 1.0}})


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(2, 1, 0), (16, 4, 3), (64, 8, 4), (4, 8, 0)])
def test_workers_follow_from_the_cores_of_a_rank(monkeypatch, cores, ranks, workers) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    plan = plan_workers(DataConfig(), ranks)
    assert (plan.workers, plan.prefetch_batches) == (workers, 2)
    with pytest.raises(ValueError, match=r"data\.workers=200 must be at most"):
        plan_workers(DataConfig(workers=200), ranks)


class Bucket(BaseHTTPRequestHandler):
    """GET and HEAD of an S3 bucket named `bucket` whose objects are the files of `folder`."""

    folder: Path
    requests: Counter[str]

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def answer(self, *, send_body: bool) -> None:
        name = self.path.split("?")[0].removeprefix("/bucket/")
        file = self.folder / name
        self.requests[name] += 1
        body = file.read_bytes() if file.is_file() else b""
        self.send_response(200 if file.is_file() else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def bucket(prepared_copy: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[type[Bucket]]:
    handler = type("CopyBucket", (Bucket,), {"folder": prepared_copy, "requests": Counter()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield handler
    server.shutdown()
    server.server_close()


def test_an_object_store_gives_the_same_batches_as_the_folder(bucket, prepared, tmp_path, cache_dir) -> None:
    expected = as_rows(take(load(prepared, cache_dir), 20))
    remote = load("s3://bucket", tmp_path / "cache")
    assert as_rows(take(remote, 20)) == expected
    shards = {name: count for name, count in bucket.requests.items() if name.endswith(".zstd")}
    assert shards and max(shards.values()) <= 2, "one HEAD and one GET a shard"


def test_a_missing_object_is_named_with_its_address(bucket, tmp_path) -> None:
    (bucket.folder / "train/alpha/shard.000003.mds.zstd").unlink()
    loader = load("s3://bucket", tmp_path / "cache", data={"timeout_s": 20.0})
    with pytest.raises(DataError, match=r"s3://bucket/train/alpha/shard\.000003\.mds\.zstd"):
        take(loader, loader.batches_per_pass)
    with pytest.raises(DataError, match=r"s3://bucket/elsewhere/manifest\.json cannot be fetched"):
        load("s3://bucket/elsewhere", tmp_path / "cache")
