"""Slices of all processes of a group, put together, are the row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.batch import BATCH_DTYPES, RowSlice, build_batch, hash_rows

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
    whole = build_batch(rows, [0] * len(rows), batch_rows=len(rows) + 1, row_tokens=len(stored[0]) - 1, bos_id=BOS)
    parts = [RowSlice(index=index, count=count).cut(whole) for index in range(count)]
    for name, tensor in whole.items():
        if not name.endswith("_BT"):
            assert all(part[name].equal(tensor) for part in parts)
            continue
        assert torch.cat([part[name] for part in parts], dim=1).equal(tensor)
        assert {part[name].shape[1] for part in parts} == {tensor.shape[1] // count}
        assert {part[name].dtype for part in parts} == {BATCH_DTYPES[name]}
        assert all(part[name].is_contiguous() for part in parts)


def test_last_label_of_a_slice_is_the_first_token_of_the_next_unless_a_document_starts_there() -> None:
    whole = build_batch([np.array([BOS, 5, 6, 7, BOS, 8, 9])], [0], batch_rows=1, row_tokens=6, bos_id=BOS)
    labels = [RowSlice(index=index, count=3).cut(whole)["labels_BT"].tolist() for index in range(3)]
    assert labels == [[[5, 6]], [[7, -100]], [[8, 9]]]


def test_row_that_does_not_divide_is_refused() -> None:
    whole = build_batch([], [], batch_rows=1, row_tokens=6, bos_id=BOS)
    with pytest.raises(ValueError, match="a row of 6 tokens must divide into 4 equal slices"):
        RowSlice(index=0, count=4).cut(whole)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=9), st.data())
def test_row_hash_is_the_same_for_every_stored_dtype_and_changes_with_any_token(
    tokens: list[int], data: st.DataObject
) -> None:
    (before,) = hash_rows(np.array([tokens], dtype=np.int64))
    assert 0 <= before < 2**63
    assert hash_rows(np.array([tokens], dtype=np.uint32)) == before
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[place] = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != tokens[place]))
    assert hash_rows(np.array([other])) != before


def test_row_hash_covers_the_last_label_and_padding_rows_have_one_of_their_own() -> None:
    rows = [np.array(row, dtype=np.uint16) for row in ([BOS, 5, 6], [BOS, 5, 7])]
    hashes = build_batch(rows, [0, 0], batch_rows=4, row_tokens=2, bos_id=BOS)["row_hash_B"].tolist()
    assert len(set(hashes)) == 3 and hashes[2] == hashes[3]
    assert hashes == hash_rows(np.array([[BOS, 5, 6], [BOS, 5, 7], [BOS] * 3, [BOS] * 3])).tolist()
