"""What `prism preflight` finds on several nodes, here processes that are told other node names, and how it says so."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher import local_ranks, node_checks, preflight
from launcher.__main__ import main
from launcher.node_checks import Report, look_at_errors, look_at_product
from launcher.preflight_verdict import Speed, find_problems, find_slow, spell_nodes
from tests.harness import read_ranks, run_on

CONFIG = Path(__file__).parent.parent.parent / "configs" / "train" / "tiny.yaml"
GOOD = {"commit": "aaaa", "torch": "2.11.0"}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "manifest.json").touch()
    return ["preflight", str(CONFIG), f"data.path={tmp_path}", f"run_dir={tmp_path}/run", "--min-free-gib=0.01"]


def check(arguments: list[str], spoil: str, within_s: float) -> tuple[int, str]:
    """This rank's exit code and what it printed; two ranks to a node, the last node spoiled."""
    ranks = read_ranks()
    node = ranks.rank // 2
    is_bad = node == (ranks.world_size - 1) // 2
    os.environ |= {"SLURMD_NODENAME": f"node{node}", "PRISM_EXPECT_GPUS": "0"}
    output = Path(arguments[2].partition("=")[2]) / f"output-{ranks.rank}"
    with pytest.MonkeyPatch.context() as patch, output.open("w") as file:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        if is_bad:
            spoil_node(patch, spoil)
        code = main([*arguments, f"--within-s={within_s:g}"])
    text = output.read_text()
    output.unlink()
    return code, text


def spoil_node(patch: pytest.MonkeyPatch, spoil: str) -> None:
    usage = namedtuple("usage", "total used free")
    match spoil:
        case "commit":
            patch.setattr(node_checks, "read_commit", lambda: "b" * 40)
        case "disk":
            patch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 2**40, 2**20))
        case "package":
            patch.setattr(node_checks, "find_version", lambda name: "9.9.9")
        case "sum" if read_ranks().rank == 3:
            patch.setattr(preflight, "_time_sums", fail_to_sum)
        case _:
            pass


def fail_to_sum(*given: object) -> float:
    raise RuntimeError("no link\nmore")


def test_good_nodes_have_a_line_each_and_the_bandwidth_and_rank_0_alone_speaks(arguments: list[str]) -> None:
    (first, text), *others = run_on(4, check, arguments, "nothing", 120.0)
    assert first == 0 and others == [(0, "")] * 3, (text, others)
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["ok   node0", "ok   node1"]
    assert "2 x cpu" in lines[0] and "run_dir" in lines[0] and "in node" in lines[1]
    assert lines[2].startswith("all-reduce of 64 MB over 4 ranks (gloo): ") and "GB/s (bus " in lines[2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("commit", ["commit=bbbbbbbbbbbb must be ", " as on 1 of 2 nodes; check out the same commit"]),
        ("disk", ["run_dir=", "GiB free but has 0.0; make room there", "; also data.cache_dir=", "; also TMPDIR="]),
        ("package", ["torch=9.9.9 must be ", "; also deepspeed=9.9.9 must be "]),
    ],
)
def test_bad_node_is_named_in_one_line_with_what_differs_and_a_remedy(
    spoil: str, words: list[str], arguments: list[str]
) -> None:
    answers = run_on(4, check, arguments, spoil, 120.0)
    assert [code for code, _ in answers] == [1] * 4
    text = answers[0][1]
    assert text.startswith("bad  node1: ") and text.count("\n") == 1
    assert all(word in text for word in words), text
    assert not any(said for _, said in answers[1:])


def test_rank_that_cannot_sum_is_named_with_its_node(arguments: list[str]) -> None:
    answers = run_on(4, check, arguments, "sum", 20.0)
    assert [code for code, _ in answers] == [1] * 4
    line = next(line for line in answers[0][1].splitlines() if line.startswith("bad  node1: "))
    assert "rank 3 must reach the others but met: no link; run with NCCL_DEBUG=INFO" in line


def test_rank_that_hangs_is_named_with_its_check_and_everything_ends_in_time(
    arguments: list[str], tmp_path: Path
) -> None:
    script = "\n".join(
        [
            "import os, sys, time",
            "from launcher import node_checks",
            "os.environ['SLURMD_NODENAME'] = 'node' + os.environ['RANK']",
            "if os.environ['RANK'] == '1': node_checks.look_at_data = lambda config: time.sleep(600)",
            "from launcher.__main__ import main",
            "sys.exit(main(sys.argv[1:]))",
        ]
    )
    command = [sys.executable, "-c", script, *arguments, "--within-s=6"]
    places = local_ranks.build_environments({}, 2)
    environment = {**os.environ, "PRISM_EXPECT_GPUS": "0"}
    began_s = time.monotonic()
    started = [
        subprocess.Popen(command, env={**environment, **place}, stderr=subprocess.PIPE, text=True) for place in places
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], errors
    assert errors[0].startswith("bad  node1: rank 1 must end within --within-s=6 but did not: data.path="), errors
    assert time.monotonic() - began_s < 100


def test_one_process_says_that_there_is_nobody_to_reach(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRISM_EXPECT_GPUS", "0")
    monkeypatch.setenv("SLURMD_NODENAME", "laptop")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("ok   laptop: 1 x cpu, run_dir ")
    assert text.endswith("one process: no other rank to reach, so no all-reduce was measured\n")


def test_missing_gpus_and_missing_data_are_problems_of_the_node_also_in_json(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PRISM_EXPECT_GPUS": "64", "SLURMD_NODENAME": "laptop"})
    assert main([*arguments, "--ranks-per-node=1", "data.path=/nowhere", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]["laptop"]
    assert problems[0].startswith("data.path=/nowhere must hold manifest.json; mount that disk on this node too")
    assert "must be at least 64, the GPUs of this node" in problems[1]


@pytest.mark.timeout(200)
def test_one_task_starts_the_ranks_of_its_node_and_leaves_none_behind(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "launcher", *arguments, "--ranks-per-node=2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"PRISM_EXPECT_GPUS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CONFIG.parent.parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 x cpu" in done.stdout and "all-reduce of 64 MB over 2 ranks (gloo): " in done.stdout


def test_ranks_of_two_tasks_with_two_gpus_each_are_numbered_through(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {
        "SLURM_JOB_ID": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "node[7-8]",
        "SLURM_GPUS_ON_NODE": "2",
        "MASTER_ADDR": "192.0.2.7",
    }
    assert local_ranks.count_to_start(task, None) == 2
    places = local_ranks.build_environments(task, 2)
    assert [(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) for place in places] == [
        ("2", "0", "4"),
        ("3", "1", "4"),
    ]
    assert {(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places} == {("192.0.2.7", "10021")}
    each_rank = {**task, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}
    assert local_ranks.count_to_start(each_rank, None) == 1
    assert local_ranks.count_to_start({**task, "RANK": "0"}, 8) == 1
    assert local_ranks.count_to_start({**task, "PRISM_RANKS_PER_NODE": "3"}, None) == 3
    with pytest.raises(ValueError, match=r"PRISM_RANKS_PER_NODE=two must be a number of ranks"):
        local_ranks.count_to_start({**task, "PRISM_RANKS_PER_NODE": "two"}, None)


def test_stop_of_the_task_ends_the_ranks_that_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "from launcher import local_ranks\n"
        "real = subprocess.Popen\n"
        "def popen(command, **given):\n"
        "    process = real([sys.executable, '-c', 'import time; time.sleep(600)'], **given)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "subprocess.Popen = popen\n"
        "local_ranks.start_and_wait([], [{}, {}])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=30) == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_value_of_most_nodes_is_the_rule_and_a_tie_goes_to_rank_0() -> None:
    facts = [GOOD, {**GOOD, "torch": "2.12.0"}, GOOD]
    reports = [Report(node=f"n{rank}", rank=rank, facts=each) for rank, each in enumerate(facts)]
    assert list(find_problems(reports)) == ["n1"]
    assert find_problems(reports)["n1"][0].startswith("torch=2.12.0 must be 2.11.0 as on 2 of 3 nodes; use one env")
    assert list(find_problems(reports[:2])) == ["n1"]
    assert find_problems([*reports[:1], reports[2]]) == {}


def test_slow_node_is_named_only_below_what_was_asked_for() -> None:
    reports = [Report(node=f"n{rank // 2}", rank=rank) for rank in range(4)]
    speeds = {rank: Speed(all_gb_s=40.0, node_gb_s=5.0 if rank == 3 else 200.0) for rank in range(4)}
    assert find_slow(reports, speeds, 0.0, 0.0) == {}
    slow = find_slow(reports, speeds, 40.0, 100.0)
    assert list(slow) == ["n1"] and slow["n1"][0].startswith(
        "all-reduce=5.00 GB/s must be at least --min-node-gb-s=100"
    )
    assert spell_nodes(reports, speeds)[1].endswith("all-reduce 40.00 GB/s, in node 5.00 GB/s")


def test_report_survives_its_way_as_json() -> None:
    report = Report(node="n", rank=1, device="H200", free_device_gib=3.0, free_disk_gib={"TMPDIR": 1.0}, facts=GOOD)
    assert Report(**json.loads(json.dumps(asdict(report)))) == report


def test_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_product("cpu") == []
    import torch

    right = torch.Tensor.__matmul__

    def spoil(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(left, other)
        if product.dtype == torch.float32:
            product[5, 7] = float("nan")
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", spoil)
    assert look_at_product("cpu") == ["cpu must multiply exactly but got 1 of 1048576 sums wrong; leave that node out"]


def test_memory_errors_of_the_ranks_own_gpu_and_hardware_errors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$1" in *ecc*) echo "GPU-aaa, 2"; echo "GPU-bbb, 0";; *) echo "GPU-aaa, Yes, No";; esac\n'
    )
    (tmp_path / "dmesg").write_text(
        '#!/bin/sh\necho "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off"\n'
    )
    for name in ("nvidia-smi", "dmesg"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = look_at_errors("aaa")
    assert [problem.split(" of GPU")[0] for problem in found] == [
        "uncorrected ECC errors=2",
        "rows to be remapped=Yes",
        "hardware errors (Xid 79) in the last hour=1",
    ]
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexit 1\n")
    assert look_at_errors("bbb") == []


@pytest.mark.parametrize(
    ("option", "words"), [("--within-s=0", "--within-s=0 must be"), ("--ranks-per-node=0", "at le")]
)
def test_options_that_cannot_hold_are_refused(
    option: str, words: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, option]) == 2
    assert words in capsys.readouterr().err
