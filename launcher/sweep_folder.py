"""A study's folder: from a study file to the complete configuration of every run, which later calls may add to only."""

import fcntl
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from launcher.config import RunConfig, dump_config, load_config
from launcher.job_record import read_record as read_job
from launcher.job_record import slurm_folder
from launcher.study import PlannedRun, Study, expand_study, split_keys
from launcher.sweep_records import STUDY_NAME, config_file, run_folder
from prism_lm.checkpoint.folder import write_whole
from prism_lm.train.lineage import LINEAGE_NAME

_LOCK_NAME = ".sweep.lock"


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run of a study with its resolved configuration."""

    plan: PlannedRun
    config: RunConfig

    @property
    def name(self) -> str:
        return self.plan.name


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What writing a study would do to the folder."""

    new: list[str]
    rewritten: list[str]
    "Their configuration changes, and nothing was started with the former one."
    dropped: list[str]
    "They have a configuration in the folder and are no longer in the study; they are kept."


def load_study(words: Sequence[str]) -> Study:
    """The study that was typed: STUDY.yaml, or the folder of one, then key=value of the study and of all its runs."""
    path = Path(words[0])
    ours, of_runs = split_keys(words[1:])
    study = load_config(Study, path / STUDY_NAME if path.is_dir() else path, ours)
    if not of_runs:
        return study
    typed = dict.fromkeys(word.partition("=")[0] for word in of_runs)
    kept = [word for word in study.overrides if word.partition("=")[0] not in typed]
    return replace(study, overrides=[*kept, *of_runs])


def resolve_study(study: Study) -> list[StudyRun]:
    """Every run with its configuration. Raises ValueError with each mistake once and the first run that has it."""
    folder, runs = Path(study.place), list[StudyRun]()
    problems: dict[str, list[str]] = {}
    for plan in expand_study(study):
        try:
            keys = [*plan.overrides, f"run_dir={run_folder(folder, plan.name)}"]
            runs.append(StudyRun(plan=plan, config=load_config(RunConfig, study.base, keys)))
        except ValueError as error:
            problems.setdefault(str(error), []).append(plan.name)
    raise_problems(problems)
    return runs


def raise_problems(problems: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for mistakes, each with the runs that have it; nothing where there are none."""
    if problems:
        raise ValueError("\nerror: ".join(f"run {_spell_names(names)}: {said}" for said, names in problems.items()))


def find_changes(study: Study, runs: Sequence[StudyRun]) -> Changes:
    """Raises ValueError for a run that was started and would get another configuration."""
    folder = Path(study.place)
    new, rewritten = list[str](), list[str]()
    problems: dict[str, list[str]] = {}
    for run in runs:
        path = config_file(folder, run.name)
        if not path.is_file():
            new.append(run.name)
            continue
        changes = _list_changes(load_config(RunConfig, path), run.config)
        if changes and _is_begun(run_folder(folder, run.name)):
            problems.setdefault(changes[0], []).append(run.name)
        elif changes:
            rewritten.append(run.name)
    remedy = f"give the study another folder=, or remove its runs from {folder / 'runs'} to train them anew"
    raise_problems({f"{change}, with which it was started; {remedy}": names for change, names in problems.items()})
    known = {run.name for run in runs}
    dropped = [path.stem for path in sorted((folder / "configs").glob("*.yaml")) if path.stem not in known]
    return Changes(new=new, rewritten=rewritten, dropped=dropped)


def write_study(study: Study, runs: Sequence[StudyRun], changes: Changes) -> None:
    """The study file goes last: a kill before leaves the former study whole."""
    folder = Path(study.place)
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    changed = {*changes.new, *changes.rewritten}
    for run in runs:
        if run.name in changed:
            write_whole(config_file(folder, run.name), dump_config(run.config).encode())
    write_whole(folder / STUDY_NAME, dump_config(replace(study, folder=str(folder))).encode())


@contextmanager
def hold_study(folder: Path) -> Generator[None, None, None]:
    """One prism sweep of a folder at a time. Raises ValueError where another is under way."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"folder={folder} is being swept by another process; follow it with prism sweep status {folder} --watch"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield


def flatten_config(config: RunConfig) -> dict[str, Any]:
    """Every key with its dots."""
    return dict(_flatten("", asdict(config)))


def _flatten(prefix: str, value: dict[str, Any]) -> Generator[tuple[str, Any], None, None]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flatten(f"{prefix}{key}.", cast(dict[str, Any], item))
        else:
            yield f"{prefix}{key}", item


def _list_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """`train.steps=200 must stay 100`, for each key that differs; where the folder lies makes no difference."""
    old, new = flatten_config(before), flatten_config(after)
    return [
        f"{key}={new.get(key)} must stay {old.get(key)}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and key != "run_dir"
    ]


def _is_begun(run_dir: Path) -> bool:
    return (run_dir / LINEAGE_NAME).is_file() or read_job(slurm_folder(run_dir)) is not None


def _spell_names(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
