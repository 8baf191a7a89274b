"""Ranks as the environment names them."""

import os

import pytest

from prism_lm.parallel.mesh import Ranks, check_devices, process_group


def test_rank_0_alone_is_the_main_one() -> None:
    assert [Ranks(rank=rank, world_size=3).is_main for rank in range(3)] == [True, False, False]


def test_more_processes_than_gpus_are_refused_on_every_rank_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in range(2):
        with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE=2 must be at most the 1 GPUs .* --nproc-per-node 1"):
            check_devices(Ranks(rank=rank, local_rank=rank, world_size=2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_devices(Ranks())


def test_host_without_gpus_holds_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_devices(Ranks(rank=7, local_rank=7, world_size=8))


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=2 must be .* below world_size=2; start the processes with torchrun"):
        Ranks(rank=2, world_size=2)


def test_one_process_needs_no_address_and_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    import torch.distributed as dist

    with process_group(Ranks()):
        assert dist.get_world_size() == 1 and os.environ["RANK"] == "0"
    assert not dist.is_initialized()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(os.environ)
