"""The learning rate as a function of the step, by its properties."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_lm.train.schedule import ScheduleConfig, compute_rate_fraction

KINDS = st.sampled_from(["cosine", "wsd", "constant"])


@given(kind=KINDS, total=st.integers(2, 300), data=st.data())
def test_rate_rises_to_its_peak_once_and_then_never_rises(kind: str, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    decay = data.draw(st.integers(0, total))
    final = data.draw(st.floats(0, 1))
    config = ScheduleConfig(kind=kind, warmup_steps=warmup, decay_steps=decay, final_fraction=final)
    rates = [compute_rate_fraction(config, step=step, total_steps=total) for step in range(total)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    after = rates[max(0, warmup - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    if kind != "constant":
        assert rates[-1] == pytest.approx(final) or warmup == total


@given(total=st.integers(20, 200), warmup=st.integers(0, 5), decay=st.integers(1, 10))
def test_wsd_stays_at_its_peak_until_the_decay_begins(total: int, warmup: int, decay: int) -> None:
    config = ScheduleConfig(kind="wsd", warmup_steps=warmup, decay_steps=decay)
    rates = [compute_rate_fraction(config, step=step, total_steps=total) for step in range(total)]
    assert rates[warmup : total - decay] == [1.0] * (total - decay - warmup)
    assert all(rate < 1.0 for rate in rates[total - decay :])


def test_wsd_decays_over_a_fifth_unless_told_otherwise() -> None:
    config = ScheduleConfig(kind="wsd", warmup_steps=0)
    rates = [compute_rate_fraction(config, step=step, total_steps=100) for step in range(100)]
    assert sum(rate < 1.0 for rate in rates) == 20


def test_cosine_is_half_way_down_in_the_middle() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=0, final_fraction=0.0)
    assert compute_rate_fraction(config, step=49, total_steps=100) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"warmup_steps": -1}, r"train\.schedule\.warmup_steps=-1 must be at least 0"),
        ({"decay_steps": -1}, r"train\.schedule\.decay_steps=-1 must be at least 0"),
        ({"final_fraction": 1.5}, r"train\.schedule\.final_fraction=1\.5 must lie in 0 to 1"),
    ],
)
def test_schedule_out_of_range_is_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ScheduleConfig(**settings)
