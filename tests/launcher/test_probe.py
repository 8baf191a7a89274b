"""`prism probe` on a few steps: what is trained, kept, resumed, tabulated and refused."""

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from launcher.__main__ import EXIT_USAGE
from launcher.probe import build_parser, choose_device, main, plan_cells, read_names
from launcher.probe_cells import Cell, CellProgress, ProbeFailed, read_cell, run_cells
from launcher.probe_table import compare_depths, estimate, format_report
from prism_lm.eval.probes.config import ProbeConfig
from prism_lm.eval.probes.tasks import TASKS

SHORT = ["--steps", "2", "--batch-rows", "2", "--heldout-rows", "8", "--device", "cpu"]
TWO = ["--tasks", "parity,local_xor", "--models", "prism_l0", "prism_l2"]


def build_result(task: str, model: str, seed: int, accuracy: float) -> dict[str, object]:
    recipe = vars(ProbeConfig())
    return {"task": task, "model": model, "seed": seed, "accuracy": accuracy, "recipe": recipe, "parameters": 10}


def test_table_json_and_plot_hold_every_cell_and_a_second_start_trains_only_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path), "--workers", "1"]
    assert main([*TWO, *SHORT, *out]) == 0
    text = capsys.readouterr()
    assert "4/4  local_xor prism_l2 seed 0" in text.err and "ETA" in text.err
    assert (
        "| task | floor | prism_l0 | prism_l2 |" in text.out and text.out == (tmp_path / "probe.md").read_text() + "\n"
    )
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("seed_*.json")}
    assert len(times) == 4

    assert main([*TWO, "--seeds", "0", "1", *SHORT, *out]) == 0
    assert "4 of 8 cells were finished before" in capsys.readouterr().err
    assert all(file.stat().st_mtime_ns == time for file, time in times.items())
    summary = json.loads((tmp_path / "probe.json").read_text())
    assert len(summary["cells"]) == 8 and summary["tasks"]["parity"]["floor"] == 0.5
    assert len(summary["tasks"]["parity"]["accuracy"]["prism_l2"]["values"]) == 2


def test_another_process_gives_the_bits_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launcher.probe_cells.ProcessPoolExecutor", lambda _, mp_context: ProcessPoolExecutor(1, mp_context)
    )
    recipe = ProbeConfig(steps=2, batch_rows=2, heldout_rows=8)
    cells = plan_cells([TASKS["mux"]], ["prism_l0", "attention"], [3], recipe)
    alone, shared = (
        run_cells(cells, tmp_path / str(workers), device="cpu", workers=workers, report=lambda _: None)
        for workers in (1, 2)
    )
    assert [cell["curve"] for cell in alone] == [cell["curve"] for cell in shared]
    assert [cell["accuracy"] for cell in alone] == [cell["accuracy"] for cell in shared]


def test_folder_of_another_recipe_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    cell = Cell(task="mux", model="attention", seed=0, config=ProbeConfig(steps=1, batch_rows=2, heldout_rows=8))
    run_cells([cell], tmp_path, device="cpu", workers=1, report=lambda _: None)
    other = Cell(task="mux", model="attention", seed=0, config=ProbeConfig(steps=2, batch_rows=2, heldout_rows=8))
    assert read_cell(cell, tmp_path) is not None
    with pytest.raises(
        ValueError, match=r"holds mux attention seed 0 with another recipe; a folder keeps one; use another --out"
    ):
        read_cell(other, tmp_path)


def test_failed_cell_is_named_after_the_others_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_or_finish(cell: Cell, out: str, device: str) -> dict[str, object]:
        if cell.model == "prism_l0":
            raise RuntimeError("lost")
        return {"accuracy": 1.0, "wall_s": 0.0}

    monkeypatch.setattr("launcher.probe_cells.run_cell", fail_or_finish)
    cells = plan_cells([TASKS["mux"]], ["prism_l0", "attention"], [0], ProbeConfig())
    lines: list[str] = []
    with pytest.raises(ProbeFailed, match=r"1 of 2 cells must be run again: mux prism_l0 seed 0 \(lost\)"):
        run_cells(cells, tmp_path, device="cpu", workers=1, report=lines.append)
    assert lines[-1].startswith("2/2  mux attention seed 0: 100.0%")


def test_interval_is_students_and_one_seed_has_none() -> None:
    of_three = estimate([0.1, 0.2, 0.3])
    assert of_three.mean == pytest.approx(0.2)
    assert of_three.half_width == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert of_three.format_pct() == "20.0 ± 24.8" and not of_three.excludes_zero
    assert estimate([0.5]).format_pct() == "50.0" and not estimate([0.5]).excludes_zero


def test_gain_of_depth_is_paired_by_seed_and_starred_where_it_is_certain() -> None:
    by_model = {"prism_l0": {0: 0.1, 1: 0.5, 2: 0.9}, "prism_l2": {2: 0.95, 1: 0.54, 0: 0.14}, "attention": {0: 1.0}}
    gains = compare_depths(by_model)
    assert list(gains) == ["prism_l2"] and gains["prism_l2"].mean == pytest.approx(0.13 / 3)
    results = [
        build_result("parity", model, seed, value) for model, seeds in by_model.items() for seed, value in seeds.items()
    ]
    text = format_report(results, [TASKS["parity"]], ["gla"], "prism probe")
    assert "| parity | +4.3 ± 1.4 * |" in text and "Absent here: gla." in text and "| parity | 50.0 |" in text


def test_eta_is_the_mean_of_what_was_done_times_what_is_left() -> None:
    clock, lines = iter([0.0, 30.0, 60.0, 90.0]), list[str]()
    progress = CellProgress(3, lines.append, now=lambda: next(clock))
    for _ in range(3):
        progress.advance("cell")
    assert lines == ["1/3  cell  ETA 0:01:00", "2/3  cell  ETA 0:00:30", "3/3  cell"]


def test_names_are_read_with_commas_spaces_and_ranges() -> None:
    assert read_names(["prism_l1..prism_l3,attention", "prism_l2"]) == ["prism_l1", "prism_l2", "prism_l3", "attention"]
    with pytest.raises(ValueError, match=r"--models=prism_l3\.\.prism_l1 must be"):
        read_names(["prism_l3..prism_l1"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "must be told what to run"),
        (["--tasks", "chess"], "--tasks=chess must be a task"),
        (["--all", "--models", "lstm"], "--models=lstm must be a model"),
        (["--all", "--steps", "0"], "--steps=0 must be at least 1"),
        (["--all", "--seeds", "-1"], "--seeds=-1 must be at least 0"),
        (["--all", "--learning-rate", "0"], "--learning-rate=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        main(arguments)
    assert EXIT_USAGE == 2


def test_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu") == "cpu"
    for name in ("cuda:99", "tpu"):
        with pytest.raises(ValueError, match=f"--device={name} must be a device"):
            choose_device(name)


def test_help_says_all_and_loads_no_torch() -> None:
    assert "--seeds" in build_parser().format_help() and "silence_gate" in build_parser().format_help()
    code = "import sys, launcher.probe as p; p.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
