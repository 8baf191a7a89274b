"""What a study's folder tells, written by hand as runs leave it: states, means, differences seed by seed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.study import Study, StudyEntry
from launcher.sweep import main
from launcher.sweep_folder import find_changes, resolve_study, write_study
from launcher.sweep_interval import compute_interval
from launcher.sweep_records import begin_log, log_file, read_study_records, run_folder
from launcher.sweep_table import spell_markdown, tabulate
from tests.launcher.run_folders import RECORD, write_checkpoint, write_lines, write_owner

TINY = str(Path(__file__).parent.parent.parent / "configs/train/tiny.yaml")
RATE = "train.optim.learning_rate"
LOSSES = {"a": {1: 3.10, 2: 3.30, 3: 3.20}, "b": {1: 3.00, 2: 3.21, 3: 3.08}}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    entries = [StudyEntry(name="a"), StudyEntry(name="b", set={"model.solver_steps": 4, RATE: 2e-3})]
    study = Study(name="s", base=TINY, runs=entries, seeds=[1, 2, 3], folder=str(tmp_path / "study"))
    runs = resolve_study(study)
    write_study(study, runs, find_changes(study, runs))
    return study


def finish(study: Study, name: str, loss: float | None, **changes: Any) -> None:
    run_dir = run_folder(Path(study.place), name)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_lines(run_dir / "lineage.jsonl", {"event": "start", "step": 0})
    losses = {"train/loss_nats": 3.0, **({} if loss is None else {"validation/loss_nats": loss})}
    result = {"status": "finished", "step": 280, "tokens": 573440, "starts": 1, "error": None, **losses, **changes}
    (run_dir / "result.json").write_text(json.dumps(result))


def finish_all(study: Study) -> None:
    for group, losses in LOSSES.items():
        for seed, loss in losses.items():
            finish(study, f"{group}-seed_{seed}", loss)


def test_difference_is_taken_seed_by_seed_and_so_is_tighter_than_its_two_means(study: Study) -> None:
    finish_all(study)
    table = tabulate(Path(study.place))
    assert table is not None and table.keys == ["model.solver_steps", RATE]
    first, second = table.rows
    assert first.loss == compute_interval([3.10, 3.30, 3.20]) and first.difference is None
    assert second.loss and second.loss.half_width and second.difference and second.difference.half_width
    assert second.difference.mean == pytest.approx(second.loss.mean - first.loss.mean)
    assert second.difference.half_width < 0.5 * second.loss.half_width
    assert (second.values, second.count_planned) == ({"model.solver_steps": 4, RATE: 2e-3}, 3)
    assert "| b | 4 | 0.002 | " in spell_markdown(table) and "Not in the table" not in spell_markdown(table)


def test_run_without_a_partner_of_its_seed_is_in_the_mean_and_not_in_the_difference(study: Study) -> None:
    finish_all(study)
    finish(study, "a-seed_2", None, status="failed", step=7, error="loss is not finite\nmore")
    table = tabulate(Path(study.place))
    assert table is not None and table.rows[1].loss and table.rows[1].difference
    assert (table.rows[1].loss.count, table.rows[1].difference.count) == (3, 2)
    text = spell_markdown(table)
    assert "| 2 of 3 |" in text and "- a-seed_2: failed: loss is not finite\n" in text + "\n"


def test_rows_by_a_key_put_together_what_else_differs_and_have_no_difference_where_seeds_repeat(study: Study) -> None:
    finish_all(study)
    table = tabulate(Path(study.place), ["model.mixer"])
    assert table is not None
    (row,) = table.rows
    assert row.values == {"model.mixer": "prism"} and len(row.runs) == 6 and row.parameters is None and not row.name
    with pytest.raises(ValueError, match=r"--by=model\.solver_step must be a key of the runs; use model\.solver_steps"):
        tabulate(Path(study.place), ["model.solver_step"])


def test_run_without_a_validation_loss_is_named_and_not_counted_as_zero(study: Study) -> None:
    finish(study, "a-seed_1", 3.1)
    finish(study, "a-seed_2", None)
    table = tabulate(Path(study.place))
    assert table is not None and table.rows[0].loss == compute_interval([3.1]) and table.rows[1].loss is None
    text = spell_markdown(table)
    assert "- a-seed_2: finished: no validation loss; set train.eval_every_steps" in text
    assert "- b-seed_1: missing: step 0 of 280" in text


def test_folder_without_results_has_no_table_and_says_so(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert tabulate(Path(study.place)) is None
    assert main(["table", study.place]) == 1
    assert "no run has finished" in capsys.readouterr().out


def test_every_state_of_a_run_is_told_with_its_step_and_error(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(study.place)
    finish(study, "a-seed_1", 3.1)
    finish(study, "a-seed_2", None, status="failed", step=7, error="loss is not finite\nmore")
    killed, running = run_folder(folder, "a-seed_3"), run_folder(folder, "b-seed_1")
    for run_dir in (killed, running):
        run_dir.mkdir(parents=True)
        write_lines(run_dir / "lineage.jsonl", {"event": "start", "step": 0})
    write_checkpoint(killed, 70)
    write_lines(running / "metrics.jsonl", {"step": 40, **RECORD})
    write_owner(running)
    begin_log(folder, "b-seed_2")
    with log_file(folder, "b-seed_2").open("a") as log:
        log.write("Traceback\nerror: no device is free\n")
    records = {record.name: record for record in read_study_records(folder)}
    assert {name: (record.status, record.step) for name, record in records.items()} == {
        "a-seed_1": ("finished", 280),
        "a-seed_2": ("failed", 7),
        "a-seed_3": ("killed", 70),
        "b-seed_1": ("running", 40),
        "b-seed_2": ("failed", 0),
        "b-seed_3": ("missing", 0),
    }
    assert records["b-seed_2"].error == "no device is free" and records["b-seed_1"].losses == {"train/loss_nats": 3.25}
    assert main(["status", study.place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].endswith("loss is not finite") and "40/280   3.2500  -           512       5 min" in lines[2]
    assert lines[-1] == "6 runs: 1 finished, 1 running, 2 failed, 1 killed, 1 missing"


def test_error_of_a_start_before_the_last_is_not_told_of_the_last(study: Study) -> None:
    folder = Path(study.place)
    begin_log(folder, "a-seed_1")
    with log_file(folder, "a-seed_1").open("a") as log:
        log.write("error: no device is free\n")
    begin_log(folder, "a-seed_1")
    assert read_study_records(folder)[0].status == "missing"


def test_watching_ends_when_all_have_finished(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    finish_all(study)
    assert main(["status", study.place, "--watch", "0.01"]) == 0
    assert "6 runs: 6 finished" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--watch=0 must be seconds above 0"):
        main(["status", study.place, "--watch", "0"])


def test_configuration_nothing_was_started_with_is_rewritten_and_told(study: Study) -> None:
    finish(study, "a-seed_1", 3.1)
    changed = replace(study, runs=[study.runs[0], StudyEntry(name="b", set={RATE: 5e-3})])
    runs = resolve_study(changed)
    changes = find_changes(changed, runs)
    assert (changes.new, changes.rewritten) == ([], ["b-seed_1", "b-seed_2", "b-seed_3"])
    write_study(changed, runs, changes)
    assert [record.config.train.optim.learning_rate for record in read_study_records(Path(study.place))[1:2]] == [5e-3]


def test_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be the folder of a study; prism sweep STUDY\.yaml makes one"):
        main(["status", str(tmp_path)])
