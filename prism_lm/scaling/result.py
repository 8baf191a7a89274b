"""A study's fit as a whole: of every family the law, its draws, its parabolas, and how held-out budgets came out."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prism_lm.scaling.fit import (
    Array,
    Law,
    Parabola,
    as_arrays,
    bootstrap_law,
    draw_parabola,
    find_outliers,
    fit_law,
    fit_parabola,
    fit_power,
    interval,
    resample_losses,
)
from prism_lm.scaling.plan import Point
from prism_lm.scaling.records import Refused, Run, refuse

PARABOLA_NUMBERS = 3


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """A power law through the parabolas' minima of the fitted budgets: log of the value = level + exponent log C."""

    exponent: float
    level: float
    exponents: list[float]
    "Of each draw."
    levels: list[float]


@dataclass(frozen=True, kw_only=True)
class FamilyFit:
    """One family."""

    family: str
    runs: list[Run]
    "Fitted ones."
    held_out: list[Run]
    law: Law
    draws: list[Law]
    parabolas: list[Parabola]
    "Of every budget, held-out ones too, small to large."
    minima: dict[str, tuple[float, float]]
    "Interval of each parabola's N*, by group."
    size: Frontier | None
    "N* over C; None with fewer than two fitted parabolas."


@dataclass(frozen=True, kw_only=True)
class StudyFit:
    """What `prism scaling fit` writes to fit.json."""

    families: list[FamilyFit]
    excluded: list[str]
    no_minimum: list[str]
    seed: int


def fit_study(
    runs: Sequence[Run], *, excluded: Sequence[str] = (), no_minimum: Sequence[str] = (), draws: int, seed: int
) -> StudyFit:
    """Fit every family. `excluded` is only written down; groups in `no_minimum` have no parabola.

    Raises Refused naming every run that lies far above the law of the others, and every budget whose minimum is at an
    edge.
    """
    names = list(dict.fromkeys(run.point.family for run in runs))
    groups = {run.point.group for run in runs}
    unknown = sorted(set(no_minimum) - groups)
    if unknown:
        raise Refused(f"--no-minimum={unknown[0]} must be a group with runs; use one of {', '.join(sorted(groups))}")
    families = [[run for run in runs if run.point.family == name] for name in names]
    laws = [_fit_robustly(members) for members in families]
    parabolas = _fit_parabolas(runs, no_minimum)
    fits = [
        _fit_family(members, law, [item for item in parabolas if item.family == name], draws=draws, seed=seed + index)
        for index, (name, members, law) in enumerate(zip(names, families, laws, strict=True))
    ]
    return StudyFit(families=fits, excluded=list(excluded), no_minimum=list(no_minimum), seed=seed)


def describe(fit: StudyFit) -> dict[str, Any]:
    """Plain values for JSON, which read_fit reads back."""
    return asdict(fit)


def read_fit(found: dict[str, Any]) -> StudyFit:
    """The fit that `describe` gave."""
    return StudyFit(
        families=[_read_family(family) for family in found["families"]],
        excluded=found["excluded"],
        no_minimum=found["no_minimum"],
        seed=found["seed"],
    )


def predict_held_out(fit: FamilyFit, seed: int) -> list[tuple[Run, float, tuple[float, float]]]:
    """(run, the law's loss, its interval) of each held-out run; the interval has a run's own noise in it."""
    parameters, tokens, losses = as_arrays(fit.runs)
    generator = np.random.default_rng(seed)
    fitted = np.asarray(fit.law.predict(parameters, tokens))
    rows: list[tuple[Run, float, tuple[float, float]]] = []
    for run in fit.held_out:
        at = (run.point.parameters, run.point.tokens)
        noise = resample_losses(losses, fitted, 5, generator) / fitted
        drawn = [draw.predict(*at) * float(generator.choice(noise)) for draw in fit.draws]
        rows.append((run, float(fit.law.predict(*at)), interval(drawn)))
    return rows


def split_groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by group, in their order."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.point.group, []).append(run)
    return groups


def _fit_robustly(members: Sequence[Run]) -> Law:
    """The law of the runs that are not held out, once none of them lies far above it."""
    fitted = [run for run in members if not run.point.held_out]
    law = fit_law(*as_arrays(fitted))
    refuse(find_outliers(law, fitted))
    return law


def _fit_parabolas(runs: Sequence[Run], no_minimum: Collection[str]) -> list[Parabola]:
    parabolas: list[Parabola] = []
    problems: list[str] = []
    for group, members in split_groups(runs).items():
        if group in no_minimum:
            continue
        try:
            parabolas.append(fit_parabola(members))
        except Refused as error:
            problems.append(str(error))
    if problems:
        raise Refused("\nerror: ".join(problems))
    return sorted(parabolas, key=lambda parabola: parabola.budget_flops)


def _fit_family(members: Sequence[Run], law: Law, parabolas: list[Parabola], *, draws: int, seed: int) -> FamilyFit:
    generator = np.random.default_rng(seed)
    fitted = [run for run in members if not run.point.held_out]
    minima_RG = _draw_minima(members, parabolas, draws, generator)
    is_fitted = [not parabola.held_out for parabola in parabolas]
    return FamilyFit(
        family=members[0].point.family,
        runs=fitted,
        held_out=[run for run in members if run.point.held_out],
        law=law,
        draws=bootstrap_law(law, *as_arrays(fitted), draws=draws, generator=generator),
        parabolas=parabolas,
        minima={item.group: interval(np.exp(minima_RG[:, index])) for index, item in enumerate(parabolas) if draws},
        size=_fit_frontier([item for item in parabolas if not item.held_out], minima_RG[:, is_fitted]),
    )


def _draw_minima(
    members: Sequence[Run], parabolas: Sequence[Parabola], draws: int, generator: np.random.Generator
) -> Array:
    """Draws x parabolas: log N* of each with noise as large as the residuals of all of them; of a draw that has no
    minimum, the size of its lowest loss."""
    groups = split_groups(members)
    chosen = [(groups[parabola.group], parabola) for parabola in parabolas]
    minima_RG = np.zeros((draws, len(chosen)))
    if not chosen:
        return minima_RG
    arrays = [as_arrays(runs) for runs, _ in chosen]
    fitted = [np.asarray(item.predict(table[0])) for (_, item), table in zip(chosen, arrays, strict=True)]
    losses = np.concatenate([table[2] for table in arrays])
    ends = np.cumsum([len(table[2]) for table in arrays])[:-1]
    for draw in range(draws):
        drawn = resample_losses(losses, np.concatenate(fitted), PARABOLA_NUMBERS * len(chosen), generator)
        for index, part in enumerate(np.split(drawn, ends)):
            minima_RG[draw, index] = _find_minimum(chosen[index][0], part)
    return minima_RG


def _find_minimum(runs: Sequence[Run], losses: Array) -> float:
    parabola = draw_parabola(runs, losses)
    x = np.log(as_arrays(runs)[0])
    if parabola.curvature <= 0:
        return float(x[np.argmin(losses)])
    return float(np.clip(parabola.log_parameters, x.min(), x.max()))


def _fit_frontier(parabolas: Sequence[Parabola], minima_RG: Array) -> Frontier | None:
    if len(parabolas) < 2:
        return None
    flops = [parabola.budget_flops for parabola in parabolas]
    exponent, level = fit_power(flops, [float(np.exp(parabola.log_parameters)) for parabola in parabolas])
    drawn = [fit_power(flops, np.exp(row).tolist()) for row in minima_RG]
    return Frontier(
        exponent=exponent, level=level, exponents=[item[0] for item in drawn], levels=[item[1] for item in drawn]
    )


def _read_family(found: dict[str, Any]) -> FamilyFit:
    return FamilyFit(
        family=found["family"],
        runs=[_read_run(run) for run in found["runs"]],
        held_out=[_read_run(run) for run in found["held_out"]],
        law=Law(**found["law"]),
        draws=[Law(**law) for law in found["draws"]],
        parabolas=[Parabola(**parabola) for parabola in found["parabolas"]],
        minima={group: (low, high) for group, (low, high) in found["minima"].items()},
        size=None if found["size"] is None else Frontier(**found["size"]),
    )


def _read_run(found: dict[str, Any]) -> Run:
    return Run(point=Point(**found["point"]), loss_nats=found["loss_nats"])
