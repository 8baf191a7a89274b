"""Which models to train for how long, so that equal compute can be compared: budgets x sizes x families.

FLOPs are the cost model's (prism_lm/model/cost.py), forward and backward of the chunk form, head and scan included.
Importing this file loads no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prism_lm.model.config import Mixer, ModelConfig
from prism_lm.model.cost import count_parameters, flops_per_token

LADDER_HEADS = 64
MATCH_TOLERANCE = 0.02
LEAST_SIZES = 4
LEAST_BUDGETS = 2


@dataclass(frozen=True, kw_only=True)
class SizeRule:
    """From a number of heads to a model: width = heads x head_width, and all else from the width."""

    head_width: int = 128
    "Keys and values of one head, K = V; a multiple of 16."
    layers_per_head: float = 3.0
    "Layers = this x heads, rounded, at least min_layers; 0 gives every size min_layers."
    min_layers: int = 1
    "Fewest layers of any size."
    mlp_ratio: float = 2.25
    "PRISM's MLP width = this x width, to a multiple of mlp_multiple; twins are widened until parameters agree."
    mlp_multiple: int = 8
    "Step of MLP widths; small steps match small models more closely."
    solver_fraction: float = 0.125
    "PRISM's solver_rank = this x width, to a multiple of 8."

    def __post_init__(self) -> None:
        for name in ("head_width", "min_layers", "mlp_multiple", "mlp_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"size.{name}={getattr(self, name)} must be above 0; leave it out for the default")
        if not self.layers_per_head >= 0:
            raise ValueError(f"size.layers_per_head={self.layers_per_head} must be at least 0; use 0 for one depth")
        if not 0 < self.solver_fraction < 1:
            raise ValueError(f"size.solver_fraction={self.solver_fraction} must lie between 0 and 1; use 0.125")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Training compute, and the sizes that share it."""

    flops: float
    "Training FLOPs of each run, forward and backward."
    heads: list[int]
    "Sizes, as numbers of heads; at least 4, so that a parabola is not drawn through every point."
    held_out: bool = False
    "Left out of the fit and predicted by it."

    def __post_init__(self) -> None:
        if not self.flops > 0:
            raise ValueError(f"budgets.flops={self.flops} must be above 0; for example 1e12")
        if len(set(self.heads)) < LEAST_SIZES or min(self.heads) < 1:
            raise ValueError(
                f"budgets.heads={self.heads} of flops={self.flops:g} must be {LEAST_SIZES} or more sizes of at least "
                "1 head; for example heads=[2,3,4,5,6]"
            )


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A scaling study. One run for each family at each size of each budget, and each seed."""

    name: str
    "Of the study; its folder is studies/NAME."
    base: str
    "Configuration file of a run that all runs start from; its learning rate is that of its own width."
    overrides: list[str] = field(default_factory=list[str])
    "key=value for all runs, after those of the base."
    families: list[Mixer] = field(default_factory=lambda: list[Mixer](["prism", "gated_delta"]))
    "Mixers to compare, each with as many parameters as PRISM at the same number of heads; the first is compared."
    budgets: list[Budget] = field(default_factory=list[Budget])
    "Compute budgets; two or more that are not held out."
    size: SizeRule = field(default_factory=SizeRule)
    "From heads to a model."
    rate_exponent: float = 1.0
    "Learning rate = the base's x (base width / width) to this power; 1 keeps the updates' effect at every width."
    warmup_fraction: float = 0.07
    "Warm-up as a share of each run's steps, at least one step."
    least_steps: int = 100
    "A run of fewer steps is refused: its rounding to whole steps and its warm-up would decide the loss."
    most_tokens: float = 0.0
    "A run of more tokens is refused, such as one that would read the text too often; 0 is no limit."
    seeds: list[int] = field(default_factory=list[int])
    "Each run once with each. Empty: the base's own seed."
    folder: str = ""
    "Where the study lies; empty is studies/NAME."

    def __post_init__(self) -> None:
        fitted = [budget for budget in self.budgets if not budget.held_out]
        if len(fitted) < LEAST_BUDGETS:
            raise ValueError(f"budgets= must hold {LEAST_BUDGETS} or more that are not held out, not {len(fitted)}")
        labels = [label_flops(budget.flops) for budget in self.budgets]
        if len(set(labels)) < len(labels) or len(set(self.families)) < len(self.families) or not self.families:
            raise ValueError("budgets= and families= must name each budget and each family once; remove the others")
        if self.least_steps < 2 or not 0 <= self.warmup_fraction < 1:
            raise ValueError("least_steps= must be at least 2 and warmup_fraction= in [0, 1); leave them out")

    @property
    def place(self) -> str:
        """The study's folder."""
        return self.folder or f"studies/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Base:
    """What the base configuration settles for every run."""

    model: ModelConfig
    learning_rate: float
    row_tokens: int
    batch_rows: int
    "Rows of one update over all processes."

    @property
    def step_tokens(self) -> int:
        """Tokens of one update."""
        return self.row_tokens * self.batch_rows


@dataclass(frozen=True, kw_only=True)
class Point:
    """One planned run: what plan.json says of it."""

    name: str
    group: str
    "Family and budget, such as prism-c1.2e12."
    family: Mixer
    budget_flops: float
    held_out: bool
    heads: int
    parameters: int
    steps: int
    tokens: int
    flops: float
    "Of its whole steps, by the cost model: the budget within half a step."
    learning_rate: float
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A size of a family under the rule."""

    heads: int
    width: int
    layers: int
    mlp_width: int
    parameters: int
    flops_per_token: int


def label_flops(flops: float) -> str:
    """c1.5e12: as few digits as tell it."""
    mantissa, _, exponent = f"{flops:.6e}".partition("e")
    return f"c{float(mantissa):g}e{int(exponent)}"


def build_size(rule: SizeRule, base: ModelConfig, heads: int, family: Mixer) -> ModelConfig:
    """The model of that many heads. Raises ValueError where no MLP width brings a twin's parameters within 2%."""
    width = heads * rule.head_width
    prism = replace(
        base,
        mixer="prism",
        layer_pattern=[],
        model_width=width,
        num_layers=max(rule.min_layers, math.floor(rule.layers_per_head * heads + 0.5)),
        num_heads=heads,
        key_width=rule.head_width,
        value_width=rule.head_width,
        mlp_width=_round_to(rule.mlp_ratio * width, rule.mlp_multiple),
        solver_rank=_round_to(rule.solver_fraction * width, 8),
    )
    return prism if family == "prism" else _match_parameters(prism, family, rule.mlp_multiple)


def transfer_rate(base: Base, width: int, exponent: float) -> float:
    """Peak learning rate at a width: the base's x (base width / width)^exponent, to four digits.

    Matrices start at 1 / sqrt(inputs) and AdamW moves every weight by about the learning rate, so what one update adds
    to an output of `width` aligned inputs is as large at every width where the rate falls as 1 / width; so does a tied
    table at the head. Looked up, its rows start at 1 / sqrt(width) an entry and would take 1 / sqrt(width): at
    exponent 1 they move less at larger widths, never more. Depth is not transferred: residual writers start at
    1 / sqrt(2 layers).
    """
    return float(f"{base.learning_rate * (base.model.model_width / width) ** exponent:.4g}")


def plan_runs(plan: PlanConfig, base: Base) -> list[Point]:
    """Every run, budgets from small to large. Raises ValueError naming every run that its budget cannot pay for."""
    points = [
        _plan_point(plan, base, budget, family, heads, seed)
        for budget in sorted(plan.budgets, key=lambda budget: budget.flops)
        for family in plan.families
        for heads in sorted(set(budget.heads))
        for seed in (plan.seeds or [None])
    ]
    problems = [problem for point in points for problem in _find_problems(plan, base, point)]
    if problems:
        raise ValueError("\nerror: ".join(problems))
    return points


def list_settings(plan: PlanConfig, base: Base, point: Point) -> dict[str, Any]:
    """Keys of a run's configuration in which it differs from the base."""
    model = build_size(plan.size, base.model, point.heads, point.family)
    names = ("model_width", "num_layers", "num_heads", "key_width", "value_width", "mlp_width", "solver_rank", "mixer")
    return {
        **{f"model.{name}": getattr(model, name) for name in names},
        "train.steps": point.steps,
        "train.eval_every_steps": point.steps,
        "train.checkpoint.save_every_steps": point.steps,
        "train.histogram_every_steps": 0,
        "train.optim.learning_rate": point.learning_rate,
        "train.schedule.warmup_steps": max(1, round(plan.warmup_fraction * point.steps)),
    }


def build_ladder(plan: PlanConfig, base: Base, family: Mixer) -> list[Rung]:
    """Sizes under the rule, 1 to 64 heads, of which the compute-optimal one is taken. A size whose twin does not match
    is left out."""
    rungs: list[Rung] = []
    for heads in range(1, LADDER_HEADS + 1):
        try:
            model = build_size(plan.size, base.model, heads, family)
        except ValueError:
            continue
        rungs.append(
            Rung(
                heads=heads,
                width=model.model_width,
                layers=model.num_layers,
                mlp_width=model.mlp_width,
                parameters=count_parameters(model),
                flops_per_token=flops_per_token(model, base.row_tokens),
            )
        )
    return rungs


def _plan_point(plan: PlanConfig, base: Base, budget: Budget, family: Mixer, heads: int, seed: int | None) -> Point:
    model = build_size(plan.size, base.model, heads, family)
    step_flops = flops_per_token(model, base.row_tokens) * base.step_tokens
    steps = math.floor(budget.flops / step_flops + 0.5)
    group = f"{family}-{label_flops(budget.flops)}"
    return Point(
        name=f"{group}-h{heads}" + ("" if seed is None else f"-seed_{seed}"),
        group=group,
        family=family,
        budget_flops=budget.flops,
        held_out=budget.held_out,
        heads=heads,
        parameters=count_parameters(model),
        steps=steps,
        tokens=steps * base.step_tokens,
        flops=float(steps * step_flops),
        learning_rate=transfer_rate(base, model.model_width, plan.rate_exponent),
        seed=seed,
    )


def _find_problems(plan: PlanConfig, base: Base, point: Point) -> Sequence[str]:
    if point.steps < plan.least_steps:
        return [
            f"{point.name}: its budget must pay for least_steps={plan.least_steps} steps of {base.step_tokens:,} "
            f"tokens, not {point.steps}; use a larger budget or fewer heads"
        ]
    if 0 < plan.most_tokens < point.tokens:
        return [
            f"{point.name}: its {point.tokens:,} tokens must be at most most_tokens={plan.most_tokens:,.0f}; "
            "use a smaller budget or more heads"
        ]
    return []


def _match_parameters(prism: ModelConfig, family: Mixer, multiple: int) -> ModelConfig:
    twin = replace(prism, mixer=family)
    target = count_parameters(prism)
    wider = (target - count_parameters(twin)) / (3 * prism.model_width * prism.num_layers)
    matched = replace(twin, mlp_width=_round_to(prism.mlp_width + wider, multiple))
    if abs(count_parameters(matched) / target - 1) > MATCH_TOLERANCE:
        raise ValueError(
            f"families: {family} at {prism.num_heads} heads must come within {MATCH_TOLERANCE:.0%} of PRISM's "
            f"{target:,} parameters; use a smaller size.mlp_multiple"
        )
    return matched


def _round_to(value: float, multiple: int) -> int:
    return max(1, math.floor(value / multiple + 0.5)) * multiple
