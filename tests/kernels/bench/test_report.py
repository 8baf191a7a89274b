"""The table and the JSON hold what was measured, and say what was not."""

import json

import pytest

from kernels.bench.bounds import Ceilings
from kernels.bench.cases import Case, Options, build_cases
from kernels.bench.measure import Measured, Timing, count_sets, shorten
from kernels.bench.report import (
    build_report,
    build_row,
    render_bounds,
    render_ceilings,
    render_header,
    render_machine,
    render_row,
)

CEILINGS = Ceilings(4e12, 600e12, True)
MACHINE = {
    "gpu": "H200",
    "driver": "1",
    "torch": "2",
    "triton": "3",
    "fla": "absent",
    "switches": {"FLA_TILELANG": "0"},
}
EVERYTHING = ("scan", "lengths", "step", "short_conv", "gated_norm")


def build_case(name: str = "prism L=2") -> Case:
    return Case(
        operator="scan", shape="1 x 32768 H16", name=name, run=Measured, forward_bound_ms=0.5, both_bound_ms=2.0
    )


def measured(forward_ms: float, both_ms: float) -> Measured:
    forward, both = (Timing(ms, 0.9 * ms, 1.1 * ms) for ms in (forward_ms, both_ms))
    return Measured(forward=forward, both=both, peak_gib=3.25, saved_ratio=0.75)


def test_row_has_shares_of_the_bound_and_ratios_to_the_peer():
    row = build_row(build_case(), measured(1.0, 3.0), measured(2.0, 4.0))
    assert (row.forward_share, row.forward_ratio, row.both_ratio) == (0.5, 0.5, 0.75)
    assert row.both_share == pytest.approx(2 / 3)
    line = render_row(row)
    for cell in ("prism L=2", "1.0000 (0.9000..1.1000)", "50%", "67%", "3.25", "0.75", "0.50"):
        assert cell in line


def test_columns_stand_below_their_names():
    header, line = render_header(), render_row(build_row(build_case(), measured(1.0, 3.0), None))
    for name, cell in (("shape", "1 x 32768"), ("form", "prism"), ("forward ms", "1.0000"), ("peak", "3.25")):
        assert header.index(name) == line.index(cell)


def test_absent_peer_is_named_with_its_reason_and_gives_no_ratio():
    absent = Measured(absent=shorten(ModuleNotFoundError("No module named 'fla'\nand more")))
    row = build_row(build_case("fla rank 1"), absent, absent)
    assert render_row(row).endswith("absent: ModuleNotFoundError: No module named 'fla'")
    assert build_row(build_case(), measured(1.0, 3.0), absent).forward_ratio is None


def test_peer_that_refuses_its_backward_keeps_its_forward():
    half = Measured(forward=Timing(2.0, 2.0, 2.0), absent="RuntimeError: no backward here")
    row = build_row(build_case(), measured(1.0, 3.0), half)
    assert row.forward_ratio == 0.5 and row.both_ratio is None


def test_json_holds_every_number_of_the_table():
    rows = [build_row(build_case(), measured(1.0, 3.0), None)]
    read = json.loads(json.dumps(build_report(MACHINE, CEILINGS, rows)))
    assert read["rows"][0]["measured"]["both"] == {"median_ms": 3.0, "low_ms": 2.7, "high_ms": pytest.approx(3.3)}
    assert read["machine"]["switches"] == {"FLA_TILELANG": "0"} and read["ceilings"]["is_known"]


def test_machine_line_names_versions_and_switches():
    assert render_machine(MACHINE) == "machine: H200, driver 1, torch 2, triton 3, fla absent; switches: FLA_TILELANG=0"


def test_ceilings_of_an_unknown_gpu_are_no_bound():
    assert render_ceilings(CEILINGS).endswith("4.00 TB/s copied, 600 TFLOP/s of bf16 products")
    assert render_ceilings(Ceilings(4e12, 600e12, False)).endswith("an unknown GPU has no bound")


def test_bounds_are_printed_for_every_case_of_ours_that_has_one():
    cases = list(build_cases(Options(operators=EVERYTHING), CEILINGS))
    ours = [case for case in cases if case.name.startswith("prism")]
    assert len(list(render_bounds(cases))) == len(ours) == 3 * 5 + 10 * 2 + 4 * 5 + 2
    assert not list(render_bounds(list(build_cases(Options(operators=EVERYTHING), Ceilings(4e12, 6e14, False)))))


def test_baseline_comes_first_in_every_group():
    seen = set()
    for case in build_cases(Options(operators=EVERYTHING, is_quick=True), CEILINGS):
        group = (case.operator, case.shape)
        assert case.is_baseline == (group not in seen)
        seen.add(group)


def test_without_peers_only_ours_and_the_plain_forms_run():
    names = {case.name for case in build_cases(Options(operators=EVERYTHING, has_peers=False), CEILINGS)}
    assert names == {"plain torch", "prism", *(f"prism L={L}" for L in range(5))}


def test_lengths_hold_the_tokens_of_a_batch_equal_up_to_32k():
    shapes = {case.shape for case in build_cases(Options(operators=("lengths",)), CEILINGS)}
    assert {"16 x 2048 H16", "1 x 32768 H16", "1 x 1048576 H16"} <= shapes and len(shapes) == 10


def test_inputs_are_rotated_until_an_l2_cache_cannot_hold_them():
    assert [count_sets(2**20 * mib) for mib in (1, 30, 59, 60, 500)] == [64, 4, 3, 1, 1]
