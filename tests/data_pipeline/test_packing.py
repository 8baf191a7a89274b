"""Packing loses and doubles no token; labels and document starts follow from a row alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.batch import BATCH_DTYPES, build_batch
from data_pipeline.packing import IGNORED_LABEL, RowPacker, row_dtype, split_documents

BOS, EOS = 1, 2
documents_of_pieces = st.lists(st.lists(st.integers(3, 500), max_size=30), max_size=12)


def pack(documents: list[list[int]], row_tokens: int) -> list[np.ndarray]:
    packer = RowPacker(row_tokens=row_tokens, bos_id=BOS, eos_id=EOS, dtype="uint16")
    rows = [row for pieces in documents for row in packer.add(pieces)]
    return rows + packer.finish()


@given(documents=documents_of_pieces, row_tokens=st.integers(1, 40))
def test_every_token_is_in_the_rows_once_and_in_order(documents, row_tokens) -> None:
    stream = [token for pieces in documents for token in (BOS, *pieces, EOS)]
    rows = pack(documents, row_tokens)
    joined = [int(token) for index, row in enumerate(rows) for token in (row if index == 0 else row[1:])]
    assert all(row.shape == (row_tokens + 1,) and row.dtype == np.uint16 for row in rows)
    assert joined[: len(stream)] == stream
    assert set(joined[len(stream) :]) <= {BOS} and len(joined) - len(stream) < row_tokens + 1
    assert all(rows[index][-1] == rows[index + 1][0] for index in range(len(rows) - 1))


@given(documents=documents_of_pieces, row_tokens=st.integers(1, 40))
def test_labels_are_each_documents_next_tokens_and_starts_its_first(documents, row_tokens) -> None:
    rows = pack(documents, row_tokens)
    batch = build_batch(rows, [0] * len(rows), batch_rows=len(rows) + 1, row_tokens=row_tokens, bos_id=BOS)
    labels, inputs = batch["labels_BT"].flatten(), batch["input_ids_BT"].flatten()
    expected = [token for pieces in documents for token in (*pieces, EOS)]
    assert labels[labels != IGNORED_LABEL].tolist() == expected
    starts = batch["document_start_BT"].flatten()
    real_starts = starts & (batch["labels_BT"].flatten() != IGNORED_LABEL)
    assert int(real_starts.sum()) == len(documents) if rows else not documents
    assert (starts == (inputs == BOS)).all()
    assert (batch["labels_BT"][-1] == IGNORED_LABEL).all(), "the missing row has no label"


def test_a_row_that_begins_inside_a_document_marks_no_start() -> None:
    rows = pack([[10, 11, 12, 13, 14, 15]], row_tokens=4)
    batch = build_batch(rows, [0] * len(rows), batch_rows=2, row_tokens=4, bos_id=BOS)
    assert batch["document_start_BT"].tolist() == [[True, False, False, False], [False, False, False, False]]
    assert batch["labels_BT"].tolist() == [[10, 11, 12, 13], [14, 15, EOS, IGNORED_LABEL]]


def test_the_batch_has_the_dtypes_written_down() -> None:
    batch = build_batch([], [], batch_rows=2, row_tokens=4, bos_id=BOS)
    assert {key: value.dtype for key, value in batch.items()} == BATCH_DTYPES
    assert batch.pop("row_hash_B").shape == batch.pop("source_B").shape == (2,)
    assert all(value.shape == (2, 4) and value.is_contiguous() for value in batch.values())


@given(documents=documents_of_pieces, row_tokens=st.integers(1, 40))
def test_split_documents_finds_the_documents_of_a_row_and_leaves_padding_out(documents, row_tokens) -> None:
    for row in pack(documents, row_tokens):
        parts = split_documents(row, BOS)
        assert all(BOS not in part[1:] for part in parts)
        kept = [int(token) for part in parts for token in part]
        assert kept == row.tolist()[: len(kept)] and set(row.tolist()[len(kept) :]) <= {BOS}


def test_ids_of_two_bytes_are_stored_in_two() -> None:
    assert (row_dtype(65536), row_dtype(65537)) == ("uint16", "uint32")
