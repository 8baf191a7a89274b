"""A study is trained run by run, a failing one is named, a stopped one goes on, and what it came to is tabulated."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from launcher import sweep_local
from launcher.__main__ import EXIT_USAGE
from launcher.__main__ import main as run_verb
from launcher.run_folder import read_last_records
from launcher.sweep import EXIT_STOPPED, main
from launcher.sweep_folder import hold_study
from launcher.sweep_local import estimate_rest, start_training
from launcher.sweep_records import read_study_records
from prism_lm.train.lineage import count_starts
from tests.harness import get_forkserver

ROOT = Path(__file__).parent.parent.parent
SMALL = ["data.row_tokens=64", "model.vocab_size=320", "model.num_layers=1", "train.schedule.warmup_steps=1"]
SHORT = ["train.steps=2", "train.log_every_steps=1", "train.eval_every_steps=2", "train.eval_rows=8"]
STEPS_THAT_TAKE_LONG = 100_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=60, seed=0)


def write_study(folder: Path, data: Path, **changes: Any) -> Path:
    """The file of a study, JSON being YAML, whose folder lies beside it."""
    overrides = [f"data.path={data}", *SMALL, *SHORT]
    fields = {"name": "two", "base": str(ROOT / "configs/train/tiny.yaml"), "overrides": overrides}
    path = folder / "study_file.yaml"
    path.write_text(json.dumps({**fields, "folder": str(folder / "study"), **changes}))
    return path


def train_in_fork(config: str, log: str) -> None:
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = run_verb(["train", config])
    sys.stdout.flush()
    os._exit(code)


class ForkedTraining:
    """A training in a process that has imported its packages already."""

    def __init__(self, config: Path, log: Path) -> None:
        self._process = get_forkserver().Process(target=train_in_fork, args=(str(config), str(log)))
        self._process.start()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_local, "start_training", ForkedTraining)


@pytest.fixture(scope="module")
def swept(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, str]:
    """The folder of a 2 x 2 study with a run that diverges, its exit code and what it printed."""
    folder = tmp_path_factory.mktemp("sweep")
    listed = [
        {"name": "good", "set": {"train.optim.learning_rate": 1e-3}},
        {"name": "bad", "set": {"train.optim.learning_rate": 1e30, "train.max_skipped_steps": 1}},
    ]
    study = write_study(folder, data, runs=listed, seeds=[1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_local, "start_training", ForkedTraining)
        code, out, err = call(["sweep", str(study)])
    return folder, code, out, err


def call(arguments: list[str]) -> tuple[int, str, str]:
    """The verb's exit code and words, for a fixture that has no capsys."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments[1:])
    return code, out.getvalue(), err.getvalue()


def test_runs_go_one_after_another_and_one_that_fails_is_named_and_not_the_last(
    swept: tuple[Path, int, str, str],
) -> None:
    folder, code, out, err = swept
    assert code == 1
    ends = [line for line in out.splitlines() if line.startswith("[") and "tail -F" not in line]
    assert [line.split(":")[0] for line in ends] == [
        "[1/4] good-seed_1", "[2/4] bad-seed_1", "[3/4] good-seed_2", "[4/4] bad-seed_2",
    ]  # fmt: skip
    assert "finished: validation " in ends[0] and "; 3 to go, about " in ends[0]
    assert "failed at step" in ends[1]
    assert "failed: bad-seed_1: " in err and "failed: bad-seed_2: " in err
    records = {record.name: record for record in read_study_records(folder / "study")}
    assert [record.status for record in records.values()] == ["finished", "failed", "finished", "failed"]
    good, bad = records["good-seed_1"], records["bad-seed_1"]
    assert (good.step, good.tokens, good.seed, good.config.seed) == (2, 2 * 8 * 64, 1, 1)
    assert set(good.losses) >= {"validation/loss_nats", "train/loss_nats"} and good.error is None
    assert bad.error and bad.overrides[-3:] == [
        "train.optim.learning_rate=1e+30",
        "train.max_skipped_steps=1",
        "seed=1",
    ]


def test_table_holds_the_mean_and_interval_of_what_finished_and_names_what_did_not(
    swept: tuple[Path, int, str, str],
) -> None:
    folder = swept[0] / "study"
    table = json.loads((folder / "table.json").read_text())
    losses = [record.losses["validation/loss_nats"] for record in read_study_records(folder) if record.group == "good"]
    good, bad = table["rows"]
    assert good["loss"]["mean"] == pytest.approx(sum(losses) / 2)
    half = 12.7062 * abs(losses[0] - losses[1]) / 2
    assert good["loss"]["half_width"] == pytest.approx(half, rel=1e-4)
    assert bad["loss"] is None and bad["count_planned"] == 2
    assert [one["name"] for one in table["left_out"]] == ["bad-seed_1", "bad-seed_2"]
    text = (folder / "table.md").read_text()
    assert text in swept[2] and "| bad | 1" in text and "- bad-seed_1: failed: " in text
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["run"] for row in rows] == ["good", "bad"] and float(rows[0]["loss_nats"]) == good["loss"]["mean"]


def test_started_again_it_skips_what_finished_and_tries_what_failed_and_takes_new_runs(
    swept: tuple[Path, int, str, str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept[0]
    listed = [
        {"name": "good", "set": {"train.optim.learning_rate": 1e-3}},
        {"name": "better", "set": {"train.optim.learning_rate": 2e-3}},
    ]
    study = write_study(folder, data, runs=listed, seeds=[1])
    before = {
        record.name: count_starts(folder / "study/runs" / record.name)
        for record in read_study_records(folder / "study")
    }
    assert main([str(study)]) == 0
    out = capsys.readouterr().out
    assert "2 runs, 1 to train, 1 finished" in out
    assert "kept in the folder, no longer in the study: bad-seed_1, bad-seed_2, good-seed_2" in out
    assert "[2/2] better-seed_1: finished" in out and "good-seed_1:" not in out
    after = {name: count_starts(folder / "study/runs" / name) for name in before}
    assert after == before
    assert main(["table", str(folder / "study"), "--by", "train.optim.learning_rate"]) == 0
    assert "| 0.002 | " in capsys.readouterr().out
    assert main(["status", str(folder / "study")]) == 0
    assert "2 runs: 2 finished" in capsys.readouterr().out


def test_change_of_a_started_run_is_refused_by_name_and_key(
    swept: tuple[Path, int, str, str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept[0]
    listed = [{"name": "good", "set": {"train.optim.learning_rate": 3e-3}}]
    study = write_study(folder, data, runs=listed, seeds=[1, 2])
    before = (folder / "study/configs/good-seed_1.yaml").read_bytes()
    assert run_sweep(study) == EXIT_USAGE
    words = "run good-seed_1 and 1 more: train.optim.learning_rate=0.003 must stay 0.001, with which it was started"
    assert words in capsys.readouterr().err
    assert (folder / "study/configs/good-seed_1.yaml").read_bytes() == before


def run_sweep(study: Path, *words: str) -> int:
    """Through the command's own handling of errors, whether or not it lists the verb."""
    from launcher import __main__ as command

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(command.VERBS, "sweep", command.Verb("", ""))
        return command.main(["sweep", str(study), *words])


def interrupt_when(holds: Callable[[], bool]) -> threading.Thread:
    """Presses Ctrl-C once something holds, or after a while."""

    def watch() -> None:
        end_s = time.monotonic() + 120
        while not holds() and time.monotonic() < end_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_ctrl_c_saves_the_run_that_trains_and_the_same_command_goes_on_from_there(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, data, grid={"model.solver_steps": [1, 2]})
    first = tmp_path / "study/runs/solver_steps_1"
    long = [f"train.steps={STEPS_THAT_TAKE_LONG}", "train.eval_every_steps=0"]
    thread = interrupt_when(lambda: read_last_records(first) is not None)
    assert main([str(study), *long]) == EXIT_STOPPED
    thread.join()
    assert "stopped with 2 of 2 runs unfinished" in capsys.readouterr().out
    stopped, other = read_study_records(tmp_path / "study")
    assert (stopped.status, other.status) == ("preempted", "missing") and stopped.step >= 1
    thread = interrupt_when(lambda: count_starts(first) == 2)
    assert main([str(tmp_path / "study")]) == EXIT_STOPPED
    thread.join()
    assert f"[1/2] solver_steps_1: from step {stopped.step:,} of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.stepz=3"], "run solver_steps_1 and 1 more: train.stepz must be a key of this configuration"),
        (["train.micro_batch_rows=3"], "run solver_steps_1 and 1 more: train.global_batch_rows=8 must be a multiple"),
        (["grid={model.solver_steps: [1, 9]}"], "run solver_steps_9: model.solver_steps=9 must be 0 to 4; use 2"),
        (["model.solver_steps=1"], "model.solver_steps=1 must not be set for all runs"),
        (["data.row_tokens=32"], "run solver_steps_1 and 1 more: data.row_tokens=32"),
        (["--at-a-time", "2"], "--at-a-time=2 must go with --submit"),
        (["base=nowhere.yaml"], "run solver_steps_1 and 1 more: CONFIG=nowhere.yaml must be an existing YAML file"),
    ],
)
def test_what_prism_train_would_refuse_is_one_error_before_anything_is_written(
    words: list[str], expected: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, data, grid={"model.solver_steps": [1, 2]})
    assert run_sweep(study, *words) == EXIT_USAGE
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_dry_run_lists_the_runs_and_writes_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, data, grid={"model.solver_steps": [1, 2]}, seeds=[5])
    assert main([str(study), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2 runs, 2 to train" in out and "solver_steps_2-seed_5  train  2      model.solver_steps=2 seed=5" in out
    assert not (tmp_path / "study").exists()


def test_second_sweep_of_a_folder_is_refused_while_the_first_holds_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, data)
    with hold_study(tmp_path / "study"):
        assert run_sweep(study) == EXIT_USAGE
    assert "is being swept by another process" in capsys.readouterr().err


def test_rest_is_estimated_by_flops_and_unknown_before_the_first_run_has_ended() -> None:
    assert estimate_rest(2e12, 10.0, 6e12) == 30.0
    assert estimate_rest(0.0, 5.0, 6e12) is None


def test_a_run_is_started_as_prism_train_in_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@ rank=$RANK session=$(ps -o sid= -p $$ | tr -d " ") own=$$"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("RANK", "1")
    log = tmp_path / "log"
    assert start_training(tmp_path / "a.yaml", log).wait() == 3
    said = log.read_text().split()
    assert said[:4] == ["-m", "launcher", "train", str(tmp_path / "a.yaml")] and said[4] == "rank="
    assert said[5].removeprefix("session=") == said[6].removeprefix("own=")


def test_help_and_tables_load_no_torch() -> None:
    program = (
        "import sys\nimport launcher.sweep, launcher.sweep_records\n"
        "try: launcher.sweep.main(['--help'])\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'deepspeed', 'streaming', 'scipy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
