"""Runs drawn from a law that is known, with noise."""

import numpy as np

from prism_lm.scaling.fit import Law
from prism_lm.scaling.plan import Point, Rung, label_flops
from prism_lm.scaling.records import Run

LAW = Law(E=1.7, A=400.0, alpha=0.34, B=410.0, beta=0.28)
FLOPS_A_PARAMETER = 6


def best_size(law: Law, flops: float) -> float:
    """N* where C = 6 N D, in closed form."""
    share = (law.alpha * law.A / law.beta / law.B) ** (1 / (law.alpha + law.beta))
    return share * (flops / FLOPS_A_PARAMETER) ** (law.beta / (law.alpha + law.beta))


def draw_runs(
    law: Law = LAW,
    *,
    family: str = "prism",
    budgets: tuple[float, ...] = (1e18, 4e18, 1.6e19, 6.4e19),
    held_out: tuple[float, ...] = (),
    noise: float = 0.003,
    seed: int = 0,
    around: float = 1.0,
) -> list[Run]:
    """Five sizes a budget, a quarter to four times the best one; `around` moves them all."""
    generator = np.random.default_rng(seed)
    return [
        _draw_run(law, family, flops, index, flops in held_out, noise, generator, around)
        for flops in (*budgets, *held_out)
        for index in range(5)
    ]


def _draw_run(law, family, flops, index, held_out, noise, generator, around) -> Run:
    parameters = int(best_size(law, flops) * around * 4 ** ((index - 2) / 2))
    tokens = int(flops / FLOPS_A_PARAMETER / parameters)
    group = f"{family}-{label_flops(flops)}"
    point = Point(
        name=f"{group}-h{index + 1}",
        group=group,
        family=family,
        budget_flops=flops,
        held_out=held_out,
        heads=index + 1,
        parameters=parameters,
        steps=100,
        tokens=tokens,
        flops=flops,
        learning_rate=1e-3,
    )
    return Run(point=point, loss_nats=float(law.predict(parameters, tokens) * np.exp(noise * generator.normal())))


def build_rungs() -> list[Rung]:
    """Sizes from 1 M to 100 B parameters, at 6 FLOPs a parameter and token."""
    sizes = np.geomspace(1e6, 1e11, 60)
    return [
        Rung(
            heads=1, width=1, layers=1, mlp_width=1, parameters=int(size), flops_per_token=int(size) * FLOPS_A_PARAMETER
        )
        for size in sizes
    ]
