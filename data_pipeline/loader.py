"""The loader: micro-batches of one rank, with a state that says exactly which were handed out.

Errors of the data, the cache disk or a loader process end as one DataError that names the file; it is also noted in the
cache folder, so that the other ranks of this start raise it at their next fetch.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data_pipeline.batch import Batch, RowSlice, build_batch, check_divides
from data_pipeline.config import DataConfig, check
from data_pipeline.dataset import OrderCache, ShardCache
from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, Split, check_row_tokens
from data_pipeline.order import BatchGrid, build_row_order
from data_pipeline.packing import TokenRow
from data_pipeline.preflight import PreparedData, open_prepared_data

FAILURE_NOTE = "failure.json"
LOOK_S = 2.0
"Seconds between looks at loader processes that are waited for; outside the main thread nothing tells of their death."
GRACE_S = 5.0
"Seconds beyond data.timeout_s, so that a loader process's own words come first."


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """The stored rows of a micro-batch, and the source of each."""

    tokens: list[TokenRow]
    sources: list[int]


class RankBatches(IterableDataset[Any]):
    """The micro-batches of a rank from number `first` on; in a loader process, those that fall to it.

    An error is handed over as its message instead of being raised, since a raise in a loader process reaches a user as
    a traceback.
    """

    def __init__(
        self, data: PreparedData, split: Split, config: DataConfig, orders: OrderCache, grid: BatchGrid, rank: int
    ) -> None:
        self.data = data
        self.split: Split = split
        self.config = config
        self.orders = orders
        self.grid = grid
        self.rank = rank
        self.first = 0
        self.batches_ahead = 1

    def __iter__(self) -> Iterator[StoredRows | str]:
        try:
            yield from self.read_batches()
        except DataError as error:
            yield str(error)
        except OSError as error:
            yield f"{error.filename or self.data.cache} failed ({error.strerror or error})"

    def read_batches(self) -> Iterator[StoredRows]:
        """Yield the rows of each batch, fetching the shards of those to come."""
        limit_bytes = int(self.config.cache_limit_gib * 2**30)
        cache = ShardCache(self.data, self.split, cache_limit_bytes=limit_bytes, timeout_s=self.config.timeout_s)
        ahead: list[list[int]] = []
        with closing(cache):
            for rows in self.each_batch_rows():
                cache.fetch_ahead(rows)
                ahead.append(rows)
                if len(ahead) > self.batches_ahead:
                    yield read_rows(cache, ahead.pop(0))
            for rows in ahead:
                yield read_rows(cache, rows)

    def each_batch_rows(self) -> Iterator[list[int]]:
        """Yield the row numbers of each batch, epoch after epoch; one epoch where the grid isn't endless."""
        worker = get_worker_info()
        number, stride = (self.first + worker.id, worker.num_workers) if worker else (self.first, 1)
        per_epoch = self.grid.batches_per_epoch
        epoch = -1
        while self.grid.endless or number < per_epoch:
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                order = self.orders.load(epoch)
                if self.grid.endless:
                    self.orders.load_ahead(epoch + 1)
            yield self.grid.rows(order, self.rank, number % per_epoch)  # pyright: ignore[reportPossiblyUnboundVariable]
            number += stride


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Loader processes and batches each keeps ready, derived from the configuration and the machine."""

    workers: int
    prefetch_batches: int


def plan_workers(config: DataConfig, ranks_per_node: int) -> WorkerPlan:
    """Derive and check. Raises ValueError for more loader processes than the rank's share of cores can feed."""
    cores = max(1, len(os.sched_getaffinity(0)) // ranks_per_node)
    most = max(2, 2 * cores)
    rule = f"be at most {most}, twice the {cores} CPU cores of a rank"
    check(config.workers <= most, f"data.workers={config.workers}", rule, "use data.workers=-1 to derive it")
    derived = 0 if cores <= 2 else min(4, cores - 1)
    workers = derived if config.workers == -1 else config.workers
    return WorkerPlan(workers=workers, prefetch_batches=2 if config.prefetch_batches == -1 else config.prefetch_batches)


def count_local_ranks(world_size: int, processes_per_rank: int = 1) -> int:
    """Return the ranks of a node as the launcher says, 1 where a rank's processes fill more than a node; all of them
    where it does not say, or where nodes are unequal."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size * processes_per_rank))
    local_ranks = max(1, local_processes // processes_per_rank)
    return world_size if world_size % local_ranks else local_ranks


class FailureNote:
    """A file in the cache folder by which a process tells the others of its start what went wrong."""

    def __init__(self, cache_dir: Path, *, is_first: bool, shared: bool) -> None:
        self.file = cache_dir / FAILURE_NOTE
        self.shared = shared
        self.start = f"{os.uname().nodename}:{os.getppid()}:{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
        if is_first:
            self.file.unlink(missing_ok=True)

    def write(self, message: str) -> None:
        """Leave the note; the first one stands. A full disk leaves none: the ranks' own agreement has to do then."""
        if self.read() is not None or not self.shared:
            return
        beside = self.file.with_name(f".{FAILURE_NOTE}.{os.getpid()}")
        try:
            beside.write_text(json.dumps({"start": self.start, "message": message}))
            beside.replace(self.file)
        except OSError:
            return

    def read(self) -> str | None:
        """Return the message of a rank of this start, or None."""
        if not self.shared or not self.file.exists():
            return None
        try:
            note: dict[str, str] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None
        return note["message"] if note["start"] == self.start else None


class Loader:
    """Iterate for micro-batches (batch.py). Endless loaders go on where they are; others begin a new pass, or finish a
    loaded one.

    Every rank yields the same number of batches a pass. Raises DataError.
    """

    def __init__(
        self,
        batches: RankBatches,
        *,
        seed: int,
        plan: WorkerPlan,
        note: FailureNote,
        row_slice: RowSlice,
    ) -> None:
        self.batches = batches
        self.row_slice = row_slice
        self.seed = seed
        self.plan = plan
        self.note = note
        self.handed_out = 0
        self.resumed = False

    @property
    def manifest(self) -> Manifest:
        """What the prepared data holds."""
        return self.batches.data.manifest

    @property
    def batches_per_pass(self) -> int:
        """Micro-batches of this rank in an epoch."""
        return self.batches.grid.batches_per_epoch

    def failure(self) -> str | None:
        """Return the message of the rank of this start that failed first, or None. Cheap; empty on other nodes."""
        return self.note.read()

    def __iter__(self) -> Iterator[Batch]:
        pass_batches = self.batches_per_pass
        if not self.batches.grid.endless and not self.resumed:
            self.handed_out = 0
        self.resumed = False
        incoming = iter(self.build_torch_loader())
        while self.batches.grid.endless or self.handed_out < pass_batches:
            batch = self.fetch(incoming)
            self.handed_out += 1
            yield batch

    def build_torch_loader(self) -> DataLoader[Any]:
        """A torch loader that begins with the batch after those handed out; its processes start at its first fetch."""
        self.batches.first = self.handed_out
        self.batches.batches_ahead = 2 * self.plan.prefetch_batches
        workers = self.plan.workers
        # Forked, since a fresh interpreter would spend seconds on importing torch; with a generator of its own,
        # since each start would draw from the run's.
        return DataLoader(
            self.batches,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=self.plan.prefetch_batches if workers else None,
            timeout=LOOK_S if workers else 0.0,
            collate_fn=keep_rows,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def fetch(self, incoming: Iterator[StoredRows | str]) -> Batch:
        """Return the next batch; raise DataError for an error of this rank or, noted, of another."""
        noted = self.failure()
        if noted is not None:
            raise DataError(noted)
        try:
            received = self.receive(incoming)
        except StopIteration:
            received = (
                f"the loader ended after {self.handed_out} of {self.batches_per_pass} batches of "
                f"{self.batches.data.location}; use data.workers=0 to see why"
            )
        except (RuntimeError, OSError, EOFError) as error:
            if not self.plan.workers:
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            received = (
                f"a loader process of {self.batches.data.location} died or did not answer ({reason}); "
                "use data.workers=0 to see why"
            )
        if isinstance(received, str):
            self.note.write(received)
            stop_workers(incoming)
            raise DataError(received)
        return self.make_batch(received)

    def receive(self, incoming: Iterator[StoredRows | str]) -> StoredRows | str:
        """Return what comes next; raise RuntimeError soon after a loader process died, or when it takes too long."""
        limit_s = self.batches.config.timeout_s + GRACE_S
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                return next(incoming)
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise
                if time.monotonic() >= deadline_s:
                    raise RuntimeError(f"nothing came within {limit_s:g} s") from error

    def make_batch(self, rows: StoredRows) -> Batch:
        """Turn stored rows into this process's slice of a batch, here and not in a loader process: small integers
        travel better than large ones."""
        batch = build_batch(
            rows.tokens,
            rows.sources,
            batch_rows=self.batches.grid.micro_batch_rows,
            row_tokens=self.manifest.row_tokens,
            bos_id=self.manifest.bos_id,
        )
        return self.row_slice.cut(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, after the batches handed out so far: equal on all ranks, a few hundred bytes
        of JSON."""
        epoch, batch = divmod(self.handed_out, self.batches_per_pass)
        if not self.batches.grid.endless:
            epoch, batch = 0, self.handed_out
        return {
            "epoch": epoch,
            "rows_in_epoch": batch * self.batches.grid.unit_rows,
            "identity": self.describe_identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, of any world size. Raises ValueError naming what differs in the data or its order."""
        before: dict[str, Any] = state["identity"]
        now = self.describe_identity()
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                raise ValueError(
                    f"{key}={now.get(key)} must equal {key}={before.get(key)} of the checkpoint, or samples would be "
                    f"lost or repeated; restore {key} or begin a new run"
                )
        grid = self.batches.grid
        unit = grid.unit_rows
        rows = int(state["rows_in_epoch"])
        check(
            rows % unit == 0 or not grid.endless,
            f"train.micro_batch_rows={grid.micro_batch_rows} times world size {grid.world_size}",
            f"divide the {rows} rows of the epoch that the checkpoint was saved after",
            "save at the end of a step, or use a smaller train.micro_batch_rows",
        )
        self.handed_out = int(state["epoch"]) * self.batches_per_pass + -(-rows // unit)
        self.resumed = True

    def describe_identity(self) -> dict[str, Any]:
        """Return what decides which rows come when, by the names a user knows them under."""
        order = self.batches.orders.order
        return {
            "data fingerprint": self.manifest.fingerprint,
            "split": self.batches.split,
            "train.global_batch_rows": self.batches.grid.global_batch_rows,
            "seed": order.seed,
            "data.shuffle": order.shuffle,
            "data.shuffle_block_rows": order.shuffle_block_rows,
            "data.num_canonical_nodes": order.num_canonical_nodes,
            "data.weights": order.weights,
        }


def read_rows(cache: ShardCache, rows: list[int]) -> StoredRows:
    """Read the rows of these numbers."""
    return StoredRows(tokens=[cache.read_row(row) for row in rows], sources=[cache.find_source(row) for row in rows])


def keep_rows(rows: Any) -> Any:
    """Leave what a loader process sends as it is; torch would make tensors of it, which travel through shared
    memory."""
    return rows


def stop_workers(incoming: Any) -> None:
    """End a torch loader's processes at once; while they are registered, any child's death raises in the main
    thread."""
    if hasattr(incoming, "_shutdown_workers"):
        incoming._shutdown_workers()


def build_loader(
    config: DataConfig,
    *,
    split: Split,
    rank: int,
    world_size: int,
    micro_batch_rows: int,
    seed: int,
    cache_dir: str | Path,
    endless: bool,
    global_batch_rows: int | None = None,
    ranks_per_node: int | None = None,
    row_slice: RowSlice | None = None,
    limit_rows: int = 0,
) -> Loader:
    """Check the prepared data and return a rank's loader.

    row_slice: what this process holds of each row of its rank, by default all of it; ranks then have a process a slice.
    global_batch_rows: rows of an optimizer step of all ranks, by default one micro-batch a rank. ranks_per_node: by
    default LOCAL_WORLD_SIZE, or all ranks. cache_dir: a folder of the run's, shared by its ranks and kept for its
    resumption. limit_rows: most rows of an epoch, each source's share of them; 0 for no limit. Raises ValueError for
    settings that do not fit one another or the data, DataError naming a bad file; on every rank alike.
    """
    cache_dir = Path(cache_dir)
    row_slice = row_slice or RowSlice()
    local_ranks = ranks_per_node or count_local_ranks(world_size, row_slice.count)
    plan = plan_workers(config, local_ranks * row_slice.count)
    data = open_prepared_data(config.path, split, cache_dir=cache_dir, verify=config.verify, timeout_s=config.timeout_s)
    check_row_tokens(data.manifest, config.row_tokens)
    check_divides(row_slice.count, config.row_tokens)
    order = build_row_order(
        data.manifest,
        split,
        weights=config.weights if split == "train" else {},
        seed=seed,
        shuffle=config.shuffle and split == "train",
        num_canonical_nodes=config.num_canonical_nodes,
        shuffle_block_rows=config.shuffle_block_rows,
        limit_rows=limit_rows,
    )
    grid = BatchGrid(
        epoch_rows=order.epoch_rows(),
        world_size=world_size,
        micro_batch_rows=micro_batch_rows,
        global_batch_rows=global_batch_rows or world_size * micro_batch_rows,
        ranks_per_node=local_ranks,
        endless=endless,
    )
    key = hashlib.sha256(json.dumps([split, asdict(order)], sort_keys=True).encode()).hexdigest()[:16]
    orders = OrderCache(order, data.cache / f"order_{key}")
    batches = RankBatches(data, split, config, orders, grid, rank)
    is_first, shared = rank == row_slice.index == 0, world_size * row_slice.count > 1
    note = FailureNote(cache_dir, is_first=is_first, shared=shared)
    return Loader(batches, seed=seed, plan=plan, note=note, row_slice=row_slice)
