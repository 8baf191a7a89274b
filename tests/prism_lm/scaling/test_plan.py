import subprocess
import sys
from dataclasses import replace

import pytest

from prism_lm.model.cost import count_parameters, flops_per_token
from prism_lm.model.sizes import named_size
from prism_lm.scaling.plan import (
    Base,
    Budget,
    PlanConfig,
    SizeRule,
    build_ladder,
    build_size,
    label_flops,
    list_settings,
    plan_runs,
    transfer_rate,
)

RULE = SizeRule(head_width=32, layers_per_head=0.5, min_layers=2, mlp_ratio=8 / 3, solver_fraction=1 / 6)
BASE = Base(model=named_size("tiny"), learning_rate=4e-3, row_tokens=256, batch_rows=4)
PLAN = PlanConfig(
    name="a",
    base="base.yaml",
    families=["prism", "gated_delta", "attention"],
    budgets=[
        Budget(flops=2.4e12, heads=[2, 3, 4, 5]),
        Budget(flops=1.2e12, heads=[2, 3, 4, 5]),
        Budget(flops=4.8e12, heads=[2, 3, 4, 5, 6], held_out=True),
    ],
    size=RULE,
)


@pytest.mark.parametrize("family", ["gated_delta", "attention"])
@pytest.mark.parametrize("heads", [1, 2, 5, 12, 40])
def test_families_of_one_size_have_equal_parameters_within_two_percent(family, heads):
    prism, twin = (build_size(RULE, BASE.model, heads, name) for name in ("prism", family))
    assert count_parameters(twin) == pytest.approx(count_parameters(prism), rel=0.02)
    assert (twin.model_width, twin.num_layers) == (prism.model_width, prism.num_layers)


def test_default_rule_at_eight_heads_is_the_350m_size():
    assert build_size(SizeRule(), named_size("350m"), 8, "prism") == named_size("350m")


def test_every_runs_flops_are_its_budget_within_half_a_step_by_the_cost_model():
    for point in plan_runs(PLAN, BASE):
        model = build_size(RULE, BASE.model, point.heads, point.family)
        step_flops = flops_per_token(model, 256) * BASE.step_tokens
        assert point.tokens == point.steps * BASE.step_tokens
        assert point.flops == point.steps * step_flops
        assert abs(point.flops - point.budget_flops) <= step_flops / 2
        assert point.parameters == count_parameters(model)


def test_points_are_every_family_at_every_size_of_every_budget_once_and_small_first():
    points = plan_runs(PLAN, BASE)
    assert len({point.name for point in points}) == len(points) == 3 * (4 + 4 + 5)
    assert [point.budget_flops for point in points] == sorted(point.budget_flops for point in points)
    assert {point.group for point in points if point.held_out} == {
        f"{family}-c4.8e12" for family in ("prism", "gated_delta", "attention")
    }


def test_each_seed_has_a_run_of_its_own():
    points = plan_runs(replace(PLAN, seeds=[1, 2]), BASE)
    assert len(points) == 2 * len(plan_runs(PLAN, BASE))
    assert points[0].name == "prism-c1.2e12-h2-seed_1"


def test_settings_hold_the_model_the_steps_and_the_rate():
    point = plan_runs(PLAN, BASE)[0]
    settings = list_settings(PLAN, BASE, point)
    assert settings["model.model_width"] == 64 and settings["model.mixer"] == "prism"
    assert settings["train.steps"] == settings["train.eval_every_steps"] == point.steps
    assert settings["train.optim.learning_rate"] == 0.012
    assert 0 < settings["train.schedule.warmup_steps"] < point.steps


def test_rate_falls_with_the_width_by_the_stated_power():
    assert transfer_rate(BASE, 192, 1.0) == 4e-3
    assert transfer_rate(BASE, 384, 1.0) == 2e-3
    assert transfer_rate(BASE, 768, 0.5) == 2e-3


def test_budgets_that_cannot_be_paid_are_refused_by_every_name():
    tight = replace(PLAN, budgets=[Budget(flops=1e11, heads=[2, 3, 4, 5]), *PLAN.budgets[:2]])
    with pytest.raises(ValueError, match=r"^prism-c1e11-h2: its budget must pay for least_steps=100 steps") as caught:
        plan_runs(tight, BASE)
    assert "gated_delta-c1e11-h5" in str(caught.value)
    with pytest.raises(ValueError, match=r"^prism-c1.2e12-h2: its .* tokens must be at most most_tokens=500,000"):
        plan_runs(replace(PLAN, most_tokens=5e5), BASE)


def test_too_few_sizes_or_budgets_are_refused():
    with pytest.raises(ValueError, match=r"budgets.heads=\[2, 3, 3\] of flops=1e\+12 must be 4 or more sizes"):
        Budget(flops=1e12, heads=[2, 3, 3])
    with pytest.raises(ValueError, match="must hold 2 or more that are not held out, not 1"):
        replace(PLAN, budgets=PLAN.budgets[1:])


def test_ladder_rises_and_holds_the_planned_sizes():
    rungs = build_ladder(PLAN, BASE, "prism")
    sizes = [rung.parameters for rung in rungs]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    assert {point.parameters for point in plan_runs(PLAN, BASE) if point.family == "prism"} <= set(sizes)


def test_labels_tell_budgets_apart_in_few_digits():
    assert [label_flops(flops) for flops in (6e11, 1.25e12, 1e21)] == ["c6e11", "c1.25e12", "c1e21"]


def test_planning_loads_neither_torch_nor_scipy():
    code = "import sys, prism_lm.scaling.plan, prism_lm.scaling.records; "
    code += "assert not {'torch', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
