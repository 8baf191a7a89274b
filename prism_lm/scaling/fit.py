"""The arithmetic of a fit: L(N, D) = E + A / N^alpha + B / D^beta, a parabola in log N for each budget, and intervals.

The law is fitted as Hoffmann et al. 2022 do: Huber's loss (delta 1e-3) of the residuals of log L, from many starts, by
L-BFGS. Intervals are of a parametric bootstrap: normal noise as large as the fit's residuals is put on the fitted
losses and everything is fitted again.
Arrays: P points, S starts, R draws. scipy is loaded when a law is fitted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from prism_lm.scaling.records import NORMAL_SCALE, Refused, Run

Array = NDArray[np.float64]

HUBER_DELTA = 1e-3
LAW_NUMBERS = 5
POLISHED_STARTS = 12
OUTLIER_DEVIATIONS = 8.0
LEAST_OUTLIER = 0.03
INTERVAL = (0.05, 0.95)
_EXPONENT_BOUNDS = (0.01, 3.0)


@dataclass(frozen=True, kw_only=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats a token."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def predict(self, parameters: Any, tokens: Any) -> Any:
        """Loss at N and D, numbers or arrays."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta


@dataclass(frozen=True, kw_only=True)
class Parabola:
    """log L = lowest + curvature (log N - log N*)^2 through the runs of one family and budget."""

    group: str
    family: str
    budget_flops: float
    held_out: bool
    log_parameters: float
    "log N*, where the minimum is."
    log_loss: float
    "log L at the minimum."
    curvature: float

    def predict(self, parameters: Any) -> Any:
        """Loss at N, a number or an array."""
        return np.exp(self.log_loss + self.curvature * (np.log(parameters) - self.log_parameters) ** 2)


def fit_law(parameters: Array, tokens: Array, losses: Array, *, start: Law | None = None) -> Law:
    """The law of least Huber loss over P points, from many starts, or from `start` alone.

    Raises Refused for fewer points than numbers to fit and one more.
    """
    if len(losses) <= LAW_NUMBERS:
        raise Refused(f"a law of {LAW_NUMBERS} numbers must have at least {LAW_NUMBERS + 1} runs, not {len(losses)}")
    centre = np.array([np.log(parameters).mean(), np.log(tokens).mean()])
    features = np.stack([np.log(parameters), np.log(tokens)]) - centre[:, None]
    target = np.log(losses)
    starts = _list_starts(losses) if start is None else _starts_near(start, centre, losses)
    best = min((_polish(theta, features, target) for theta in _choose(starts, features, target)), key=lambda at: at[0])
    return _read_law(best[1], centre)


def resample_losses(losses: Array, fitted: Array, numbers: int, generator: np.random.Generator) -> Array:
    """Losses as they might have come out: fitted x exp(normal noise), as large as the residuals allow after `numbers`
    were fitted, another size each time. The residuals themselves would not do: Huber's loss makes some of them nearly
    0, and intervals narrow."""
    freedom = max(1, len(losses) - numbers)
    variance = float((np.log(losses / fitted) ** 2).sum()) / generator.chisquare(freedom)
    return fitted * np.exp(math.sqrt(variance) * generator.standard_normal(len(losses)))


def bootstrap_law(
    law: Law, parameters: Array, tokens: Array, losses: Array, *, draws: int, generator: np.random.Generator
) -> list[Law]:
    """The law of each of `draws` resampled sets of losses."""
    fitted = law.predict(parameters, tokens)
    return [
        fit_law(parameters, tokens, resample_losses(losses, fitted, LAW_NUMBERS, generator), start=law)
        for _ in range(draws)
    ]


def find_outliers(law: Law, runs: Sequence[Run]) -> dict[str, str]:
    """Runs whose loss lies far above the law that the others agree on: name -> what is wrong.

    The threshold is 8 robust standard deviations of all residuals of log L, and at least 3%.
    """
    parameters, tokens, losses = as_arrays(runs)
    residuals = np.log(losses / law.predict(parameters, tokens))
    scale = NORMAL_SCALE * float(np.median(np.abs(residuals - np.median(residuals))))
    threshold = max(LEAST_OUTLIER, OUTLIER_DEVIATIONS * scale)
    return {
        run.point.name: f"its loss of {run.loss_nats:.3f} nats is {math.expm1(above):.1%} above the law of the others "
        f"(diverged; at most {math.expm1(threshold):.1%} is taken for noise)"
        for run, above in zip(runs, residuals.tolist(), strict=True)
        if above > threshold
    }


def fit_parabola(runs: Sequence[Run]) -> Parabola:
    """The parabola of one family and budget. Raises Refused, naming the group, where its minimum is at an edge: the
    lowest loss is that of the smallest or largest size, or the parabola's lies beyond them or nowhere."""
    first = runs[0].point
    if len({run.point.parameters for run in runs}) < 4:
        raise Refused(f"{first.group} must have 4 or more sizes for a parabola; train them or --exclude {first.group}")
    ordered = sorted(runs, key=lambda run: run.point.parameters)
    lowest = min(range(len(ordered)), key=lambda index: ordered[index].loss_nats)
    parameters, _, losses = as_arrays(ordered)
    parabola = draw_parabola(ordered, losses)
    low, high = math.log(parameters[0]), math.log(parameters[-1])
    is_inside = parabola.curvature > 0 and low < parabola.log_parameters < high
    edges = {parameters[0], parameters[-1]}
    if not is_inside or parameters[lowest] in edges:
        falls = losses[0] > losses[-1] if parabola.curvature <= 0 or is_inside else parabola.log_parameters > high
        end, remedy = ("largest", "larger") if falls else ("smallest", "smaller")
        raise Refused(
            f"{first.group} must have its minimum between its sizes, and it is at the edge of the {end}; add a "
            f"{remedy} size to the budget, --no-minimum {first.group} or --exclude {first.group}"
        )
    return parabola


def draw_parabola(runs: Sequence[Run], losses: Array) -> Parabola:
    """The parabola of least squares through these losses of the runs, wherever its minimum is."""
    first = runs[0].point
    x = np.log(as_arrays(runs)[0])
    square, slope, level = (float(value) for value in np.polyfit(x - x.mean(), np.log(losses), 2))
    offset = -slope / (2 * square) if square else 0.0
    return Parabola(
        group=first.group,
        family=first.family,
        budget_flops=first.budget_flops,
        held_out=first.held_out,
        log_parameters=float(x.mean()) + offset,
        log_loss=level - square * offset**2,
        curvature=square,
    )


def fit_power(flops: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(exponent, value at 1 FLOP as its log) of the power law of least squares in logs."""
    slope, level = np.polyfit(np.log(flops), np.log(values), 1)
    return float(slope), float(level)


def as_arrays(runs: Sequence[Run]) -> tuple[Array, Array, Array]:
    """(N, D, loss) of the runs, P each."""
    columns = [(run.point.parameters, run.point.tokens, run.loss_nats) for run in runs]
    table = np.array(columns, dtype=np.float64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def interval(values: Any) -> tuple[float, float]:
    """The 5% and 95% quantiles of draws: an interval of 90%."""
    low, high = np.quantile(np.asarray(values, dtype=np.float64), INTERVAL)
    return float(low), float(high)


def _list_starts(losses: Array) -> Array:
    """S x 5 of (log A', alpha, log B', beta, log E), A' and B' at the points' mean log N and log D."""
    exponents, floors, shares = (0.1, 0.25, 0.5, 1.0), (0.1, 0.4, 0.7, 0.95), (0.1, 0.3, 0.5, 0.7, 0.9)
    lowest, middle = float(losses.min()), float(np.median(losses))
    rows: list[list[float]] = []
    for alpha, beta, floor, share in product(exponents, exponents, floors, shares):
        above = middle - floor * lowest
        rows.append([math.log(share * above), alpha, math.log((1 - share) * above), beta, math.log(floor * lowest)])
    return np.array(rows)


def _starts_near(law: Law, centre: Array, losses: Array) -> Array:
    """The law itself, and it with its floor at half."""
    floor = min(max(law.E, 1e-3), 0.98 * float(losses.min()))
    row = [math.log(law.A) - law.alpha * centre[0], law.alpha, math.log(law.B) - law.beta * centre[1], law.beta]
    return np.array([[*row, math.log(floor)], [*row, math.log(floor / 2)]])


def _read_law(theta: Array, centre: Array) -> Law:
    log_a, alpha, log_b, beta, log_e = (float(value) for value in theta)
    return Law(
        E=math.exp(log_e),
        A=math.exp(log_a + alpha * centre[0]),
        alpha=alpha,
        B=math.exp(log_b + beta * centre[1]),
        beta=beta,
    )


def _choose(starts: Array, features: Array, target: Array) -> Array:
    scores = [_objective(theta, features, target)[0] for theta in starts]
    return starts[np.argsort(scores)[:POLISHED_STARTS]]


def _polish(theta: Array, features: Array, target: Array) -> tuple[float, Array]:
    from scipy.optimize import minimize

    spread = (float(target.min()) - 12.0, float(target.max()) + 12.0)
    bounds = [spread, _EXPONENT_BOUNDS, spread, _EXPONENT_BOUNDS, (float(target.min()) - 12.0, float(target.min()))]
    options = {"maxiter": 400, "ftol": 1e-10, "gtol": 1e-7}
    arguments = (features, target)
    found = minimize(_objective, theta, arguments, method="L-BFGS-B", jac=True, bounds=bounds, options=options)
    return float(found.fun), cast(Array, found.x)


def _objective(theta: Array, features: Array, target: Array) -> tuple[float, Array]:
    """Sum of Huber's loss over delta, and its gradient."""
    log_a, alpha, log_b, beta, log_e = theta
    terms = np.stack([log_a - alpha * features[0], log_b - beta * features[1], np.full(len(target), log_e)])
    highest = terms.max(axis=0)
    weights = np.exp(terms - highest)
    total = weights.sum(axis=0)
    residuals = highest + np.log(total) - target
    weights /= total
    size = np.abs(residuals)
    huber = np.where(size <= HUBER_DELTA, residuals**2 / 2, HUBER_DELTA * (size - HUBER_DELTA / 2))
    pull = np.clip(residuals, -HUBER_DELTA, HUBER_DELTA) / HUBER_DELTA
    by_a, by_b, by_e = (weights * pull).tolist()
    gradient = [sum(by_a), -float(np.dot(by_a, features[0])), sum(by_b), -float(np.dot(by_b, features[1])), sum(by_e)]
    return float(huber.sum() / HUBER_DELTA), np.array(gradient)
