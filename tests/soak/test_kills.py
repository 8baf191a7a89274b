"""Runs that are killed at drawn moments and resumed have every bit of the run that nobody killed.

One of every kind here; `make soak` draws hundreds.
"""

from pathlib import Path

import pytest

from tests.soak.campaign import References, run_plan
from tests.soak.plan import POINTS, draw_kill

SEEDS = range(8)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_and_resumed_run_has_the_losses_norms_order_and_weights_of_the_one_left_alone(
    seed: int, references: References, tmp_path: Path
) -> None:
    run_plan(draw_kill(seed), tmp_path, references)


def test_drawn_kills_come_at_every_point_and_in_runs_of_one_two_and_four_processes() -> None:
    plans = [draw_kill(seed) for seed in SEEDS]
    assert {plan.point for plan in plans} == set(POINTS)
    assert {plan.setting.num_processes for plan in plans} == {1, 2, 4}
    assert [draw_kill(seed) for seed in SEEDS] == plans
