"""A study as one job array: what is queued, how its runs are named in errors and in status, and who else reads it."""

import json
import subprocess
from pathlib import Path

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from launcher.job_record import read_record
from launcher.sweep import main, split_options
from tests.launcher.fake_slurm import FakeSlurm, put_on_path

ROOT = Path(__file__).parent.parent.parent
CPU = ["--ranks-per-node", "2", "--partition=cpu", "--time", "1:00:00"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=60, seed=0)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    fake.install()
    put_on_path(fake, monkeypatch)
    return fake


@pytest.fixture
def study(tmp_path: Path, data: Path) -> Path:
    fields = {
        "name": "depth",
        "base": str(ROOT / "configs/train/tiny.yaml"),
        "overrides": [f"data.path={data}", "data.row_tokens=64", "model.vocab_size=320", "train.micro_batch_rows=2"],
        "grid": {"model.solver_steps": [0, 1, 2]},
        "folder": str(tmp_path / "study of"),
    }
    path = tmp_path / "depth_file.yaml"
    path.write_text(json.dumps(fields))
    return path


def write_finished(run_dir: Path, steps: int) -> None:
    (run_dir / "lineage.jsonl").write_text('{"event": "start", "step": 0}\n')
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "step": steps, "tokens": 1, "starts": 1}))


def test_unfinished_runs_are_one_array_that_status_and_the_shipped_script_know(
    fake: FakeSlurm, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "study of"
    assert main([str(study), "--submit", *CPU]) == 0
    write_finished(folder / "runs" / "solver_steps_1", 280)
    assert len(fake.read_calls("sbatch")) == 1
    script = (folder / "runs/slurm-depth/job.sh").read_text()
    assert "#SBATCH --array=0-2\n" in script
    fake.set_queue(
        *(f"101_{n}|10{n}|PENDING|Resources||1|1:00|cpu|prism-depth|{folder}/runs/slurm-depth" for n in (0, 2))
    )
    (folder / "runs/solver_steps_1/slurm/job.json").unlink()
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    assert "3 runs: 2 queued, 1 finished" in capsys.readouterr().out
    assert main([str(study), "--submit", "--at-a-time", "2", *CPU]) == 1
    out = capsys.readouterr().out
    assert "0 to train" in out and len(fake.read_calls("sbatch")) == 1
    assert "left to the process or job that has it: solver_steps_0, solver_steps_2" in out
    listed = (folder / "sweep.txt").read_text().splitlines()
    assert listed[0] == f"'{folder}/configs/solver_steps_0.yaml' 'run_dir={folder}/runs/solver_steps_0'"
    for runs in (folder / "sweep.txt", folder / "configs"):
        said = dry_run_of_the_shipped_script(runs)
        assert f"{folder}/configs/solver_steps_0.yaml" in said.replace("\\", "")
        assert f"{folder}/runs/solver_steps_0" in said.replace("\\", "")


def dry_run_of_the_shipped_script(runs: Path) -> str:
    done = subprocess.run(
        ["/bin/bash", "slurm/sweep.sh", str(runs), "--dry-run"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PRISM_SETUP": ":"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_array_of_at_most_so_many_at_a_time_is_shown_and_nothing_is_written_by_a_dry_run(
    fake: FakeSlurm, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study), "--dry-run", "--submit", "--at-a-time", "2", *CPU]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-2%2\n" in out and "solver_steps_1" in out
    assert not (tmp_path / "study of").exists() and not fake.read_calls("sbatch")


def test_error_of_a_run_names_the_run_and_queues_nothing(fake: FakeSlurm, study: Path) -> None:
    with pytest.raises(ValueError, match=r"run solver_steps_0: train\.global_batch_rows=6 must be a multiple"):
        main([str(study), "train.global_batch_rows=6", "--submit", *CPU])
    assert not fake.read_calls("sbatch")


def test_words_after_submit_are_shared_out_between_both_verbs() -> None:
    words = [
        "s.yaml",
        "a.b=1",
        "--submit",
        "--nodes",
        "2",
        "--at-a-time",
        "3",
        "c=d",
        "--sbatch=--qos=high",
        "--dry-run",
    ]
    ours = ["s.yaml", "a.b=1", "--submit", "--dry-run", "--at-a-time", "3", "c=d"]
    assert split_options(words) == (ours, ["--nodes", "2", "--sbatch=--qos=high"])
    assert split_options(["s.yaml", "--dry-run"]) == (["s.yaml", "--dry-run"], [])


def test_each_queued_run_keeps_the_number_of_its_task(fake: FakeSlurm, study: Path, tmp_path: Path) -> None:
    assert main([str(study), "--submit", *CPU]) == 0
    records = [read_record(tmp_path / "study of/runs" / f"solver_steps_{steps}" / "slurm") for steps in range(3)]
    assert [record and record.job_ids for record in records] == [["101_0"], ["101_1"], ["101_2"]]
