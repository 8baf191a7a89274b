"""Which process this is, and the groups that processes share.

A sequence group holds slices of the same rows and is one data rank. Its processes are neighbours, so that a group stays
on one host where it fits. Eight processes, four to a row:

    rank           0 1 2 3   4 5 6 7
    data_rank      0 0 0 0   1 1 1 1        which rows
    sequence_rank  0 1 2 3   0 1 2 3        which slice of them
"""

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from prism_lm.parallel.sequence import SequenceGroup

COLLECTIVE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all processes of the run."""

    rank: int = 0
    "Number of this process, 0 to world_size - 1; 0 writes the run's files and the console."
    local_rank: int = 0
    "Number of this process on its host; it picks the GPU."
    world_size: int = 1
    "Number of processes in the run."
    sequence_degree: int = 1
    "Number of processes that share each row; it divides world_size."

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} must be at least 0 and below world_size={self.world_size}; "
                "start the processes with torchrun, which sets both"
            )
        if self.sequence_degree < 1 or self.world_size % self.sequence_degree:
            raise ValueError(
                f"sequence_degree={self.sequence_degree} must divide world_size={self.world_size}; "
                f"use {spell_divisors(self.world_size)}"
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this process's sequence group: the rows it reads."""
        return self.rank // self.sequence_degree

    @property
    def data_world_size(self) -> int:
        """Number of sequence groups."""
        return self.world_size // self.sequence_degree

    @property
    def sequence_rank(self) -> int:
        """Place of this process in its group: the slice of each row it holds."""
        return self.rank % self.sequence_degree

    def __str__(self) -> str:
        return f"{self.data_world_size} data x {self.sequence_degree} sequence"


def cut_rows(
    ranks: Ranks,
    sequence_degree: int,
    *,
    row_tokens: int,
    key: str = "parallel.sequence_degree",
    tokens_key: str = "data.row_tokens",
) -> Ranks:
    """The ranks with `sequence_degree` of them to a row. Raises ValueError, under these keys, for a number that does
    not divide processes and tokens."""
    world_size, typed = ranks.world_size, f"{key}={sequence_degree}"
    good = spell_divisors(math.gcd(world_size, row_tokens))
    if sequence_degree > world_size:
        raise ValueError(
            f"{typed} must be at most the WORLD_SIZE={world_size} processes of the run; start {sequence_degree} "
            f"(torchrun --nproc-per-node {sequence_degree}), or use {good}"
        )
    if sequence_degree < 1 or world_size % sequence_degree:
        raise ValueError(f"{typed} must divide the WORLD_SIZE={world_size} processes of the run; use {good}")
    if row_tokens % sequence_degree:
        raise ValueError(f"{typed} must divide {tokens_key}={row_tokens}; use {good}")
    return replace(ranks, sequence_degree=sequence_degree)


def spell_divisors(number: int) -> str:
    """`1, 2 or 4`."""
    divisors = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return " or ".join([", ".join(divisors[:-1]), divisors[-1]]) if len(divisors) > 1 else divisors[0]


def open_sequence_group(ranks: Ranks) -> "SequenceGroup":
    """The group of this process. Every process of the run calls it, once the default process group is up."""
    import torch.distributed as dist

    from prism_lm.parallel.sequence import SequenceGroup

    degree = ranks.sequence_degree
    groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, ranks.world_size, degree)]
    return SequenceGroup(cast("dist.ProcessGroup", groups[ranks.data_rank]))


def choose_device(ranks: Ranks) -> "torch.device":
    """The GPU of this local rank, or the CPU where the machine has no GPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank)


def check_devices(ranks: Ranks) -> None:
    """Raises ValueError where a host with GPUs has fewer of them than processes; on every process of that host. Where
    each process is shown GPUs of its own (PRISM_GPU_BOUND), one is enough."""
    import torch

    is_bound = os.environ.get("PRISM_GPU_BOUND") == "1"
    num_local = 1 if is_bound else int(os.environ.get("LOCAL_WORLD_SIZE", ranks.local_rank + 1))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_WORLD_SIZE={num_local} must be at most the {torch.cuda.device_count()} GPUs that this host shows; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}, or look at CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def process_group(ranks: Ranks, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Generator[None, None, None]:
    """The default process group, gloo for CPU tensors and NCCL for GPU tensors, for the time of the block.

    A collective fails after timeout_s, in the groups made of it meanwhile too; what watches for hangs must be quicker.
    One process needs no address or port. Several need MASTER_ADDR and MASTER_PORT, which torchrun sets.
    """
    import torch
    import torch.distributed as dist

    from prism_lm.parallel.store import open_store

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with _naming_process(ranks):
        if torch.cuda.is_available():
            torch.cuda.set_device(ranks.local_rank)
        alone = ranks.world_size == 1
        store = dist.HashStore() if alone else open_store(ranks, purpose="group")  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
        try:
            with _new_groups_within(timeout):
                yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _naming_process(ranks: Ranks) -> Generator[None, None, None]:
    """Sets what torchrun would of RANK, LOCAL_RANK and WORLD_SIZE, which libraries read, where it is not set."""
    values = {"RANK": ranks.rank, "LOCAL_RANK": ranks.local_rank, "WORLD_SIZE": ranks.world_size}
    added = {name: str(value) for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _new_groups_within(timeout: timedelta) -> Generator[None, None, None]:
    """Makes it the timeout of groups that name none, DeepSpeed's among them; NCCL's would be 10 minutes."""
    import torch.distributed.distributed_c10d as c10d

    former = c10d._get_default_timeout  # pyright: ignore[reportPrivateUsage]
    c10d._get_default_timeout = lambda backend: timeout  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        c10d._get_default_timeout = former  # pyright: ignore[reportPrivateUsage]
