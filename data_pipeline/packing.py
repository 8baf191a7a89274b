"""Documents to rows of T+1 tokens: pure, no files.

A document is BOS, its pieces, EOS. Documents are laid end to end in a stream, which is cut into rows of T+1 tokens with
stride T: the last token of a row is the first of the next, so that each token but the stream's first is a label exactly
once and each token (but possibly the stream's last) an input exactly once. The stream's tail is padded with BOS. BOS
occurs nowhere else, so that a row alone tells where documents start and which labels count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100
TokenRow = NDArray[np.uint16 | np.uint32]


def row_dtype(vocab_size: int) -> str:
    """Name of the stored dtype: `uint16` where every id fits in two bytes, else `uint32`."""
    return "uint16" if vocab_size <= 65536 else "uint32"


class RowPacker:
    """Packs documents into rows of `row_tokens` + 1 tokens of `dtype`."""

    def __init__(self, *, row_tokens: int, bos_id: int, eos_id: int, dtype: str) -> None:
        self.row_tokens = row_tokens
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.dtype = np.dtype(dtype)
        self.pending: list[int] = []

    def add(self, pieces: Sequence[int]) -> list[TokenRow]:
        """Append the document of these pieces (without BOS or EOS) and return the rows that became complete."""
        self.pending.append(self.bos_id)
        self.pending.extend(pieces)
        self.pending.append(self.eos_id)
        count = (len(self.pending) - 1) // self.row_tokens
        rows = [self.cut(index * self.row_tokens) for index in range(count)]
        del self.pending[: count * self.row_tokens]
        return rows

    def finish(self) -> list[TokenRow]:
        """Return the last row, padded with BOS, or nothing when no token is left without having been a label."""
        if len(self.pending) < 2:
            return []
        self.pending.extend([self.bos_id] * (self.row_tokens + 1 - len(self.pending)))
        row = self.cut(0)
        self.pending.clear()
        return [row]

    def cut(self, begin: int) -> TokenRow:
        """Return the row of T+1 tokens that starts at `begin` of the pending stream."""
        return np.asarray(self.pending[begin : begin + self.row_tokens + 1], dtype=self.dtype)


def split_documents(row: TokenRow, bos_id: int) -> list[TokenRow]:
    """Cut a stored row at its document starts; padding (a BOS followed by BOS, or by nothing) is left out of the
    last part."""
    starts = np.flatnonzero(np.asarray(row) == bos_id)
    parts = np.split(np.asarray(row), starts)
    return [part for part in parts if len(part) > 1 or (len(part) == 1 and part[0] != bos_id)]
