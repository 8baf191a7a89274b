import json
from dataclasses import replace

import pytest

from prism_lm.scaling.fit import Law
from prism_lm.scaling.optimum import Ladder, compute_ratio, find_optimum
from prism_lm.scaling.predict import compare_families, predict_budget
from prism_lm.scaling.records import Refused
from prism_lm.scaling.report import write_report
from prism_lm.scaling.result import describe, fit_study, predict_held_out, read_fit
from tests.prism_lm.scaling.known_law import LAW, best_size, build_rungs, draw_runs

HELD_OUT = 2.56e20
DEARER = replace(LAW, A=LAW.A * 1.1, B=LAW.B * 1.1)
LADDER = Ladder(build_rungs())


@pytest.fixture(scope="module")
def runs():
    twin = draw_runs(DEARER, family="gated_delta", held_out=(HELD_OUT,), seed=2)
    return [*draw_runs(held_out=(HELD_OUT,), seed=1), *twin]


@pytest.fixture(scope="module")
def fit(runs):
    return fit_study(runs, draws=20, seed=0)


def test_held_out_runs_are_predicted_and_not_fitted(fit):
    family = fit.families[0]
    assert {run.point.budget_flops for run in family.held_out} == {HELD_OUT}
    assert HELD_OUT not in {run.point.budget_flops for run in family.runs}
    for run, loss, bounds in predict_held_out(family, 0):
        # Noise of 0.3% a run, and four times the compute of what was fitted: 2% is some four times the law's own.
        assert loss == pytest.approx(run.loss_nats, rel=0.02)
        assert bounds[0] < bounds[1]


def test_prediction_of_a_budget_is_near_the_known_best_size(fit):
    found = predict_budget(fit.families[0], LADDER, HELD_OUT)
    assert found.parameters[0] < found.best.parameters < found.parameters[1]
    assert found.best.parameters == pytest.approx(best_size(LAW, HELD_OUT), rel=0.5)
    assert found.best.loss_nats == pytest.approx(find_optimum(LAW, LADDER, HELD_OUT).loss_nats, rel=0.02)


def test_optimum_of_a_known_law_is_its_closed_form():
    assert find_optimum(LAW, LADDER, 1e19).parameters == pytest.approx(best_size(LAW, 1e19), rel=0.02)
    with pytest.raises(Refused, match="--budget=1e\\+30 must have its best size inside"):
        find_optimum(LAW, LADDER, 1e30)


def test_family_of_half_the_compute_has_ratio_one_half():
    """The law in N and D / 2 at E = 0 reaches with C what the other reaches with 2 C at twice the tokens a loss."""
    halved = Law(E=1.7, A=LAW.A, alpha=LAW.alpha, B=LAW.B * 2**LAW.beta, beta=LAW.beta)
    assert compute_ratio(LAW, LADDER, LAW, LADDER, 1e19) == pytest.approx(1.0, rel=1e-3)
    assert compute_ratio(LAW, LADDER, halved, LADDER, 1e19) == pytest.approx(0.5, rel=0.01)


def test_dearer_family_needs_more_compute_and_the_interval_says_so(fit):
    (found,) = compare_families(fit, {"prism": LADDER, "gated_delta": LADDER}, 6.4e19)
    known = compute_ratio(LAW, LADDER, DEARER, LADDER, 6.4e19)
    assert found.ratio < 1 and found.ratio == pytest.approx(known, rel=0.15)
    assert found.interval[0] < found.ratio < found.interval[1]


def test_diverged_run_is_refused_by_name(runs):
    name = runs[8].point.name
    spoiled = [replace(run, loss_nats=run.loss_nats * 1.25) if run.point.name == name else run for run in runs]
    with pytest.raises(Refused, match=f"^{name} must not be fitted: its loss of .* above the law"):
        fit_study(spoiled, draws=20, seed=0)


def test_budget_with_its_minimum_at_an_edge_stops_the_fit_unless_named(runs):
    edge = draw_runs(budgets=(1.6e18,), around=8.0, noise=0.0)
    with pytest.raises(Refused, match=r"^prism-c1\.6e18 must have its minimum"):
        fit_study([*runs, *edge], draws=20, seed=0)
    found = fit_study([*runs, *edge], no_minimum=["prism-c1.6e18"], draws=20, seed=0)
    assert "prism-c1.6e18" not in {item.group for item in found.families[0].parabolas}
    assert len(found.families[0].runs) == 25


def test_fit_written_as_json_reads_back_equal(fit):
    assert read_fit(json.loads(json.dumps(describe(fit)))) == fit


def test_report_holds_every_figure_and_its_pictures(fit, tmp_path):
    page = write_report(fit, {"prism": LADDER, "gated_delta": LADDER}, tmp_path, title="A study", rule="A rule.")
    text = page.read_text()
    for words in ("held-out run", "N* grows as C^", "PRISM against its baselines", "prism-c2.56e20-h3", "A rule."):
        assert words in text
    for name in ("isoflop", "compute", "residuals"):
        assert f"plots/{name}.png" in text
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 5000
        assert (tmp_path / "plots" / f"{name}.svg").read_text().rstrip().endswith("</svg>")
