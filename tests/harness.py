"""Shared by tests of all rooms: several CPU processes, errors against a bound, tiny models and loaders."""

import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.batch import RowSlice, hash_rows
from prism_lm.model.config import ModelConfig
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.state import TrainRun

VOCAB = 64
ROW_TOKENS = 24


def read_ranks() -> Ranks:
    """This process as `run_on` or torchrun named it; one process where they did not."""
    names = (("rank", "0"), ("local_rank", "0"), ("world_size", "1"))
    return Ranks(**{name: int(os.environ.get(name.upper(), default)) for name, default in names})


def run_on(num_processes: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0) -> list[Any]:
    """Calls a module-level function in that many processes, with the variables torchrun would set, and returns what
    each returned, by rank. No process group is started. A failing process fails the caller with its traceback."""
    return Group(num_processes, function, *arguments).wait(timeout_s)


def get_forkserver() -> Any:
    """Processes of this context have imported what a training needs as they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


class Group:
    """Processes that call one module-level function as the ranks of a run."""

    def __init__(self, num_processes: int, function: Callable[..., Any], *arguments: Any) -> None:
        context = get_forkserver()
        port = find_free_port()
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, rank, num_processes, port, function, arguments)
            process = context.Process(target=_run_as_rank, args=given)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait(self, timeout_s: float = 240.0) -> list[Any]:
        """What each rank returned; fails with the traceback of the first to raise."""
        results: dict[int, Any] = {}
        end_s = time.monotonic() + timeout_s
        try:
            while len(results) < len(self._pipes):
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
                ready = connection.wait(list(waiting), timeout=end_s - time.monotonic())
                assert ready, f"ranks {sorted(waiting.values())} gave no result within {timeout_s:.0f} s"
                results |= {waiting[pipe]: _receive(pipe, waiting[pipe]) for pipe in ready}
            return [results[rank] for rank in range(len(self._pipes))]
        finally:
            for process in self._processes:
                process.join(timeout=5)
            self.kill()

    def send_signal(self, number: int, *, rank: int | None = None) -> None:
        """To one rank, or to all of them."""
        for process in self._processes if rank is None else [self._processes[rank]]:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def is_alive(self) -> bool:
        """True while any rank runs."""
        return any(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """SIGKILL to all, and their end awaited."""
        self.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.join(timeout=10)


class ForkedCommand:
    """`prism` with those words and variables, forked with everything imported: to the last line as it runs when typed,
    without the 8 s of processor time that an interpreter's start and imports cost."""

    def __init__(
        self, words: list[str], variables: dict[str, str], stderr: Path, *, folder: Path | None = None
    ) -> None:
        self._process = get_forkserver().Process(target=_run_command, args=(words, variables, stderr, folder))
        self._process.start()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code, once it has ended; TimeoutError where it does not in time."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self._process.pid} still runs after {timeout_s} s")
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _run_command(words: list[str], variables: dict[str, str], stderr: Path, folder: Path | None) -> None:
    from launcher.__main__ import main

    os.environ |= variables
    if folder is not None:
        os.chdir(folder)
    for path, descriptor in ((Path(os.devnull), 1), (stderr, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.exit(main(words))


def _receive(pipe: connection.Connection, rank: int) -> Any:
    try:
        succeeded, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        raise AssertionError(f"rank {rank} died without a result") from None
    assert succeeded, f"rank {rank} failed:\n{value}"
    return value


def _run_as_rank(
    pipe: connection.Connection,
    rank: int,
    num_processes: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= build_rank_environment(rank, num_processes, port)
    torch.set_num_threads(1)
    try:
        outcome = (True, function(*arguments))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Tensors by value: torch would hand over shared memory, which ends with this process.
    with io.BytesIO() as buffer:
        torch.save(outcome, buffer)
        pipe.send_bytes(buffer.getvalue())


def build_rank_environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """The variables torchrun sets for one of several processes on this host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def find_free_port() -> int:
    """A TCP port free on this host at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assert_error_within(actual: Tensor, expected: Tensor, bound: float, *, what: str = "value") -> None:
    """The largest absolute difference, relative to the largest expected magnitude, is at most `bound`."""
    difference = (actual.double() - expected.double()).abs()
    scale = max(expected.double().abs().max().item(), 1e-30)
    error = difference.max().item() / scale
    worst = int(difference.argmax())
    assert error <= bound, (
        f"{what}: relative error {error:.3e} exceeds {bound:.3e} at flat index {worst}: "
        f"{actual.flatten()[worst].item()!r} against {expected.flatten()[worst].item()!r}"
    )


class TinyBlock(nn.Module):
    """A residual block with everything that matters to an engine: a norm, a bias, matrices, a direct parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.down(torch.tanh(self.up(self.norm(x_BTD)))) * torch.exp(-self.A_log)


class TinyModel(nn.Module):
    """A per-token model with the language model's forward; large enough that stage 3 really splits its matrices."""

    def __init__(self, width: int = 64, vocab: int = VOCAB, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor | None) -> Tensor:
        x_BTD = self.embedding(input_ids_BT) * (~document_start_BT)[..., None]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if labels_BT is None:
            return self.head(x_BTD).float()
        logits = self.head(x_BTD).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels_BT.flatten(), ignore_index=-100, reduction="sum")


def build_language_config(**settings: Any) -> ModelConfig:
    """A language model small enough to train some steps in a test, with every part of the real one."""
    sizes = {"model_width": 48, "num_layers": 2, "num_heads": 2, "key_width": 16, "value_width": 32, "mlp_width": 96}
    defaults = {"vocab_size": VOCAB, "solver_rank": 8, "chunk_tokens": 16, "tie_embeddings": True}
    return ModelConfig(**{**sizes, **defaults, **settings})


def build_batch(
    rows: int, *, seed: int, row_tokens: int = ROW_TOKENS, vocab: int = VOCAB, starts: float = 0.1
) -> dict[str, Tensor]:
    """Random rows whose numbers of labels with loss differ from row to row; the last four tokens never occur. A token
    starts a document with probability `starts`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab - 4, (rows, row_tokens + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < torch.rand(rows, 1, generator=generator)] = -100
    document_start_BT = torch.rand(labels.shape, generator=generator) < starts
    return {"input_ids_BT": tokens[:, :-1].contiguous(), "labels_BT": labels, "document_start_BT": document_start_BT}


class ListLoader:
    """Global batch g of `global_rows` rows, of two sources in turn, is seeded by g; each rank takes its share,
    micro-batch by micro-batch, and its slice of those rows.

    Every world size, sequence degree and micro-batch size sees the same global batches. `fail_at` raises at that
    micro-batch, `end_at` ends there, to begin again when next iterated.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        global_rows: int,
        micro_rows: int,
        row_tokens: int = ROW_TOKENS,
        starts: float = 0.1,
        fail_at: int | None = None,
        end_at: int | None = None,
        spoil: Callable[[int, dict[str, Tensor]], None] | None = None,
    ) -> None:
        self.ranks, self.global_rows, self.micro_rows, self.row_tokens = ranks, global_rows, micro_rows, row_tokens
        self.starts = starts
        self.fail_at, self.end_at, self.spoil = fail_at, end_at, spoil
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        per_step = self.global_rows // (self.micro_rows * self.ranks.data_world_size)
        row_slice = RowSlice(index=self.ranks.sequence_rank, count=self.ranks.sequence_degree)
        if self.taken == self.end_at:
            self.taken = 0
        while self.taken != self.end_at:
            if self.taken == self.fail_at:
                raise OSError("shard.00003.mds is truncated")
            step, micro = divmod(self.taken, per_step)
            batch = build_batch(self.global_rows, seed=step, row_tokens=self.row_tokens, starts=self.starts)
            batch["row_hash_B"] = torch.from_numpy(hash_rows(batch["input_ids_BT"].numpy()))
            batch["source_B"] = torch.arange(self.global_rows) % 2
            first = (micro * self.ranks.data_world_size + self.ranks.data_rank) * self.micro_rows
            share = row_slice.cut({name: tensor[first : first + self.micro_rows] for name, tensor in batch.items()})
            if self.spoil is not None:
                self.spoil(step, share)
            self.taken += 1
            yield share

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def build_run(
    run_dir: Path,
    train: TrainConfig,
    *,
    parallel: ParallelConfig | None = None,
    build_model: Callable[[], nn.Module] = TinyModel,
    loader: Callable[[Ranks], Any] | None = None,
) -> TrainRun:
    """A run of this process as the environment names it, on the tiny model and list loaders unless told otherwise."""
    ranks = read_ranks()
    rows = {"global_rows": train.global_batch_rows, "micro_rows": train.micro_batch_rows}
    return TrainRun(
        run_dir=run_dir,
        train=train,
        parallel=parallel or ParallelConfig(),
        ranks=ranks,
        seed=7,
        build_model=build_model,
        build_train_loader=lambda: loader(ranks) if loader else ListLoader(ranks, **rows),
        build_validation_loader=lambda: ListLoader(ranks, **rows, end_at=4 // ranks.world_size),
        flops_per_token=1e6,
        config_yaml="steps: few\n",
        environment={"python": "3"},
        fingerprints={"model": "tiny"},
    )


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_losses(run_dir: Path) -> dict[int, float]:
    """Training loss by step; fails where a step was recorded twice."""
    records = read_records(run_dir)
    steps = [record["step"] for record in records]
    assert len(set(steps)) == len(steps), f"steps recorded twice: {steps}"
    return {record["step"]: record["train/loss_nats"] for record in records if "train/loss_nats" in record}
