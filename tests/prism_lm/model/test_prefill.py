from functools import partial

import pytest
import torch

from prism_lm.model.generate import generate
from prism_lm.model.kernels import select_operators
from prism_lm.model.lm import build_model
from prism_lm.model.prefill import PIECE_TOKENS, choose_piece_length, pad_left, read_in_pieces
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_small, relative_error

LENGTHS = (70, 1, 33, 34, 16, 49)


def build_prompts(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]


def test_padding_precedes_prompts_and_begins_no_document():
    ids_BT, start_BT = pad_left([[5, 6, 7], [9]])
    assert ids_BT.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert start_BT.tolist() == [[True, False, False], [False, False, True]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("piece_tokens", [1, 6 * 32, 10**6])
@torch.no_grad()
def test_prompts_read_in_pieces_leave_what_whole_ones_leave(family, piece_tokens):
    """Prompts that begin before, at and after cuts, beside padding. fp64 sums of some hundred terms, reordered."""
    model, rows = build_small(FAMILIES[family]), pad_left(build_prompts())
    whole_BTV, whole = model.logits(rows[0], document_start_BT=rows[1], last_only=True)
    cut_BTV, cut = read_in_pieces(model, *rows, piece_tokens=piece_tokens)
    assert relative_error(cut_BTV, whole_BTV) < 1e-12
    for expected, actual in zip(whole.layers, cut.layers, strict=True):
        for name in set(expected._fields) - {"document_BT", "position_B"}:
            assert relative_error(getattr(actual, name), getattr(expected, name)) < 1e-12


def note_pieces(monkeypatch, model) -> list[tuple[int, int]]:
    """Rows and tokens of every piece that the model is given from now on."""
    shapes, read = [], model.read

    def note(input_ids_BT, **given):
        shapes.append(tuple(input_ids_BT.shape))
        return read(input_ids_BT, **given)

    monkeypatch.setattr(model, "read", note)
    return shapes


@pytest.mark.parametrize("rows", [1, 3])
def test_no_piece_grows_with_the_prompt(rows, monkeypatch):
    """A model's working memory is that of the longest piece it is given, and its recurrent state has one size."""
    model = build_small(SMALL, dtype=torch.float32)
    longest = []
    for length in (1500, 6000):
        shapes = note_pieces(monkeypatch, model)
        monkeypatch.setattr("prism_lm.model.generate.read_in_pieces", partial(read_in_pieces, piece_tokens=960))
        generate(model, build_prompts([length] * rows), max_new_tokens=1)
        assert sum(tokens for _, tokens in shapes) == length and {count for count, _ in shapes} == {rows}
        longest.append(max(count * tokens for count, tokens in shapes))
        monkeypatch.undo()
    assert longest == [960, 960]


@pytest.mark.parametrize(
    ("num_rows", "chunk_tokens", "expected"), [(1, 64, 16384), (3, 64, 5440), (64, 128, 256), (1000, 64, 64)]
)
def test_piece_is_of_whole_chunks_and_at_least_one(num_rows, chunk_tokens, expected):
    assert choose_piece_length(num_rows, chunk_tokens, 16384) == expected


@pytest.mark.gpu
@torch.no_grad()
def test_prompt_four_times_as_long_takes_no_more_memory_on_the_gpu():
    model = build_model(SMALL, seed=3, device="cuda", dtype=torch.bfloat16, operators=select_operators("cuda"))
    peaks = []
    for length in (4 * PIECE_TOKENS, 4 * PIECE_TOKENS, 16 * PIECE_TOKENS):
        rows = [tensor.cuda() for tensor in pad_left([[1] * length])]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        read_in_pieces(model, *rows)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] <= peaks[1]
