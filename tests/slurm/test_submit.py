"""`prism submit` and `prism status` on a real SLURM, typed as a user would; the jobs of all tests run side by side."""

import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.job_record import JobRecord, read_record
from launcher.run_status import read_run
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ENDED, ROOT, build_keys, count_starts, count_steps, list_endings

pytestmark = pytest.mark.timeout(240, func_only=True)
ONE = ("--gpus-per-node=1", "--cpus-per-rank=1", "--time=10", "--partition=spare")
DIVERGING = ("train.max_skipped_steps=1", "train.optim.learning_rate=1e30")


@dataclass
class User:
    """Who types commands on the login node of the cluster; every path of theirs holds a space."""

    cluster: Cluster
    data: Path
    folder: Path
    config: Path

    def prism(self, *words: str) -> str:
        """What is printed, standard error last."""
        command = [sys.executable, "-m", "launcher", *words]
        return self.cluster.run(*command, check=False, PRISM_PREFLIGHT="0", OMP_NUM_THREADS="1")

    def submit(self, name: str, *words: str) -> str:
        """What is printed when a run is submitted whose folder carries `name`."""
        return self.prism("submit", str(self.config), f"run_dir={self.find_run(name)}", *words)

    def find_run(self, name: str) -> Path:
        return self.folder / name

    def read_record(self, name: str) -> JobRecord:
        record = read_record(self.find_run(name) / "slurm")
        assert record is not None, name
        return record

    def tell(self, name: str) -> str:
        return self.prism("status", str(self.find_run(name)))

    def wait_for(self, is_true: Callable[[], bool], what: str, wait_s: float = 100.0) -> None:
        end_s = time.monotonic() + wait_s
        while not is_true():
            assert time.monotonic() < end_s, f"{what}: {self.cluster.run('squeue')}"
            time.sleep(0.3)

    def finish(self, name: str) -> list[str]:
        """The states in which the run's jobs end."""
        return [self.cluster.wait_for(job, *ENDED)["JobState"] for job in self.read_record(name).job_ids]


@pytest.fixture(scope="module")
def user(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    folder = tmp_path_factory.mktemp("user")
    config = folder / "my config.yaml"
    config.write_text((ROOT / "configs" / "train" / "tiny.yaml").read_text())
    return User(cluster, data, folder / "my runs", config)


@pytest.fixture(scope="module")
def printed(user: User) -> dict[str, str]:
    """What submit printed for each of the runs, by name. `held` waits until it is released."""
    keys = build_keys(user.data, "train.steps=20")
    setup = user.folder.parent / "my setup.sh"
    setup.write_text("exit 3\n")
    sweep = user.folder.parent / "my sweep.txt"
    lines = [f"{shlex.quote(str(user.config))} 'run_dir={user.find_run(f'task {n}')}'" for n in range(3)]
    sweep.write_text(f"{lines[0]}\n{lines[1]} {' '.join(DIVERGING)}\n{lines[2]}\n")
    two = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-rank=1", "--time=10")
    typed = {
        "held": [*keys, *two, "--launch=srun", "--sbatch=--hold"],
        "no start": [*keys, *ONE, f"--setup={setup}"],
        "back": [*keys, "train.steps=20000", *ONE],
        "chain": [*keys, "train.steps=300", *ONE, "--chain=3", "--max-restarts=0"],
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        array = pool.submit(user.prism, "submit", "--array", str(sweep), "--at-once=2", *keys, *ONE)
        said = dict(zip(typed, pool.map(lambda name: user.submit(name, *typed[name]), typed), strict=True))
        return said | {"sweep": array.result()}


@pytest.fixture(scope="module")
def noticed(user: User, printed: dict[str, str]) -> None:
    """The chain's first job has SLURM's notice, as before its time limit."""
    user.wait_for(lambda: count_steps(user.find_run("chain")) >= 20, "step 20")
    user.cluster.run("scancel", "--batch", "--signal=USR1", user.read_record("chain").job_ids[0])


def test_what_a_partition_does_not_have_is_refused_by_what_sinfo_prints(user: User) -> None:
    user.cluster.run("scontrol", "create", "PartitionName=brief", "Nodes=node1", "MaxTime=30", "MaxNodes=1")
    keys = build_keys(user.data)
    expected = {
        "--partition=none": "--partition=none must be one of sinfo's; use brief, high, low, main, spare",
        "--partition=brief": "--time=01:00:00 must be at most the 00:30:00 of partition brief",
        "--nodes=3": "must fit partition main, which has 2 such nodes (8 GPUs a node)",
        "--gpus-per-node=9": "must fit partition main, which has 0 such nodes",
        "--cpus-per-rank=17": "must give 1 ranks at most the 16 CPUs of a node of partition main; use 16",
    }
    for option, text in expected.items():
        said = user.submit("refused", *keys, "--gpus-per-node=1", "--time=1:00:00", option)
        assert said.startswith("error: ") and text in said and said.count("\n") == 1
    assert "--time=00:30:00\n" in user.submit("refused", *keys, "--gpus-per-node=1", "--partition=brief", "--dry-run")
    assert not user.find_run("refused").exists()


def test_waiting_run_is_told_as_queued_and_a_second_submit_is_refused_by_its_number(
    user: User, printed: dict[str, str]
) -> None:
    (job,) = user.read_record("held").job_ids
    assert f"state        queued: job {job} PENDING (JobHeldUser)\n" in user.tell("held")
    said = user.submit("held", *build_keys(user.data), *ONE)
    assert said.startswith("error: ") and f"has {job} PENDING (JobHeldUser); " in said and f"scancel {job}\n" in said


def test_requeued_job_is_told_with_why_it_started_again(user: User, printed: dict[str, str], noticed: None) -> None:
    (job,) = user.read_record("back").job_ids
    user.wait_for(lambda: count_steps(user.find_run("back")) >= 20, "step 20")
    assert (
        "state        running: process " in (told := user.tell("back")) and f"jobs         {job} RUNNING on n" in told
    )
    user.cluster.run("scontrol", "requeue", job)
    user.wait_for(lambda: list_endings(user.find_run("back")) == ["preempted"], "an ending")
    user.wait_for(lambda: read_run(user.find_run("back")).state == "preempted", "the owner to leave")
    user.wait_for(
        lambda: ", after preempted\n" in user.tell("back") or count_starts(user.find_run("back")) == 2, "word"
    )
    user.wait_for(lambda: count_starts(user.find_run("back")) == 2, "a second start")
    assert "starts       2: 1 after preempted\n" in user.tell("back")
    user.cluster.run("scancel", job)


def test_job_runs_the_configuration_of_its_submission_and_logs_where_it_was_printed(
    user: User, printed: dict[str, str]
) -> None:
    user.config.write_text("changed after the submission")
    (job,) = user.read_record("held").job_ids
    user.cluster.run("scontrol", "release", job)
    assert user.finish("held") == ["COMPLETED"]
    run_dir = user.find_run("held")
    log = run_dir / "slurm" / f"prism-held-{job}.log"
    assert f"log         {log}\n" in printed["held"] and f"tail -F '{log}'\n" in printed["held"]
    assert "step 20/20" in log.read_text()
    assert (run_dir / "config.yaml").read_text() == (run_dir / "slurm" / "config.yaml").read_text()
    assert (run_dir / "slurm" / "commit").is_file()
    told = user.tell("held")
    assert "state        finished\n" in told and "2 (2 x 1, ZeRO 1)  node" in told and str(log) in told


def test_sweep_runs_two_at_once_and_tells_which_failed(user: User, printed: dict[str, str]) -> None:
    folder = user.folder / "slurm-my sweep"
    assert f"prism status '{folder}'\n" in printed["sweep"]
    names = [f"task {number}" for number in range(3)]
    array = user.read_record(names[0]).job_ids[0].partition("_")[0]
    assert f"job         {array}\n" in printed["sweep"]
    assert user.cluster.show_job(f"{array}_0")["ArrayTaskThrottle"] == "2"
    assert [user.finish(name) for name in names] == [["COMPLETED"], ["FAILED"], ["COMPLETED"]]
    rows = user.prism("status", str(folder)).splitlines()[1:]
    runs = [user.find_run(name) for name in names]
    states = [row.removeprefix(str(run)).split()[0] for row, run in zip(rows, runs, strict=True)]
    assert states == ["finished", "failed", "finished"]
    logs = [Path(user.read_record(name).spell_log(f"{array}_{task}")) for task, name in enumerate(names)]
    assert "error: " in logs[1].read_text() and "step 20/20" in logs[2].read_text()


def test_job_that_ends_before_its_run_starts_is_told_with_its_exit_code(user: User, printed: dict[str, str]) -> None:
    (job,) = user.read_record("no start").job_ids
    assert user.finish("no start") == ["FAILED"]
    assert f"state        never started: job {job} FAILED, exit code 3:0; see its log\n" in user.tell("no start")


def test_chain_goes_on_where_a_link_was_stopped_and_its_last_link_has_nothing_to_do(
    user: User, printed: dict[str, str], noticed: None
) -> None:
    jobs = user.read_record("chain").job_ids
    assert f"job         {jobs[0]}, then {jobs[1]}, {jobs[2]}\n" in printed["chain"]
    assert user.finish("chain") == ["FAILED", "COMPLETED", "COMPLETED"]
    assert list_endings(user.find_run("chain")) == ["preempted", "finished"]
    last = Path(user.read_record("chain").spell_log(jobs[2])).read_text()
    assert last == f"prism: the run is finished; nothing is left to do for job {jobs[2]}\n"
