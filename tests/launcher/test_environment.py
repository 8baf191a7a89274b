from pathlib import Path

import pytest

from launcher.environment import detect_environment
from launcher.node_limits import count_expected_gpus, count_threads, find_gloo_interface, is_gpu_bound
from launcher.slurm_step import expand_counts

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4000",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[7-8]",
}


def test_without_a_launcher_there_is_one_rank_with_a_port_of_its_own() -> None:
    first, second = detect_environment({}), detect_environment({})
    assert first.launcher == "single"
    assert (first.ranks.rank, first.ranks.world_size) == (0, 1)
    assert 0 < int(first.variables["MASTER_PORT"]) < 65536
    assert second.variables["MASTER_ADDR"] == "127.0.0.1"


def test_torchrun_variables_are_taken_as_they_are() -> None:
    environment = detect_environment(TORCHRUN)
    assert environment.launcher == "torchrun"
    assert (environment.ranks.rank, environment.ranks.local_rank, environment.ranks.world_size) == (3, 1, 4)


def test_rank_without_the_other_variables_is_refused_and_names_them() -> None:
    incomplete = {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}
    with pytest.raises(ValueError, match="RANK=3 must come with MASTER_PORT"):
        detect_environment(incomplete)


def test_two_tasks_that_would_each_start_a_whole_run_are_refused() -> None:
    standalone = {**TORCHRUN, "WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=2 must be 1 .* WORLD_SIZE=2 .*--ntasks-per-node=1"):
        detect_environment(standalone)
    assert detect_environment({**TORCHRUN, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}).launcher == "torchrun"


def write_scontrol(folder: Path) -> None:
    """Answers as SLURM does: names that need not resolve, and the address to use."""
    script = folder / "scontrol"
    script.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        '  hostnames) [ "$3" = "node[7-8]" ] && printf "node7\\nnode8\\n" ;;\n'
        '  node) printf "NodeName=%s Arch=x86_64\\n   NodeAddr=192.0.2.7 NodeHostName=%s\\n" "$3" "$3" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)


def test_srun_ranks_come_from_slurm_and_the_address_from_the_first_nodes_nodeaddr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environment = detect_environment(SRUN)
    assert environment.launcher == "srun"
    assert (environment.ranks.rank, environment.ranks.local_rank, environment.ranks.world_size) == (2, 0, 4)
    assert environment.variables["LOCAL_WORLD_SIZE"] == "2"
    assert environment.variables["MASTER_ADDR"] == "192.0.2.7"


def test_port_differs_after_a_restart_and_stays_below_the_ephemeral_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first = int(detect_environment(SRUN).variables["MASTER_PORT"])
    second = int(detect_environment({**SRUN, "SLURM_RESTART_COUNT": "1"}).variables["MASTER_PORT"])
    assert first != second
    assert 10000 <= min(first, second) <= max(first, second) < 30000


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2),2", [1, 3, 3, 2]), ("8(x12)", [8] * 12)]
)
def test_tasks_per_node_are_expanded_as_slurm_writes_them(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(("node", "tasks"), [("0", "2"), ("2", "2"), ("3", "1")])
def test_local_world_size_is_that_of_this_node_where_nodes_differ(
    node: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7", "SLURM_NODEID": node}
    assert detect_environment(uneven).variables["LOCAL_WORLD_SIZE"] == tasks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"SLURM_LOCALID": None, "SLURM_PROCID": None},
            r"SLURM_NTASKS=4 must come with SLURM_PROCID, SLURM_LOCALID; .*",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, r"SLURM_STEP_TASKS_PER_NODE=two must be numbers such as 2\(x3\),1; "),
        ({"SLURM_NODEID": "5"}, r"SLURM_NODEID=5 must be below the 2 nodes of SLURM_STEP_TASKS_PER_NODE=2\(x2\); "),
    ],
)
def test_srun_variables_that_are_missing_or_wrong_are_named(
    changes: dict[str, str | None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    changed = {name: value for name, value in {**SRUN, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        detect_environment(changed)


def test_without_scontrol_a_remedy_names_the_address_and_a_given_address_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"MASTER_ADDR= must be set where `scontrol show node` gives no answer"):
        detect_environment(SRUN)
    given = detect_environment({**SRUN, "SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1"})
    assert given.variables["MASTER_ADDR"] == "127.0.0.1" and "PRISM_NODES" not in given.variables


def test_step_of_one_task_in_a_larger_allocation_is_one_process() -> None:
    interactive = {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}
    assert detect_environment(interactive).launcher == "single"
    standalone = {**TORCHRUN, **interactive, "WORLD_SIZE": "2", "RANK": "1"}
    assert detect_environment(standalone).launcher == "torchrun"


def test_rank_0_alone_knows_the_nodes_and_their_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert detect_environment({**SRUN, "SLURM_PROCID": "0"}).variables["PRISM_NODES"] == "node7:2,node8:2"
    assert "PRISM_NODES" not in detect_environment(SRUN).variables
    agents = {**SRUN, **TORCHRUN, "RANK": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert detect_environment(agents).variables["PRISM_NODES"] == "node7:2,node8:2"


def test_threads_are_a_ranks_share_of_the_cpus_and_the_users_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert count_threads({}, 8) == "8" and count_threads({}, 1) is None and count_threads({}, 100) == "1"
    assert count_threads({"SLURM_CPUS_ON_NODE": "32"}, 8) == "4"
    assert count_threads({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16"}, 4) == "16"
    assert count_threads({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16", "RANK": "1"}, 4) == "4"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert count_threads({"SLURM_CPUS_ON_NODE": "64"}, 8) == "8", "a mask of the task's own is not divided again"
    assert detect_environment(TORCHRUN).variables["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in detect_environment({**TORCHRUN, "OMP_NUM_THREADS": "3"}).variables


@pytest.mark.parametrize(
    ("variables", "is_bound"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_PER_TASK": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_TRES_PER_TASK": "cpu=4"}, False),
        ({"SLURM_GPUS_ON_NODE": "2"}, False),
    ],
)
def test_gpu_of_a_bound_task_is_its_first_and_a_shared_gpu_is_no_binding(
    variables: dict[str, str], is_bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert is_gpu_bound(variables, 2) == is_bound
    found = detect_environment({**SRUN, **variables, "SLURM_LOCALID": "1"}).variables
    assert found["LOCAL_RANK"] == ("0" if is_bound else "1") and found["LOCAL_WORLD_SIZE"] == "2"
    assert ("PRISM_GPU_BOUND" in found) == is_bound


def test_gpus_expected_are_the_users_number_then_slurms_then_the_visible_ones() -> None:
    assert count_expected_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
    assert count_expected_gpus({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "8"}) == 8
    assert count_expected_gpus({"SLURM_GPUS_ON_NODE": "8", "PRISM_EXPECT_GPUS": "0"}) == 0
    with pytest.raises(ValueError, match=r"PRISM_EXPECT_GPUS=all must be a number"):
        count_expected_gpus({"PRISM_EXPECT_GPUS": "all"})


def test_gloo_is_given_an_interface_only_where_the_hosts_name_would_mislead(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"misled": "127.0.1.1", "sound": "192.0.2.9", "192.0.2.7": "192.0.2.7", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr("socket.gethostbyname", lambda host: addresses[host])
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    monkeypatch.setattr("launcher.node_limits._find_own_address", lambda address, port: "192.0.2.5")
    monkeypatch.setattr("launcher.node_limits._read_address", {"lo": "127.0.0.1", "ib0": "192.0.2.5"}.get)
    monkeypatch.setattr("socket.gethostname", lambda: "misled")
    assert find_gloo_interface("192.0.2.7", 1) == "ib0"
    assert find_gloo_interface("127.0.0.1", 1) is None
    monkeypatch.setattr("socket.gethostname", lambda: "sound")
    assert find_gloo_interface("192.0.2.7", 1) is None
