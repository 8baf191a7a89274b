"""What a fitted study says of a budget: best size, tokens, loss, and how one family compares with another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prism_lm.scaling.fit import interval
from prism_lm.scaling.optimum import Ladder, Optimum, compute_ratio, find_optimum
from prism_lm.scaling.plan import Rung
from prism_lm.scaling.records import Refused
from prism_lm.scaling.result import FamilyFit, StudyFit

LEAST_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The best use of a budget by a family's law, with intervals of 90%."""

    family: str
    best: Optimum
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    loss_nats: tuple[float, float]
    rung: Rung
    "The nearest size under the plan's rule."
    by_minima: float | None
    "N* by the power law through the parabolas' minima; None where there is none."


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compute that a family needs for the loss that a baseline reaches with `flops`, as a share of it."""

    family: str
    baseline: str
    flops: float
    ratio: float
    interval: tuple[float, float]


def predict_budget(fit: FamilyFit, ladder: Ladder, flops: float) -> Prediction:
    """Raises Refused for a budget whose best size lies outside the rule's, by the law or by a tenth of its draws."""
    best = find_optimum(fit.law, ladder, flops)
    drawn: list[Optimum] = []
    for law in fit.draws:
        try:
            drawn.append(find_optimum(law, ladder, flops))
        except Refused:
            continue
    if len(drawn) < max(2, LEAST_SHARE * len(fit.draws)):
        raise Refused(
            f"--budget={flops:g} must have its best size inside the rule's sizes, and {len(fit.draws) - len(drawn)} of "
            f"{len(fit.draws)} draws of {fit.family}'s law put it outside; use a budget nearer to the study's"
        )
    by_minima = None if fit.size is None else float(np.exp(fit.size.level + fit.size.exponent * np.log(flops)))
    return Prediction(
        family=fit.family,
        best=best,
        parameters=interval([item.parameters for item in drawn]),
        tokens=interval([item.tokens for item in drawn]),
        loss_nats=interval([item.loss_nats for item in drawn]),
        rung=ladder.nearest(best.parameters),
        by_minima=by_minima,
    )


def compare_families(fit: StudyFit, ladders: Mapping[str, Ladder], flops: float) -> list[Comparison]:
    """The first family against each of the others at one budget of theirs; draws are paired in their order."""
    first, *others = fit.families
    return [
        Comparison(
            family=first.family,
            baseline=other.family,
            flops=flops,
            ratio=compute_ratio(first.law, ladders[first.family], other.law, ladders[other.family], flops),
            interval=interval(
                [
                    compute_ratio(mine, ladders[first.family], theirs, ladders[other.family], flops)
                    for mine, theirs in zip(first.draws, other.draws, strict=True)
                ]
            ),
        )
        for other in others
    ]
