"""A run's hold on its folder and its ranks' signs of life, around a loop of collectives."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prism_lm.checkpoint.ownership import OWNER_NAME, claim, read_owner
from prism_lm.parallel.collectives import RunFailed, sum_integers
from prism_lm.train.guard import Guard
from prism_lm.train.stop_signal import StopSignal
from tests.harness import Group, read_ranks, run_on
from tests.prism_lm.train.guarded import MARKS, mark, read_error, run_guarded, wait_for_exits, wait_for_files

pytestmark = pytest.mark.alone


def reduce_for_ever(guard: Guard, stop: StopSignal) -> None:
    """Large all-reduces without an end; each rank marks its file once it is among them."""
    tensor = torch.ones(1 << 20)
    for step in range(1 << 30):
        guard.watchdog.beat(f"step {step}")
        dist.all_reduce(tensor)
        if step == 3:
            mark()


def reduce_in(folder: str, limits: dict[str, float]) -> Any:
    os.environ["MARKS"] = folder
    return run_guarded(Path(folder), reduce_for_ever, **limits)


@pytest.mark.parametrize("victim", [1, 0])
def test_partner_of_a_killed_rank_ends_soon_and_names_it(tmp_path: Path, victim: int) -> None:
    group = Group(2, reduce_in, str(tmp_path), {})
    wait_for_files(tmp_path, MARKS)
    pid = group._processes[victim].pid
    group.send_signal(signal.SIGKILL, rank=victim)
    began_s = time.monotonic()
    survivor = 1 - victim
    assert group._pipes[survivor].poll(15.0)
    assert time.monotonic() - began_s < 15.0
    wait_for_exits(group, [0, 1], 10.0)
    assert read_error(tmp_path).startswith(f"rank {victim} (") and f"pid {pid})" in read_error(tmp_path)
    assert "ended or could not be reached" in read_error(tmp_path)


def take_steps(guard: Guard, stop: StopSignal) -> list[str]:
    for step in range(12):
        guard.watchdog.beat(f"step {step}")
        guard.owner.check()
        time.sleep(0.3)
        sum_integers([1])
    guard.watchdog.finish()
    return ["done"]


def train_twice(folder: str) -> list[Any]:
    """Two runs one after the other in the same processes, with limits shorter than either."""
    limits = {"hang_timeout_s": 2.0, "rank_timeout_s": 2.0, "stop_grace_s": 2.0}
    ended = []
    for _ in range(2):
        began_s = time.monotonic()
        ended += run_guarded(Path(folder), take_steps, **limits)
        ended.append(time.monotonic() - began_s < 12 * 0.3 + 2.0)
    return ended


def test_run_that_goes_on_raises_no_alarm_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on(2, train_twice, str(tmp_path)) == [["done", True, "done", True]] * 2
    assert [path.name for path in tmp_path.iterdir()] == [".owner.lock"]
    assert capfd.readouterr().err == ""


def fail_alone(guard: Guard, stop: StopSignal) -> None:
    if read_ranks().rank == 1:
        raise OSError("no space left")
    sum_integers([1])


def fail_in(folder: str) -> str:
    try:
        return run_guarded(Path(folder), fail_alone)
    except OSError as error:
        return str(error)


def test_rank_that_left_by_itself_is_named_to_the_one_it_left(tmp_path: Path) -> None:
    first, second = run_on(2, fail_in, str(tmp_path))
    assert second == "no space left"
    assert first.startswith("failed: rank 1 (") and "of the run ended or could not be reached" in first


def start_in_used_folder(folder: str) -> str:
    try:
        run_guarded(Path(folder), take_steps)
    except ValueError as error:
        return f"{error} (group: {dist.is_initialized()})"
    return "started"


def test_start_in_a_used_folder_is_refused_on_every_rank_before_a_group_starts(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    kept = (tmp_path / OWNER_NAME).read_bytes()
    first, second = run_on(2, start_in_used_folder, str(tmp_path))
    assert first == second
    assert f"run_dir={tmp_path} is in use by process {os.getpid()} on " in first and first.endswith("(group: False)")
    assert (tmp_path / OWNER_NAME).read_bytes() == kept
    owner.release()


def lose_the_folder(guard: Guard, stop: StopSignal) -> list[str]:
    guard.owner.check()
    held = read_owner(Path(os.environ["MARKS"]))
    assert held is not None
    sum_integers([1])
    if read_ranks().rank == 0:
        (Path(os.environ["MARKS"]) / OWNER_NAME).write_text(json.dumps(held.describe() | {"token": "another"}))
    sum_integers([1])
    try:
        guard.owner.check()
    except RunFailed as error:
        return [str(error)]
    return ["still the owner"]


def lose_in(folder: str) -> Any:
    os.environ["MARKS"] = folder
    return run_guarded(Path(folder), lose_the_folder)


def test_every_rank_learns_that_the_folder_is_another_starts(tmp_path: Path) -> None:
    for words in run_on(2, lose_in, str(tmp_path)):
        assert words[0].startswith("another start took this run over at ")
    assert (tmp_path / OWNER_NAME).exists()
