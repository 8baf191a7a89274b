"""The rank that the others wait for is named, whether its data or its device is slow, and no other rank ever is."""

import hashlib
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.state import capture_generators
from prism_lm.train.stopwatch import FORWARD, GATHER, Stopwatch
from prism_lm.train.straggler import Times, describe_slowest, find_slowest
from tests.harness import ListLoader, TinyModel, build_run, read_losses, read_ranks, read_records, run_on

pytestmark = pytest.mark.alone

ROWS = 8
TAGS = ("speed/slowest_rank", "speed/slowest_over_median", "speed/data_wait_max_s", "speed/collective_wait_max_s")


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Seconds that each rank loses, by rank."""

    data_s: tuple[float, ...] = (0.0, 0.0)
    "With each micro-batch."
    forward_s: tuple[float, ...] = (0.0, 0.0)
    "In each forward pass with labels."
    validation_s: tuple[float, ...] = (0.0, 0.0)
    "With each validation batch."


class SlowModel(TinyModel):
    """The tiny model on a device that takes its time, before the first weights are gathered too."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, inputs: time.sleep(delay_s if module.training else 0.0))


def build_slow_loader(delay_s: float, **settings: Any) -> ListLoader:
    def sleep(step: int, batch: dict[str, Tensor]) -> None:
        time.sleep(delay_s)

    return ListLoader(read_ranks(), global_rows=ROWS, micro_rows=2, spoil=sleep, **settings)


def train(folder: str, delays: Delays, settings: dict[str, Any]) -> str:
    """A run of eight steps, its lines in a file beside it; the digest of this rank's generators at its end."""
    rank = read_ranks().rank
    defaults = {"steps": 8, "global_batch_rows": ROWS, "micro_batch_rows": 2, "log_every_steps": 1}
    config = TrainConfig(**{**defaults, "schedule": ScheduleConfig(warmup_steps=1), **settings})
    run = build_run(
        Path(folder),
        config,
        build_model=lambda: SlowModel(delays.forward_s[rank]),
        loader=lambda ranks: build_slow_loader(delays.data_s[rank]),
    )
    run = replace(run, build_validation_loader=lambda: build_slow_loader(delays.validation_s[rank], end_at=2))
    with (
        Path(f"{folder}.rank_{rank}.txt").open("w") as console,
        redirect_stdout(console),
        pytest.MonkeyPatch.context() as patch,
    ):
        # Every weight of a model this small would be one of those that stage 3 keeps whole.
        patch.setattr("prism_lm.train.engine._PERSISTENT_ELEMENTS", 0)
        assert run_training(run) == "finished"
    return hashlib.sha256(repr(capture_generators()).encode()).hexdigest()


def read_reports(folder: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """The steps named on TensorBoard with a slow rank, and the records of all comparisons."""
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()
    tag = "speed/straggler/text_summary"
    named = [event.step for event in board.Tensors(tag)] if tag in board.Tags()["tensors"] else []
    return named, [record for record in read_records(folder) if TAGS[0] in record]


def read_console(folder: Path, rank: int) -> list[str]:
    return Path(f"{folder}.rank_{rank}.txt").read_text().splitlines()


def model_times(
    arrivals_s: list[float], forwards_s: list[float], *, rest: float, wait_seen: bool = True
) -> list[Times]:
    """What ranks measure that meet at the batch, at the loss and at the end, where the rest of the step takes `rest`
    times the forward pass; wait_seen: they see how long they wait at the loss."""
    agreed_s, longest_s = max(arrivals_s), max(forwards_s)
    return [
        Times(
            step_s=agreed_s + longest_s * (1.0 + rest),
            arrival_s=arrival_s,
            data_s=arrival_s,
            forward_s=forward_s,
            wait_s=agreed_s - arrival_s + (longest_s - forward_s if wait_seen else 0.0),
        )
        for arrival_s, forward_s in zip(arrivals_s, forwards_s, strict=True)
    ]


@pytest.mark.parametrize("wait_seen", [True, False])
def test_slow_device_counts_with_its_whole_step_not_its_forward_pass_alone(wait_seen: bool) -> None:
    slowest = find_slowest(model_times([0.0] * 4, [1.0, 1.0, 1.3, 1.0], rest=2.0, wait_seen=wait_seen))
    assert (slowest.rank, slowest.slow_ranks) == (2, (2,))
    assert slowest.over_median == pytest.approx(1.3) and slowest.own_s == pytest.approx(3.9)
    assert slowest.forward_s == pytest.approx(0.9) and slowest.data_s == 0.0


def test_slow_data_counts_against_the_whole_step() -> None:
    slowest = find_slowest(model_times([0.1, 0.9, 0.1], [1.0, 1.0, 1.0], rest=1.0))
    assert (slowest.rank, slowest.slow_ranks) == (1, (1,))
    assert slowest.over_median == pytest.approx(2.9 / 2.1)
    assert slowest.data_s == pytest.approx(0.8) and slowest.forward_s == 0.0


def test_ranks_within_a_tenth_of_the_median_are_not_slow() -> None:
    assert find_slowest(model_times([0.0, 0.0], [1.0, 1.09], rest=2.0)).slow_ranks == ()
    assert find_slowest(model_times([0.0, 0.0], [1.0, 1.11], rest=2.0)).slow_ranks == (1,)
    assert find_slowest([Times(), Times()]).slow_ranks in ((), (0, 1))


def test_line_names_rank_and_node_and_says_where_a_whole_node_is_slow() -> None:
    slowest = find_slowest(model_times([0.0] * 6, [1.0, 1.0, 1.5, 1.4, 1.0, 1.0], rest=1.0))
    text = describe_slowest(400, slowest, "rank 2 (node02, pid 7)", ["a", "a", "node02", "node02", "b", "b"])
    assert text == (
        "step 400: slowest rank 2 (node02, pid 7): 1.50x the median rank's step, 3.000 s against 2.000 s by itself; "
        "of it +0.000 s waiting for data, +1.000 s computing; 2 of the 2 ranks of node02 are slow"
    )


def test_stretch_counts_only_where_it_lies_within_the_one_named() -> None:
    watch = Stopwatch(torch.device("cpu"))
    with watch.measuring(FORWARD):
        time.sleep(0.01)
    assert watch.read()[FORWARD] == 0.0
    watch.is_on = True
    with watch.measuring(GATHER, within=FORWARD):
        time.sleep(0.01)
    with watch.measuring(FORWARD), watch.measuring(GATHER, within=FORWARD):
        time.sleep(0.01)
    seconds = watch.read()
    assert 0.01 <= seconds[GATHER] <= seconds[FORWARD] and seconds[GATHER] < 0.02 + seconds[FORWARD] / 2
    assert watch.read() == {}


STEADY = Delays(forward_s=(0.05, 0.05))
CASES: dict[str, tuple[Delays, dict[str, Any], int]] = {
    "data of rank 1": (replace(STEADY, data_s=(0.0, 0.1)), {}, 1),
    "data of rank 0": (replace(STEADY, data_s=(0.1, 0.0)), {"zero_stage": 0}, 0),
    "device of rank 1, stage 1": (Delays(forward_s=(0.05, 0.15)), {}, 1),
    "device of rank 0, stage 2": (Delays(forward_s=(0.15, 0.05)), {"zero_stage": 2}, 0),
    "device of rank 1, stage 3": (Delays(forward_s=(0.05, 0.15)), {"zero_stage": 3}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_slow_rank_is_named_in_log_records_and_tensorboard(case: str, tmp_path: Path) -> None:
    delays, settings, rank = CASES[case]
    run_on(2, train, str(tmp_path / "run"), delays, {"straggler_every_steps": 4, **settings})
    named, records = read_reports(tmp_path / "run")
    assert named == [4, 8] and [record["step"] for record in records] == [4, 8]
    for record in records:
        assert record["speed/slowest_rank"] == rank and record["speed/slowest_over_median"] > 1.3
        assert record["speed/slowest_name"].startswith(f"rank {rank} (") and "pid" in record["speed/slowest_name"]
        assert (record["speed/data_wait_max_s"] >= 0.1) == case.startswith("data")
        assert record["speed/collective_wait_max_s"] > 0.0
        assert record["speed/straggler"] in read_console(tmp_path / "run", 0)
    lines = [line for line in read_console(tmp_path / "run", 0) if "slowest rank" in line and "median" in line]
    assert [line.partition(" (")[0] for line in lines] == [f"step {step}: slowest rank {rank}" for step in (4, 8)]
    assert read_console(tmp_path / "run", 1) == []


def check_none_is_named(folder: Path, delays: Delays, settings: dict[str, Any]) -> None:
    run_on(2, train, str(folder / "run"), delays, {"straggler_every_steps": 4, **settings})
    named, records = read_reports(folder / "run")
    assert named == [] and not [line for line in read_console(folder / "run", 0) if "median" in line]
    assert [record["step"] for record in records] == [4, 8]
    assert all(record["speed/slowest_over_median"] < 1.1 and "speed/straggler" not in record for record in records)


def test_equal_ranks_name_none(tmp_path: Path) -> None:
    check_none_is_named(tmp_path, Delays(forward_s=(0.3, 0.3)), {})


def test_rank_slow_in_validation_alone_is_not_named(tmp_path: Path) -> None:
    delays = Delays(forward_s=(0.3, 0.3), validation_s=(0.0, 1.0))
    check_none_is_named(tmp_path, delays, {"eval_every_steps": 2, "eval_rows": 0})


@pytest.mark.parametrize("stage", [1, 3])
def test_comparing_leaves_losses_and_generators_as_they_are(tmp_path: Path, stage: int) -> None:
    def run(every_steps: int) -> list[str]:
        settings = {"straggler_every_steps": every_steps, "zero_stage": stage}
        return run_on(2, train, str(tmp_path / str(every_steps)), Delays(), settings)

    assert run(0) == run(2)
    losses = [read_losses(tmp_path / name) for name in ("0", "2")]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert read_reports(tmp_path / "0")[1] == [] and len(read_reports(tmp_path / "2")[1]) == 4


def test_one_process_has_nobody_to_compare_with(tmp_path: Path) -> None:
    run_on(1, train, str(tmp_path / "run"), Delays(), {"straggler_every_steps": 1})
    assert read_reports(tmp_path / "run") == ([], [])


@pytest.mark.gpu
def test_stretch_of_a_gpu_is_its_own_time_and_not_that_of_the_host() -> None:
    watch = Stopwatch(torch.device("cuda"))
    watch.is_on = True
    with watch.measuring(FORWARD):
        torch.cuda._sleep(1_000_000_000)
    assert watch.read()[FORWARD] == 0.0
    torch.cuda.synchronize()
    assert watch.read()[FORWARD] > 0.1
