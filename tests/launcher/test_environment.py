from pathlib import Path

import pytest

from launcher.environment import detect_environment

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
