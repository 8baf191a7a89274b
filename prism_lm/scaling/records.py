"""What planned runs came to, as plain values, and which of them must not be fitted. Importing this loads no numpy."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from prism_lm.scaling.plan import Point

NORMAL_SCALE = 1.4826
SPIKE_WINDOW = 8
SPIKE_DEVIATIONS = 8.0
LEAST_SPIKE_NATS = 0.5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a planned run ended."""

    name: str
    status: str
    "finished, or why it is not: missing, running, failed, shorter ..."
    tokens: int
    loss_nats: float | None
    "On held-out rows after the last step."
    curve_nats: Sequence[float] = ()
    "Training losses as they were logged, oldest first."
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A planned run with its loss, in nats a token; all that a fit sees."""

    point: Point
    loss_nats: float


class Refused(ValueError):
    """Runs that must not be fitted, by name, with what is wrong and what to do."""


def take_runs(points: Sequence[Point], outcomes: Sequence[Outcome], excluded: Collection[str]) -> list[Run]:
    """The runs to fit. `excluded` names runs or groups, such as prism-c1e12. Raises Refused naming every other run
    that is missing, unfinished, not finite or whose training loss leapt, and every excluded name that is none."""
    known = {point.name for point in points} | {point.group for point in points}
    unknown = sorted(set(excluded) - known)
    if unknown:
        raise Refused(f"--exclude={unknown[0]} must be a run or a group of the plan; for example {points[0].name}")
    found = {outcome.name: outcome for outcome in outcomes}
    kept = [point for point in points if not {point.name, point.group} & set(excluded)]
    problems = {point.name: find_problem(point, found.get(point.name)) for point in kept}
    refuse({name: problem for name, problem in problems.items() if problem})
    return [Run(point=point, loss_nats=found[point.name].loss_nats or 0.0) for point in kept]


def refuse(problems: dict[str, str]) -> None:
    """Raises Refused with a line for each named run; nothing where there are none."""
    lines = [
        f"{name} must not be fitted: {problem}; train it again or --exclude {name}"
        for name, problem in problems.items()
    ]
    if lines:
        raise Refused("\nerror: ".join(lines))


def find_problem(point: Point, outcome: Outcome | None) -> str | None:
    """Why a run's loss is not what its plan asked for; None where it is."""
    if outcome is None:
        return "it is missing"
    if outcome.status != "finished":
        return f"it is {outcome.status}" + (f" ({outcome.error})" if outcome.error else "")
    if outcome.tokens != point.tokens:
        return f"it read {outcome.tokens:,} tokens and its plan says {point.tokens:,}"
    if outcome.loss_nats is None or not math.isfinite(outcome.loss_nats) or outcome.loss_nats <= 0:
        return f"its validation loss is {outcome.loss_nats}"
    leap = find_spike(outcome.curve_nats)
    return None if leap is None else f"its training loss leapt to {outcome.curve_nats[leap]:.3f} nats (spike)"


def find_spike(curve_nats: Sequence[float]) -> int | None:
    """Index of the first logged loss that is not finite, or lies above the median of the eight before it by 0.5 nats
    and by 8 robust standard deviations of them; None where there is none."""
    for index, loss in enumerate(curve_nats):
        window = curve_nats[max(0, index - SPIKE_WINDOW) : index]
        if not math.isfinite(loss):
            return index
        if len(window) == SPIKE_WINDOW:
            middle = median(window)
            scale = NORMAL_SCALE * median(abs(value - middle) for value in window)
            if loss > middle + max(LEAST_SPIKE_NATS, SPIKE_DEVIATIONS * scale):
                return index
    return None
