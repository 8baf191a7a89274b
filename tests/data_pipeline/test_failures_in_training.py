"""`prism train` on data or a cache disk that breaks: every rank ends, soon, and one line on stderr names the file."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from launcher.__main__ import EXIT_FAILED
from tests.data_pipeline.disks import REFUSALS, fill, full_disk, make_read_only
from tests.data_pipeline.test_preflight import flip, truncate
from tests.harness import ForkedCommand, build_rank_environment, find_free_port

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
SHARD = "train/alpha/shard.000003.mds.zstd"
SIZES = [
    "model_width=32",
    "num_layers=1",
    "num_heads=1",
    "key_width=16",
    "value_width=16",
    "mlp_width=64",
    "solver_rank=8",
]
READING = ["row_tokens=64", "shuffle=false", "prefetch_batches=1", "verify=sizes"]
TRAINING = ["global_batch_rows=4", "micro_batch_rows=2", "log_every_steps=1", "eval_every_steps=0"]
OWN_TRACEBACK = "launcher/__main__.py"  # torchrun writes one of its own whatever a rank ended with
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Processes of `prism train`, whose stderr goes to files, and its folder."""

    folder: Path
    processes: list[subprocess.Popen[bytes] | ForkedCommand]
    errors: list[Path]

    def wait_for_first_step(self) -> None:
        """Return once metrics.jsonl shows a step."""
        metrics = self.folder / "metrics.jsonl"
        deadline_s = time.monotonic() + 2 * LIMIT_S
        while not (metrics.exists() and metrics.read_text()):
            assert all(process.poll() is None for process in self.processes), self.read_errors()
            assert time.monotonic() < deadline_s, "no step was made"
            time.sleep(0.005)

    def wait_for_end(self) -> list[int]:
        """Return the exit codes, all of them there within LIMIT_S."""
        deadline_s = time.monotonic() + LIMIT_S
        return [process.wait(max(0.1, deadline_s - time.monotonic())) for process in self.processes]

    def read_errors(self) -> str:
        """Return what the ranks wrote to stderr."""
        return "".join(file.read_text() for file in self.errors)


Start = Callable[..., Run]


def start_torchrun(words: list[str], errors: Path) -> "subprocess.Popen[bytes]":
    """Torchrun itself, with interpreters of its own."""
    command = [sys.executable, *TORCHRUN, "-m", "launcher", *words]
    with errors.open("wb") as stderr:
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=stderr)


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    """Start a run of small steps: `ranks` processes as torchrun starts them, or torchrun itself."""
    runs: list[Run] = []

    def start_run(data: Path, *keys: str, ranks: int, torchrun: bool = False) -> Run:
        folder = tmp_path / "run"
        words = ["train", str(ROOT / "configs/train/tiny.yaml"), f"run_dir={folder}", f"data.path={data}"]
        words += [f"model.{key}" for key in ["vocab_size=320", *SIZES]] + [f"data.{key}" for key in READING]
        words += [f"train.{key}" for key in ["steps=100000", *TRAINING]] + list(keys)
        errors = [tmp_path / f"stderr_{rank}.txt" for rank in range(1 if torchrun else ranks)]
        run = Run(folder=folder, processes=[], errors=errors)
        runs.append(run)
        if torchrun:
            run.processes.append(start_torchrun(words, errors[0]))
            return run
        port = find_free_port()
        for rank, file in enumerate(errors):
            run.processes.append(ForkedCommand(words, build_rank_environment(rank, ranks, port), file))
        return run

    yield start_run
    for process in [process for run in runs for process in run.processes]:
        process.kill()
        process.wait()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some forty shards of 32 rows: eight steps each, read in stored order."""
    return write_synthetic_dataset(tmp_path / "data", vocab_size=320, row_tokens=64, documents=150, shard_mib=0.004)


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    with full_disk(tmp_path / "disk", free_bytes=1 << 20) as folder:
        yield folder


def harm_shards_to_come(data: Path, cache: Path, harm: Callable[[Path], None]) -> str:
    """Harm the training shards that are not in the cache yet, the last first; return a pattern of their names."""
    cached = {file.name for file in cache.rglob("alpha/*.mds")}
    coming = sorted(file for file in data.glob("train/alpha/*.zstd") if file.stem not in cached)
    assert len(coming) > 5
    for file in reversed(coming):
        harm(file)
    return "|".join(re.escape(str(file)) for file in coming)


def check_end(run: Run, pattern: str, *, codes: list[int]) -> None:
    """All ranks have failed; one error, on one line of one stderr and in result.json, matches the pattern."""
    assert run.wait_for_end() == codes
    said = [line for line in run.read_errors().splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and re.search(pattern, said[0]), run.read_errors()
    assert OWN_TRACEBACK not in run.read_errors()
    result = json.loads((run.folder / "result.json").read_text())
    assert result["status"] == "failed" and result["step"] >= 1 and re.search(pattern, result["error"])


@pytest.mark.parametrize(("ranks", "workers", "harm"), [(1, 2, Path.unlink), (2, 1, truncate)])
def test_shards_that_vanish_or_shrink_in_mid_run_end_every_rank(start, data, tmp_path, ranks, workers, harm) -> None:
    run = start(data, f"data.workers={workers}", f"data.cache_dir={tmp_path / 'cache'}", ranks=ranks)
    run.wait_for_first_step()
    names = harm_shards_to_come(data, tmp_path / "cache", harm)
    check_end(run, names, codes=[EXIT_FAILED] * ranks)


@pytest.mark.parametrize(("workers", "ranks", "torchrun"), [(0, 1, False), (1, 2, True)])
def test_a_flipped_bit_that_sizes_do_not_show_ends_the_run_when_it_is_read(
    start, data, workers, ranks, torchrun
) -> None:
    flip(data / SHARD)
    run = start(data, f"data.workers={workers}", ranks=ranks, torchrun=torchrun)
    run.wait_for_first_step()
    check_end(run, re.escape(f"{data}/{SHARD}"), codes=[EXIT_FAILED])  # torchrun itself ends with 1 for all ranks


@pytest.mark.parametrize(("ranks", "workers", "spoil"), [(1, 1, make_read_only), (2, 0, fill)])
def test_a_cache_disk_that_fills_up_or_turns_read_only_ends_every_rank(
    start, data, disk, ranks, workers, spoil
) -> None:
    run = start(data, f"data.workers={workers}", f"data.cache_dir={disk}", ranks=ranks)
    run.wait_for_first_step()
    spoil(disk)
    check_end(run, f"{re.escape(str(disk))}.*({'|'.join(REFUSALS)})", codes=[EXIT_FAILED] * ranks)


def test_a_shard_found_bad_at_the_start_is_said_once_by_two_ranks_that_make_no_step(start, data) -> None:
    truncate(data / SHARD)
    run = start(data, ranks=2)
    assert run.wait_for_end() == [EXIT_FAILED] * 2
    (line,) = [line for line in run.read_errors().splitlines() if line.startswith("error: ")]
    assert f"{data}/{SHARD} has" in line and OWN_TRACEBACK not in run.read_errors()
    assert not (run.folder / "metrics.jsonl").exists()
