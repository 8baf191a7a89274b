import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import RunConfig, dump_config, load_config
from launcher.scaling import main
from launcher.scaling_files import read_plan
from launcher.study import expand_study
from launcher.sweep_records import config_file, read_study, run_folder
from prism_lm.scaling.fit import Law
from prism_lm.scaling.records import Refused

PLAN = "configs/scaling/tiny.yaml"
# The best size lies between the plan's at every one of its budgets.
LAW = Law(E=2.0, A=40.0, alpha=0.3, B=57.0, beta=0.3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main(["plan", PLAN, f"folder={tmp_path / 'study'}"]) == 0
    return tmp_path / "study"


def finish_runs(folder: Path) -> None:
    """Every run as it would lie there, with the law's loss."""
    plan = read_plan(folder)
    points = {point.name: point for point in plan.points}
    study = read_study(folder)
    for run in expand_study(study):
        point, place = points[run.name], run_folder(folder, run.name)
        config = load_config(RunConfig, study.base, [*run.overrides, f"run_dir={place}"])
        assert config.train.steps == point.steps and config.train.optim.learning_rate == point.learning_rate
        config_file(folder, run.name).parent.mkdir(exist_ok=True)
        config_file(folder, run.name).write_text(dump_config(config))
        place.mkdir(parents=True)
        loss = LAW.predict(point.parameters, point.tokens)
        losses = {"train/loss_nats": loss, "validation/loss_nats": loss}
        ended = {"status": "finished", "step": point.steps, "tokens": point.tokens, **losses, "error": None}
        (place / "result.json").write_text(json.dumps(ended))
        (place / "config.yaml").write_text(dump_config(config))
        (place / "lineage.jsonl").write_text(json.dumps({"event": "start", "step": 0}) + "\n")
        (place / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens": 1024, "train/loss_nats": 5.0}) + "\n")


def test_plan_writes_the_study_that_a_sweep_runs_under_the_same_names(folder):
    points = read_plan(folder).points
    assert [run.name for run in expand_study(read_study(folder))] == [point.name for point in points]
    assert len(points) == 40


def test_seeds_of_the_plan_are_those_of_the_study(tmp_path):
    main(["plan", PLAN, f"folder={tmp_path}", "seeds=[1,2]"])
    names = {run.name for run in expand_study(read_study(tmp_path))}
    assert names == {point.name for point in read_plan(tmp_path).points} and len(names) == 80


def test_dry_run_lists_the_runs_and_writes_nothing(tmp_path, capsys):
    assert main(["plan", PLAN, f"folder={tmp_path / 'study'}", "--dry-run"]) == 0
    assert "gated_delta-c2e12-h8 (held out)" in capsys.readouterr().out
    assert not (tmp_path / "study").exists()


def test_plan_does_not_take_another_studys_folder(folder):
    with pytest.raises(ValueError, match="must not be another study's"):
        main(["plan", PLAN, "name=other", f"folder={folder}"])


def test_from_finished_runs_to_prediction_and_report(folder, capsys):
    finish_runs(folder)
    assert main(["fit", str(folder), "--draws", "20"]) == 0
    assert main(["predict", str(folder), "--budget", "1e12"]) == 0
    assert "PRISM needs" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert "mean error 0.0" in (folder / "report.md").read_text()


def test_missing_run_stops_the_fit_by_name_unless_it_is_excluded(folder):
    finish_runs(folder)
    name = "prism-c4e11-h2"
    for path in run_folder(folder, name).iterdir():
        path.unlink()
    run_folder(folder, name).rmdir()
    with pytest.raises(Refused, match=f"^{name} must not be fitted: it is missing; .*--exclude {name}$"):
        main(["fit", str(folder), "--draws", "20"])
    assert not (folder / "fit.json").exists()
    assert main(["fit", str(folder), "--draws", "20", "--exclude", name]) == 0
    assert name in json.loads((folder / "fit.json").read_text())["excluded"]


def test_folder_without_a_plan_or_a_fit_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"plan\.json must be there; prism scaling plan writes it"):
        main(["fit", str(tmp_path)])
    with pytest.raises(ValueError, match=r"fit\.json must be there; prism scaling fit writes it"):
        main(["report", str(folder)])


def test_help_and_planning_load_neither_torch_nor_scipy():
    code = "import sys; from launcher.scaling import main; main(['plan', sys.argv[1], '--dry-run'])\n"
    code += "assert not {'torch', 'scipy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, PLAN], check=True, capture_output=True)
