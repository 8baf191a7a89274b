"""Whatever a run waits for, a stop signal ends it soon, and the resumed run is the uninterrupted one to the bit."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from prism_lm.checkpoint.folder import WEIGHTS_NAME, step_folder
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.waiting import STOPPED, call_interruptibly, iterate_interruptibly
from tests.harness import ListLoader, TinyModel, build_run, read_ranks, read_records, run_on

pytestmark = pytest.mark.alone

LONG_S, SOON_S = 60.0, 5.0
GLOBAL_ROWS, MICRO_ROWS, STEPS, EVAL_EVERY = 8, 2, 6, 2


def never() -> bool:
    return False


def test_result_comes_back_without_waiting_for_a_poll() -> None:
    began_s = time.monotonic()
    assert call_interruptibly(lambda: 5, never, poll_s=LONG_S) == 5
    assert time.monotonic() - began_s < SOON_S


def fail_deep_inside() -> None:
    raise OSError("shard.00003.mds is truncated")


def test_exception_comes_through_with_its_traceback() -> None:
    with pytest.raises(OSError, match=r"shard\.00003\.mds is truncated") as caught:
        call_interruptibly(fail_deep_inside, never)
    assert "fail_deep_inside" in "".join(traceback.format_exception(caught.value))


def test_end_of_an_iterator_comes_through_as_stop_iteration() -> None:
    empty: Iterator[int] = iter(())
    with pytest.raises(StopIteration):
        call_interruptibly(lambda: next(empty), never)


def test_stop_asked_for_before_the_call_begins_no_call() -> None:
    assert call_interruptibly(fail_deep_inside, lambda: True) is STOPPED


def test_signal_to_the_process_ends_the_wait_while_the_call_goes_on() -> None:
    released, began_s = threading.Event(), time.monotonic()
    with StopSignal() as stop:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert call_interruptibly(lambda: released.wait(LONG_S), lambda: stop.requested) is STOPPED
    assert 0.3 <= time.monotonic() - began_s < SOON_S
    released.set()


def test_iterating_gives_every_item_and_after_a_stop_no_further_one() -> None:
    assert list(iterate_interruptibly([1, 2, 3], never)) == [1, 2, 3]
    taken: list[Any] = []
    for item in iterate_interruptibly([1, 2, 3], lambda: len(taken) == 2):
        taken.append(item)
    assert taken == [1, 2, STOPPED]


@dataclass
class Plan:
    """What happens to rank 1 in this start: at the `at`-th event of a kind it is sent SIGTERM, and what it waits for
    from then on takes long."""

    kind: str
    at: int
    seen: int = 0
    signalled_at_s: float | None = field(default=None)

    def meet(self, kind: str, *, slow_s: float) -> None:
        """An event of this kind begins."""
        if not self.at or kind != self.kind or read_ranks().rank != 1:
            return
        self.seen += 1
        if self.seen == self.at:
            self.signalled_at_s = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        if self.seen >= self.at:
            time.sleep(slow_s)


class DrawingModel(TinyModel):
    """Draws from the generator in training, so that a resume shows whether the generators came back; tells a plan of
    each forward pass."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.blocks.append(nn.Dropout(0.1))

    def forward(self, input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor | None) -> Tensor:
        self.plan.meet("forward" if self.training else "evaluation", slow_s=1.0)
        return super().forward(input_ids_BT, document_start_BT, labels_BT)


def build_loader(plan: Plan, kind: str, end_at: int | None = None) -> Callable[[], ListLoader]:
    def tell(step: int, batch: dict[str, Tensor]) -> None:
        plan.meet(kind, slow_s=LONG_S)

    ranks = read_ranks()
    return lambda: ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=MICRO_ROWS, end_at=end_at, spoil=tell)


def train(folder: str, kind: str, at: int, eval_rows: int, zero_stage: Any) -> tuple[str, float]:
    """How the run ended, and how long after the signal."""
    plan = Plan(kind, at)
    config = TrainConfig(
        steps=STEPS,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=MICRO_ROWS,
        zero_stage=zero_stage,
        log_every_steps=1,
        eval_every_steps=EVAL_EVERY,
        eval_rows=eval_rows,
        schedule=ScheduleConfig(warmup_steps=1),
    )
    run = build_run(Path(folder), config, build_model=lambda: DrawingModel(plan))
    run = replace(
        run,
        build_train_loader=build_loader(plan, "batch"),
        build_validation_loader=build_loader(plan, "validation batch", end_at=4),
    )
    status = run_training(run)
    return status, 0.0 if plan.signalled_at_s is None else time.monotonic() - plan.signalled_at_s


@dataclass(frozen=True)
class Stop:
    """A wait in which rank 1 is asked to stop, and the step that the run stands at then."""

    kind: str
    at: int
    step: int
    eval_rows: int = 0
    zero_stage: int = 1


STOPS = {
    "first-batch": Stop("batch", 1, 0),
    "second-batch-of-a-step": Stop("batch", 8, 3, zero_stage=3),
    "first-forward": Stop("forward", 1, 0, zero_stage=2),
    "validation-batch": Stop("validation batch", 2, 2, eval_rows=16),
    "validation-batch-of-a-later-pass": Stop("validation batch", 6, 4),
    "evaluation-of-kept-rows": Stop("evaluation", 6, 4, eval_rows=16),
    "last-evaluation": Stop("evaluation", 11, 6, zero_stage=0),
}


def start(folder: Path, stop: Stop, at: int) -> list[tuple[str, float]]:
    return run_on(2, train, str(folder), stop.kind, at, stop.eval_rows, stop.zero_stage)


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Every record, but for what a clock or the machine decides."""
    records = read_records(folder)
    return [{tag: record[tag] for tag in record if not tag.startswith(("speed/", "memory/"))} for record in records]


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_stop_in_a_wait_ends_the_run_soon_and_the_resumed_one_is_the_uninterrupted_one(
    stop: Stop, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert {status for status, _ in start(whole, stop, at=0)} == {"finished"}
    ends = start(stopped, stop, at=stop.at)
    assert {status for status, _ in ends} == {"preempted"}
    assert 0.0 < ends[1][1] < SOON_S
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == [f"step_{stop.step}"]
    assert {status for status, _ in start(stopped, stop, at=0)} == {"finished"}
    assert read_curve(stopped) == read_curve(whole)
    assert sum("validation/loss_nats" in record for record in read_curve(whole)) == STEPS // EVAL_EVERY
    weights = [(step_folder(folder, STEPS) / WEIGHTS_NAME).read_bytes() for folder in (stopped, whole)]
    assert weights[0] == weights[1]
    assert (stopped / "metrics.jsonl").read_text().count("\n") == STEPS
