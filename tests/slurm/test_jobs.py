"""The shipped batch scripts on a real SLURM: launched, chained, in an array, ended."""

from pathlib import Path

import pytest

from prism_lm.train.lineage import read_lineage
from tests.slurm.jobs import ROOT, Jobs, count_starts, count_steps, list_curve

pytestmark = pytest.mark.timeout(400, func_only=True)
SCRIPTS = ("prism_130m.sh", "prism_1b.sh", "prism_7b.sh", "sweep.sh")


@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_two_nodes_train_one_run_with_the_losses_of_one_process(
    jobs: Jobs, jobs_at_once: dict[str, str], reference: Path, launch: str
) -> None:
    assert jobs.finish(jobs_at_once[launch], launch)["JobState"] == "COMPLETED"
    start = read_lineage(jobs.find_run(launch))[0]
    assert (start["world_size"], start["event"]) == (2, "start")
    ours, alone = list_curve(jobs.find_run(launch)), list_curve(reference)
    assert [line[-1] for line in ours] == [line[-1] for line in alone]
    assert [line[1] for line in ours[:20]] == pytest.approx([line[1] for line in alone[:20]], rel=2**-16)


def test_two_jobs_at_once_on_the_same_nodes_do_not_meet(jobs: Jobs, jobs_at_once: dict[str, str]) -> None:
    fields = [jobs.finish(job, launch) for launch, job in jobs_at_once.items()]
    assert max(one["StartTime"] for one in fields) < min(one["EndTime"] for one in fields)
    assert [one["NodeList"] for one in fields] == ["node[1-2]"] * 2
    assert list_curve(jobs.find_run("torchrun")) == list_curve(jobs.find_run("srun"))


@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_preflight_looks_at_both_nodes_and_their_all_reduce_before_training_begins(
    jobs: Jobs, jobs_at_once: dict[str, str], launch: str
) -> None:
    jobs.finish(jobs_at_once[launch], launch)
    said, trained = jobs.read_log(launch).split("training begins")
    assert "ok   node1" in said and "ok   node2" in said and "all-reduce of 64 MB over 2 ranks" in said
    assert "ranks: " in trained


@pytest.mark.parametrize("launch", ["torchrun", "srun"])
def test_worker_that_raises_fails_the_job_which_is_not_requeued_and_its_log_ends_with_the_traceback(
    jobs: Jobs, short_jobs: dict[str, str], launch: str
) -> None:
    name = f"raising {launch}"
    fields = jobs.finish(short_jobs[name], name)
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "0")
    assert count_starts(jobs.find_run(name)) == 1
    # torchrun's own report of 20 lines follows the traceback.
    *log, last = jobs.read_log(name).splitlines()[-45:]
    assert last.endswith("error: planned fault")
    assert any("Traceback (most recent call last)" in line for line in log)
    assert any("RuntimeError: planned fault" in line for line in log)


def test_run_whose_losses_blow_up_fails_the_job_which_is_not_requeued(jobs: Jobs, short_jobs: dict[str, str]) -> None:
    fields = jobs.finish(short_jobs["diverging"], "diverging")
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "0")
    assert count_starts(jobs.find_run("diverging")) == 1
    assert "error: " in jobs.read_log("diverging").splitlines()[-1]


def test_job_submitted_from_a_restarted_job_counts_its_own_restarts(jobs: Jobs, short_jobs: dict[str, str]) -> None:
    assert jobs.finish(short_jobs["inheriting"], "inheriting")["JobState"] == "COMPLETED"
    assert "restarts    at most 20; 0 so far" in jobs.read_log("inheriting")


def test_array_runs_each_line_of_a_file_and_one_that_fails_stops_no_other(jobs: Jobs, tmp_path: Path) -> None:
    keys = ["train.steps=2", "train.steps=none", "train.steps=2", "train.steps=3"]
    lines = [f"configs/train/tiny.yaml 'run_dir={jobs.find_run(f'array {number}')}'" for number in range(4)]
    runs = tmp_path / "runs.txt"
    runs.write_text("".join(f"{line} {key}\n" for line, key in zip(lines, keys, strict=True)))
    job = jobs.submit_array(runs, options=("--array=0-3%2",))
    states = [jobs.finish(f"{job}_{number}", "array")["JobState"] for number in range(4)]
    assert states == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED"]
    assert [count_steps(jobs.find_run(f"array {number}")) for number in range(4)] == [2, 0, 2, 3]


def test_later_link_of_a_chain_goes_on_and_one_behind_the_end_ends_at_once(jobs: Jobs) -> None:
    first = jobs.submit("chain", "train.steps=2")
    second = jobs.submit("chain", "train.steps=4", options=(f"--dependency=afterany:{first}",))
    third = jobs.submit("chain", "train.steps=4", options=(f"--dependency=afterany:{second}",))
    states = [jobs.finish(job, "chain")["JobState"] for job in (first, second, third)]
    assert states == ["COMPLETED"] * 3
    assert [line["step"] for line in read_lineage(jobs.find_run("chain")) if line["event"] == "resume"][:1] == [2]
    assert count_steps(jobs.find_run("chain")) == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_takes_the_header_of_every_script(jobs: Jobs, script: str) -> None:
    options = ["--nodes=2", "--cpus-per-task=2", "--test-only"]
    said = jobs.cluster.run("sbatch", *options, ROOT / "slurm" / script, check=False)
    assert "to start at" in said, said


@pytest.mark.parametrize("script", SCRIPTS[:3])
def test_dry_run_says_what_would_be_done_and_does_nothing(jobs: Jobs, script: str) -> None:
    said = jobs.cluster.run("bash", "-c", f"cd '{ROOT}' && slurm/{script} --dry-run train.steps=7 run_dir=/none/at/all")
    assert "train.steps=7" in said and "/none/at/all" in said
    assert not Path("/none").exists()


def test_script_trains_inside_an_allocation_that_is_there_already(jobs: Jobs) -> None:
    said = jobs.run_in_allocation("allocated", "train.steps=2", options=("--nodes=1",))
    assert f"run folder  {jobs.find_run('allocated')}" in said and "the run is finished" in said
    assert count_steps(jobs.find_run("allocated")) == 2


def test_scripts_pass_shellcheck(jobs: Jobs) -> None:
    scripts = sorted((ROOT / "slurm").glob("*.sh"))
    jobs.cluster.run("shellcheck", "--external-sources", f"--source-path={ROOT}", *scripts)


@pytest.mark.parametrize(("setup", "threads"), [("", 4), ("; export OMP_NUM_THREADS=3", 3)])
def test_ranks_share_the_cpus_of_their_node_and_torchrun_is_given_the_time_to_meet(
    jobs: Jobs, tmp_path: Path, setup: str, threads: int
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "threads=$OMP_NUM_THREADS $*"\n')
    python.chmod(0o755)
    ranks = {"PRISM_RANKS_PER_NODE": "2", "PRISM_RENDEZVOUS_S": "7"}
    setup = f'export PATH="{tmp_path}:$PATH"{setup}'
    job = jobs.submit(f"threads {threads}", options=("--cpus-per-task=8",), PRISM_SETUP=setup, **ranks)
    jobs.finish(job, f"threads {threads}")
    assert f"threads={threads} -m torch.distributed.run" in jobs.read_log(f"threads {threads}")
    assert "--rdzv-conf=timeout=7 -m launcher train" in jobs.read_log(f"threads {threads}")
