"""`prism status [RUN ...]`: how runs stand, read from their folders and, where there is SLURM, from its queue.

One run: its state, its jobs, progress, newest checkpoint and every start. Several, or without RUN all of runs/* and
those of your jobs: one line each. The state is one of running, finished, preempted (stopped by a signal, with a
checkpoint), failed, killed (it left no ending), never started; of a run with a job in the queue: queued, or starting
(its job runs, and no process of it holds the folder). The folder of a sweep's jobs stands for its runs.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.job_record import find_run_of, read_record
from launcher.run_folder import check_folder
from launcher.run_jobs import ask_queue
from launcher.run_status import read_run
from launcher.slurm_jobs import JOB_PREFIX, SlurmJob
from launcher.status_table import describe_run, describe_runs
from prism_lm.train.lineage import LINEAGE_NAME

EXAMPLE = """\
example:
  prism status
  prism status runs/tiny
  prism status runs/tiny --json
"""


def main(arguments: list[str]) -> int:
    """Print one run in full, several as a table, or each as a line of JSON."""
    parsed = build_parser().parse_args(arguments)
    runs = [Path(run) for run in parsed.runs]
    for run_dir in runs:
        check_folder(run_dir)
    runs = [run for given in runs for run in _expand_sweep(given)]
    jobs = ask_queue(runs)
    is_asked = jobs is not None
    jobs = jobs or []
    runs = runs or find_runs(jobs)
    if not runs and not parsed.json:
        print("no runs: none in runs/, and no job of yours in the queue; prism train CONFIG, or prism submit CONFIG")
        return 0
    is_one = len(parsed.runs) == len(runs) == 1
    statuses = [read_run(run_dir, jobs, with_past=is_one and is_asked) for run_dir in runs]
    if parsed.json:
        lines = [json.dumps(asdict(status)) for status in statuses]
    else:
        lines = describe_run(statuses[0]) if is_one else describe_runs(statuses)
    if lines:
        print("\n".join(lines))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="folders of runs (all of runs/, and of your jobs)")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, on a line of its own")
    return parser


def _expand_sweep(folder: Path) -> list[Path]:
    """The runs of a sweep, or the one run that the folder is of."""
    record = read_record(folder)
    return [Path(run) for run in record.runs] if record and record.runs else [folder]


def find_runs(jobs: Sequence[SlurmJob]) -> list[Path]:
    """The folders in runs/ that are of runs, and those of the jobs that prism submit queued."""
    here = [path for path in sorted(Path("runs").glob("*")) if _is_run(path)]
    queued = [find_run_of(job) for job in jobs if job.name.startswith(JOB_PREFIX)]
    known = {path.absolute() for path in here}
    others = {path for path in queued if path is not None and path.is_dir() and path not in known}
    return here + sorted(others)


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("config.yaml", LINEAGE_NAME, "slurm/job.json"))
