"""`prism submit CONFIG [key=value ...]`: check a run on the login node, then hand it to SLURM.

What can be found wrong without a GPU is found here, before the job waits in the queue. The resolved configuration, the
commit and the batch script are kept in RUN/slurm/, where the log goes too. A run that is queued or running is refused.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.batch_script import BatchScript
from launcher.help_text import describe_config
from launcher.job_record import JobRecord
from launcher.job_request import Request, choose_request
from launcher.partition_check import check_partition
from launcher.planned_run import PlannedRun, read_plan
from launcher.provenance import ROOT, read_commit
from launcher.run_checks import check_room, check_run
from launcher.run_folder import spell_bytes
from launcher.slurm_commands import SlurmAbsent
from launcher.slurm_jobs import JOB_PREFIX
from launcher.slurm_partitions import NodeGroup, list_partitions, spell_time
from launcher.submission import Submission, hold_folders, list_changes, refuse_active
from prism_lm.model.cost import checkpoint_bytes

EXAMPLE = """\
examples:
  prism submit configs/train/1b.yaml data.path=data/slimpajama --nodes 4 --gpus-per-node 8 --time 24:00:00
  prism submit configs/train/tiny.yaml --ranks-per-node 4 --dry-run      nodes without GPUs; shows the script
  prism submit configs/train/7b.yaml --nodes 16 --gpus-per-node 8 --chain 5
  prism submit --array sweep.txt --at-once 4 --gpus-per-node 8     a run a line: CONFIG run_dir=runs/a key=value
"""
_ARRAY_HELP = """a sweep: a file with a run a line, CONFIG run_dir=... key=value, quoted as in a shell; or a folder of
configurations, each with its own run_dir"""
# Before the limit SLURM's notice comes up to this early or late.
_NOTICE_SPARE_S = 60
_MOST_NOTICE_S = 65535


def main(arguments: list[str]) -> int:
    """Check, submit, and say how to follow; 0 when every job is queued."""
    options = build_parser().parse_intermixed_args(arguments)
    _check_options(options)
    plan = read_plan(options.words, options.array)
    return _submit(options, plan)


def build_parser() -> argparse.ArgumentParser:
    from launcher.config import RunConfig

    parser = argparse.ArgumentParser(
        prog="prism submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLE + "\nkeys (write key=value after CONFIG):\n" + describe_config(RunConfig),
        usage="prism submit [options] CONFIG [key=value ...], or prism submit [options] --array SWEEP [key=value ...]",
    )
    add = parser.add_argument
    add("words", metavar="CONFIG key=value", nargs="*", help="YAML file of the run, and keys to override")
    add("--nodes", type=int, default=1, help="nodes of the job (1)")
    add("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each node, a rank for each: 8, or h100:8")
    add("--ranks-per-node", type=int, metavar="N", help="ranks of each node, for nodes without GPUs")
    add("--cpus-per-rank", type=int, metavar="N", help="CPUs of each rank (a GPU's share of its node; 1 without GPUs)")
    add("--time", metavar="D-HH:MM:SS", help="time limit of the job (the partition's, or a day)")
    add("--partition", metavar="NAME", help="partition (SBATCH_PARTITION, or the cluster's default)")
    add("--account", metavar="NAME", help="account (SBATCH_ACCOUNT, or yours)")
    add("--launch", choices=("torchrun", "srun"), default="torchrun", help="one task a node, or a task a rank")
    add("--setup", metavar="FILE", help="bash that is sourced before Python: modules, an environment")
    add("--sbatch", metavar="OPTION", action="append", default=[], help="one more of sbatch's: --sbatch=--qos=high")
    add("--max-restarts", type=int, default=20, metavar="N", help="how often a job may go back into the queue (20)")
    add("--chain", type=int, default=1, metavar="N", help="N jobs, each after the one before has ended (1)")
    add("--dependency", metavar="LIST", help="what the first job waits for, as sbatch spells it: afterok:123")
    add("--array", metavar="SWEEP", help=_ARRAY_HELP)
    add("--at-once", type=int, metavar="M", help="of a sweep, at most M runs at one time")
    add("--dry-run", action="store_true", help="check, and print the script; nothing is written or submitted")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    for name in ("nodes", "ranks_per_node", "cpus_per_rank", "chain", "at_once"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be at least 1; leave it out for the default")
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts={options.max_restarts} must be at least 0; use 0 for none")
    if options.array and options.chain > 1:
        raise ValueError(f"--chain={options.chain} must not go with --array; submit runs one by one, or leave it out")
    if options.at_once and not options.array:
        raise ValueError(f"--at-once={options.at_once} must come with --array; leave it out for one run")
    for option in options.sbatch:
        if not option.startswith("--") or "\n" in option:
            raise ValueError(f"--sbatch={option} must be a long option of sbatch; for example --sbatch=--qos=high")


def _submit(options: argparse.Namespace, plan: list[PlannedRun]) -> int:
    groups = _look_at_cluster(is_needed=not options.dry_run)
    run_dirs = [run.run_dir for run in plan]
    if groups is not None:
        refuse_active(run_dirs)
    request = choose_request(options, groups or [])
    if groups is not None:
        check_partition(groups, request)
    warnings = _check_runs(plan, request)
    submission = _build_submission(options, plan, request)
    warnings += list_changes()
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(_describe(plan, request, submission.script)))
    if options.dry_run:
        print("\n".join(submission.describe_plan()))
        return 0
    with hold_folders(run_dirs):
        refuse_active(run_dirs)
        record = submission.submit()
    print("\n".join(_say_how_to_follow(record, plan, submission.folder)))
    return 0


def _look_at_cluster(*, is_needed: bool) -> list[NodeGroup] | None:
    """The partitions; None off a cluster, where a dry run goes on without them."""
    try:
        return list_partitions()
    except SlurmAbsent as error:
        if is_needed:
            raise
        print(f"warning: partition, time limit and nodes are not checked: {error}", file=sys.stderr)
        return None


def _check_runs(plan: Sequence[PlannedRun], request: Request) -> list[str]:
    """Warnings; raises with the errors of all runs of a sweep at once, each with its place."""
    from data_pipeline.errors import DataError

    warnings: list[str | None] = []
    problems: list[str] = []
    for run in plan:
        try:
            warnings += [check_room(run.config), check_run(run.config, request)]
        except (ValueError, DataError) as error:
            if not run.origin:
                raise
            problems.append(f"{run.origin}: {error}")
    if problems:
        raise ValueError("\nerror: ".join(problems))
    return [warning for warning in warnings if warning]


def _build_submission(options: argparse.Namespace, plan: list[PlannedRun], request: Request) -> Submission:
    is_array = bool(options.array)
    folder = plan[0].slurm_folder
    label = plan[0].run_dir.name
    if is_array:
        label = Path(options.array).stem
        folder = plan[0].run_dir.parent / f"slurm-{label}"
    name = JOB_PREFIX + "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in label)
    script = BatchScript(
        name=name,
        comment=folder if is_array else plan[0].run_dir,
        log=str(folder / f"{name}-{'%A_%a' if is_array else '%j'}.log"),
        request=request,
        runs=[run.run_dir for run in plan],
        at_once=options.at_once,
        is_array=is_array,
        root=_find_root(),
        commit=read_commit(),
        launch=options.launch,
        setup=_spell_setup(options.setup),
        max_restarts=options.max_restarts,
        grace_s=_choose_grace(plan, request),
        extra=options.sbatch,
    )
    return Submission(folder=folder, script=script, plan=plan, num_jobs=options.chain, dependency=options.dependency)


def _find_root() -> Path:
    if not (ROOT / "slurm" / "body.sh").is_file():
        raise ValueError(f"{ROOT} must hold slurm/body.sh; install the project from its checkout with pip install -e .")
    return ROOT


def _spell_setup(file: str | None) -> str:
    """The Python that submits, then the user's own file."""
    path = f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    if file is None:
        return path
    if not Path(file).is_file():
        raise ValueError(f"--setup={file} must be an existing file of bash; for example one with module load cuda")
    checked = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
    if checked.returncode:
        raise ValueError(f"--setup={file} must be bash that can be read; {' '.join(checked.stderr.split())}")
    return f"{path}; source {shlex.quote(str(Path(file).absolute()))}"


def _choose_grace(plan: Sequence[PlannedRun], request: Request) -> int:
    """Seconds of notice before the limit: what the run may take to save itself, and what SLURM may be late."""
    stop_s = max(run.config.train.stop_grace_s for run in plan)
    grace_s = int(stop_s) + _NOTICE_SPARE_S
    if grace_s >= min(request.time_s, _MOST_NOTICE_S):
        raise ValueError(
            f"train.stop_grace_s={stop_s:g} must leave time to train within --time={spell_time(request.time_s)}: the "
            f"last {grace_s} s are for saving; use a longer --time, or a shorter grace"
        )
    return grace_s


def _describe(plan: Sequence[PlannedRun], request: Request, script: BatchScript) -> list[str]:
    config = plan[0].config
    each = checkpoint_bytes(config.model, precision=config.train.precision)
    kind = "GPUs" if request.gpus_per_node else "ranks on CPUs"
    facts = {
        "checked": f"{len(plan)} runs" if script.is_array else str(plan[0].run_dir),
        "ranks": f"{request.nodes} nodes x {request.ranks_per_node} {kind} = {request.num_ranks}, by {script.launch}",
        "checkpoint": f"{spell_bytes(each)} each",
        "commit": script.commit or "unknown: no git checkout",
    }
    return [f"{name:<12}{text}" for name, text in facts.items()]


def _say_how_to_follow(record: JobRecord, plan: Sequence[PlannedRun], folder: Path) -> list[str]:
    is_sweep = record.runs is not None
    job_ids = record.job_ids
    first = plan[0]
    log = str(first.slurm_folder / f"{record.name}-{job_ids[0]}_0.log") if is_sweep else record.spell_log(job_ids[0])
    facts = {
        "job": f"{job_ids[0]}" + (f", then {', '.join(job_ids[1:])}" if job_ids[1:] else ""),
        "log": log,
        "script": record.script,
        "follow": f"tail -F {shlex.quote(log)}",
        "": f"prism status {shlex.quote(str(folder if is_sweep else first.run_dir))}",
        "end": f"scancel {' '.join(job_ids)}",
    }
    return [f"{name:<12}{text}" for name, text in facts.items()]
