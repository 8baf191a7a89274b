"""The runs that a submission is for, with their resolved configurations: one from the command line, or one a line of a
sweep's file."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.batch_script import REFUSED_CHARACTERS
from launcher.config import RunConfig, dump_config, load_config
from launcher.job_record import slurm_folder
from launcher.run_checks import check_folder_can_be_made


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run before it is submitted."""

    config: RunConfig
    "Resolved, with absolute paths: the job runs in the project's folder, wherever it was submitted."
    origin: str = ""
    "Of a sweep's run: the line, or the file of the folder, that it stands in."

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def slurm_folder(self) -> Path:
        return slurm_folder(self.run_dir)

    @property
    def config_yaml(self) -> str:
        return dump_config(self.config)


def read_plan(words: Sequence[str], sweep_file: str | None) -> list[PlannedRun]:
    """The runs, checked as far as their keys and folders go. Raises ValueError, for a sweep with every line's error."""
    if sweep_file is not None:
        return _read_sweep(Path(sweep_file), words)
    if not words:
        raise ValueError("CONFIG must be given; for example prism submit configs/train/tiny.yaml --ranks-per-node 2")
    return [PlannedRun(config=_read_config(words[0], words[1:]))]


def _read_sweep(sweep: Path, overrides: Sequence[str]) -> list[PlannedRun]:
    """Keys on the command line stand after those of the sweep, and overrule them."""
    plan: list[PlannedRun] = []
    problems: list[str] = []
    for origin, words in _list_sweep(sweep):
        try:
            typed = shlex.split(words, comments=True)
            if typed:
                plan.append(PlannedRun(config=_read_config(typed[0], [*typed[1:], *overrides]), origin=origin))
        except ValueError as error:
            problems.append(f"{origin}: {error}")
    problems = problems or _find_shared_folders(plan)
    if problems:
        raise ValueError("\nerror: ".join(problems))
    if not plan:
        raise ValueError(f"--array={sweep} must have a run on a line; write CONFIG run_dir=runs/a key=value")
    return plan


def _list_sweep(sweep: Path) -> list[tuple[str, str]]:
    """What is typed for each run, and where it stands: lines of a file, or the configurations in a folder."""
    if sweep.is_dir():
        return [(str(file), shlex.quote(str(file))) for file in sorted(sweep.glob("*.yaml"))]
    if not sweep.is_file():
        raise ValueError(
            f"--array={sweep} must be a file with a run on each line, CONFIG run_dir=runs/a key=value, or a folder of "
            "configurations"
        )
    return [(f"{sweep} line {number}", line) for number, line in enumerate(sweep.read_text().splitlines(), start=1)]


def _find_shared_folders(plan: Sequence[PlannedRun]) -> list[str]:
    first: dict[Path, str] = {}
    problems: list[str] = []
    for run in plan:
        other = first.setdefault(run.run_dir, run.origin)
        if other != run.origin:
            rule = f"must be another folder than that of {other}; give each run its own run_dir"
            problems.append(f"{run.origin}: run_dir={run.run_dir} {rule}")
    return problems


def _read_config(path: str, overrides: Sequence[str]) -> RunConfig:
    config = load_config(RunConfig, path, overrides)
    data = replace(config.data, path=_make_absolute(config.data.path), cache_dir=_make_absolute(config.data.cache_dir))
    config = replace(config, run_dir=_make_absolute(config.run_dir), data=data)
    refused = sorted(set(config.run_dir) & set(REFUSED_CHARACTERS))
    if refused:
        raise ValueError(
            f"run_dir={config.run_dir!r} must not hold {' '.join(map(repr, refused))}, which sbatch reads otherwise; "
            "rename the folder"
        )
    _check_survives_the_shell(path, config.run_dir)
    check_folder_can_be_made(Path(config.run_dir))
    return config


def _make_absolute(path: str | None) -> str:
    """A folder seen from here; a URL, and nothing, stay as they are."""
    return path if path and "://" in path else os.path.abspath(path) if path else ""  # noqa: PTH100


def _check_survives_the_shell(path: str, run_dir: str) -> None:
    """The batch script gives the folder on as run_dir=FOLDER, which is read as YAML."""
    if load_config(RunConfig, path, [f"run_dir={run_dir}"]).run_dir != run_dir:
        raise ValueError(f"run_dir={run_dir} must be plain text to YAML, which reads it otherwise; rename the folder")
