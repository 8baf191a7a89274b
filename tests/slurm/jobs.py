"""Jobs of the shipped scripts on the pretend cluster, and what is asked of their runs."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from launcher.curves import read_metrics
from prism_lm.train.lineage import read_lineage
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parent.parent.parent
SLOW_STEPS, RAISING_STEPS = (Path(__file__).parent / name for name in ("slow_steps", "raising_steps"))
STEPS = 300
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def build_keys(data: Path, *extra: str) -> list[str]:
    """Keys of a run whose steps do not depend on how many there are, so that a longer one equals a shorter one."""
    return [
        f"data.path={data}",
        "data.row_tokens=64",
        "model.vocab_size=320",
        f"train.steps={STEPS}",
        *("model.model_width=64", "model.num_layers=1", "model.num_heads=2", "model.key_width=32"),
        *("model.value_width=32", "model.mlp_width=128", "model.solver_rank=16"),
        "train.schedule.kind=constant",
        "train.schedule.warmup_steps=1",
        "train.log_every_steps=1",
        "train.eval_every_steps=0",
        "train.histogram_every_steps=0",
        "train.checkpoint.save_every_steps=50",
        *extra,
    ]


class Jobs:
    """Submits the shipped scripts, made small by the command line as a user would."""

    def __init__(self, cluster: Cluster, data: Path, folder: Path) -> None:
        self.cluster, self.data, self.folder = cluster, data, folder
        self.variables = {
            "PRISM_CONFIG": "configs/train/tiny.yaml",
            "PRISM_SETUP": f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH OMP_NUM_THREADS=1",
            "PRISM_RANKS_PER_NODE": "1",
            "PRISM_PREFLIGHT": "0",
        }

    def slow_down(self, *, starts: int) -> dict[str, str]:
        """Variables of a job whose first starts take half a second a step, so that they can be stopped at leisure."""
        slow = f"[[ ${{SLURM_RESTART_COUNT:-0}} -ge {starts} ]] || export PYTHONPATH={shlex.quote(str(SLOW_STEPS))}"
        return {"PRISM_SETUP": f"{self.variables['PRISM_SETUP']}; {slow}"}

    def make_raise(self) -> dict[str, str]:
        """Variables of a job whose ranks raise in their first step."""
        return {"PRISM_SETUP": f"{self.variables['PRISM_SETUP']}; export PYTHONPATH={shlex.quote(str(RAISING_STEPS))}"}

    def submit(
        self, name: str, *extra: str, options: tuple[str, ...] = (), script: str = "prism_130m.sh", **variables: str
    ) -> str:
        """The job's id. Its run folder and its log carry `name`."""
        size = ["--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10", f"--output={self.find_log(name)}"]
        keys = build_keys(self.data, *extra)
        return self.cluster.run(
            "sbatch", "--parsable", f"--chdir={ROOT}", *size, *options, ROOT / "slurm" / script, *keys,
            **self.variables | {"PRISM_RUN_DIR": str(self.find_run(name))} | variables,
        )  # fmt: skip

    def submit_array(self, runs: Path, *, options: tuple[str, ...]) -> str:
        """The id of an array over the lines of `runs`."""
        size = [
            "--nodes=1",
            "--gpus-per-node=1",
            "--cpus-per-task=1",
            "--time=10",
            f"--output={self.find_log('array')}",
        ]
        keys = [key for key in build_keys(self.data) if not key.startswith("train.steps=")]
        return self.cluster.run(
            "sbatch", "--parsable", f"--chdir={ROOT}", *size, *options, ROOT / "slurm" / "sweep.sh", runs, *keys,
            **self.variables,
        )  # fmt: skip

    def run_in_allocation(self, name: str, *extra: str, options: tuple[str, ...]) -> str:
        """Output of the script as salloc runs it: without a batch shell, on the machine that asks."""
        return self.cluster.run(
            "salloc", f"--chdir={ROOT}", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10", *options,
            ROOT / "slurm" / "prism_130m.sh", *build_keys(self.data, *extra),
            **self.variables | {"PRISM_RUN_DIR": str(self.find_run(name))},
        )  # fmt: skip

    def find_run(self, name: str) -> Path:
        return self.folder / name

    def find_log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def read_log(self, name: str) -> str:
        path = self.find_log(name)
        return path.read_text() if path.is_file() else ""

    def wait_for_step(self, name: str, step: int, *, starts: int = 1, wait_s: float = 120.0) -> None:
        """Until the run has recorded `step` in its start number `starts` or a later one."""
        run, end_s = self.find_run(name), time.monotonic() + wait_s
        while count_starts(run) < starts or count_steps(run) < step:
            assert time.monotonic() < end_s, f"no step {step}:\n{self.read_log(name)[-4000:]}"
            time.sleep(0.2)

    def finish(self, job: str, name: str, *, wait_s: float = 200.0) -> dict[str, str]:
        """The job's fields once it is over for good, its log shown where it did not complete."""
        fields = self.cluster.wait_for(job, *ENDED, wait_s=wait_s)
        print(self.read_log(name)[-6000:])
        return fields


def count_steps(run: Path) -> int:
    return max((line["step"] for line in read_metrics(run)), default=0) if (run / "metrics.jsonl").is_file() else 0


def count_starts(run: Path) -> int:
    return sum(line["event"] != "end" for line in read_lineage(run))


def list_endings(run: Path) -> list[str]:
    """How each start ended, in its own words."""
    return [line["status"] for line in read_lineage(run) if line["event"] == "end"]


def read_result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def list_curve(run: Path) -> list[tuple[Any, ...]]:
    """Step, loss, norm and order hash of every line: all that is to be equal to the bit."""
    tags = ("step", "train/loss_nats", "optim/grad_norm", "data/order_hash")
    return [tuple(line[tag] for tag in tags) for line in read_metrics(run)]
