from dataclasses import replace

import pytest

from prism_lm.scaling.records import Outcome, Refused, find_spike, take_runs
from tests.prism_lm.scaling.known_law import draw_runs

RUNS = draw_runs()
POINTS = [run.point for run in RUNS]
OUTCOMES = [
    Outcome(name=run.point.name, status="finished", tokens=run.point.tokens, loss_nats=run.loss_nats) for run in RUNS
]
NAME = POINTS[6].name
CALM = [4.0 - 0.01 * step for step in range(30)]


def spoil(**changes) -> list[Outcome]:
    return [replace(item, **changes) if item.name == NAME else item for item in OUTCOMES]


def test_whole_study_is_taken_as_it_is():
    assert take_runs(POINTS, OUTCOMES, []) == RUNS


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([item for item in OUTCOMES if item.name != NAME], "it is missing"),
        (spoil(status="missing"), "it is missing"),
        (spoil(status="failed", error="out of memory"), r"it is failed \(out of memory\)"),
        (spoil(status="running"), "it is running"),
        (spoil(tokens=17), "it read 17 tokens"),
        (spoil(loss_nats=float("nan")), "its validation loss is nan"),
        (spoil(loss_nats=None), "its validation loss is None"),
        (spoil(curve_nats=[*CALM, 9.0, 3.7]), "its training loss leapt to 9.000 nats"),
        (spoil(curve_nats=[4.0, float("nan")]), "its training loss leapt to nan"),
    ],
)
def test_run_that_must_not_be_fitted_is_refused_by_name_until_it_is_excluded(outcomes, said):
    with pytest.raises(Refused, match=f"^{NAME} must not be fitted: {said}.*--exclude {NAME}$"):
        take_runs(POINTS, outcomes, [])
    assert len(take_runs(POINTS, outcomes, [NAME])) == len(RUNS) - 1


def test_group_is_excluded_as_a_whole_and_an_unknown_name_is_refused():
    assert len(take_runs(POINTS, OUTCOMES, [POINTS[0].group])) == len(RUNS) - 5
    with pytest.raises(Refused, match=r"^--exclude=prism-c9 must be a run or a group"):
        take_runs(POINTS, OUTCOMES, ["prism-c9"])


def test_every_bad_run_is_named_at_once():
    with pytest.raises(Refused) as caught:
        take_runs(POINTS, OUTCOMES[3:], [])
    assert all(point.name in str(caught.value) for point in POINTS[:3])


def test_falling_curve_with_noise_has_no_spike():
    assert find_spike([loss + 0.1 * (-1) ** index for index, loss in enumerate(CALM)]) is None
    assert find_spike([*CALM, 9.0]) == len(CALM)
