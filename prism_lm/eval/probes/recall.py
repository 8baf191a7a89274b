"""Tasks that ask for what was written: MQAR, poly-recall, variable tracking, palindrome. Each is our reading.

Dims: R rows, T tokens of a row, N blocks of a row.
"""

import numpy as np
from numpy.typing import NDArray

from prism_lm.eval.probes.rows import (
    BEGIN,
    COPY,
    FIRST,
    IGNORED,
    MIRROR,
    QUERY,
    SECOND,
    SET,
    SYMBOLS,
    Ints,
    Rows,
    draw_distinct,
    draw_noise,
    no_labels,
    spread,
    stack_blocks,
    write_blocks,
)

NUM_PAIRS = 8
NUM_POLY_KEYS = 6
NUM_VARIABLES = 8
NUM_STATEMENTS = 24
TIMES_ASKED = 3
WORD_TOKENS, NUM_WORDS = 8, 6


def generate_mqar(rng: np.random.Generator, num_rows: int) -> Rows:
    """Multi-query associative recall (Arora et al. 2023): 8 pairs `key value` open the row, the keys different ones of
    data 0..15, the values any of 16..31. Each key then comes three times more, at random among noise; there the answer
    is its value."""
    tokens_RT, labels_RT = draw_noise(rng, num_rows), no_labels(num_rows)
    keys_RN, values_RN = draw_distinct(rng, num_rows, NUM_PAIRS, SYMBOLS), _draw_values(rng, num_rows, NUM_PAIRS)
    write_blocks(tokens_RT, _packed(num_rows, NUM_PAIRS, 2), stack_blocks(keys_RN, values_RN))
    order_RN = _draw_questions(rng, num_rows, NUM_PAIRS)
    starts_RN = spread(rng, num_rows, num_blocks=order_RN.shape[1], block_tokens=1, start=2 * NUM_PAIRS)
    write_blocks(tokens_RT, starts_RN, np.take_along_axis(keys_RN, order_RN, 1)[:, :, None])
    write_blocks(labels_RT, starts_RN, np.take_along_axis(values_RN, order_RN, 1)[:, :, None])
    return Rows(tokens_RT, labels_RT)


def generate_poly_recall(rng: np.random.Generator, num_rows: int) -> Rows:
    """Recall of keys with several values each: 6 keys are each written twice, `key value`, in random order, with values
    of their own. A question is `key FIRST` or `key SECOND`; at the control token the answer is that key's first or
    second value. Each of the 12 questions is asked three times, in random order among noise. What a delta rule would
    overwrite is asked for."""
    tokens_RT, labels_RT = draw_noise(rng, num_rows), no_labels(num_rows)
    num_writes = 2 * NUM_POLY_KEYS
    keys_RK = draw_distinct(rng, num_rows, NUM_POLY_KEYS, SYMBOLS)
    write_order_RN = draw_distinct(rng, num_rows, num_writes, num_writes) % NUM_POLY_KEYS
    values_RN = _draw_values(rng, num_rows, num_writes)
    write_blocks(
        tokens_RT,
        _packed(num_rows, num_writes, 2),
        stack_blocks(np.take_along_axis(keys_RK, write_order_RN, 1), values_RN),
    )
    by_key_RN = np.take_along_axis(values_RN, np.argsort(write_order_RN, axis=1, kind="stable"), 1)
    question_RN = _draw_questions(rng, num_rows, num_writes)
    starts_RN = spread(rng, num_rows, num_blocks=question_RN.shape[1], block_tokens=2, start=2 * num_writes)
    asked_RN = np.take_along_axis(keys_RK, question_RN // 2, 1)
    write_blocks(tokens_RT, starts_RN, stack_blocks(asked_RN, np.where(question_RN % 2, SECOND, FIRST)))
    write_blocks(labels_RT, starts_RN + 1, np.take_along_axis(by_key_RN, question_RN, 1)[:, :, None])
    return Rows(tokens_RT, labels_RT)


def generate_variable_tracking(rng: np.random.Generator, num_rows: int) -> Rows:
    """A program of 24 statements on variables 0..7: `SET x value` for every variable in random order, then 16
    statements of which each is `SET x value` or `COPY x y` (x takes the value that y has now, y another one). Then
    `QUERY x` three times for every variable, in random order among noise; at x the answer is its value after the
    program."""
    tokens_RT, labels_RT = draw_noise(rng, num_rows), no_labels(num_rows)
    later = NUM_STATEMENTS - NUM_VARIABLES
    first_RN = draw_distinct(rng, num_rows, NUM_VARIABLES, NUM_VARIABLES)
    target_RN = np.concatenate([first_RN, rng.integers(0, NUM_VARIABLES, (num_rows, later))], axis=1)
    source_RN = (target_RN + rng.integers(1, NUM_VARIABLES, target_RN.shape)) % NUM_VARIABLES
    copies_RN = (rng.random(target_RN.shape) < 0.5) & (np.arange(NUM_STATEMENTS) >= NUM_VARIABLES)
    values_RN = _draw_values(rng, num_rows, NUM_STATEMENTS)
    write_blocks(
        tokens_RT,
        _packed(num_rows, NUM_STATEMENTS, 3),
        stack_blocks(np.where(copies_RN, COPY, SET), target_RN, np.where(copies_RN, source_RN, values_RN)),
    )
    held_RN = _run_program(target_RN, source_RN, copies_RN, values_RN)
    asked_RN = _draw_questions(rng, num_rows, NUM_VARIABLES)
    starts_RN = spread(rng, num_rows, num_blocks=asked_RN.shape[1], block_tokens=2, start=3 * NUM_STATEMENTS)
    write_blocks(tokens_RT, starts_RN, stack_blocks(QUERY, asked_RN))
    write_blocks(labels_RT, starts_RN + 1, np.take_along_axis(held_RN, asked_RN, 1)[:, :, None])
    return Rows(tokens_RT, labels_RT)


def _run_program(target_RN: Ints, source_RN: Ints, copies_RN: NDArray[np.bool_], values_RN: Ints) -> Ints:
    """What each variable holds at the end, all rows at once."""
    rows = np.arange(len(target_RN))
    held = np.zeros((len(target_RN), NUM_VARIABLES), dtype=np.int64)
    for index in range(NUM_STATEMENTS):
        copied = held[rows, source_RN[:, index]]
        held[rows, target_RN[:, index]] = np.where(copies_RN[:, index], copied, values_RN[:, index])
    return held


def generate_palindrome(rng: np.random.Generator, num_rows: int) -> Rows:
    """Six palindromes a row among noise: `BEGIN`, a word of 8 data tokens of 0..15, `MIRROR`, and the word backwards.
    From MIRROR on the answer is the next token, so the reversed word is written out from memory, each right token being
    shown after it was asked for."""
    tokens_RT, labels_RT = draw_noise(rng, num_rows), no_labels(num_rows)
    words_RNW = rng.integers(0, SYMBOLS, (num_rows, NUM_WORDS, WORD_TOKENS))
    backwards_RNW = words_RNW[:, :, ::-1]
    edge = np.ones((num_rows, NUM_WORDS, 1), dtype=np.int64)
    starts_RN = spread(rng, num_rows, num_blocks=NUM_WORDS, block_tokens=2 * WORD_TOKENS + 2)
    blocks = np.concatenate([BEGIN * edge, words_RNW, MIRROR * edge, backwards_RNW], axis=2)
    write_blocks(tokens_RT, starts_RN, blocks)
    write_blocks(labels_RT, starts_RN + WORD_TOKENS + 1, np.concatenate([backwards_RNW, IGNORED * edge], axis=2))
    return Rows(tokens_RT, labels_RT)


def _draw_questions(rng: np.random.Generator, num_rows: int, count: int) -> Ints:
    """Each of `count` questions TIMES_ASKED times, in random order."""
    total = TIMES_ASKED * count
    return draw_distinct(rng, num_rows, total, total) % count


def _draw_values(rng: np.random.Generator, num_rows: int, count: int) -> Ints:
    return rng.integers(SYMBOLS, 2 * SYMBOLS, (num_rows, count))


def _packed(num_rows: int, num_blocks: int, block_tokens: int) -> Ints:
    """Blocks one after the other from the row's start."""
    return np.broadcast_to(np.arange(num_blocks) * block_tokens, (num_rows, num_blocks))
