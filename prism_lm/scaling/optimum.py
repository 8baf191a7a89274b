"""The size that a budget is best spent on, by a law and the cost model's FLOPs of every size under the rule.

Arrays: M sizes on a fine grid between the ladder's ends, C budgets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism_lm.scaling.fit import Array, Law
from prism_lm.scaling.plan import Rung
from prism_lm.scaling.records import Refused

GRID_SIZES = 400
GRID_BUDGETS = 161
BUDGET_RANGE = 30.0


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """Where a law says that a budget is spent best."""

    flops: float
    parameters: float
    tokens: float
    loss_nats: float


class Ladder:
    """Sizes of a family, N and FLOPs a token, interpolated in logs between those under the rule."""

    def __init__(self, rungs: Sequence[Rung]) -> None:
        logs = np.log([[rung.parameters, rung.flops_per_token] for rung in rungs])
        self.rungs = list(rungs)
        grid = np.linspace(logs[0, 0], logs[-1, 0], GRID_SIZES)
        self.parameters_M: Array = np.exp(grid)
        self.token_flops_M: Array = np.exp(np.interp(grid, logs[:, 0], logs[:, 1]))

    def nearest(self, parameters: float) -> Rung:
        """The size under the rule that is nearest in log N."""
        return min(self.rungs, key=lambda rung: abs(np.log(rung.parameters / parameters)))

    def losses(self, law: Law, flops: Any) -> Array:
        """C x M: the loss of every size where it takes the whole budget."""
        tokens = np.asarray(flops, dtype=np.float64).reshape(-1, 1) / self.token_flops_M
        return np.asarray(law.predict(self.parameters_M, tokens))


def find_optimum(law: Law, ladder: Ladder, flops: float) -> Optimum:
    """The best size for a budget. Raises Refused where it would lie outside the sizes of the rule."""
    losses_M = ladder.losses(law, flops)[0]
    index = int(np.argmin(losses_M))
    if index in (0, len(losses_M) - 1):
        end = "smallest" if index == 0 else "largest"
        raise Refused(
            f"--budget={flops:g} must have its best size inside the rule's {len(ladder.rungs)} sizes, and the {end} of "
            "them is best; use a budget nearer to the study's"
        )
    x = np.log(ladder.parameters_M[index - 1 : index + 2])
    square, slope, _ = np.polyfit(x - x[1], losses_M[index - 1 : index + 2], 2)
    parameters = float(np.exp(x[1] + np.clip(-slope / (2 * square), x[0] - x[1], x[2] - x[1])))
    token_flops = np.exp(np.interp(np.log(parameters), np.log(ladder.parameters_M), np.log(ladder.token_flops_M)))
    tokens = flops / float(token_flops)
    return Optimum(flops=flops, parameters=parameters, tokens=tokens, loss_nats=float(law.predict(parameters, tokens)))


def compute_ratio(law: Law, ladder: Ladder, other: Law, other_ladder: Ladder, flops: float) -> float:
    """Compute that the first needs for the loss that the other reaches at `flops`, as a share of it: 0.8 is a fifth
    less. It is 1/30 or 30 where it lies beyond."""
    target = float(other_ladder.losses(other, flops).min())
    budgets_C = flops * np.geomspace(1 / BUDGET_RANGE, BUDGET_RANGE, GRID_BUDGETS)
    best_C = ladder.losses(law, budgets_C).min(axis=1)
    return float(np.exp(np.interp(-target, -best_C, np.log(budgets_C / flops))))
