"""A mixture keeps its weights in every epoch and covers a source before it repeats."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.mixture import apportion, compute_quotas, select_spans

rows_by_source = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 5000), min_size=1)
shard_rows = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@given(rows=rows_by_source, data=st.data())
def test_quotas_follow_the_weights_to_one_row_and_fill_the_epoch(rows, data) -> None:
    weights = {source: data.draw(st.floats(0, 10), label=source) for source in rows}
    weights[min(weights)] = 1.0
    quotas = compute_quotas(rows, weights)
    epoch_rows = sum(count for source, count in rows.items() if weights[source] > 0)
    assert sum(quotas.values()) == epoch_rows and set(quotas) == set(rows)
    for source, quota in quotas.items():
        assert abs(quota - epoch_rows * weights[source] / sum(weights.values())) < 1.0


def test_without_weights_every_row_comes_once() -> None:
    assert compute_quotas({"a": 3, "b": 5}, {}) == {"a": 3, "b": 5}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0, "c": 1.0}, r"data\.weights\.c=1\.0 must name a source of the data; use a, b"),
        ({"a": 1.0}, r"b is missing; add data\.weights\.b=0"),
    ],
)
def test_weights_must_name_exactly_the_sources(weights, message) -> None:
    with pytest.raises(ValueError, match=message):
        compute_quotas({"a": 3, "b": 5}, weights)


@given(sizes=shard_rows, quota=st.integers(0, 100), epochs=st.integers(1, 6), shuffle=st.booleans())
def test_epochs_together_repeat_no_row_before_all_were_read(sizes, quota, epochs, shuffle) -> None:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    spans = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        chosen = select_spans(spans, quota, epoch=epoch, seed=[3, 1], shuffle=shuffle)
        assert all(any(begin <= first < last <= end for begin, end in spans) for first, last in chosen)
        assert sum(last - first for first, last in chosen) == quota
        seen.update(row for first, last in chosen for row in range(first, last))
    times = [seen[row] for row in range(ends[-1])]
    assert max(times) - min(times) <= 1


@given(rows=rows_by_source, data=st.data())
def test_limited_rows_are_shared_to_one_row_and_no_source_gives_more_than_it_has(rows, data) -> None:
    limit = data.draw(st.integers(1, sum(rows.values())))
    quotas = apportion(limit, rows)
    assert sum(quotas.values()) == limit and set(quotas) == set(rows)
    for source, quota in quotas.items():
        assert quota <= rows[source] and abs(quota - limit * rows[source] / sum(rows.values())) < 1.0
