"""What a reader sees: the machine, the bounds, a table that grows line by line, and everything as JSON."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import triton

from kernels.bench.bounds import Ceilings
from kernels.bench.cases import Case
from kernels.bench.measure import Measured, Timing
from kernels.bench.peers import find_version

SWITCH_PREFIXES = ("FLA_", "TRITON_", "PYTORCH_", "CUDA_LAUNCH")
COLUMNS = (
    ("operator", 10), ("shape", 20), ("form", 14), ("forward ms (20..80%)", 24), ("bound", 6),
    ("fwd+bwd ms (20..80%)", 24), ("bound", 6), ("peak GiB", 8), ("kept/in", 7), ("fwd/peer", 8), ("both/peer", 9),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case with what was measured, and its ratios to the baseline of its shape (below 1: faster than that)."""

    operator: str
    shape: str
    name: str
    measured: Measured
    forward_bound_ms: float | None
    both_bound_ms: float | None
    forward_share: float | None
    both_share: float | None
    forward_ratio: float | None
    both_ratio: float | None


def build_row(case: Case, measured: Measured, baseline: Measured | None) -> Row:
    """Shares of the bounds and ratios to the baseline, where both sides were measured."""
    base = baseline or Measured()
    return Row(
        operator=case.operator,
        shape=case.shape,
        name=case.name,
        measured=measured,
        forward_bound_ms=case.forward_bound_ms,
        both_bound_ms=case.both_bound_ms,
        forward_share=_divide(case.forward_bound_ms, _median(measured.forward)),
        both_share=_divide(case.both_bound_ms, _median(measured.both)),
        forward_ratio=_divide(_median(measured.forward), _median(base.forward)),
        both_ratio=_divide(_median(measured.both), _median(base.both)),
    )


def _median(timing: Timing | None) -> float | None:
    return None if timing is None else timing.median_ms


def _divide(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def render_header() -> str:
    """The names of the columns."""
    return "  ".join(name.ljust(width) for name, width in COLUMNS).rstrip()


def render_row(row: Row) -> str:
    """One line of the table, and a second one with the reason where something is absent."""
    measured = row.measured
    cells = (
        row.operator, row.shape, row.name, _timing(measured.forward), _percent(row.forward_share),
        _timing(measured.both), _percent(row.both_share), _number(measured.peak_gib), _number(measured.saved_ratio),
        _number(row.forward_ratio), _number(row.both_ratio),
    )  # fmt: skip
    line = "  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)).rstrip()
    return line if measured.absent is None else f"{line}\n{'':12}absent: {measured.absent}"


def _timing(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.median_ms:.4f} ({timing.low_ms:.4f}..{timing.high_ms:.4f})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def describe_machine() -> dict[str, object]:
    """The GPU, the versions, and the environment's switches that change what is measured."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _read_driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fla": find_version("flash-linear-attention"),
        "switches": {key: value for key, value in sorted(os.environ.items()) if key.startswith(SWITCH_PREFIXES)},
    }


def _read_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def render_machine(machine: dict[str, object]) -> str:
    """The machine in one line."""
    switches = " ".join(f"{key}={value}" for key, value in dict(machine["switches"]).items()) or "none set"
    names = ", ".join(f"{key} {machine[key]}" for key in ("driver", "torch", "triton", "fla"))
    return f"machine: {machine['gpu']}, {names}; switches: {switches}"


def render_ceilings(ceilings: Ceilings) -> str:
    """The ceilings in one line."""
    measured = (
        f"{ceilings.copy_bytes_per_s / 1e12:.2f} TB/s copied, "
        f"{ceilings.product_flops_per_s / 1e12:.0f} TFLOP/s of bf16 products"
    )
    return f"ceilings, measured now: {measured}{'' if ceilings.is_known else '; an unknown GPU has no bound'}"


def render_bounds(cases: list[Case]) -> Iterator[str]:
    """The bound of every case that has one, before anything is timed."""
    for case in cases:
        if case.forward_bound_ms is not None and not case.is_baseline:
            both = "" if case.both_bound_ms is None else f", with backward {case.both_bound_ms:.4f} ms"
            yield f"bound: {case.operator} {case.shape} {case.name}: forward {case.forward_bound_ms:.4f} ms{both}"


def build_report(machine: dict[str, object], ceilings: Ceilings, rows: list[Row]) -> dict[str, object]:
    """Everything that was printed, as JSON takes it."""
    return {"machine": machine, "ceilings": asdict(ceilings), "rows": [asdict(row) for row in rows]}
