"""One real SLURM cluster for all tests of this folder, a tiny data set, and the run that theirs must equal.

Jobs that take long because they wait are submitted before the first test, and run beside the tests of others.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from tests.slurm.cluster import Cluster, skip_without_cluster
from tests.slurm.jobs import ROOT, Jobs, build_keys

# The last two wait for the first steps of their jobs.
SUBMITTED_FIRST = ("limited_job", "jobs_at_once", "jobs_without_a_rank", "stopped_jobs", "jobs_on_a_lost_node")


@pytest.fixture(scope="session", autouse=True)
def submit_long_jobs(request: pytest.FixtureRequest) -> None:
    """Those that a chosen test asks for."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in SUBMITTED_FIRST:
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three pretend nodes."""
    skip_without_cluster()
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data with spaces") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=200, seed=0)


@pytest.fixture(scope="session")
def jobs(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(cluster, data, tmp_path_factory.mktemp("runs with spaces"))


@pytest.fixture(scope="session")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process on this machine that nothing interrupted."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    command = [sys.executable, "-m", "launcher", "train", "configs/train/tiny.yaml", *build_keys(data)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, f"run_dir={folder}"], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def limited_job(jobs: Jobs) -> str:
    """A job of a minute at most, whose first two starts are too slow to end in that time: SLURM tells it in time."""
    return jobs.submit("limited", options=("--time=1", "--signal=B:USR1@5"), **jobs.slow_down(starts=2))


@pytest.fixture(scope="session")
def jobs_at_once(jobs: Jobs) -> dict[str, str]:
    """Two jobs on the same two nodes at the same time, by launcher, with the preflight before them."""
    checks = {"PRISM_PREFLIGHT": "1", "PRISM_EXPECT_GPUS": "0"}
    return {
        launch: jobs.submit(launch, options=("--nodes=2",), PRISM_LAUNCH=launch, **checks)
        for launch in ("torchrun", "srun")
    }


@pytest.fixture(scope="session")
def stopped_jobs(jobs: Jobs) -> dict[str, str]:
    """Jobs that a signal or a command has stopped in their first start, by what did."""
    notice = ("scancel", "--batch", "--signal=USR1")
    stops = {"notice": notice, "capped": notice, "requeued": ("scontrol", "requeue"), "cancelled": ("scancel",)}
    settings = {"capped": {"PRISM_MAX_RESTARTS": "0", "PRISM_LAUNCH": "srun"}, "requeued": {"PRISM_LAUNCH": "srun"}}
    slow = jobs.slow_down(starts=1)
    submitted = {name: jobs.submit(name, **slow | settings.get(name, {})) for name in stops}
    for name, command in stops.items():
        jobs.wait_for_step(name, 7)
        jobs.cluster.run(*command, submitted[name])
    return submitted


@pytest.fixture(scope="session")
def jobs_on_a_lost_node(jobs: Jobs) -> Iterator[dict[str, str]]:
    """A job with its batch shell on the node that dies, and one with only its last rank there."""
    options = {"whole": ("--nodes=1",), "half": ("--nodes=2",)}
    slow = jobs.slow_down(starts=1)
    submitted = {
        name: jobs.submit(
            name, "train.checkpoint.save_every_steps=5", options=("--partition=spare", *options[name]), **slow
        )
        for name in options
    }
    for name in options:
        jobs.wait_for_step(name, 8)
    jobs.cluster.kill_node("node3")
    yield submitted
    jobs.cluster.start_node("node3")


@pytest.fixture(scope="session")
def jobs_without_a_rank(jobs: Jobs) -> dict[str, str]:
    """Jobs of two nodes on the second of which no rank ever starts, by launcher."""
    setup = f"{jobs.variables['PRISM_SETUP']}; [[ $SLURM_PROCID != 1 ]] || sleep 1000"
    return {
        launch: jobs.submit(
            f"alone {launch}",
            options=("--nodes=2",),
            PRISM_RENDEZVOUS_S="12",
            PRISM_LAUNCH=launch,
            PRISM_SETUP=setup,
        )
        for launch in ("torchrun", "srun")
    }


@pytest.fixture(scope="session")
def short_jobs(jobs: Jobs) -> dict[str, str]:
    """Jobs that end by themselves within their first steps, side by side."""
    raising = jobs.make_raise()
    blown = ("train.max_skipped_steps=1", "train.optim.learning_rate=1e30")
    return {
        "raising torchrun": jobs.submit("raising torchrun", **raising),
        "raising srun": jobs.submit("raising srun", PRISM_LAUNCH="srun", **raising),
        "diverging": jobs.submit("diverging", *blown),
        "inheriting": jobs.submit("inheriting", "train.steps=2", SLURM_RESTART_COUNT="30"),
    }
