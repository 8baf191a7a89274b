"""A run that cannot go on is ended, with a code of its own and words that name who is to blame."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from prism_lm.parallel.collectives import sum_integers
from prism_lm.parallel.presence import Sign
from prism_lm.train.guard import Guard
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.watchdog import (
    EXIT_GRACE_PASSED,
    EXIT_HUNG,
    EXIT_RANK_LOST,
    EXIT_SECOND_SIGNAL,
    find_behind,
)
from tests.harness import Group, read_ranks, run_on
from tests.prism_lm.train.guarded import MARKS, mark, read_error, run_guarded, wait_for_exits, wait_for_files

pytestmark = pytest.mark.alone


def sleep_at_rank_1(guard: Guard, stop: StopSignal) -> None:
    guard.watchdog.beat("step 1")
    sum_integers([1])
    guard.watchdog.beat("step 2")
    if read_ranks().rank == 1:
        sleep_for_ever()
    sum_integers([1])


def sleep_for_ever() -> None:
    while True:
        time.sleep(60.0)


def hang_in(folder: str, limits: dict[str, float]) -> Any:
    return run_guarded(Path(folder), sleep_at_rank_1, **limits)


def test_rank_that_hangs_is_named_and_every_rank_leaves_its_stacks(tmp_path: Path) -> None:
    group = Group(2, hang_in, str(tmp_path), {"hang_timeout_s": 2.0})
    assert wait_for_exits(group, [0, 1], 30.0) == [EXIT_HUNG] * 2
    stacks = [(tmp_path / "stacks" / f"rank_{rank}.txt").read_text() for rank in range(2)]
    assert "all_reduce" in stacks[0] and "sleep_for_ever" in stacks[1]
    assert "train.hang_timeout_s=2" in read_error(tmp_path)
    behind = read_error(tmp_path).partition("behind: ")[2]
    assert behind.startswith("rank 1 (") and "rank 0" not in behind and "sleep_for_ever" in behind


def score_long(guard: Guard, stop: StopSignal) -> str:
    guard.watchdog.beat("tasks of step 1")
    for _ in range(12):
        time.sleep(0.5)
        guard.watchdog.touch()
    return "went on"


def score_in(folder: str, limits: dict[str, float]) -> Any:
    return run_guarded(Path(folder), score_long, **limits)


def test_phase_that_is_seen_to_go_on_is_no_hang_however_long(tmp_path: Path) -> None:
    assert run_on(1, score_in, str(tmp_path), {"hang_timeout_s": 3.0}) == ["went on"]


def work_briefly_at_rank_1(guard: Guard, stop: StopSignal) -> None:
    guard.watchdog.beat("step 1")
    sum_integers([1])
    mark()
    sleep_for_ever()


def idle_in(folder: str, limits: dict[str, float]) -> Any:
    os.environ["MARKS"] = folder
    return run_guarded(Path(folder), work_briefly_at_rank_1, **limits)


@pytest.mark.parametrize("victim", [1, 0])
def test_stopped_rank_is_lost_to_the_others(tmp_path: Path, victim: int) -> None:
    group = Group(2, idle_in, str(tmp_path), {"rank_timeout_s": 2.0})
    wait_for_files(tmp_path, MARKS)
    group.send_signal(signal.SIGSTOP, rank=victim)
    try:
        assert wait_for_exits(group, [1 - victim], 20.0) == [EXIT_RANK_LOST]
    finally:
        group.kill()
    assert read_error(tmp_path).startswith(f"rank {victim} (")
    assert "gave no sign of life for train.rank_timeout_s=2" in read_error(tmp_path)


def test_rank_killed_while_no_collective_fails_is_lost_to_the_others(tmp_path: Path) -> None:
    group = Group(2, idle_in, str(tmp_path), {"rank_timeout_s": 60.0})
    wait_for_files(tmp_path, MARKS)
    group.send_signal(signal.SIGKILL, rank=1)
    assert wait_for_exits(group, [0], 20.0) == [EXIT_RANK_LOST]
    assert read_error(tmp_path).startswith("rank 1 (")


def test_second_signal_ends_ranks_that_wait_in_a_collective_at_once(tmp_path: Path) -> None:
    group = Group(2, stuck_in, str(tmp_path))
    wait_for_files(tmp_path, MARKS)
    group.send_signal(signal.SIGTERM)
    group.send_signal(signal.SIGUSR1)
    assert wait_for_exits(group, [0, 1], 2.2) == [None, None]
    group.send_signal(signal.SIGTERM, rank=0)
    assert wait_for_exits(group, [0], 5.0) == [EXIT_SECOND_SIGNAL]
    group.send_signal(signal.SIGUSR1, rank=1)
    wait_for_exits(group, [1], 5.0)
    group.kill()
    assert read_error(tmp_path) == "stopped at once by a second signal; there is no complete checkpoint"


def wait_for_late_partner(guard: Guard, stop: StopSignal) -> None:
    mark()
    if read_ranks().rank == 1:
        sleep_for_ever()
    sum_integers([1])


def stuck_in(folder: str, limits: dict[str, float] | None = None) -> Any:
    os.environ["MARKS"] = folder
    return run_guarded(Path(folder), wait_for_late_partner, **(limits or {}))


def test_run_that_does_not_stop_in_its_grace_is_ended(tmp_path: Path) -> None:
    group = Group(2, stuck_in, str(tmp_path), {"stop_grace_s": 1.5})
    wait_for_files(tmp_path, MARKS)
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step}" / "manifest.json").write_text('{"files": {}}')
    group.send_signal(signal.SIGTERM, rank=1)
    assert wait_for_exits(group, [0, 1], 10.0) == [EXIT_GRACE_PASSED] * 2
    assert "the run had not ended train.stop_grace_s=1.5 after a stop signal" in read_error(tmp_path)
    assert read_error(tmp_path).endswith("the newest complete checkpoint is step 10")


def finish_at_different_times(guard: Guard, stop: StopSignal) -> str:
    """Rank 0 ends last, and is sent a second signal then, as a launcher does when the first rank has ended."""
    if read_ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    sum_integers([1])
    guard.watchdog.finish()
    if read_ranks().rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
    return "whole"


def end_in(folder: str) -> Any:
    return run_guarded(Path(folder), finish_at_different_times)


def test_second_signal_does_not_end_a_run_that_has_saved_everything(tmp_path: Path) -> None:
    assert run_on(2, end_in, str(tmp_path)) == ["whole", "whole"]


def test_rank_behind_is_the_one_with_fewest_phases_that_waits_for_nobody() -> None:
    waiting, busy = Sign(beats=5, is_waiting=True), Sign(beats=5)
    assert find_behind([waiting, busy, waiting]) == [1]
    assert find_behind([Sign(beats=6), Sign(beats=6, is_waiting=True), waiting]) == [2]
    assert find_behind([waiting, waiting]) == [0, 1]
    assert find_behind([busy, busy]) == [0, 1]


def hang_alone(guard: Guard, stop: StopSignal) -> None:
    guard.watchdog.beat("step 7")
    sleep_for_ever()


def hang_alone_in(folder: str) -> Any:
    return run_guarded(Path(folder), hang_alone, hang_timeout_s=1.0)


def test_one_process_that_hangs_says_where_and_ends(tmp_path: Path) -> None:
    group = Group(1, hang_alone_in, str(tmp_path))
    assert wait_for_exits(group, [0], 10.0) == [EXIT_HUNG]
    assert "sleep_for_ever" in (tmp_path / "stacks" / "rank_0.txt").read_text()
    assert "was in 'step 7' for longer than train.hang_timeout_s=1; it is in 'step 7' at sleep_for_ever" in read_error(
        tmp_path
    )


def rest_and_go_on(guard: Guard, stop: StopSignal) -> str:
    mark()
    end_s = time.monotonic() + 6.0
    while time.monotonic() < end_s:
        guard.watchdog.beat("step")
        time.sleep(0.05)
    return "went on"


def rest_in(folder: str) -> Any:
    os.environ["MARKS"] = folder
    return run_guarded(Path(folder), rest_and_go_on, hang_timeout_s=2.6, rank_timeout_s=2.6)


def test_run_that_its_scheduler_suspends_and_wakes_is_not_taken_for_hung(tmp_path: Path) -> None:
    group = Group(2, rest_in, str(tmp_path))
    wait_for_files(tmp_path, MARKS)
    group.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    group.send_signal(signal.SIGCONT)
    assert group.wait(20.0) == ["went on"] * 2
