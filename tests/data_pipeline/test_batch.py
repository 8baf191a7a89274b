"""Slices of all processes of a group, put together, are the row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.batch import BATCH_DTYPES, RowSlice, build_batch

BOS = 1


@given(
    st.integers(1, 5).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.integers(1, 6).flatmap(
                lambda tokens: st.lists(
                    st.lists(st.integers(0, 4), min_size=count * tokens + 1, max_size=count * tokens + 1),
                    min_size=1,
                    max_size=3,
                )
            ),
        )
    )
)
def test_slices_put_together_are_the_batch_of_whole_rows(drawn: tuple[int, list[list[int]]]) -> None:
    count, stored = drawn
    rows = [np.array(row, dtype=np.uint16) for row in stored]
    whole = build_batch(rows, batch_rows=len(rows) + 1, row_tokens=len(stored[0]) - 1, bos_id=BOS)
    parts = [RowSlice(index=index, count=count).cut(whole) for index in range(count)]
    for name, tensor in whole.items():
        assert torch.cat([part[name] for part in parts], dim=1).equal(tensor)
        assert {part[name].shape[1] for part in parts} == {tensor.shape[1] // count}
        assert {part[name].dtype for part in parts} == {BATCH_DTYPES[name]}
        assert all(part[name].is_contiguous() for part in parts)


def test_last_label_of_a_slice_is_the_first_token_of_the_next_unless_a_document_starts_there() -> None:
    whole = build_batch([np.array([BOS, 5, 6, 7, BOS, 8, 9])], batch_rows=1, row_tokens=6, bos_id=BOS)
    labels = [RowSlice(index=index, count=3).cut(whole)["labels_BT"].tolist() for index in range(3)]
    assert labels == [[[5, 6]], [[7, -100]], [[8, 9]]]


def test_row_that_does_not_divide_is_refused() -> None:
    whole = build_batch([], batch_rows=1, row_tokens=6, bos_id=BOS)
    with pytest.raises(ValueError, match="a row of 6 tokens must divide into 4 equal slices"):
        RowSlice(index=0, count=4).cut(whole)
