"""The stop notice where SLURM follows processes by control groups, the default on real clusters.

It then signals only the direct children of its step; the rest of the way is the scripts' own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, find_reason_against_cgroup, skip_without_cluster
from tests.slurm.jobs import Jobs, list_curve, list_endings

pytestmark = pytest.mark.timeout(400, func_only=True)


@pytest.fixture(scope="module")
def grouped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Two nodes of a cluster with proctrack/cgroup."""
    folder = tmp_path_factory.mktemp("cgroup_cluster")
    skip_without_cluster()
    reason = find_reason_against_cgroup(folder)
    if reason is not None:
        pytest.skip(reason)
    started = Cluster(folder, nodes=2, proctrack="cgroup", prefix="grouped")
    try:
        started.start()
        yield Jobs(started, data, tmp_path_factory.mktemp("grouped runs"))
    finally:
        started.stop()


def test_notice_reaches_the_ranks_through_control_groups_and_the_run_resumes(grouped: Jobs, reference: Path) -> None:
    assert "proctrack/cgroup" in grouped.cluster.run("scontrol", "show", "config")
    job = grouped.submit("notice")
    grouped.wait_for_step("notice", 60)
    grouped.cluster.run("scancel", "--batch", "--signal=USR1", job)
    fields = grouped.finish(job, "notice")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert list_endings(grouped.find_run("notice")) == ["preempted", "finished"]
    assert list_curve(grouped.find_run("notice")) == list_curve(reference)
