"""A study: one base configuration, what differs between its runs, and their seeds; expanded into runs without a disk.

A run's name is made of the keys that the study varies and of its own values, of nothing else, so that values and seeds
added later leave the names of the others as they are.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import yaml

NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
_PLAIN = re.compile(r"-?\d[\w.+]*(e[+-]?\d+)?|[A-Za-z][\w.+]*", re.ASCII)
_WORD = re.compile(r"[A-Za-z_][\w./+-]*", re.ASCII)
_MOST_LETTERS = 40


@dataclass(frozen=True, kw_only=True)
class StudyEntry:
    """One of the runs that a study lists."""

    name: str = ""
    "Of the run, as part of a folder's name; empty makes one of what is set."
    set: dict[str, Any] = field(default_factory=dict[str, Any])
    "Keys of the run's configuration and their values, such as {model.solver_steps: 1}."


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study file. The runs are every entry of `runs` at every point of `grid`, with every seed."""

    name: str
    "Of the study; its folder is studies/NAME."
    base: str
    "Configuration file that every run starts from, such as configs/train/tiny.yaml."
    overrides: list[str] = field(default_factory=list[str])
    "key=value for all runs, after those of the base; key=value of a run typed after the file joins them."
    grid: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    "Keys and the values of each, all combinations of which are run: {model.solver_steps: [1, 2]}."
    runs: list[StudyEntry] = field(default_factory=list[StudyEntry])
    "Runs that are listed one by one: [{name: deep, set: {model.solver_steps: 4}}]. Empty: the grid alone."
    seeds: list[int] = field(default_factory=list[int])
    "Each run once with each; those of the first seed go first. Empty: the base's own seed."
    folder: str = ""
    "Where configurations, runs and tables lie; empty is studies/NAME."

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name} must be letters, digits and . _ + - alone; for example name=depth")
        if not self.base:
            raise ValueError("base= must name a configuration file; for example base=configs/train/tiny.yaml")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key}=[] must have at least one value; add one, or leave the key out")
        _refuse_repeats("seeds", self.seeds)
        for key, values in self.grid.items():
            _refuse_repeats(f"grid.{key}", values)
        for entry in self.runs:
            if entry.name and not NAME.fullmatch(entry.name):
                raise ValueError(f"runs: name={entry.name} must be letters, digits and . _ + - alone; rename the run")

    @property
    def place(self) -> str:
        """The study's folder."""
        return self.folder or f"studies/{self.name}"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a study."""

    name: str
    overrides: list[str]
    "key=value, in order, for the study's base: those of all runs, then the run's own, then its seed."
    group: str
    "The name without the seed: what runs that differ by their seed alone have in common."
    settings: dict[str, Any]
    "The run's own keys and values, the seed not among them."
    seed: int | None
    "None: the base's own."


STUDY_KEYS = tuple(item.name for item in fields(Study))


def expand_study(study: Study) -> list[PlannedRun]:
    """The runs of a study in the order they are run in. Raises ValueError for two runs of one name, and for a key that
    is both varied and set for all."""
    _refuse_fixed(study)
    entries = study.runs or [StudyEntry()]
    points = [dict(zip(study.grid, values, strict=True)) for values in product(*study.grid.values())]
    seeds = study.seeds or [None]
    plan = [_plan_run(study, *each) for each in product(seeds, entries, points)]
    for name, count in Counter(run.name for run in plan).items():
        if count > 1:
            raise ValueError(f"runs: name={name} must be one run's alone, and {count} have it; give them other names")
    return plan


def split_keys(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """key=value of the study, such as base= or seeds=, and those of its runs, each in the order given."""
    is_study = [re.split(r"[=.\[]", word)[0] in STUDY_KEYS for word in words]
    ours = [word for word, holds in zip(words, is_study, strict=True) if holds]
    return ours, [word for word, holds in zip(words, is_study, strict=True) if not holds]


def spell_override(key: str, value: Any) -> str:
    """key=value as the command line reads it back to the same value."""
    if isinstance(value, str) and _WORD.fullmatch(value) and yaml.safe_load(value) == value:
        return f"{key}={value}"
    return f"{key}={json.dumps(value)}"


def spell_settings(settings: Mapping[str, Any]) -> str:
    """`solver_steps_2-gain_constant`: part of a folder's name, another one for other settings of the same keys."""
    shown = _shorten_keys(list(settings))
    return "-".join(f"{shown[key]}_{_spell_value(value)}" for key, value in settings.items())


def _plan_run(study: Study, seed: int | None, entry: StudyEntry, point: Mapping[str, Any]) -> PlannedRun:
    settings = {**entry.set, **point}
    group = "-".join(filter(None, [entry.name or spell_settings(entry.set), spell_settings(point)])) or study.name
    own = [spell_override(key, value) for key, value in settings.items()]
    return PlannedRun(
        name=group if seed is None else f"{group}-seed_{seed}",
        overrides=[*study.overrides, *own, *([] if seed is None else [f"seed={seed}"])],
        group=group,
        settings=settings,
        seed=seed,
    )


def _refuse_fixed(study: Study) -> None:
    listed = {key for entry in study.runs for key in entry.set}
    for key, remedy in (("run_dir", "use folder="), ("seed", "use seeds=")):
        if key in study.grid or key in listed:
            raise ValueError(f"{key} must not be a key of grid or runs; {remedy}")
    both = sorted(listed & set(study.grid))
    if both:
        raise ValueError(f"{both[0]} must not be a key of grid and of runs at once; leave it out of one of them")
    varied = {**dict.fromkeys([*study.grid, *listed], "change its values there"), "run_dir": "use folder="}
    varied |= {"seed": "use seeds="} if study.seeds else {}
    for override in study.overrides:
        key = override.partition("=")[0]
        if key in varied:
            raise ValueError(f"{override} must not be set for all runs: each has its own; {varied[key]}")


def _refuse_repeats(key: str, values: Sequence[Any]) -> None:
    spelled = Counter(_spell_value(value) for value in values)
    for text, count in spelled.items():
        if count > 1:
            raise ValueError(f"{key}: {text} must stand there once, not {count} times; remove the others")


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each key's last word, or as many of its last words as it takes to tell it from the others."""
    shown: dict[str, str] = {}
    for key in keys:
        words = key.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        shown[key] = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)
    return shown


def _spell_value(value: Any) -> str:
    """Letters that any file system takes; a value that has others is told apart by a few digits of its hash."""
    text = value if isinstance(value, str) else json.dumps(value)
    if _PLAIN.fullmatch(text) and len(text) <= _MOST_LETTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9.+]+', '_', text)[:_MOST_LETTERS].strip('_')}.{digest}"
