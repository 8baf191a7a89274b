"""Optimizer state in pieces: whoever wrote them, any range of any parameter is read back."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from prism_lm.checkpoint.folder import write_json
from prism_lm.checkpoint.fragments import (
    INDEX_NAME,
    KINDS,
    OPTIMIZER_NAME,
    FragmentReader,
    Piece,
    build_index,
    list_parameters,
    rank_path,
    read_full,
    read_index,
)

SHAPE, NUMEL = (3, 4), 12


def write(folder: Path, cuts: list[int]) -> None:
    """A parameter w of 0, 1, 2, ... cut at these elements, a piece a rank; moments are 100 and 200 more."""
    edges = [0, *cuts, NUMEL]
    (folder / OPTIMIZER_NAME).mkdir(parents=True, exist_ok=True)
    pieces = []
    for rank, (begin, end) in enumerate(itertools.pairwise(edges)):
        values = torch.arange(begin, end, dtype=torch.float32)
        save_file({f"{kind}/w": values + 100 * i for i, kind in enumerate(KINDS)}, rank_path(folder, rank))
        pieces.append([Piece(name="w", start=begin, numel=end - begin)])
    write_json(folder / OPTIMIZER_NAME / INDEX_NAME, build_index({"w": SHAPE}, pieces, 5).describe())


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, NUMEL - 1)), edges=st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)))
def test_any_range_is_read_from_whatever_pieces_hold_it(
    cuts: set[int], edges: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    write(folder, sorted(cuts))
    begin, end = sorted(edges)
    with FragmentReader(folder) as reader:
        for index, kind in enumerate(KINDS):
            expected = torch.arange(begin, end, dtype=torch.float32) + 100 * index
            assert torch.equal(reader.read("w", kind, begin, end - begin), expected)


def test_whole_parameters_have_their_shapes_and_the_count_of_updates(tmp_path: Path) -> None:
    write(tmp_path, [5])
    assert list_parameters(tmp_path) == {"w": SHAPE} and read_index(tmp_path).applied_steps == 5
    assert torch.equal(read_full(tmp_path, "w", "exp_avg"), torch.arange(100.0, 112.0).view(SHAPE))


@pytest.mark.parametrize(("name", "start", "numel"), [("v", 0, 1), ("w", 0, 13), ("w", -1, 2)])
def test_what_a_checkpoint_does_not_hold_is_named(name: str, start: int, numel: int, tmp_path: Path) -> None:
    write(tmp_path, [])
    with (
        FragmentReader(tmp_path) as reader,
        pytest.raises(ValueError, match=f"must hold elements .* of {name}; resume"),
    ):
        reader.read(name, "master", start, numel)


@pytest.mark.parametrize(
    ("pieces", "covered"), [([(0, 5), (6, 6)], 5), ([(0, 5), (4, 8)], 5), ([(1, 11)], 0), ([(0, 11)], 11)]
)
def test_elements_held_by_nobody_or_by_two_are_refused(pieces: list[tuple[int, int]], covered: int) -> None:
    held = [[Piece(name="w", start=start, numel=numel)] for start, numel in pieces]
    with pytest.raises(ValueError, match=f"must hold all 12 elements of w once, but hold {covered} in order"):
        build_index({"w": SHAPE}, held, 0)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"applied_steps": 1}', '{"applied_steps": 1, "shapes": 3, "pieces": {}}']
)
def test_damaged_index_is_named_with_the_remedy(content: str, tmp_path: Path) -> None:
    write(tmp_path, [])
    (tmp_path / OPTIMIZER_NAME / INDEX_NAME).write_text(content)
    with pytest.raises(ValueError, match=r"optimizer/index\.json must .*restore it, or remove"):
        read_index(tmp_path)


def test_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer/index\.json must exist to resume; restore it"):
        read_index(tmp_path)
