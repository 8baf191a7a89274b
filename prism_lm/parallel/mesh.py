"""Which process this is, and the process group all of them share."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all processes of the run; every process is one data rank."""

    rank: int = 0
    "Number of this process, 0 to world_size - 1; 0 writes the run's files and the console."
    local_rank: int = 0
    "Number of this process on its host; it picks the GPU."
    world_size: int = 1
    "Number of processes in the run."

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} must be at least 0 and below world_size={self.world_size}; "
                "start the processes with torchrun, which sets both"
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def choose_device(ranks: Ranks) -> "torch.device":
    """The GPU of this local rank, or the CPU where the machine has no GPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank)


def check_devices(ranks: Ranks) -> None:
    """Raises ValueError where a host with GPUs has fewer of them than processes; on every process of that host."""
    import torch

    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.local_rank + 1))
    if torch.cuda.is_available() and num_local > torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_WORLD_SIZE={num_local} must be at most the {torch.cuda.device_count()} GPUs that this host shows; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}, or look at CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def process_group(ranks: Ranks) -> Generator[None, None, None]:
    """The default process group, gloo for CPU tensors and NCCL for GPU tensors, for the time of the block.

    One process needs no address or port. Several need MASTER_ADDR and MASTER_PORT, which torchrun sets.
    """
    import torch
    import torch.distributed as dist

    added = {"RANK": ranks.rank, "LOCAL_RANK": ranks.local_rank, "WORLD_SIZE": ranks.world_size}
    added = {name: str(value) for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank)
    if ranks.world_size == 1:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
        )
    else:
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in added:
            os.environ.pop(name, None)
