"""Ranks as the environment names them."""

import os
import time

import pytest

from prism_lm.parallel.collectives import sum_integers
from prism_lm.parallel.mesh import Ranks, check_devices, cut_rows, process_group, spell_divisors
from tests.harness import read_ranks, run_on


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


@pytest.mark.parametrize(("world_size", "degree"), [(1, 1), (8, 1), (8, 2), (8, 4), (8, 8), (6, 3)])
def test_every_row_and_slice_has_one_process_and_groups_are_neighbours(world_size: int, degree: int) -> None:
    ranks = [Ranks(rank=rank, world_size=world_size, sequence_degree=degree) for rank in range(world_size)]
    assert [one.data_rank * degree + one.sequence_rank for one in ranks] == list(range(world_size))
    places = {(one.data_rank, one.sequence_rank) for one in ranks}
    assert places == {(row, part) for row in range(world_size // degree) for part in range(degree)}
    assert {one.data_world_size for one in ranks} == {world_size // degree}


@pytest.mark.parametrize(
    ("world_size", "degree", "row_tokens", "text"),
    [
        (4, 3, 4096, r"^parallel\.sequence_degree=3 must divide the WORLD_SIZE=4 processes of the run; use 1, 2 or 4$"),
        (6, 3, 4096, r"^parallel\.sequence_degree=3 must divide data\.row_tokens=4096; use 1 or 2$"),
        (3, 3, 4096, r"^parallel\.sequence_degree=3 must divide data\.row_tokens=4096; use 1$"),
        (
            2,
            4,
            64,
            r"^parallel\.sequence_degree=4 must be at most the WORLD_SIZE=2 processes of the run; start 4 "
            r"\(torchrun --nproc-per-node 4\), or use 1 or 2$",
        ),
    ],
)
def test_degree_that_does_not_fit_is_refused_with_those_that_do(
    world_size: int, degree: int, row_tokens: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        cut_rows(Ranks(world_size=world_size), degree, row_tokens=row_tokens)


def test_slice_of_one_token_is_allowed() -> None:
    assert cut_rows(Ranks(rank=3, world_size=4), 4, row_tokens=4).sequence_rank == 3


def test_ranks_refuse_a_degree_that_does_not_divide_them() -> None:
    with pytest.raises(ValueError, match=r"sequence_degree=2 must divide world_size=3; use 1 or 3"):
        Ranks(world_size=3, sequence_degree=2)
    assert [spell_divisors(number) for number in (1, 3, 8)] == ["1", "1 or 3", "1, 2, 4 or 8"]


def test_one_process_needs_no_address_and_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    import torch.distributed as dist

    with process_group(Ranks()):
        assert dist.get_world_size() == 1 and os.environ["RANK"] == "0"
    assert not dist.is_initialized()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(os.environ)


def meet_a_timeout() -> list[float]:
    import torch
    import torch.distributed as dist

    seconds: list[float] = []
    with process_group(read_ranks(), timeout_s=2.0):
        dist.barrier()
        for group in (None, dist.new_group([0, 1])):
            began_s = time.monotonic()
            if read_ranks().rank == 0:
                with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                    dist.all_reduce(torch.ones(1), group=group)
            else:
                time.sleep(4.0)
            seconds.append(time.monotonic() - began_s)
            if read_ranks().rank == 0:
                time.sleep(2.0)
    return seconds


def test_collective_fails_after_the_timeout_given_in_later_groups_too() -> None:
    waited = run_on(2, meet_a_timeout)[0]
    assert all(1.5 < seconds < 3.9 for seconds in waited), waited


def sum_in_three_groups() -> list[int]:
    totals: list[int] = []
    for _ in range(3):
        with process_group(read_ranks()):
            totals += sum_integers([read_ranks().rank])
        time.sleep(0.2 * read_ranks().rank)
    return totals


def test_groups_of_the_same_processes_follow_one_another() -> None:
    assert run_on(3, sum_in_three_groups) == [[3, 3, 3]] * 3


def test_several_processes_need_an_address_and_a_refusal_leaves_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    before = dict(os.environ)
    with (
        pytest.raises(ValueError, match=r"MASTER_PORT must be set for world_size=2 processes; start with torchrun"),
        process_group(Ranks(world_size=2)),
    ):
        pass
    assert dict(os.environ) == before
