"""What the nine tasks share: the vocabulary, rows with labels, and two splits that cannot meet.

Rows have 128 tokens of 64: data 0..31, control 32..47, noise 48..63. A label stands at the position whose output is
scored and is the data token to answer with; -100 elsewhere. Labels are not shifted: what a task asks at a position may
not be there to read. The paper (arXiv 2602.10796) names the tasks and gives V = 64, D = 16, T = 128; how a row is made
is our reading, written in each task's docstring.

Dims: R rows, T tokens of a row, N blocks of a row, W tokens of a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Split = Literal["train", "heldout"]

VOCAB_SIZE, ROW_TOKENS = 64, 128
DATA, CONTROL, NOISE = range(0, 32), range(32, 48), range(48, 64)
BEGIN, QUERY, SET, COPY, FIRST, SECOND, MIRROR, OPEN, CLOSE, LOAD = range(32, 42)
SELECTORS = range(44, 48)
SYMBOLS = 16
"Data tokens of one kind: keys, variables and words are below it, values of recall at it and above."
IGNORED = -100
HELDOUT_PART = 8
_HASH_SEED = 2602_10796


@dataclass(frozen=True)
class Rows:
    """Rows of one task, int64."""

    tokens_RT: Ints
    labels_RT: Ints

    def __len__(self) -> int:
        return len(self.tokens_RT)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of the nine: how its rows are made and what they ask."""

    name: str
    asks: str
    "One line for a table's legend."
    num_answers: int
    "Data tokens among which the answer lies, each equally often, whatever the position."
    generate: Callable[[np.random.Generator, int], Rows]
    "Rows of no split in particular, from a generator and how many; their labels follow from their tokens."

    @property
    def floor(self) -> float:
        """Accuracy of the best answer that does not read the row."""
        return 1 / self.num_answers


def draw_rows(task: Task, *, num_rows: int, seed: Sequence[int], split: Split) -> Rows:
    """So many rows of a split, the same for the same task, seed and split; seed holds numbers of at least 0.

    A row's split is a property of its tokens (one in eight is held out), so no seed draws a held-out row in training.
    """
    entropy = [*seed, get_args(Split).index(split), *task.name.encode()]
    rng = np.random.default_rng(entropy)
    kept: list[Rows] = []
    while sum(map(len, kept)) < num_rows:
        rows = task.generate(rng, 2 * num_rows if split == "train" else HELDOUT_PART * num_rows)
        chosen = is_heldout(rows.tokens_RT) == (split == "heldout")
        kept.append(Rows(rows.tokens_RT[chosen], rows.labels_RT[chosen]))
    tokens_RT, labels_RT = (np.concatenate(parts)[:num_rows] for parts in _columns(kept))
    return Rows(tokens_RT, labels_RT)


def _columns(parts: list[Rows]) -> tuple[list[Ints], list[Ints]]:
    return [rows.tokens_RT for rows in parts], [rows.labels_RT for rows in parts]


def is_heldout(tokens_RT: Ints) -> NDArray[np.bool_]:
    """Which rows belong to the held-out split, by the top bits of a linear hash of their tokens."""
    weights_T = np.random.default_rng(_HASH_SEED).integers(0, 2**63, tokens_RT.shape[1], dtype=np.uint64) * 2 + 1
    hashed_R = (tokens_RT.astype(np.uint64) * weights_T).sum(axis=1, dtype=np.uint64)
    return (hashed_R >> np.uint64(61)) == 0


def draw_noise(rng: np.random.Generator, num_rows: int) -> Ints:
    """Rows of nothing but noise, to write on."""
    return rng.integers(NOISE.start, NOISE.stop, (num_rows, ROW_TOKENS))


def no_labels(num_rows: int) -> Ints:
    """Rows of which nothing is scored yet."""
    return np.full((num_rows, ROW_TOKENS), IGNORED, dtype=np.int64)


def draw_distinct(rng: np.random.Generator, num_rows: int, count: int, below: int) -> Ints:
    """For each row `count` different numbers below `below`, in random order."""
    return np.argsort(rng.random((num_rows, below)), axis=1)[:, :count]


def spread(rng: np.random.Generator, num_rows: int, *, num_blocks: int, block_tokens: int, start: int = 0) -> Ints:
    """Where N blocks of W tokens begin in each row, from `start` on, without overlap and with random gaps."""
    free = ROW_TOKENS - start - num_blocks * block_tokens
    picks_RN = np.sort(draw_distinct(rng, num_rows, num_blocks, free + num_blocks), axis=1)
    return start + picks_RN + np.arange(num_blocks) * (block_tokens - 1)


def write_blocks(target_RT: Ints, starts_RN: Ints, blocks_RNW: Ints) -> None:
    """Put each block at its start, in place."""
    positions_RNW = starts_RN[:, :, None] + np.arange(blocks_RNW.shape[2])
    num_rows = len(target_RT)
    np.put_along_axis(target_RT, positions_RNW.reshape(num_rows, -1), blocks_RNW.reshape(num_rows, -1), axis=1)


def stack_blocks(*parts: Ints | int) -> Ints:
    """Blocks RNW from their tokens, each RN or one number for all."""
    return np.stack(np.broadcast_arrays(*parts), axis=-1)


def last_where(marked_RT: NDArray[np.bool_]) -> Ints:
    """For each position the newest marked position up to it, itself included; -1 before the first."""
    return np.maximum.accumulate(np.where(marked_RT, np.arange(marked_RT.shape[1]), -1), axis=1)
