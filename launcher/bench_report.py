"""What `prism bench --out FOLDER` keeps: bench.json, bench.md, and tokens/s over row length as PNG and SVG."""

import importlib.util
import json
from pathlib import Path
from typing import Any

COLUMNS = ("model", "parameters", "batch", "tokens/s", "20 to 80%", "step, ms", "MFU, %", "peak, GiB")


def write_report(folder: Path, measured: dict[str, Any], command: str) -> None:
    """Keep what was measured; without matplotlib there are no plots. `measured` is bench.json, and says the rest."""
    (folder / "bench.json").write_text(json.dumps({"command": command, **measured}, indent=1) + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(format_report(measured, command), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        draw_lengths(measured["timings"], [folder / "bench.png", folder / "bench.svg"])


def format_report(measured: dict[str, Any], command: str) -> str:
    """The machine, the command and one Markdown table of every model at every batch."""
    machine = " · ".join(f"{name} {value}" for name, value in measured["machine"].items())
    header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    rows = "".join(_format_row(timing) for timing in measured["timings"])
    return "\n".join(["# Speed of training steps", "", machine, "", f"    {command}", "", header + rows])


def _format_row(timing: dict[str, Any]) -> str:
    batch = f"{timing['rows']} x {timing['row_tokens']}"
    if "why_absent" in timing:
        cells = [timing["name"], "", batch, timing["why_absent"], "", "", "", ""]
    else:
        speed, mfu = timing["tokens_per_s"], timing["mfu_pct"]
        cells = [
            timing["name"],
            f"{timing['parameters']:,}",
            batch,
            f"{speed['p50']:,.0f}",
            f"{speed['p20']:,.0f} to {speed['p80']:,.0f}",
            f"{timing['step_ms']['p50']:,.1f}",
            "" if mfu is None else f"{mfu:.1f}",
            f"{timing['peak_gib']:.1f}",
        ]
    return f"| {' | '.join(cells)} |\n"


def draw_lengths(timings: list[dict[str, Any]], files: list[Path]) -> None:
    """Tokens/s over tokens a row, a line a model, both axes logarithmic; bars from 20 to 80%. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for index, name in enumerate(dict.fromkeys(timing["name"] for timing in timings)):
        _draw_model(axes, name, [timing for timing in timings if timing["name"] == name], f"C{index}")
    lengths = sorted({timing["row_tokens"] for timing in timings})
    axes.set(xscale="log", yscale="log", xlabel="tokens in a row", ylabel="tokens/s of a training step")
    axes.set_xticks(lengths, [_shorten(length) for length in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(which="both", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    for file in files:
        figure.savefig(file)


def _draw_model(axes: Any, name: str, timings: list[dict[str, Any]], color: str) -> None:
    timed = sorted((timing for timing in timings if "why_absent" not in timing), key=lambda item: item["row_tokens"])
    speeds = [timing["tokens_per_s"] for timing in timed]
    medians = [speed["p50"] for speed in speeds]
    spread = [[speed["p50"] - speed["p20"] for speed in speeds], [speed["p80"] - speed["p50"] for speed in speeds]]
    lengths = [timing["row_tokens"] for timing in timed]
    axes.errorbar(lengths, medians, yerr=spread, marker="o", markersize=4, capsize=2, color=color, label=name)


def _shorten(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
