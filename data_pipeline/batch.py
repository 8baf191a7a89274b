"""The batch: its keys, shapes and dtypes, written once.

input_ids_BT int64: tokens to read. labels_BT int64: the token that follows each, IGNORED_LABEL (-100) where no loss is
due (the next document's start and padding). document_start_BT bool: True at a document's first token, where states
begin anew. row_hash_B int64: a hash of each whole stored row, also where a process holds only a slice of it. source_B
int64: which of the split's sources, sorted by name, each row is of; NO_SOURCE (-1) for padding.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.packing import IGNORED_LABEL, TokenRow

NO_SOURCE = -1


class Batch(TypedDict):
    """One micro-batch of B rows of T tokens."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    document_start_BT: torch.Tensor
    row_hash_B: torch.Tensor
    source_B: torch.Tensor


BATCH_DTYPES = {
    "input_ids_BT": torch.int64,
    "labels_BT": torch.int64,
    "document_start_BT": torch.bool,
    "row_hash_B": torch.int64,
    "source_B": torch.int64,
}


def hash_rows(tokens_BT: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return a hash of each row: 0 to 2^63 - 1, of its tokens as little-endian 32-bit integers, on every machine."""
    stored_BT = np.ascontiguousarray(tokens_BT, dtype="<u4")
    digests = b"".join(hashlib.blake2b(row, digest_size=8).digest() for row in stored_BT)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64) & np.iinfo(np.int64).max


def build_batch(
    rows: Sequence[TokenRow], sources: Sequence[int], *, batch_rows: int, row_tokens: int, bos_id: int
) -> Batch:
    """Make a batch of `batch_rows` rows from stored rows of T+1 tokens and the source of each; missing rows are BOS
    without any label."""
    tokens_BT: NDArray[np.int64] = np.full((batch_rows, row_tokens + 1), bos_id, dtype=np.int64)
    for index, row in enumerate(rows):
        tokens_BT[index] = row
    source_B = torch.full((batch_rows,), NO_SOURCE)
    source_B[: len(rows)] = torch.tensor(list(sources), dtype=torch.int64)
    stored_BT = torch.from_numpy(tokens_BT)
    input_ids_BT = stored_BT[:, :-1].contiguous()
    labels_BT = stored_BT[:, 1:].clone()
    labels_BT[labels_BT == bos_id] = IGNORED_LABEL
    return Batch(
        input_ids_BT=input_ids_BT,
        labels_BT=labels_BT,
        document_start_BT=input_ids_BT == bos_id,
        row_hash_B=torch.from_numpy(hash_rows(tokens_BT)),
        source_B=source_B,
    )


@dataclass(frozen=True, kw_only=True)
class RowSlice:
    """The part of every row that a process holds: number `index` of `count` equal ones; by default all of it."""

    index: int = 0
    count: int = 1

    def cut(self, batch: Batch) -> Batch:
        """Return this part of a batch of whole rows; its last label is the first token of the part after it.

        Raises ValueError for rows that do not divide.
        """
        row_tokens = batch["input_ids_BT"].shape[1]
        check_divides(self.count, row_tokens)
        if self.count == 1:
            return batch
        num_tokens = row_tokens // self.count
        here = slice(self.index * num_tokens, (self.index + 1) * num_tokens)
        return Batch(
            input_ids_BT=batch["input_ids_BT"][:, here].contiguous(),
            labels_BT=batch["labels_BT"][:, here].contiguous(),
            document_start_BT=batch["document_start_BT"][:, here].contiguous(),
            row_hash_B=batch["row_hash_B"],
            source_B=batch["source_B"],
        )


def check_divides(slices: int, row_tokens: int) -> None:
    """Raise ValueError for rows that cannot be cut into so many equal slices."""
    if row_tokens % slices:
        raise ValueError(f"a row of {row_tokens} tokens must divide into {slices} equal slices; use a divisor of it")
