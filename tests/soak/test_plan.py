"""Plans: equal for equal seeds, at every point in turn, and only at moments that come."""

import random
from dataclasses import replace

import pytest

from tests.soak.plan import ACCUMULATION, MAIN_ONLY, PLACES, POINTS, Plan, Setting, count_occurrences, draw_kill

SEEDS = range(400)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [draw_kill(seed) for seed in SEEDS]


def test_plan_is_a_function_of_its_seed_alone(plans: list[Plan]) -> None:
    random.seed(1)
    before = random.getstate()
    assert [draw_kill(seed) for seed in SEEDS] == plans
    assert random.getstate() == before
    assert len({replace(plan, seed=0) for plan in plans}) > len(plans) // 2


def test_points_take_turns_so_that_any_run_of_seeds_holds_each(plans: list[Plan]) -> None:
    for first in range(0, len(plans) - len(POINTS)):
        assert {plan.point for plan in plans[first : first + len(POINTS)]} == set(POINTS)


def test_every_place_dies_with_one_rank_and_with_all_and_in_every_number_of_processes(plans: list[Plan]) -> None:
    kills = [(kill, plan.setting) for plan in plans for kill in plan.kills]
    assert {(kill.point, kill.place) for kill, _ in kills} == {(of, place) for of in PLACES for place in PLACES[of]}
    for point in PLACES:
        assert {kill.who is None for kill, _ in kills if kill.point == point} == {True, False}, point
        assert {setting.num_processes for kill, setting in kills if kill.point == point} == {1, 2, 4}, point
    assert {setting.zero_stage for _, setting in kills} == {1, 2, 3}
    assert {setting.sequence_degree for _, setting in kills} == {1, 2}


def test_victims_come_to_the_place_that_they_die_at_as_often_as_planned(plans: list[Plan]) -> None:
    for plan in plans:
        for kill in plan.kills:
            assert 1 <= kill.occurrence <= count_occurrences(kill.point, kill.place, plan.setting), plan
            assert kill.who is None or 0 <= kill.who < plan.setting.num_processes, plan
            assert kill.place not in MAIN_ONLY or kill.who in (None, 0), plan


def test_asynchronous_saves_die_in_runs_that_save_so(plans: list[Plan]) -> None:
    for plan in plans:
        for kill in plan.kills:
            if kill.point == "asynchronous_save":
                assert plan.setting.asynchronous, plan


def test_two_deaths_follow_one_another_where_the_point_says_so(plans: list[Plan]) -> None:
    for plan in plans:
        assert len(plan.kills) == (2 if plan.point in ("after_resume", "twice_in_a_row") else 1)


def test_death_after_a_resume_follows_one_that_left_a_checkpoint(plans: list[Plan]) -> None:
    for plan in plans:
        if plan.point == "after_resume":
            former, later = plan.kills
            assert later.point == "after_resume"
            saves = former.occurrence - 1
            if former.point == "forward":
                saves = (former.occurrence - 1) // ACCUMULATION // plan.setting.save_every_steps - 1
            assert saves >= 1, plan


def test_settings_that_save_otherwise_share_one_reference() -> None:
    plain = Setting(num_processes=2)
    assert replace(plain, asynchronous=True, save_every_steps=3).describe() == plain.describe()
    others = [replace(plain, num_processes=4), replace(plain, zero_stage=3), replace(plain, model="language")]
    assert len({setting.describe() for setting in [plain, *others]}) == 4
