"""Rows of tokens as a tree of shared beginnings, so that each beginning is read once.

The answers to one question share the question, and questions may share the examples before them. A node holds the
tokens that its rows share beyond its parent's; a leaf holds the rest of one row. A row that another begins with needs
no leaf of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

ROOT = -1
"The parent of a node that begins its rows."


@dataclass(frozen=True, kw_only=True)
class Node:
    """Tokens of one or several rows, after `depth` tokens of the nodes above."""

    tokens: Sequence[int]
    depth: int
    parent: int
    children: list[int] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        return not self.children


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """Nodes, parents before their children, and for each row the leaf whose path begins with it."""

    nodes: list[Node]
    leaf_of_row: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens to read, each node's once."""
        return sum(len(node.tokens) for node in self.nodes)

    def find_path(self, leaf: int) -> list[int]:
        """The nodes from the top to a leaf."""
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) != ROOT:
            path.append(parent)
        return path[::-1]


def build_tree(rows: Sequence[Sequence[int]], *, grain_tokens: int) -> TokenTree:
    """The tree of those rows, none of them empty; it depends on the set of rows alone, not on their order.

    A beginning of fewer than grain_tokens is not worth a node, and one below another node is cut to a multiple of it,
    so that many nodes are of equal length; what is cut off is read with each row.
    """
    distinct = sorted({tuple(row) for row in rows})
    leaves = [row for row, after in zip(distinct, [*distinct[1:], ()], strict=True) if after[: len(row)] != row]
    shared = [_count_shared(left, right) for left, right in pairwise(leaves)]
    nodes, node_of_leaf = _grow(leaves, shared, grain_tokens)
    leaf_of_row: dict[tuple[int, ...], int] = {}
    place = len(leaves) - 1
    for row in reversed(distinct):
        while leaves[place][: len(row)] != row:
            place -= 1
        leaf_of_row[row] = node_of_leaf[place]
    return TokenTree(nodes=nodes, leaf_of_row=[leaf_of_row[tuple(row)] for row in rows])


def _grow(leaves: list[tuple[int, ...]], shared: list[int], grain_tokens: int) -> tuple[list[Node], list[int]]:
    """The nodes over sorted rows of which none begins with another, and the node of each of them."""
    nodes: list[Node] = []
    node_of_leaf = [ROOT] * len(leaves)
    waiting = [(0, len(leaves), ROOT, 0)]
    while waiting:
        first, end, parent, depth = waiting.pop()
        for begin, stop in _split(first, end, shared, depth + grain_tokens):
            is_leaf = stop - begin == 1
            until = len(leaves[begin]) if is_leaf else min(shared[begin : stop - 1])
            if not is_leaf and parent != ROOT:
                until -= (until - depth) % grain_tokens
            nodes.append(Node(tokens=leaves[begin][depth:until], depth=depth, parent=parent))
            place = len(nodes) - 1
            if parent != ROOT:
                nodes[parent].children.append(place)
            if is_leaf:
                node_of_leaf[begin] = place
            else:
                waiting.append((begin, stop, place, until))
    return nodes, node_of_leaf


def _split(first: int, end: int, shared: list[int], least: int) -> list[tuple[int, int]]:
    """Cut sorted rows where neighbours share fewer than `least` tokens."""
    cuts = [place + 1 for place in range(first, end - 1) if shared[place] < least]
    return list(zip([first, *cuts], [*cuts, end], strict=True))


def _count_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two rows begin with together."""
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))
