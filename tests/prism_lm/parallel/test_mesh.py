"""Ranks as the environment names them."""

import pytest

from prism_lm.parallel.mesh import Ranks, process_group


def test_ranks_without_a_launcher_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(rank=0, local_rank=0, world_size=1)
    assert Ranks.from_environment().is_main


def test_ranks_follow_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    ranks = Ranks.from_environment()
    assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.is_main) == (3, 1, 4, False)


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=2 must be .* below world_size=2; start the processes with torchrun"):
        Ranks(rank=2, world_size=2)


def test_one_process_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    import torch.distributed as dist

    with process_group(Ranks()):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
