"""One record a step, in metrics.jsonl, TensorBoard and on the console."""

import json
import math
from pathlib import Path

import pytest
import torch

from prism_lm.train.tensorboard import METRICS_NAME, Recorder, drop_after, format_duration, format_line
from tests.harness import read_records


def build_recorder(run_dir: Path, *, resumed_step: int = 0, enabled: bool = True) -> Recorder:
    return Recorder(run_dir, resumed_step=resumed_step, total_steps=9, enabled=enabled)


def read_board(run_dir: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    return [event.step for event in board.Scalars(tag)]


def test_resumed_run_records_no_step_twice(tmp_path: Path) -> None:
    with build_recorder(tmp_path) as recorder:
        for step in range(1, 6):
            recorder.write(step, 10 * step, {"train/loss_nats": 1.0 / step})
    with build_recorder(tmp_path, resumed_step=3) as recorder:
        for step in range(4, 8):
            recorder.write(step, 10 * step, {"train/loss_nats": 2.0 / step})
    records = read_records(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert records[4] == {"step": 5, "tokens": 50, "train/loss_nats": 0.4}
    assert read_board(tmp_path, "train/loss_nats") == [1, 2, 3, 4, 5, 6, 7]


def test_figure_made_after_a_resume_joins_the_record_of_the_step_resumed_from(tmp_path: Path) -> None:
    with build_recorder(tmp_path) as recorder:
        recorder.write(2, 20, {"train/loss_nats": 0.5}, texts={"data/order_hash": "ab"})
        recorder.write(3, 30, {"train/loss_nats": 0.4}, texts={"data/order_hash": "cd"})
    for _ in range(2):
        with build_recorder(tmp_path, resumed_step=3) as recorder:
            recorder.write(3, 30, {"validation/loss_nats": 0.6}, texts={"data/order_hash": "cd"})
            recorder.write(4, 40, {"train/loss_nats": 0.3})
    first, joined, last = read_records(tmp_path)
    assert (first["step"], last["step"]) == (2, 4)
    assert joined == {
        "step": 3,
        "tokens": 30,
        "train/loss_nats": 0.4,
        "data/order_hash": "cd",
        "validation/loss_nats": 0.6,
    }


def test_figure_made_after_a_resume_has_a_record_of_its_own_where_the_step_had_none(tmp_path: Path) -> None:
    with build_recorder(tmp_path) as recorder:
        recorder.write(2, 20, {"train/loss_nats": 0.5})
    with build_recorder(tmp_path, resumed_step=3) as recorder:
        recorder.write(3, 30, {"validation/loss_nats": 0.6})
    assert [record["step"] for record in read_records(tmp_path)] == [2, 3]


def test_recorder_leaves_the_records_alone_until_it_is_entered(tmp_path: Path) -> None:
    with build_recorder(tmp_path) as recorder:
        recorder.write(1, 10, {"train/loss_nats": 1.0})
    build_recorder(tmp_path, resumed_step=0)
    assert [record["step"] for record in read_records(tmp_path)] == [1]


def test_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "tra')
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_value_that_is_not_finite_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with build_recorder(tmp_path) as recorder:
        recorder.write(1, 10, {"train/loss_nats": math.nan}, {"decay/blocks.0": torch.rand(5)})
    assert json.loads((tmp_path / METRICS_NAME).read_text()) == {"step": 1, "tokens": 10, "train/loss_nats": None}
    assert capsys.readouterr().out == "step 1/9  loss nan\n"


def test_other_ranks_record_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with build_recorder(tmp_path, enabled=False) as recorder:
        recorder.write(1, 10, {"train/loss_nats": 1.0})
        recorder.say("hello")
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_console_line_shows_what_a_step_recorded() -> None:
    figures = {
        "train/loss_nats": 3.14159,
        "optim/learning_rate": 3e-4,
        "optim/grad_norm": 0.5,
        "speed/tokens_per_s": 12345.6,
        "speed/mfu_pct": 41.23,
        "speed/data_wait_pct": 0.04,
        "speed/eta_s": 3723.0,
    }
    assert format_line(7, 1000, figures) == (
        "step    7/1000  loss 3.1416  lr 3.00e-04  grad 0.500  12,346 tokens/s  MFU 41.2%  data wait 0.0%  ETA 1:02:03"
    )
    assert format_line(7, 10, {"validation/loss_nats": 2.0}) == "step  7/10  validation 2.0000"


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [format_duration(seconds) for seconds in (-1, 59.6, 86400)] == ["0:00:00", "0:01:00", "24:00:00"]
