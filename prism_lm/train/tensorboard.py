"""Where figures go: metrics.jsonl, TensorBoard and one console line, through one `write`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

METRICS_NAME = "metrics.jsonl"
SHOWN = {
    "train/loss_nats": "loss {:.4f}",
    "validation/loss_nats": "validation {:.4f}",
    "optim/learning_rate": "lr {:.2e}",
    "optim/grad_norm": "grad {:.3f}",
    "speed/tokens_per_s": "{:,.0f} tokens/s",
    "speed/mfu_pct": "MFU {:.1f}%",
    "speed/data_wait_pct": "data wait {:.1f}%",
    "speed/slowest_over_median": "slowest rank {:.2f}x",
    "memory/peak_gib": "{:.1f} GiB",
}
"What stands on the console, by tag."


class Recorder:
    """Records the figures of a run at rank 0, from the step after `resumed_step` on; other ranks record nothing.

    It writes while it is entered. What an earlier, killed process recorded beyond that step is dropped then, so that no
    step is recorded twice; what is still to be recorded of that step itself joins its record.
    """

    def __init__(self, run_dir: Path, *, resumed_step: int, total_steps: int, enabled: bool) -> None:
        self._run_dir = run_dir
        self._resumed_step = resumed_step
        self._total_steps = total_steps
        self._enabled = enabled

    def __enter__(self) -> "Recorder":
        if self._enabled:
            from torch.utils.tensorboard.writer import SummaryWriter

            drop_after(self._run_dir / METRICS_NAME, self._resumed_step)
            self._file = (self._run_dir / METRICS_NAME).open("a")
            board_dir = str(self._run_dir / "tensorboard")
            self._board = SummaryWriter(board_dir, purge_step=self._resumed_step + 1, flush_secs=10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._file.close()
            self._board.close()

    def write(
        self,
        step: int,
        tokens: int,
        figures: Mapping[str, float],
        histograms: Mapping[str, torch.Tensor] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Records one step's figures (tags `group/name_unit`); call it once a step at most. Texts go to metrics.jsonl
        alone."""
        if not self._enabled:
            return
        readable = {tag: value if math.isfinite(value) else None for tag, value in figures.items()}
        self._append({"step": step, "tokens": tokens, **readable, **(texts or {})})
        for tag, value in figures.items():
            self._board.add_scalar(tag, value, step)
        for tag, values in (histograms or {}).items():
            self._board.add_histogram(tag, values, step)
        if SHOWN.keys() & figures.keys():
            print(format_line(step, self._total_steps, figures), flush=True)

    def _append(self, record: dict[str, Any]) -> None:
        if record["step"] != self._resumed_step:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            return
        self._file.close()
        join_record(self._run_dir / METRICS_NAME, record)
        self._file = (self._run_dir / METRICS_NAME).open("a")

    def say(self, text: str) -> None:
        """Prints a line at rank 0."""
        if self._enabled:
            print(text, flush=True)

    def remark(self, step: int, tag: str, text: str) -> None:
        """Prints a line at rank 0 and shows it on TensorBoard."""
        self.say(text)
        if self._enabled:
            self._board.add_text(tag, text, step)


def drop_after(path: Path, last_step: int) -> None:
    """Keeps the lines of steps up to last_step; a line cut short by a kill is dropped as well."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except ValueError:
            continue
    _replace(path, kept)


def join_record(path: Path, record: dict[str, Any]) -> None:
    """Adds to the last line where that is of the same step; else a line of its own."""
    lines = path.read_text().splitlines(keepends=True)
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if last.get("step") == record["step"]:
        lines, record = lines[:-1], last | record
    _replace(path, [*lines, json.dumps(record) + "\n"])


def _replace(path: Path, lines: list[str]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(lines))
    temporary.replace(path)


def format_line(step: int, total_steps: int, figures: Mapping[str, float]) -> str:
    """The console line of a step; figures that are absent are left out."""
    width = len(str(total_steps))
    parts = [f"step {step:>{width}}/{total_steps}"]
    parts += [text.format(figures[tag]) for tag, text in SHOWN.items() if tag in figures]
    if "speed/eta_s" in figures:
        parts.append(f"ETA {format_duration(figures['speed/eta_s'])}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
