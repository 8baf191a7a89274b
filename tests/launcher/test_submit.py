"""`prism submit` finds on the login node what can be found there, and hands SLURM a script of what was checked."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from launcher import run_checks, submission
from launcher.__main__ import EXIT_FAILED, EXIT_USAGE, main
from launcher.config import RunConfig, dump_config, load_config
from launcher.job_record import read_record
from launcher.provenance import ROOT
from prism_lm.model.cost import checkpoint_bytes
from tests.harness import run_on
from tests.launcher.fake_slurm import FakeSlurm, put_on_path
from tests.launcher.run_folders import write_owner

CONFIG = ROOT / "configs" / "train" / "tiny.yaml"
CPU = ["--partition", "cpu", "--ranks-per-node", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared rows"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=200, seed=0)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "fake")
    made.install()
    put_on_path(made, monkeypatch)
    monkeypatch.setattr(submission, "_git", lambda *arguments: "")
    return made


@pytest.fixture
def keys(tmp_path: Path, data: Path) -> list[str]:
    """Of a run whose folder holds a space."""
    fitting = ["data.row_tokens=64", "model.vocab_size=320", "train.global_batch_rows=16"]
    return [f"run_dir={tmp_path}/my runs/a", f"data.path={data}", *fitting]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "my runs" / "a"


def submit(keys: list[str], *options: str) -> int:
    return main(["submit", str(CONFIG), *keys, *options])


def expect_error(capsys: pytest.CaptureFixture[str], code: int, text: str, expected: int = EXIT_USAGE) -> None:
    error = capsys.readouterr().err
    assert (code, sum(line.startswith("error: ") for line in error.splitlines())) == (expected, 1), error
    assert text in error


def test_job_is_queued_recorded_and_followed_with_the_lines_that_are_printed(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(keys, *CPU, "--nodes", "2", "--time", "2:00:00", "train.steps=77") == 0
    shown = capsys.readouterr().out
    folder = run_dir / "slurm"
    record = read_record(folder)
    assert record is not None and record.job_ids == ["101"]
    assert (record.script, record.log) == (str(folder / "job.sh"), str(folder / "prism-a-%j.log"))
    assert fake.read_calls("sbatch") == [f"--parsable {folder}/job.sh"]
    assert f"tail -F '{folder}/prism-a-101.log'" in shown and f"prism status '{run_dir}'" in shown
    assert "scancel 101\n" in shown and "2 nodes x 2 ranks on CPUs = 4" in shown
    kept = load_config(RunConfig, folder / "config.yaml")
    assert (kept.train.steps, kept.run_dir) == (77, str(run_dir))
    assert (folder / "commit").is_file()
    assert not list(run_dir.parent.rglob(".prism-check-*")) and not (run_dir / "cache").exists()


def test_script_holds_what_was_asked_and_bash_reads_back_every_path(
    fake: FakeSlurm, keys: list[str], run_dir: Path, tmp_path: Path
) -> None:
    setup = tmp_path / "my setup.sh"
    setup.write_text("module load cuda\n")
    options = ["--gpus-per-node", "h100:8", "--time", "1-00:00:00", "--account", "me", "--setup", str(setup)]
    assert submit([*keys, "train.global_batch_rows=64"], *options, "--nodes", "2", "--sbatch=--qos=high") == 0
    script = (run_dir / "slurm" / "job.sh").read_text()
    directives = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert directives == {
        "--job-name=prism-a",
        "--nodes=2",
        "--gpus-per-node=h100:8",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--time=1-00:00:00",
        "--account=me",
        "--signal=B:USR1@180",
        "--open-mode=append",
        f'--comment="{run_dir}"',
        f'--output="{run_dir}/slurm/prism-a-%j.log"',
        "--requeue",
        "--qos=high",
    }
    body = script.replace('source "$PRISM_ROOT/slurm/body.sh"', 'printf "%s\\n" "$PRISM_CONFIG" "$PRISM_SETUP"')
    done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, check=True)
    config, spelled = done.stdout.splitlines()
    assert config == f"{run_dir}/slurm/config.yaml"
    assert spelled == f"export PATH={Path(sys.executable).parent}:$PATH; source '{setup}'"


def test_task_a_rank_shares_out_the_cpus_of_the_node(fake: FakeSlurm, keys: list[str], run_dir: Path) -> None:
    assert submit(keys, *CPU, "--launch", "srun", "--cpus-per-rank", "2") == 0
    script = (run_dir / "slurm" / "job.sh").read_text()
    assert "--ntasks-per-node=2\n#SBATCH --cpus-per-task=2\n" in script and "PRISM_LAUNCH=srun\n" in script
    assert "--gpus-per-node" not in script and "PRISM_RANKS_PER_NODE=2\n" in script


@pytest.mark.skipif(not (ROOT / "slurm" / "body.sh").is_file(), reason="slurm/body.sh is not there")
def test_rendered_script_is_taken_by_the_body_that_it_sources(
    fake: FakeSlurm, keys: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit(keys, *CPU) == 0
    monkeypatch.undo()
    script = run_dir / "slurm" / "job.sh"
    done = subprocess.run(["bash", str(script), "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(run_dir) in done.stdout and "by torchrun" in done.stdout


def test_dry_run_prints_the_script_and_writes_and_submits_nothing(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(keys, *CPU, "--dry-run", "--chain", "2") == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --partition=cpu\n" in shown and f"would write {run_dir}/slurm/job.sh" in shown
    assert shown.count("would run   sbatch") == 2 and "--dependency=afterany:JOB" in shown
    assert not run_dir.parent.exists() and fake.read_calls("sbatch") == []


def test_without_slurm_a_dry_run_still_checks_and_a_true_one_is_refused(
    fake: FakeSlurm, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sinfo", "squeue", "sbatch"):
        (fake.bin / name).unlink()
    expect_error(capsys, submit(keys, *CPU), "SLURM must be at hand, but sinfo is not on PATH", EXIT_FAILED)
    assert submit(keys, *CPU, "--dry-run") == 0
    assert "not checked: SLURM must be at hand" in capsys.readouterr().err
    code = submit([*keys, "train.global_batch_rows=7"], *CPU, "--dry-run")
    expect_error(capsys, code, "train.global_batch_rows=7 must be a multiple")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["train.stepz=1"], "train.stepz must be a key"),
        (["train.global_batch_rows=4"], "train.global_batch_rows=4 must be a multiple of train.micro_batch_rows=4 x 2"),
        (["parallel.sequence_degree=3"], "parallel.sequence_degree=3 must"),
        (["parallel.kernels=triton"], "parallel.kernels=triton must run on a CUDA device"),
        (["parallel.compile=true", "train.zero_stage=3"], "parallel.compile=true must not go with train.zero_stage=3"),
        (["parallel.compile=true"], "must have weights of a multiple of 4 elements"),
        (["model.vocab_size=300"], "model.vocab_size=300"),
        (["data.row_tokens=32"], "data.row_tokens=32"),
        (["train.stop_grace_s=90000", "--time", "24:00:00"], "train.stop_grace_s=90000 must leave time"),
    ],
)
def test_settings_that_cannot_run_on_these_ranks_are_refused_before_anything_is_written(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys, extra: list[str], text: str
) -> None:
    expect_error(capsys, submit(keys, *CPU, *extra), text)
    assert fake.read_calls("sbatch") == [] and not run_dir.parent.exists()


def test_missing_and_damaged_data_and_another_tokenizer_are_found(
    fake: FakeSlurm, keys: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_error(capsys, submit([*keys, "data.path=''"], *CPU), "data.path= must be a folder")
    expect_error(capsys, submit([*keys, f"data.path={tmp_path}/none"], *CPU), "none", EXIT_FAILED)
    copy = shutil.copytree(data, tmp_path / "copy")
    (copy / "tokenizer.model").write_bytes(b"another")
    expect_error(capsys, submit([*keys, f"data.path={copy}"], *CPU), "tokenizer.model", EXIT_FAILED)


def test_disk_without_room_for_checkpoints_is_refused_and_room_for_those_kept_for_good_is_warned_of(
    fake: FakeSlurm, keys: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(num_checkpoints: float) -> None:
        config = load_config(RunConfig, CONFIG, keys)
        free = int(num_checkpoints * checkpoint_bytes(config.model, precision=config.train.precision))
        fake_shutil = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free))
        monkeypatch.setattr(run_checks, "shutil", fake_shutil)

    fill(2.5)
    expect_error(capsys, submit(keys, *CPU), "must have room for 3 checkpoints")
    assert submit([*keys, "train.checkpoint.keep_last=1"], *CPU, "--dry-run") == 0
    fill(3.5)
    assert submit([*keys, "train.checkpoint.keep_every_steps=70"], *CPU, "--dry-run") == 0
    assert "keeps up to 4 checkpoints for good, more than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--partition", "gpus", "--gpus-per-node", "8"], "--partition=gpus must be one of sinfo's; use cpu, gpu, old"),
        (["--partition", "old", "--ranks-per-node", "1"], "--partition=old must be up"),
        (
            ["--gpus-per-node", "8", "--time", "2-0"],
            "--time=2-00:00:00 must be at most the 1-00:00:00 of partition gpu",
        ),
        (["--gpus-per-node", "8", "--nodes", "5"], "--nodes=5 must be at most the 4 that a job may have"),
        (["--gpus-per-node", "a100:4", "--nodes", "3"], "which has 2 such nodes"),
        (["--gpus-per-node", "9"], "which has 0 such nodes (a100:4 or h100:8 GPUs a node)"),
        (["--partition", "cpu", "--gpus-per-node", "1"], "(0 GPUs a node)"),
        (["--partition", "cpu", "--ranks-per-node", "1", "--nodes", "9"], "at most the 3 nodes of partition cpu"),
        (["--partition", "cpu", "--ranks-per-node", "8"], "--cpus-per-rank=1 must give 8 ranks at most the 4 CPUs"),
        ([], "--gpus-per-node, or --ranks-per-node for nodes without GPUs, must be given; use --gpus-per-node=8"),
        (["--gpus-per-node", "8", "--time", "soon"], "--time=soon must be a time"),
        (["--gpus-per-node", "4", "--ranks-per-node", "8"], "--ranks-per-node=8 must be at most --gpus-per-node=4"),
        (["--gpus-per-node", "8", "--setup", "none.sh"], "--setup=none.sh must be an existing file"),
        (["--gpus-per-node", "8", "--at-once", "2"], "--at-once=2 must come with --array"),
        (["--gpus-per-node", "8", "--nodes", "0"], "--nodes=0 must be at least 1"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    fake: FakeSlurm, keys: list[str], capsys, options: list[str], text: str
) -> None:
    expect_error(capsys, submit([*keys, "train.global_batch_rows=640"], *options), text)
    assert fake.read_calls("sbatch") == []


def test_checkpoint_of_another_seed_is_refused_and_a_run_that_is_done_is_told(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    short = ["train.steps=2", "train.schedule.warmup_steps=1", "train.eval_every_steps=0"]
    with mock.patch.dict(os.environ):
        assert run_on(1, main, ["train", str(CONFIG), *keys, *short]) == [0]
    expect_error(capsys, submit([*keys, *short, "seed=7"], *CPU), "seed")
    assert submit([*keys, *short], *CPU) == 0
    assert "has its train.steps=2 done; a larger train.steps extends it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["50%", "a#b", 'a"b', "it's", "a\\b"])
def test_folders_that_sbatch_would_read_otherwise_are_refused(
    fake: FakeSlurm, keys: list[str], tmp_path: Path, capsys, name: str
) -> None:
    expect_error(capsys, submit([*keys, f"run_dir={tmp_path}/{name}"], *CPU), "must not hold")


def test_run_with_a_queued_or_running_job_is_refused_by_its_number_and_state(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(keys, *CPU) == 0
    capsys.readouterr()
    fake.set_queue("101|101|PENDING|Resources||1|1:00|cpu|prism-a|(null)")
    expect_error(capsys, submit(keys, *CPU), "must have no job in the queue, and has 101 PENDING (Resources); ")
    fake.set_queue(others=("101|101|RUNNING|None|node1|1|1:00|cpu|prism-a|(null)",))
    expect_error(capsys, submit(keys, *CPU), "101 RUNNING on node1, 1:00 left; follow it with prism status, or end it")
    (run_dir / "slurm" / "job.json").unlink()
    fake.set_queue(f"109|109|RUNNING|None|node1|1|1:00|cpu|prism-a|{run_dir}")
    expect_error(capsys, submit(keys, *CPU), "109 RUNNING")
    fake.set_queue("101|101|RUNNING|None|node1|1|1:00|cpu|another|(null)")
    assert submit(keys, *CPU) == 0


def test_run_that_a_process_holds_without_slurm_is_refused(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.mkdir(parents=True)
    write_owner(run_dir)
    expect_error(capsys, submit(keys, *CPU), "is in use by process ")


def test_run_that_is_being_submitted_is_refused(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with submission.hold_folders([run_dir]):
        expect_error(capsys, submit(keys, *CPU), "is being submitted by another process")


def test_words_of_sbatch_end_the_submission(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake.folder / "refuse_from").write_text("101")
    expect_error(capsys, submit(keys, *CPU), "Invalid account or account/partition", EXIT_FAILED)
    assert not (run_dir / "slurm" / "job.json").exists()


def test_chain_waits_link_by_link_and_a_link_that_is_refused_leaves_the_others_recorded(
    fake: FakeSlurm, keys: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake.folder / "refuse_from").write_text("103")
    code = submit(keys, *CPU, "--chain", "3", "--dependency", "afterok:7")
    expect_error(capsys, code, "101 102 of the chain are queued", EXIT_FAILED)
    path = run_dir / "slurm" / "job.sh"
    assert fake.read_calls("sbatch")[:2] == [
        f"--parsable --dependency=afterok:7 {path}",
        f"--parsable --dependency=afterany:101 {path}",
    ]
    record = read_record(run_dir / "slurm")
    assert record is not None and record.job_ids == ["101", "102"]


@pytest.mark.parametrize(
    ("status", "restarts", "code"),
    [("finished", None, 0), ("failed", None, 1), ("failed", "1", 42), ("preempted", None, 42)],
)
def test_later_link_goes_on_only_where_the_one_before_left_something_to_do(
    fake: FakeSlurm, keys: list[str], run_dir: Path, monkeypatch, status: str, restarts: str | None, code: int
) -> None:
    result = run_dir / "result.json"
    run_dir.mkdir(parents=True)
    result.write_text(json.dumps({"status": "finished"}))
    assert submit(keys, *CPU) == 0
    script = (run_dir / "slurm" / "job.sh").read_text().replace('source "$PRISM_ROOT/slurm/body.sh"', "exit 42")
    assert subprocess.run(["bash", "-c", script]).returncode == 42
    config = run_dir / "slurm" / "config.yaml"
    result.write_text(json.dumps({"status": status, "step": 3}, indent=1))
    subprocess.run(["touch", "-d", "+5 seconds", str(result)], check=True)
    if restarts:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert subprocess.run(["bash", "-c", script]).returncode == code and config.is_file()


def write_sweep(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "rates.txt"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_sweep_is_one_array_whose_tasks_find_their_own_run(
    fake: FakeSlurm, keys: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "sweep of" / name for name in ("lr 1", "lr2", "lr3")]
    lines = [f"{CONFIG} 'run_dir={run}' train.optim.learning_rate={n}e-3" for n, run in enumerate(runs, start=1)]
    file = write_sweep(tmp_path, "# rates", lines[0], "", *lines[1:])
    assert main(["submit", "--array", str(file), "--at-once", "2", *CPU, *keys[1:]]) == 0
    folder = tmp_path / "sweep of" / "slurm-rates"
    assert f"prism status '{folder}'\n" in capsys.readouterr().out
    script = (folder / "job.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in script and f'--output="{folder}/prism-rates-%A_%a.log"' in script
    assert len(fake.read_calls("sbatch")) == 1
    records = [read_record(run / "slurm") for run in runs]
    assert [record and record.job_ids for record in records] == [["101_0"], ["101_1"], ["101_2"]]
    rates = [load_config(RunConfig, run / "slurm" / "config.yaml").train.optim.learning_rate for run in runs]
    assert rates == [1e-3, 2e-3, 3e-3]
    probe = script.replace('source "$PRISM_ROOT/slurm/body.sh"', 'echo "$PRISM_CONFIG"')
    variables = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "101", "SLURM_JOB_NAME": "prism-rates"}
    subprocess.run(["bash", "-c", probe], env=variables | {"PATH": str(fake.bin)}, check=True)
    log = records[1] and Path(records[1].spell_log("101_1"))
    assert log and log.read_text().endswith(f"{runs[1]}/slurm/config.yaml\n")
    fake.set_queue(f"101_1|102|PENDING|JobArrayTaskLimit||1|1:00|cpu|prism-rates|{folder}")
    capsys.readouterr()
    code = main(["submit", str(CONFIG), f"run_dir={runs[1]}", *keys[1:], *CPU])
    expect_error(capsys, code, "101_1 PENDING (JobArrayTaskLimit)")


def test_sweep_may_be_a_folder_of_configurations_each_with_its_own_run_folder(
    fake: FakeSlurm, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my rates"
    folder.mkdir()
    for name in ("b", "a"):
        config = load_config(RunConfig, CONFIG, [f"run_dir={tmp_path}/runs of/{name}"])
        (folder / f"{name}.yaml").write_text(dump_config(config))
    assert main(["submit", "--array", str(folder), *CPU, *keys[1:]]) == 0
    record = read_record(tmp_path / "runs of" / "slurm-my rates")
    assert record is not None and record.runs == [f"{tmp_path}/runs of/a", f"{tmp_path}/runs of/b"]
    code = main(["submit", "--array", str(folder), *CPU, *keys[1:], "run_dir=runs/same"])
    expect_error(capsys, code, f"{folder}/b.yaml: run_dir={Path.cwd()}/runs/same must be another folder than that of")


def test_every_wrong_line_of_a_sweep_is_named_and_none_is_submitted(
    fake: FakeSlurm, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = f"{CONFIG} run_dir={tmp_path}/a"
    file = write_sweep(
        tmp_path, good, f"{CONFIG} run_dir={tmp_path}/b train.stepz=1", f"{CONFIG} 'run_dir={tmp_path}/c"
    )
    arguments = ["submit", "--array", str(file), *CPU, *keys[1:]]
    assert main(arguments) == EXIT_USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert f"{file} line 2: train.stepz must be a key" in first and f"{file} line 3: No closing quotation" in second
    write_sweep(tmp_path, good, good)
    expect_error(capsys, main(arguments), f"{file} line 2: run_dir={tmp_path}/a must be another folder")
    write_sweep(tmp_path, good, f"{CONFIG} run_dir={tmp_path}/b train.micro_batch_rows=3")
    expect_error(capsys, main(arguments), f"{file} line 2: train.global_batch_rows=16 must be a multiple")
    assert fake.read_calls("sbatch") == []


def test_uncommitted_changes_are_named_and_kept_beside_the_configuration(
    fake: FakeSlurm, keys: list[str], run_dir: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"status": " M launcher/train.py\n M prism_lm/train/loop.py\n", "diff": "a patch\n"}
    monkeypatch.setattr(submission, "_git", lambda *arguments: answers[arguments[0]])
    assert submit(keys, *CPU) == 0
    assert "warning: launcher/train.py, prism_lm/train/loop.py differ from the commit" in capsys.readouterr().err
    assert (run_dir / "slurm" / "changes.patch").read_text() == "a patch\n"


def test_site_defaults_in_variables_are_read_and_kept_from_overruling_the_script(
    fake: FakeSlurm, keys: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PARTITION": "cpu", "ACCOUNT": "lab", "TIMELIMIT": "30"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    assert submit(keys, "--ranks-per-node", "1", "--time", "2:00:00") == 0
    script = (run_dir / "slurm" / "job.sh").read_text()
    assert "--partition=cpu\n" in script and "--account=lab\n" in script and "--time=02:00:00\n" in script
    assert (fake.folder / "sbatch.env").read_text() == "SBATCH_TIMELIMIT=unset\n"
