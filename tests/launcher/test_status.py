"""`prism status` tells how a run stands from its folder, whatever state a kill left it in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import EXIT_USAGE, main
from launcher.job_record import JobRecord, write_record
from launcher.run_status import read_run
from launcher.slurm_jobs import list_jobs
from prism_lm.train.lineage import append_line
from tests.launcher.fake_slurm import FakeSlurm, put_on_path
from tests.launcher.run_folders import CONFIG, RECORD, write_checkpoint, write_lines, write_owner

ROOT = Path(__file__).parent.parent.parent
START = {
    "time": "2026-12-01T10:00:00+0000",
    "event": "start",
    "step": 0,
    "resumed_from": None,
    "former_end": None,
    "former_error": None,
    "commit": "3052b82aaaaaaaaa+changes",
    "world_size": 4,
    "data_degree": 2,
    "sequence_degree": 2,
    "zero_stage": 1,
    "host": "node7",
}
RESUME = START | {"event": "resume", "step": 20, "resumed_from": "step_20", "former_end": "killed"}


def write_run(run_dir: Path) -> Path:
    """A run that started, saved at step 20 and recorded up to step 40."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(CONFIG)
    write_checkpoint(run_dir, 20)
    append_line(run_dir / "lineage.jsonl", START)
    write_lines(run_dir / "metrics.jsonl", RECORD | {"step": 20, "validation/loss_nats": 3.5}, RECORD | {"step": 40})
    return run_dir


def end_run(run_dir: Path, *, starts: int = 1, **result: object) -> None:
    (run_dir / "result.json").write_text(
        json.dumps({"step": 40, "tokens": 4000, "error": None, "starts": starts} | result)
    )


def test_run_without_an_ending_is_running_while_its_owner_lives_and_killed_after(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_owner(tmp_path)
    running = read_run(tmp_path)
    assert (running.state, running.eta_s) == ("running", 300.0)
    assert running.detail is not None and running.detail.startswith("process ")
    write_owner(tmp_path, process_start_time="1")
    killed = read_run(tmp_path)
    assert (killed.state, killed.detail, killed.eta_s) == ("killed", None, None)
    assert (killed.step, killed.total_steps, killed.tokens, killed.loss_nats) == (40, 1000, 4000, 3.25)
    assert killed.checkpoint is not None and killed.checkpoint["step"] == 20


@pytest.mark.parametrize("status", ["finished", "preempted", "failed"])
def test_state_of_a_run_that_ended_is_its_result(tmp_path: Path, status: str) -> None:
    end_run(write_run(tmp_path), status=status, error="no space left" if status == "failed" else None, step=45)
    found = read_run(tmp_path)
    assert (found.state, found.step) == (status, 45)
    assert found.detail == ("no space left" if status == "failed" else None)


def test_result_of_an_earlier_start_does_not_hide_that_the_later_one_was_killed(tmp_path: Path) -> None:
    end_run(write_run(tmp_path), status="preempted")
    append_line(tmp_path / "lineage.jsonl", RESUME)
    found = read_run(tmp_path)
    assert (found.state, found.starts) == ("killed", 2)


def test_folder_of_a_run_that_never_started_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "state        never started\n" in shown and "checkpoint   none complete\n" in shown
    assert "#" not in shown


def test_torn_records_damaged_result_and_damaged_checkpoint_are_told_not_raised(tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    for name in ("metrics.jsonl", "lineage.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 41, "tok')
    (write_checkpoint(tmp_path, 60) / "model.safetensors").write_bytes(b"short")
    (tmp_path / "result.json").write_text("{")
    (tmp_path / "config.yaml").write_text("train: [")
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "state        unknown: " in shown and "result.json must hold JSON" in shown
    assert "step         40\n" in shown and "starts       1\n" in shown
    assert "checkpoint   step_20, " in shown and "; step_60 is damaged (prism checkpoint verify)" in shown


def test_one_run_is_told_in_full_with_why_each_start_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    append_line(tmp_path / "lineage.jsonl", {"event": "end", "status": "failed", "step": 40})
    append_line(
        tmp_path / "lineage.jsonl", RESUME | {"former_end": "failed", "former_error": "no space\nleft " + 80 * "x"}
    )
    assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  step         40 of 1,000" in lines and "  loss         3.2500 nats, validation 3.5000" in lines
    assert "  speed        512 tokens/s" in lines and "  starts       2: 1 after failed" in lines
    header, first, second = lines[-3:]
    assert header.startswith("#  when") and first.split()[1:5] == ["2026-12-01T10:00:00+0000", "start", "0", "-"]
    assert "3052b82a+  4 (2 x 2, ZeRO 1)  node7" in first
    assert "step_20" in second and "failed: no space left xxx" in second and "xxx..." in second


def test_several_runs_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_run(write_run(tmp_path / "a"), status="finished")
    (tmp_path / "b").mkdir()
    assert main(["status", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "run",
        "state",
        "step",
        "tokens",
        "loss",
        "tokens/s",
        "ETA",
        "record",
        "checkpoint",
        "starts",
    ]
    assert first.split()[1:6] == ["finished", "40/1,000", "4,000", "3.2500", "512"]
    assert "never started" in second and second.split()[-2:] == ["none", "0"]


def test_json_is_an_object_a_run_on_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_run(write_run(tmp_path / "a"), status="finished")
    (tmp_path / "b").mkdir()
    assert main(["status", "--json", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["state"], first["step"], first["lineage"]) == ("finished", 40, [START])
    assert (second["state"], second["checkpoint"], second["lineage"]) == ("never started", None, [])


def test_what_is_no_folder_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "absent")]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"error: RUN={tmp_path}/absent must be the folder of a run; ")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A queue, and a folder with runs/ in it to stand in."""
    made = FakeSlurm(tmp_path / "fake")
    made.install()
    put_on_path(made, monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return made


def record_jobs(run_dir: Path, *job_ids: str, runs: list[str] | None = None, folder: Path | None = None) -> None:
    folder = folder or run_dir / "slurm"
    folder.mkdir(parents=True)
    log = f"{folder}/prism-a-%j.log"
    record = JobRecord(job_ids=list(job_ids), submitted="2026-12-01T10:00:00+0000", script="job.sh", log=log, runs=runs)
    write_record(folder, record)


def test_run_with_a_waiting_job_is_queued_and_one_whose_job_has_no_process_yet_is_starting(
    cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "a")
    end_run(run_dir, status="preempted")
    record_jobs(run_dir, "12", "13")
    after = "13|13|PENDING|Dependency||2|1:00:00|gpu|prism-a|(null)"
    cluster.set_queue("12|12|PENDING|Priority||2|1:00:00|gpu|prism-a|(null)", after)
    assert main(["status", str(run_dir)]) == 0
    assert "  state        queued: job 12 PENDING (Priority), after preempted\n" in capsys.readouterr().out
    cluster.set_queue("12|12|RUNNING|None|node[1-2]|2|0:59:00|gpu|prism-a|(null)", after)
    assert main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "  state        starting: job 12 RUNNING on node[1-2], 0:59:00 left, after preempted\n" in shown
    assert (
        "13 PENDING (Dependency), 2 nodes, gpu\n" in shown and f"  log          {run_dir}/slurm/prism-a-12.log" in shown
    )
    write_owner(run_dir)
    assert main(["status", str(run_dir)]) == 0
    assert "  state        running: process " in capsys.readouterr().out
    end_run(run_dir, status="finished")
    (run_dir / "owner.json").unlink()
    assert main(["status", str(run_dir)]) == 0
    assert "  state        finished\n" in capsys.readouterr().out


def test_accounting_tells_each_time_that_a_job_ran_and_lineage_why_it_started_again(
    cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "a")
    append_line(run_dir / "lineage.jsonl", RESUME)
    append_line(run_dir / "lineage.jsonl", RESUME | {"former_end": "preempted"})
    record_jobs(run_dir, "12")
    cluster.write_program("sacct", "echo '12|NODE_FAIL|2026-01-01T10:00:00|2026-01-01T11:00:00|0:0|node[1-2]'\n")
    assert main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "  starts       3: 1 after killed, 1 after preempted\n" in shown
    assert (
        "  ended jobs   12 NODE_FAIL, exit code 0:0, 2026-01-01T10:00:00 to 2026-01-01T11:00:00 on node[1-2]\n" in shown
    )


def test_run_whose_job_ended_before_it_could_start_is_told_with_the_word_of_slurm(
    cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_jobs(tmp_path / "a", "12")
    cluster.write_program("sacct", "echo '12|FAILED|2026-01-01T10:00:00|2026-01-01T11:00:00|3:0|node1'\n")
    assert main(["status", str(tmp_path / "a")]) == 0
    assert "state        never started: job 12 FAILED, exit code 3:0; see its log\n" in capsys.readouterr().out


def test_without_a_name_runs_here_and_runs_of_jobs_elsewhere_are_listed(
    cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = write_run(tmp_path / "here" / "runs" / "a")
    (here.parent / "only_data").mkdir()
    sweep = tmp_path / "sweep" / "slurm-rates"
    runs = [write_run(tmp_path / "sweep" / name) for name in ("b", "c")]
    record_jobs(runs[0], "20", runs=[str(run) for run in runs], folder=sweep)
    cluster.set_queue(
        f"12|12|RUNNING|None|node1|1|0:59:00|gpu|prism-a|{here}",
        f"20_1|22|PENDING|JobArrayTaskLimit||1|1:00:00|gpu|prism-rates|{sweep}",
        "30|30|RUNNING|None|node3|1|1:00:00|gpu|other-prism-a|/elsewhere",
    )
    assert main(["status", str(sweep)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", *map(str, runs)]
    assert main(["status"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "job"
    assert first.startswith("runs/a ") and first.endswith("12 RUNNING on node1, 0:59:00 left")
    assert second.startswith(f"{runs[1]} ") and second.endswith("20_1 PENDING (JobArrayTaskLimit)")


def test_job_of_a_script_that_left_no_record_is_known_by_the_number_in_its_lineage(
    cluster: FakeSlurm, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "a")
    append_line(run_dir / "lineage.jsonl", RESUME | {"slurm_job_id": 44})
    cluster.set_queue(others=("20_1|44|RUNNING|None|node1|1|1:00|gpu|prism-1b|(null)",))
    jobs = list_jobs(["20_1", "44"])
    assert [job.job_id for job in read_run(run_dir, jobs).jobs] == ["20_1"]
    assert read_run(run_dir, []).jobs == []


def test_without_slurm_and_with_one_that_does_not_answer_folders_are_told_all_the_same(
    cluster: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("no runs: ")
    write_run(tmp_path / "here" / "runs" / "a")
    cluster.write_program("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2\nexit 1\n')
    assert main(["status"]) == 0
    shown = capsys.readouterr()
    assert "killed" in shown.out and shown.err.startswith("note: jobs are not shown: squeue must end with 0")
    (cluster.bin / "squeue").unlink()
    assert main(["status"]) == 0
    assert "killed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["status", "RUN"], ["checkpoint", "ls", "RUN"], ["checkpoint", "verify", "RUN"]])
def test_answer_comes_at_once_and_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    write_run(tmp_path)
    words = [str(tmp_path) if word == "RUN" else word for word in arguments]
    program = (
        "import sys, time\nfrom launcher.__main__ import main\n"
        f"assert main({words!r}) == 0\n"
        "print(time.process_time(), 'torch' in sys.modules, 'omegaconf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    spent_s, *loaded = done.stdout.splitlines()[-1].split()
    assert float(spent_s) < 0.5 and loaded == ["False", "False"]
