import numpy as np
import pytest

from prism_lm.scaling.fit import as_arrays, bootstrap_law, fit_law, fit_parabola, interval
from prism_lm.scaling.records import Refused
from tests.prism_lm.scaling.known_law import LAW, best_size, draw_runs

DRAWS = 6
# At a true coverage of 80% each, fewer than 5 of 12 intervals hold the exponent once in some 1,700 times (binomial).
LEAST_HITS = 5


def test_without_noise_the_law_itself_is_found():
    law = fit_law(*as_arrays(draw_runs(noise=0.0)))
    assert np.allclose([law.alpha, law.beta, law.E], [LAW.alpha, LAW.beta, LAW.E], rtol=2e-2)


def test_gradient_is_that_of_the_objective():
    from scipy.optimize import check_grad

    from prism_lm.scaling import fit

    features, target = np.random.default_rng(0).normal(size=(2, 9)), np.full(9, 0.7)
    theta = np.array([0.1, 0.3, -0.2, 0.5, 0.2])
    error = check_grad(
        lambda at: fit._objective(at, features, target)[0], lambda at: fit._objective(at, features, target)[1], theta
    )
    # Finite differences of step 1.5e-8 on values near 10 are good to some 1e-6.
    assert error < 1e-5


def test_intervals_of_90_percent_hold_the_known_exponents_at_about_that_rate():
    hits = 0
    for seed in range(DRAWS):
        table = as_arrays(draw_runs(seed=seed))
        law = fit_law(*table)
        drawn = bootstrap_law(law, *table, draws=20, generator=np.random.default_rng(seed))
        alphas, betas = interval([item.alpha for item in drawn]), interval([item.beta for item in drawn])
        hits += (alphas[0] <= LAW.alpha <= alphas[1]) + (betas[0] <= LAW.beta <= betas[1])
    assert hits >= LEAST_HITS


def test_one_spike_moves_a_huber_fit_less_than_its_size():
    runs = draw_runs(seed=3)
    parameters, tokens, losses = as_arrays(runs)
    spoiled = losses.copy()
    spoiled[7] *= 1.4
    law = fit_law(parameters, tokens, spoiled)
    moved = np.abs(np.log(law.predict(parameters, tokens) / LAW.predict(parameters, tokens)))
    assert np.median(moved) < 0.02


def test_parabola_finds_the_best_size_of_its_budget():
    flops = 4e18
    runs = [run for run in draw_runs(noise=0.0) if run.point.budget_flops == flops]
    found = fit_parabola(runs)
    # Symmetric sizes about the best one: what is off comes from the law's third derivative in log N.
    assert np.exp(found.log_parameters) == pytest.approx(best_size(LAW, flops), rel=0.1)


@pytest.mark.parametrize(("around", "end"), [(8.0, "smallest"), (1 / 8, "largest")])
def test_budget_with_its_minimum_at_an_edge_is_refused_by_name(around, end):
    runs = draw_runs(budgets=(4e18,), noise=0.0, around=around)
    with pytest.raises(Refused, match=f"^prism-c4e18 must have its minimum between its sizes.*edge of the {end}"):
        fit_parabola(runs)


def test_law_with_no_more_runs_than_numbers_is_refused():
    with pytest.raises(Refused, match="at least 6 runs, not 5"):
        fit_law(*as_arrays(draw_runs(budgets=(1e18,))))
