"""Ranks see one another's signs of life while their main threads wait for something else."""

import io
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from prism_lm.parallel.mesh import Ranks
from prism_lm.parallel.presence import AwakeClock, Presence, Verdict
from prism_lm.parallel.store import open_store
from tests.harness import Group, read_ranks, run_on

pytestmark = pytest.mark.alone

QUICK = {"rank_timeout_s": 1.5, "dead_s": 0.5}


def show(body: Callable[[Presence], Any]) -> Any:
    """The body, once every rank has shown itself."""
    ranks = read_ranks()
    with Presence(ranks, open_store(ranks, purpose="presence"), interval_s=0.1).showing() as presence:
        assert wait_until(lambda: all(presence.read_signs(wait_s=0.1)[rank].count for rank in range(ranks.world_size)))
        return body(presence)


def wait_until(is_true: Callable[[], bool], within_s: float = 60.0) -> bool:
    end_s = time.monotonic() + within_s
    while not is_true() and time.monotonic() < end_s:
        time.sleep(0.02)
    return is_true()


def test_one_process_misses_nobody_and_finds_no_verdict() -> None:
    presence = Presence(Ranks(), None)
    with presence.showing():
        began_s = time.monotonic()
        presence.begin_phase("step 1")
        assert presence.find_missing(8.0) == [] and presence.find_lost(rank_timeout_s=0.0, dead_s=0.0) == []
        mine = Verdict(code=70, text="hung")
        assert presence.leave_verdict(mine, wait_s=8.0) == mine and presence.verdict is None
        assert [(sign.beats, sign.phase) for sign in presence.read_signs(wait_s=8.0)] == [(1, "step 1")]
        assert time.monotonic() - began_s < 1.0


def test_sign_of_a_rank_that_came_before_rank_0_is_kept() -> None:
    """It may be its only one: a rank may die before the next."""
    store = HashStore()
    early = Presence(Ranks(rank=1, world_size=2), store, interval_s=60.0)
    with early.showing():
        assert wait_until(lambda: store.check(["sign/1"]))
        with Presence(Ranks(rank=0, world_size=2), store, interval_s=0.1).showing() as main:
            assert wait_until(lambda: "pid" in main.name_rank(1), within_s=5.0)


def see_all_alive() -> Any:
    def body(presence: Presence) -> Any:
        presence.begin_phase("step 3")
        began_s = time.monotonic()
        missing = presence.find_missing(8.0)
        took_s = time.monotonic() - began_s
        presence.note_place(f"place of {presence.ranks.rank}", is_waiting=presence.ranks.rank == 0)
        signs = presence.read_signs(wait_s=8.0)
        return missing, took_s < 3.0, [(sign.phase, sign.place, sign.is_waiting) for sign in signs]

    return show(body)


def test_live_ranks_are_soon_seen_and_know_one_anothers_places() -> None:
    seen = [("step 3", f"place of {rank}", rank == 0) for rank in range(3)]
    assert run_on(3, see_all_alive) == [([], True, seen)] * 3


def meet_a_death(number: int) -> Any:
    def body(presence: Presence) -> Any:
        if presence.ranks.rank == 2:
            time.sleep(0.5)
            os.kill(os.getpid(), number)
        time.sleep(1.0)
        assert wait_until(lambda: presence.find_lost(**QUICK) == ([2] if presence.ranks.is_main else []))
        return presence.find_missing(1.5), presence.name_rank(2)

    return show(body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_and_stopped_ranks_are_named_by_the_others(number: int) -> None:
    group = Group(3, meet_a_death, number)
    try:
        for pipe in group._pipes[:2]:
            assert pipe.poll(30.0)
        time.sleep(0.5)
    finally:
        pid = group._processes[2].pid
        group.kill()
    for rank in range(2):
        succeeded, value = torch.load(io.BytesIO(group._pipes[rank].recv_bytes()), weights_only=False)
        assert succeeded, value
        (missing, name) = value
        assert missing == [name] and name.startswith("rank 2 (") and name.endswith(f"pid {pid})")


def leave_verdicts() -> Any:
    def body(presence: Presence) -> Any:
        mine = Verdict(code=70 + presence.ranks.rank, text=f"of rank {presence.ranks.rank}")
        held = presence.leave_verdict(mine, wait_s=8.0)
        return held == presence.verdict, held

    return show(body)


def test_first_verdict_holds_for_every_rank() -> None:
    answers = run_on(3, leave_verdicts)
    assert all(agreed for agreed, _ in answers) and len({held for _, held in answers}) == 1


def leave_one_after_another() -> Any:
    def body(presence: Presence) -> Any:
        time.sleep(1.5 * presence.ranks.rank)
        return presence.find_lost(**QUICK)

    return show(body), show(lambda presence: presence.find_lost(**QUICK))


def test_ranks_that_end_are_not_lost_and_the_next_presence_begins_anew() -> None:
    assert run_on(2, leave_one_after_another) == [([], [])] * 2


def test_awake_clock_counts_a_time_without_reading_as_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    clock = AwakeClock()
    now_s += 1.5
    assert clock.read() == 1.5
    now_s += 3600.0
    assert clock.read() == 3.5 and clock.read() == 3.5
