"""Loss curves of runs, read from their metrics.jsonl, as one PNG."""

import json
from pathlib import Path
from typing import Any

SMOOTHING_POINTS = 3


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl; empty where the run has not logged yet."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines]


def read_curve(run_dir: Path, tag: str) -> tuple[list[int], list[float]]:
    """Tokens and values of one tag, where it was logged."""
    lines = [line for line in read_metrics(run_dir) if tag in line]
    return [int(line["tokens"]) for line in lines], [float(line[tag]) for line in lines]


def smooth(values: list[float], points: int = SMOOTHING_POINTS) -> list[float]:
    """The mean of each value and up to points - 1 before it."""
    windows = (values[max(0, index + 1 - points) : index + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw_curves(runs: dict[str, Path], floors_nats: dict[str, float], png: Path) -> None:
    """Training loss (smoothed) and validation loss (dots) in nats a token, over tokens; floors as dashed lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, run_dir) in enumerate(runs.items()):
        tokens, losses = read_curve(run_dir, "train/loss_nats")
        axes.plot(tokens, smooth(losses), color=f"C{index}", linewidth=1.2, label=f"{name}, training")
        axes.plot(*read_curve(run_dir, "validation/loss_nats"), "o", color=f"C{index}", label=f"{name}, validation")
    for index, (name, nats) in enumerate(floors_nats.items()):
        axes.axhline(nats, color="0.4", linestyle=("--", ":")[index % 2], linewidth=1, label=name)
    axes.set(xlabel="tokens", ylabel="loss, nats a token", title="Loss on real English text")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(png)
