"""Tasks that ask for a function of what was read: parity, local XOR, modulo addition, silence gate, MUX. Each is our
reading.

Dims: R rows, T tokens of a row, N blocks of a row.
"""

import numpy as np

from prism_lm.eval.probes.rows import (
    BEGIN,
    CLOSE,
    IGNORED,
    LOAD,
    NOISE,
    OPEN,
    QUERY,
    ROW_TOKENS,
    SELECTORS,
    SYMBOLS,
    Ints,
    Rows,
    draw_distinct,
    draw_noise,
    last_where,
    no_labels,
    spread,
    stack_blocks,
    write_blocks,
)

NUM_QUERIES = 24
NUM_XORS = 24
MODULUS, NUM_SUMS = 7, 10
NUM_LINES, LINE_SLOTS, NUM_SELECTIONS = 4, 7, 12


def generate_parity(rng: np.random.Generator, num_rows: int) -> Rows:
    """A row of bits, the data tokens 0 and 1, with a quarter noise and 24 QUERY at random places; at QUERY the answer
    is the parity of all bits before it. The first token is a bit."""
    tokens_RT = _draw_stream(rng, num_rows, below=2, noise_share=0.25)
    tokens_RT[:, 0] = rng.integers(0, 2, num_rows)
    _place_queries(rng, tokens_RT, start=1)
    parity_RT = np.cumsum(tokens_RT == 1, axis=1) % 2
    return Rows(tokens_RT, np.where(tokens_RT == QUERY, parity_RT, IGNORED))


def generate_local_xor(rng: np.random.Generator, num_rows: int) -> Rows:
    """Blocks `bit bit QUERY`, 24 a row, among noise; at QUERY the answer is the exclusive or of the two bits right
    before it. Nothing farther than two tokens matters."""
    tokens_RT, labels_RT = draw_noise(rng, num_rows), no_labels(num_rows)
    left_RN, right_RN = rng.integers(0, 2, (2, num_rows, NUM_XORS))
    starts_RN = spread(rng, num_rows, num_blocks=NUM_XORS, block_tokens=3)
    write_blocks(tokens_RT, starts_RN, stack_blocks(left_RN, right_RN, QUERY))
    write_blocks(labels_RT, starts_RN + 2, (left_RN ^ right_RN)[:, :, None])
    return Rows(tokens_RT, labels_RT)


def generate_modulo_addition(rng: np.random.Generator, num_rows: int) -> Rows:
    """A stream of digits 0..6, a third of it noise. BEGIN, always followed by a digit, starts a new sum: at the row's
    start and at 10 random places more. At each of 24 QUERY the answer is the sum modulo 7 of the digits since the last
    BEGIN."""
    tokens_RT = _draw_stream(rng, num_rows, below=MODULUS, noise_share=1 / 3)
    tokens_RT[:, :2] = stack_blocks(BEGIN, rng.integers(0, MODULUS, num_rows))
    num_blocks = NUM_SUMS + NUM_QUERIES
    starts_RN = spread(rng, num_rows, num_blocks=num_blocks, block_tokens=2, start=2)
    begins_RN = draw_distinct(rng, num_rows, num_blocks, num_blocks) < NUM_SUMS
    filler_RN = np.take_along_axis(tokens_RT, starts_RN, 1)
    digit_RN = rng.integers(0, MODULUS, begins_RN.shape)
    blocks = stack_blocks(np.where(begins_RN, BEGIN, filler_RN), np.where(begins_RN, digit_RN, QUERY))
    write_blocks(tokens_RT, starts_RN, blocks)
    total_RT = np.cumsum(np.where(tokens_RT < MODULUS, tokens_RT, 0), axis=1)
    before_RT = np.take_along_axis(total_RT, last_where(tokens_RT == BEGIN), 1)
    return Rows(tokens_RT, np.where(tokens_RT == QUERY, (total_RT - before_RT) % MODULUS, IGNORED))


def generate_silence_gate(rng: np.random.Generator, num_rows: int) -> Rows:
    """A stream of data tokens 0..15, a quarter of it noise; one token in eight opens (OPEN) or closes (CLOSE) a gate.
    At each of 24 QUERY the answer is the newest data token that came while the gate was open: what came in the silence
    must leave no trace. The row starts with OPEN and a data token."""
    tokens_RT = _draw_stream(rng, num_rows, below=SYMBOLS, noise_share=0.25)
    toggles_RT = rng.random(tokens_RT.shape) < 1 / 8
    tokens_RT = np.where(toggles_RT, rng.choice([OPEN, CLOSE], tokens_RT.shape), tokens_RT)
    tokens_RT[:, :2] = stack_blocks(OPEN, rng.integers(0, SYMBOLS, num_rows))
    _place_queries(rng, tokens_RT, start=2)
    toggle_RT = last_where((tokens_RT == OPEN) | (tokens_RT == CLOSE))
    is_open_RT = np.take_along_axis(tokens_RT, toggle_RT, 1) == OPEN
    heard_RT = last_where(is_open_RT & (tokens_RT < SYMBOLS)).clip(min=0)
    answer_RT = np.take_along_axis(tokens_RT, heard_RT, 1)
    return Rows(tokens_RT, np.where(tokens_RT == QUERY, answer_RT, IGNORED))


def generate_mux(rng: np.random.Generator, num_rows: int) -> Rows:
    """A multiplexer of four lines, 12 times a row: `LOAD`, seven tokens of which four at random places are the lines'
    values (data 0..15, in the lines' order, the rest noise), and one of four selectors; at the selector the answer is
    the value of the line that it names."""
    tokens_RT, labels_RT = draw_noise(rng, num_rows), no_labels(num_rows)
    starts_RN = spread(rng, num_rows, num_blocks=NUM_SELECTIONS, block_tokens=LINE_SLOTS + 2)
    lines_RNC = rng.integers(0, SYMBOLS, (num_rows, NUM_SELECTIONS, NUM_LINES))
    flat = draw_distinct(rng, num_rows * NUM_SELECTIONS, NUM_LINES, LINE_SLOTS)
    slots_RNC = np.sort(flat, axis=1).reshape(lines_RNC.shape)
    chosen_RN = rng.integers(0, NUM_LINES, starts_RN.shape)
    write_blocks(tokens_RT, starts_RN, np.full((*starts_RN.shape, 1), LOAD))
    positions_RNC = starts_RN[:, :, None] + 1 + slots_RNC
    np.put_along_axis(tokens_RT, positions_RNC.reshape(num_rows, -1), lines_RNC.reshape(num_rows, -1), axis=1)
    write_blocks(tokens_RT, starts_RN + LINE_SLOTS + 1, (SELECTORS.start + chosen_RN)[:, :, None])
    answers_RN1 = np.take_along_axis(lines_RNC, chosen_RN[:, :, None], 2)
    write_blocks(labels_RT, starts_RN + LINE_SLOTS + 1, answers_RN1)
    return Rows(tokens_RT, labels_RT)


def _draw_stream(rng: np.random.Generator, num_rows: int, *, below: int, noise_share: float) -> Ints:
    """Data tokens below a number, a share of them replaced by noise."""
    shape = (num_rows, ROW_TOKENS)
    noise_RT = rng.integers(NOISE.start, NOISE.stop, shape)
    return np.where(rng.random(shape) < noise_share, noise_RT, rng.integers(0, below, shape))


def _place_queries(rng: np.random.Generator, tokens_RT: Ints, *, start: int) -> None:
    starts_RN = spread(rng, len(tokens_RT), num_blocks=NUM_QUERIES, block_tokens=1, start=start)
    np.put_along_axis(tokens_RT, starts_RN, np.int64(QUERY), axis=1)
