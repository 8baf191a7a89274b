"""What `prism bench --out` keeps besides JSON: a table, and a plot where there is something to draw."""

from pathlib import Path
from typing import Any

from launcher.bench_report import draw_lengths, format_report


def describe_timing(name: str, row_tokens: int, speed: float | None) -> dict[str, Any]:
    place = {"name": name, "rows": 2, "row_tokens": row_tokens}
    if speed is None:
        return {**place, "why_absent": "out of memory"}
    speeds = {"p20": 0.9 * speed, "p50": speed, "p80": 1.1 * speed}
    figures = {"step_ms": {"p50": 12.34}, "parameters": 1234567, "peak_gib": 1.5, "mfu_pct": 36.94}
    return {**place, "tokens_per_s": speeds, **figures}


def test_table_has_a_row_for_every_batch_and_says_what_was_not_timed() -> None:
    timings = [describe_timing("deep", 1024, 160_814.0), describe_timing("deep", 2048, None)]
    text = format_report({"machine": {"device": "a GPU"}, "timings": timings}, "prism bench x.yaml")
    assert "device a GPU" in text and "    prism bench x.yaml\n" in text
    assert "| deep | 1,234,567 | 2 x 1024 | 160,814 | 144,733 to 176,895 | 12.3 | 36.9 | 1.5 |\n" in text
    assert "| deep |  | 2 x 2048 | out of memory |" in text


def test_plot_has_a_line_a_model_over_the_lengths_that_were_timed(tmp_path: Path) -> None:
    timings = [describe_timing("deep", 1024, 10.0), describe_timing("wide", 1024, 20.0), describe_timing("deep", 48, 9)]
    draw_lengths([*timings, describe_timing("wide", 4096, None)], [tmp_path / "a.png", tmp_path / "a.svg"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {word} -->" in drawn for word in ("deep", "wide", "1K", "48", "4K", "tokens in a row"))
