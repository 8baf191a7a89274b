"""What squeue and sacct print of jobs is read as it is meant."""

from pathlib import Path

import pytest

from launcher.slurm_jobs import list_jobs, list_past
from tests.launcher.fake_slurm import FakeSlurm, put_on_path

RUNNING = "12|12|RUNNING|None|node[1-2]|2|3:59:00|gpu|prism-a|/runs/with space|bar"
TASK = "13_2|15|PENDING|Dependency||1|1:00:00|cpu|prism-b|(null)"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "fake slurm")
    put_on_path(made, monkeypatch)
    return made


def test_queue_tells_state_nodes_and_comment_even_one_that_holds_the_separator(fake: FakeSlurm) -> None:
    fake.install()
    fake.set_queue(RUNNING, TASK)
    running, task = list_jobs()
    assert (running.state, running.nodes, running.num_nodes, running.time_left) == (
        "RUNNING",
        "node[1-2]",
        2,
        "3:59:00",
    )
    assert running.comment == "/runs/with space|bar" and not running.is_pending
    assert (task.job_id, task.own_id, task.reason, task.comment) == ("13_2", "15", "Dependency", "")


def test_numbers_of_jobs_that_ended_long_ago_are_no_error(fake: FakeSlurm) -> None:
    fake.install()
    fake.set_queue(RUNNING)
    assert list_jobs(["7"]) == [] and list_jobs([]) == []
    assert [job.job_id for job in list_jobs(["7", "12"])] == ["12"]


def test_variables_that_choose_lines_and_columns_do_not_reach_squeue(fake: FakeSlurm, monkeypatch) -> None:
    fake.install()
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    fake.write_program("squeue", 'echo "${SQUEUE_STATES-unset}" > "$here/states"\n')
    list_jobs()
    assert (fake.folder / "states").read_text() == "unset\n"


def test_accounting_lists_every_stretch_that_ended_and_is_empty_where_it_is_off(fake: FakeSlurm) -> None:
    line = "printf '%s\\n' '12|RUNNING|2026-01-01T12:00:00|Unknown|0:0|node2'"
    fake.write_program(
        "sacct", f"{line}\nprintf '%s\\n' '12|PREEMPTED|2026-01-01T10:00:00|2026-01-01T11:00:00|0:0|node1'\n"
    )
    assert [job.state for job in list_past(["12"])] == ["PREEMPTED"]
    assert "--duplicates" in fake.read_calls("sacct")[0]
    fake.write_program("sacct", 'echo "Slurm accounting storage is disabled" >&2\nexit 1\n')
    assert list_past(["12"]) == []


def test_without_accounting_squeue_tells_of_jobs_that_ended_a_short_while_ago(fake: FakeSlurm) -> None:
    ended = "12|FAILED|2026-01-01T12:00:00|2026-01-01T13:00:00|768|node2|"
    waiting = "13|PENDING|N/A|N/A|0||"
    fake.write_program("squeue", f"printf '%s\\n' '{ended}' '{waiting}' '14|CANCELLED|N/A|2026-01-01T09:00:00|0||'\n")
    cancelled, failed = list_past(["12", "13", "14"])
    assert (cancelled.job_id, failed.state, failed.exit_code) == ("14", "FAILED", "3:0")
    assert "--states=all --jobs=12,13,14" in fake.read_calls("squeue")[0]
