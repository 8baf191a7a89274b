from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from prism_lm.eval.token_tree import ROOT, TokenTree, build_tree

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=24)
GRAINS = st.integers(1, 5)


def read_path(tree: TokenTree, leaf: int) -> list[int]:
    return [token for node in tree.find_path(leaf) for token in tree.nodes[node].tokens]


def count_beginnings(rows: Sequence[Sequence[int]]) -> int:
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@given(ROWS, GRAINS)
def test_every_row_is_the_beginning_of_its_leafs_path(rows: list[list[int]], grain: int) -> None:
    tree = build_tree(rows, grain_tokens=grain)
    assert len(tree.leaf_of_row) == len(rows)
    for row, leaf in zip(rows, tree.leaf_of_row, strict=True):
        assert tree.nodes[leaf].is_leaf
        assert read_path(tree, leaf)[: len(row)] == row


@given(ROWS, GRAINS)
def test_a_tree_never_holds_more_tokens_than_its_rows_nor_fewer_than_their_beginnings(
    rows: list[list[int]], grain: int
) -> None:
    num_tokens = build_tree(rows, grain_tokens=grain).num_tokens
    assert count_beginnings(rows) <= num_tokens <= sum(map(len, rows))


@given(ROWS)
def test_at_a_grain_of_one_every_shared_beginning_is_counted_once(rows: list[list[int]]) -> None:
    assert build_tree(rows, grain_tokens=1).num_tokens == count_beginnings(rows)


@given(ROWS, GRAINS)
def test_shared_nodes_hold_at_least_a_grain_and_whole_grains_below_another(rows: list[list[int]], grain: int) -> None:
    for node in build_tree(rows, grain_tokens=grain).nodes:
        if not node.is_leaf:
            assert len(node.children) > 1
            assert len(node.tokens) >= grain
            assert node.parent == ROOT or len(node.tokens) % grain == 0


@given(ROWS, GRAINS)
def test_nodes_follow_their_parents_and_their_depth_is_what_lies_above(rows: list[list[int]], grain: int) -> None:
    nodes = build_tree(rows, grain_tokens=grain).nodes
    for place, node in enumerate(nodes):
        assert node.parent < place
        assert len(node.tokens) > 0
        above = 0 if node.parent == ROOT else nodes[node.parent].depth + len(nodes[node.parent].tokens)
        assert node.depth == above


@given(ROWS, GRAINS, st.randoms())
def test_the_order_of_rows_changes_nothing(rows: list[list[int]], grain: int, random) -> None:
    places = list(range(len(rows)))
    random.shuffle(places)
    tree, other = (build_tree(given, grain_tokens=grain) for given in (rows, [rows[place] for place in places]))
    assert tree.nodes == other.nodes
    assert [tree.leaf_of_row[place] for place in places] == other.leaf_of_row


def test_answers_share_their_question_and_questions_their_examples() -> None:
    examples, first, second = [9] * 8, [1, 2, 3, 4], [4, 3, 2, 1]
    rows = [examples + question + [answer] for question in (first, second) for answer in (5, 6, 7)]
    tree = build_tree(rows, grain_tokens=4)
    assert tree.num_tokens == 8 + 2 * 4 + 6
    assert [len(tree.find_path(leaf)) for leaf in tree.leaf_of_row] == [3] * 6


def test_rows_with_one_input_need_one_leaf() -> None:
    tree = build_tree([[1, 2, 3], [1, 2, 3], [1, 2]], grain_tokens=1)
    assert len(tree.nodes) == 1
    assert tree.leaf_of_row == [0, 0, 0]


def test_a_thousand_nested_beginnings_do_not_exhaust_the_stack() -> None:
    rows = [[0] * length + [1] for length in range(1, 3000, 2)]
    assert build_tree(rows, grain_tokens=1).num_tokens == count_beginnings(rows[-1:]) + len(rows) - 1
