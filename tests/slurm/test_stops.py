"""What stops a job of the shipped scripts on a real SLURM, and how the run goes on, or ends."""

from pathlib import Path

import pytest

from prism_lm.train.lineage import read_lineage
from tests.slurm.jobs import Jobs, count_starts, count_steps, list_curve, list_endings, read_result

pytestmark = pytest.mark.timeout(400, func_only=True)


def test_notice_saves_and_requeues_and_the_next_start_resumes_to_the_same_curve(
    jobs: Jobs, stopped_jobs: dict[str, str], reference: Path
) -> None:
    fields = jobs.finish(stopped_jobs["notice"], "notice")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert list_endings(jobs.find_run("notice")) == ["preempted", "finished"]
    assert list_curve(jobs.find_run("notice")) == list_curve(reference)
    errors = [line for line in jobs.read_log("notice").splitlines() if "error: " in line]
    assert [line for line in errors if "DUE TO JOB REQUEUE" not in line] == []


def test_cancelled_job_saves_and_stays_dead(jobs: Jobs, stopped_jobs: dict[str, str]) -> None:
    fields = jobs.finish(stopped_jobs["cancelled"], "cancelled")
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")
    assert list_endings(jobs.find_run("cancelled")) == ["preempted"]
    assert read_result(jobs.find_run("cancelled"))["step"] >= 7


def test_requeue_by_a_user_saves_and_the_job_goes_on_to_the_same_curve(
    jobs: Jobs, stopped_jobs: dict[str, str], reference: Path
) -> None:
    fields = jobs.finish(stopped_jobs["requeued"], "requeued")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert list_endings(jobs.find_run("requeued")) == ["preempted", "finished"]
    assert list_curve(jobs.find_run("requeued")) == list_curve(reference)


def test_cap_on_restarts_fails_the_job_and_says_how_to_go_on(jobs: Jobs, stopped_jobs: dict[str, str]) -> None:
    fields = jobs.finish(stopped_jobs["capped"], "capped")
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "0")
    assert list_endings(jobs.find_run("capped")) == ["preempted"]
    assert "PRISM_MAX_RESTARTS=0 is reached; submit again to go on" in jobs.read_log("capped").splitlines()[-1]


def test_job_that_a_higher_partition_preempts_comes_back_and_ends_the_same_curve(jobs: Jobs, reference: Path) -> None:
    low = jobs.submit("low", options=("--partition=low", "--nodelist=node2", "--cpus-per-task=12"))
    jobs.wait_for_step("low", 60)
    high = jobs.submit("high", "train.steps=2", options=("--partition=high", "--nodelist=node2", "--cpus-per-task=12"))
    assert jobs.finish(high, "high")["JobState"] == "COMPLETED"
    fields = jobs.finish(low, "low")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert list_endings(jobs.find_run("low")) == ["preempted", "finished"]
    assert list_curve(jobs.find_run("low")) == list_curve(reference)


def test_node_with_a_full_disk_ends_the_job_by_name_before_training(jobs: Jobs, tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=8m none "{tmp_path}" && export TMPDIR="{tmp_path}"'
    setup = f"{jobs.variables['PRISM_SETUP']}; [[ $SLURMD_NODENAME != node2 ]] || {{ {mount}; }}"
    checks = {"PRISM_PREFLIGHT": "1", "PRISM_EXPECT_GPUS": "0"}
    job = jobs.submit("full", options=("--nodes=2",), PRISM_SETUP=setup, **checks)
    assert jobs.finish(job, "full")["JobState"] == "FAILED"
    log = jobs.read_log("full")
    assert f"bad  node2: TMPDIR={tmp_path} must have 1.0 GiB free but has 0.0" in log
    assert "bad  node1" not in log and "training begins" not in log
    assert not read_lineage(jobs.find_run("full"))


@pytest.mark.parametrize(
    ("launch", "words"),
    [("torchrun", "no rank had started on node2"), ("srun", "1 did not come: node2 (0 of 1 ranks came), rank 1")],
)
def test_node_whose_rank_never_comes_ends_the_job_by_name_in_the_stated_time(
    jobs: Jobs, jobs_without_a_rank: dict[str, str], launch: str, words: str
) -> None:
    fields = jobs.finish(jobs_without_a_rank[launch], f"alone {launch}")
    assert fields["JobState"] == "FAILED"
    # The stated time, what python takes to start where much else does, and less than srun would wait: a minute more.
    assert fields["RunTime"] < "00:00:55"
    log = jobs.read_log(f"alone {launch}")
    assert words in log
    assert count_steps(jobs.find_run(f"alone {launch}")) == 0


def test_node_that_dies_with_the_batch_shell_is_left_and_the_job_resumes_elsewhere(
    jobs: Jobs, jobs_on_a_lost_node: dict[str, str], reference: Path
) -> None:
    fields = jobs.finish(jobs_on_a_lost_node["whole"], "whole")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert read_lineage(jobs.find_run("whole"))[1]["former_end"] == "killed"
    assert list_curve(jobs.find_run("whole")) == list_curve(reference)


def test_job_that_loses_the_node_of_another_rank_is_requeued_and_ends_the_curve_of_two_nodes(
    jobs: Jobs, jobs_on_a_lost_node: dict[str, str], jobs_at_once: dict[str, str]
) -> None:
    jobs.finish(jobs_at_once["torchrun"], "torchrun")
    fields = jobs.finish(jobs_on_a_lost_node["half"], "half")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert count_starts(jobs.find_run("half")) == 2
    assert list_curve(jobs.find_run("half")) == list_curve(jobs.find_run("torchrun"))


def test_time_limit_met_twice_or_more_makes_one_start_more_of_one_curve(
    jobs: Jobs, limited_job: str, reference: Path
) -> None:
    """Two limits on an idle machine; a busy one makes fewer steps in a minute."""
    fields = jobs.finish(limited_job, "limited")
    restarts = int(fields["Restarts"])
    assert (fields["JobState"], fields["TimeLimit"], restarts >= 2) == ("COMPLETED", "00:01:00", True)
    assert list_endings(jobs.find_run("limited")) == ["preempted"] * restarts + ["finished"]
    assert count_starts(jobs.find_run("limited")) == restarts + 1
    assert list_curve(jobs.find_run("limited")) == list_curve(reference)
