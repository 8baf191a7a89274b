import json
from pathlib import Path

import pytest

from launcher.curves import draw_curves, read_curve, smooth


def write_run(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    lines = [{"step": step, "tokens": 100 * step, "train/loss_nats": loss} for step, loss in enumerate(losses, start=1)]
    lines[-1]["validation/loss_nats"] = losses[-1] + 0.1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_curve_holds_only_the_lines_that_logged_the_tag(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [3.0, 2.0])
    assert read_curve(run_dir, "train/loss_nats") == ([100, 200], [3.0, 2.0])
    assert read_curve(run_dir, "validation/loss_nats") == ([200], [2.1])
    assert read_curve(tmp_path / "not_yet", "train/loss_nats") == ([], [])


def test_smoothing_averages_what_came_before_and_keeps_the_length() -> None:
    assert smooth([4.0, 2.0, 0.0], points=2) == pytest.approx([4.0, 3.0, 1.0])


def test_curves_are_drawn_as_a_png(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [3.0, 2.5, 2.0])
    draw_curves({"model": run_dir}, {"bigram": 2.2}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
