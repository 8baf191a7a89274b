"""Intervals of means: Student's own table, and the share of draws that they hold the truth of."""

import math
import random

import pytest

from launcher.sweep_interval import compute_interval, t_quantile


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.95, 3, 3.18245),
        (0.95, 4, 2.77645),
        (0.95, 30, 2.04227),
        (0.99, 5, 4.03214),
        (0.9, 10, 1.81246),
        (0.5, 1, 1.0),
        (0.95, 1000, 1.96234),
    ],
)
def test_quantile_is_that_of_the_printed_tables(level: float, degrees: int, expected: float) -> None:
    assert t_quantile(level, degrees) == pytest.approx(expected, rel=1e-5)


def test_interval_of_three_seeds_covers_the_true_mean_as_often_as_it_says() -> None:
    draw, hits, trials = random.Random(0), 0, 4000
    for _ in range(trials):
        found = compute_interval([draw.gauss(3.2, 0.05) for _ in range(3)])
        assert found.half_width is not None
        hits += abs(found.mean - 3.2) <= found.half_width
    assert abs(hits / trials - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


def test_one_value_has_a_mean_and_no_interval() -> None:
    found = compute_interval([3.5])
    assert (found.mean, found.half_width, found.count) == (3.5, None, 1)
