"""Pieces that the chunk kernels share: where a program stands, loads, decays, the triangular inverse, the activation.

C tokens in a chunk, rows of a tile; G the cumulative log decay inside a chunk, segments the documents inside it.
"""

import triton
import triton.language as tl

ERFC_SCALE = tl.constexpr(0.3275911 * 0.7071067811865476)
LOG2_E = tl.constexpr(1.4426950408889634)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
DIAGONAL_BLOCK = tl.constexpr(16)


@triton.jit
def locate_chunk(N, H, NUM_BLOCKS: tl.constexpr):
    """This program's block, chunk, row of the batch and head, blocks fastest, then heads: neighbours share pages."""
    i_program = tl.program_id(0).to(tl.int64)
    i_block = (i_program % NUM_BLOCKS).to(tl.int32)
    i_rest = i_program // NUM_BLOCKS
    return i_block, (i_rest // H) % N, i_rest // (H * N), i_rest % H


@triton.jit
def load_tile(p_tile, o_row, m_row, stride, o_col, m_col):
    """A (row, col) tile of a row-major matrix, zero outside."""
    return tl.load(p_tile + o_row[:, None] * stride + o_col[None, :], mask=m_row[:, None] & m_col[None, :], other=0.0)


@triton.jit
def store_tile(p_tile, b_tile, o_row, m_row, stride, o_col, m_col):
    """Store a (row, col) tile into a row-major matrix, in its dtype."""
    p_element = p_tile + o_row[:, None] * stride + o_col[None, :]
    tl.store(p_element, b_tile.to(p_tile.dtype.element_ty), mask=m_row[:, None] & m_col[None, :])


@triton.jit
def store_transposed(p_tile, b_tile, o_row, stride, o_col, m_col):
    """Store a (row, col) tile as (col, row)."""
    p_element = p_tile + o_col[None, :] * stride + o_row[:, None]
    tl.store(p_element, b_tile.to(p_tile.dtype.element_ty), mask=m_col[None, :] & (o_row[:, None] >= 0))


@triton.jit
def load_segments(p_start, o_t, m_t, HAS_DOCUMENTS: tl.constexpr):
    """How many documents began in the chunk up to and with each token."""
    if HAS_DOCUMENTS:
        b_start = tl.load(p_start + o_t, mask=m_t, other=0).to(tl.int32)
        return tl.cumsum(b_start, 0)
    else:
        return tl.zeros_like(o_t.to(tl.int32))


@triton.jit
def decay_between(b_total, b_segment, o_c, STRICT: tl.constexpr):
    """(i, j): the decay from after token j to token i >= j (STRICT: i > j) of the same document, else 0."""
    m_pair = o_c[:, None] > o_c[None, :] if STRICT else o_c[:, None] >= o_c[None, :]
    m_pair = m_pair & (b_segment[:, None] == b_segment[None, :])
    b_exponent = (b_total[:, None] - b_total[None, :]).to(tl.float32) * LOG2_E
    return tl.exp2(tl.where(m_pair, b_exponent, float("-inf")))


@triton.jit
def decay_between_transposed(b_total, b_segment, o_c, STRICT: tl.constexpr):
    """(j, i): the transpose of `decay_between`."""
    m_pair = o_c[:, None] < o_c[None, :] if STRICT else o_c[:, None] <= o_c[None, :]
    m_pair = m_pair & (b_segment[:, None] == b_segment[None, :])
    b_exponent = (b_total[None, :] - b_total[:, None]).to(tl.float32) * LOG2_E
    return tl.exp2(tl.where(m_pair, b_exponent, float("-inf")))


@triton.jit
def gelu_parts(b_x):
    """The normal distribution function of x and exp(-x^2 / 2), which GELU and its slope are made of.

    erfc by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most: fp32's own rounding, at a third of erf's cost. exp2 and
    rsqrt are one instruction each where exp and a division are five.
    """
    b_bell = tl.exp2(b_x * b_x * (-0.5 * LOG2_E))
    b_root = tl.rsqrt(1.0 + tl.abs(b_x) * ERFC_SCALE)
    b_t = b_root * b_root
    b_poly = 0.5307027145 * b_t - 0.7265760135
    b_poly = b_poly * b_t + 0.7107068705
    b_poly = b_poly * b_t - 0.142248368
    b_poly = b_poly * b_t + 0.127414796
    b_tail = b_poly * b_t * b_bell
    return tl.where(b_x >= 0, 1.0 - b_tail, b_tail), b_bell


@triton.jit
def activate(b_x, GELU: tl.constexpr):
    """The solver's activation: GELU or identity."""
    if GELU:
        b_below, _ = gelu_parts(b_x)
        return b_x * b_below
    else:
        return b_x


@triton.jit
def activate_with_slope(b_x, GELU: tl.constexpr):
    """The activation and its derivative."""
    if GELU:
        b_below, b_bell = gelu_parts(b_x)
        return b_x * b_below, b_below + b_x * b_bell * INV_SQRT_2PI
    else:
        return b_x, tl.zeros_like(b_x) + 1.0


@triton.jit
def invert_unit_lower(b_strict, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strict)^-1 in fp32: forward substitution on the diagonal blocks, all at once, then a short block series.

    With D the blocks' own inverse, I + A = D^-1 (I + N), N = D (A - diagonal blocks) is zero after C / 16 powers.
    """
    NUM: tl.constexpr = C // DIAGONAL_BLOCK
    o_c = tl.arange(0, C)
    o_s = tl.arange(0, DIAGONAL_BLOCK)
    b_eye = (o_s[:, None] == o_s[None, :]).to(tl.float32)[None, :, :]
    if NUM == 1:
        b_block = tl.reshape(b_strict, (1, DIAGONAL_BLOCK, DIAGONAL_BLOCK))
    else:
        m_same = tl.arange(0, NUM)[:, None, None, None] == tl.arange(0, NUM)[None, None, :, None]
        b_cut = tl.reshape(b_strict, (NUM, DIAGONAL_BLOCK, NUM, DIAGONAL_BLOCK))
        b_block = tl.sum(tl.where(m_same, b_cut, 0.0), 2)
    b_inverse = b_block * 0.0 + b_eye
    for i in tl.static_range(DIAGONAL_BLOCK - 1):
        b_column = tl.sum(tl.where(o_s[None, None, :] == i, b_block, 0.0), 2)
        b_row = tl.sum(tl.where(o_s[None, :, None] == i, b_inverse, 0.0), 1)
        b_inverse -= b_column[:, :, None] * b_row[:, None, :]
    if NUM == 1:
        return tl.reshape(b_inverse, (C, C))
    else:
        b_wide = tl.where(m_same, b_inverse[:, :, None, :], 0.0)
        b_wide = tl.reshape(b_wide, (C, C))
        m_off = (o_c[:, None] // DIAGONAL_BLOCK) != (o_c[None, :] // DIAGONAL_BLOCK)
        b_off = tl.where(m_off, b_strict, 0.0)
        b_nilpotent = tl.dot(b_wide, b_off, input_precision=PRECISION)
        b_series = (o_c[:, None] == o_c[None, :]).to(tl.float32) - b_nilpotent
        if NUM > 2:
            b_square = tl.dot(b_nilpotent, b_nilpotent, input_precision=PRECISION)
            b_series += tl.dot(b_series, b_square, input_precision=PRECISION)
        return tl.dot(b_series, b_wide, input_precision=PRECISION)
