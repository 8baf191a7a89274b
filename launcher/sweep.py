"""`prism sweep STUDY.yaml [key=value ...]`: train every run of a study, skip the finished ones, tabulate at the end.

A study file names a base configuration, what differs between the runs, and seeds. Its folder, studies/NAME, gets a
complete configuration of each run (configs/), the run folders (runs/), what they printed (logs/) and the table. Runs
are trained here one after another; one that fails is named and the next goes on. Ctrl-C saves the run that trains; the
same command goes on from there, trying failed runs again. Values, runs and seeds added to the file later are added to
the folder; what would change a run that was started is refused. With --submit the unfinished runs become one SLURM job
array. key=value is a key of the study, such as base=, or of every run, such as train.steps=100.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from launcher.help_text import describe_config
from launcher.run_folder import align
from launcher.study import Study
from launcher.sweep_folder import (
    Changes,
    StudyRun,
    find_changes,
    hold_study,
    load_study,
    resolve_study,
    write_study,
)
from launcher.sweep_records import Record, config_file, read_study_records
from launcher.sweep_status import MOVING, read_records, show_status
from launcher.sweep_table import tabulate, write_table

EXIT_STOPPED = 75
EXAMPLE = """\
examples:
  prism sweep configs/ablation/depth.yaml
  prism sweep configs/ablation/all.yaml base=configs/train/tiny.yaml seeds=[1,2,3] train.steps=100 --dry-run
  prism sweep configs/ablation/all.yaml base=configs/train/130m.yaml --submit --at-a-time 4 --gpus-per-node 8
  prism sweep studies/depth                    go on with the study of a folder
  prism sweep status studies/depth --watch 10
  prism sweep table studies/depth --by model.solver_steps
"""
_SUBMIT_HELP = """the unfinished runs as a SLURM job array; what follows it are options of prism submit, such as --nodes
1 --gpus-per-node 8 --time 12:00:00"""


def main(arguments: list[str]) -> int:
    """0 when every run has finished, 1 when one has not, 75 when a signal stopped the sweep."""
    match arguments[:1]:
        case ["status"]:
            parsed = build_status_parser().parse_args(arguments[1:])
            return show_status(Path(parsed.folder), parsed.watch, is_json=parsed.json)
        case ["table"]:
            parsed = build_table_parser().parse_args(arguments[1:])
            return show_table(Path(parsed.folder), parsed.by)
        case _:
            ours, of_submit = split_options(arguments)
            return sweep(build_parser().parse_intermixed_args(ours), of_submit)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLE + "\nkeys of a study:\n" + describe_config(Study),
        usage="prism sweep STUDY.yaml [key=value ...] [options] [--submit [--at-a-time N] [prism submit's options]]\n"
        "       prism sweep status FOLDER [--watch S] [--json]\n       prism sweep table FOLDER [--by KEY ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("words", metavar="STUDY key=value", nargs="+", help="study file, or a study's folder, and keys to override")
    add("--dry-run", action="store_true", help="check and list the runs; nothing is written or started")
    add("--skip-failed", action="store_true", help="leave failed runs as they are instead of trying them again")
    add("--submit", action="store_true", help=_SUBMIT_HELP)
    add("--at-a-time", type=int, metavar="N", help="of the array, at most N runs at one time")
    return parser


def build_status_parser() -> argparse.ArgumentParser:
    """Of `prism sweep status`."""
    parser = argparse.ArgumentParser(prog="prism sweep status", description="How each run of a study stands.")
    parser.add_argument("folder", metavar="FOLDER", help="folder of a study, such as studies/depth")
    parser.add_argument("--watch", type=float, metavar="S", help="show it every S seconds, until all is done")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, on a line of its own")
    return parser


def build_table_parser() -> argparse.ArgumentParser:
    """Of `prism sweep table`."""
    from launcher import sweep_table

    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="prism sweep table", description=sweep_table.__doc__, formatter_class=shape, allow_abbrev=False
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of a study, such as studies/depth")
    parser.add_argument("--by", metavar="KEY", nargs="+", default=[], help="rows are the values of these keys")
    return parser


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and after --submit the options of prism submit; a key=value is ours wherever it stands."""
    if "--submit" not in arguments:
        return list(arguments), []
    place = list(arguments).index("--submit") + 1
    parser = argparse.ArgumentParser(prog="prism sweep", add_help=False, allow_abbrev=False)
    parser.add_argument("--at-a-time")
    for flag in ("--dry-run", "--skip-failed"):
        parser.add_argument(flag, action="store_true")
    parsed, others = parser.parse_known_args(arguments[place:])
    keys = [word for word in others if re.match(r"[a-z]\w*(\.\w+)*=", word)]
    flags = [f"--{name.replace('_', '-')}" for name in ("dry_run", "skip_failed") if getattr(parsed, name)]
    flags += ["--at-a-time", parsed.at_a_time] if parsed.at_a_time else []
    return [*arguments[:place], *flags, *keys], [word for word in others if word not in keys]


def sweep(options: argparse.Namespace, of_submit: Sequence[str]) -> int:
    """Expand, compare with the folder, check, and train or submit what has not finished."""
    _check_options(options)
    of_submit = [*of_submit, *([f"--at-once={options.at_a_time}"] if options.at_a_time else [])]
    study = load_study(options.words)
    runs, folder = resolve_study(study), Path(study.place)
    changes = find_changes(study, runs)
    todo = choose_unfinished(folder, runs, skip_failed=options.skip_failed)
    if options.dry_run:
        return _preview(study, runs, todo, changes, of_submit if options.submit else None)
    print("\n".join(describe_plan(study, runs, todo, changes)), flush=True)
    if not options.submit and todo:
        _check(todo)
    with hold_study(folder):
        write_study(study, runs, changes)
        if options.submit and todo:
            from launcher.sweep_slurm import submit_runs

            return submit_runs(folder, todo, of_submit, name=study.name)
        is_stopped = _train(folder, todo, len(runs))
    return _conclude(folder, is_stopped=is_stopped)


def choose_unfinished(folder: Path, runs: Sequence[StudyRun], *, skip_failed: bool) -> list[StudyRun]:
    """Those to train: neither finished nor in the hands of another process or of SLURM."""
    known = {record.name: record for record in _read_known(folder, runs)}
    left = ("finished", *MOVING, *(["failed"] if skip_failed else []))
    return [run for run in runs if run.name not in known or known[run.name].status not in left]


def describe_plan(study: Study, runs: Sequence[StudyRun], todo: Sequence[StudyRun], changes: Changes) -> list[str]:
    """What the study is about to do, a fact a line."""
    waiting = {run.name for run in todo}
    known = [record for record in _read_known(Path(study.place), runs) if record.name not in waiting]
    counts = Counter(record.status for record in known)
    others = "".join(f", {count} {status}" for status, count in counts.items())
    lines = [f"study {study.name} in {study.place}: {len(runs)} runs, {len(todo)} to train{others}"]
    moving = [record.name for record in known if record.status in MOVING]
    notes = {
        "left to the process or job that has it": moving,
        "configuration rewritten, nothing had been started with the former one": changes.rewritten,
        "kept in the folder, no longer in the study": changes.dropped,
    }
    return lines + [f"{note}: {', '.join(names)}" for note, names in notes.items() if names]


def show_table(folder: Path, keys: Sequence[str]) -> int:
    """Writes and prints the table; 1 while there is nothing to tabulate."""
    table = tabulate(folder, keys)
    if table is None:
        print("no table: no run has finished with a validation loss; prism sweep status shows where they are")
        return 1
    print(write_table(folder, table), end="")
    return 0


def _read_known(folder: Path, runs: Sequence[StudyRun]) -> list[Record]:
    """How those of the runs stand that the folder has already."""
    return read_records(folder, [run.plan for run in runs if config_file(folder, run.name).is_file()])


def _check_options(options: argparse.Namespace) -> None:
    if options.at_a_time is not None and options.at_a_time < 1:
        raise ValueError(f"--at-a-time={options.at_a_time} must be at least 1; leave it out for all at once")
    if options.at_a_time and not options.submit:
        raise ValueError(f"--at-a-time={options.at_a_time} must go with --submit; here runs go one after another")


def _check(todo: Sequence[StudyRun]) -> None:
    from launcher.sweep_check import check_runs

    for warning in check_runs(todo):
        print(f"warning: {warning}", file=sys.stderr)


def _preview(
    study: Study, runs: Sequence[StudyRun], todo: Sequence[StudyRun], changes: Changes, of_submit: Sequence[str] | None
) -> int:
    names = {run.name for run in todo}
    rows = [["run", "to do", "steps", "differs"]]
    for run in runs:
        word = "train" if run.name in names else "leave"
        own = run.plan.overrides[len(study.overrides) :]
        rows.append([run.name, word, f"{run.config.train.steps:,}", " ".join(own) or "-"])
    print("\n".join([*describe_plan(study, runs, todo, changes), "", *align(rows)]))
    if todo and of_submit is not None:
        from launcher.sweep_slurm import preview_submission

        return preview_submission(todo, of_submit, name=study.name)
    _check(todo)
    return 0


def _train(folder: Path, todo: Sequence[StudyRun], num_runs: int) -> bool:
    """Whether a signal ended it."""
    from launcher.sweep_local import LocalRunner

    runner = LocalRunner(folder, todo, num_runs=num_runs)
    runner.run_all()
    return runner.is_stopped


def _conclude(folder: Path, *, is_stopped: bool) -> int:
    """The failures by name, the table, and the exit code."""
    records = read_study_records(folder)
    if is_stopped:
        left = sum(record.status != "finished" for record in records)
        print(f"stopped with {left} of {len(records)} runs unfinished; prism sweep {folder} goes on")
        return EXIT_STOPPED
    print()
    show_table(folder, [])
    failed = [record for record in records if record.status == "failed"]
    for record in failed:
        print(f"failed: {record.name}: {(record.error or 'no error was left').splitlines()[0]}", file=sys.stderr)
    return int(any(record.status != "finished" for record in records))
