"""Which nodes of a token tree are read together, and by which process.

A batch of nodes that begin rows is padded on the left to its longest; leaves that continue a batch are padded on the
right, since nothing continues them; nodes that continue a batch and are continued are of equal length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from prism_lm.eval.token_tree import ROOT, TokenTree

T = TypeVar("T")
STATE_BYTES = 2 * 1024**3
NUM_BATCHES, LEAST_BATCH_TOKENS = 16, 4096
"Of a small work: enough batches that many processes have some, and no smaller than a GPU is busy with."


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a batch may cost. One row is always allowed: it is read in pieces."""

    batch_tokens: int
    "Most tokens of a batch, padding counted."
    row_state_bytes: int = 0
    "Of a row's state whatever its length."
    token_state_bytes: int = 0
    "Of a row's state for each token read; 0 without attention."
    state_bytes: int = STATE_BYTES
    "Most bytes of the states of a batch's rows."

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens={self.batch_tokens} must be at least 1; for example 8192")

    def fits(self, num_rows: int, row_tokens: int, tokens_before: int = 0) -> bool:
        """Whether that many rows may be read together."""
        state_bytes = self.row_state_bytes + self.token_state_bytes * (tokens_before + row_tokens)
        return num_rows == 1 or (
            num_rows * row_tokens <= self.batch_tokens and num_rows * state_bytes <= self.state_bytes
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Nodes read together; each continues a row of the batch above, `parent_rows`, or begins one (none given)."""

    nodes: list[int]
    parent_rows: list[int]
    row_tokens: int
    children: list["Batch"]

    @property
    def padded_tokens(self) -> int:
        return len(self.nodes) * self.row_tokens

    def walk(self) -> Iterator["Batch"]:
        """This batch and all below it, in the order in which they are read."""
        yield self
        for child in self.children:
            yield from child.walk()


def plan_batches(tree: TokenTree, budget: Budget) -> list[Batch]:
    """The batches that begin rows, longest first, with those that continue them below."""
    tops = [place for place, node in enumerate(tree.nodes) if node.parent == ROOT]
    return [
        _plan_below(tree, budget, nodes, parent_rows=[], tokens_before=0)
        for nodes in pack(tops, lambda node: len(tree.nodes[node].tokens), budget)
    ]


def _plan_below(
    tree: TokenTree, budget: Budget, nodes: list[int], *, parent_rows: list[int], tokens_before: int
) -> Batch:
    row_tokens = max(len(tree.nodes[node].tokens) for node in nodes)
    below = [(child, row) for row, node in enumerate(nodes) for child in tree.nodes[node].children]
    read = tokens_before + row_tokens
    children = [
        _plan_below(tree, budget, [node for node, _ in part], parent_rows=[row for _, row in part], tokens_before=read)
        for group in _group_alike(tree, below)
        for part in pack(group, lambda item: len(tree.nodes[item[0]].tokens), budget, tokens_before=read)
    ]
    return Batch(nodes=nodes, parent_rows=parent_rows, row_tokens=row_tokens, children=children)


def _group_alike(tree: TokenTree, below: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Leaves together, other nodes by their length."""
    leaves = [item for item in below if tree.nodes[item[0]].is_leaf]
    others = [item for item in below if not tree.nodes[item[0]].is_leaf]
    others.sort(key=lambda item: len(tree.nodes[item[0]].tokens))
    return [leaves, *(list(group) for _, group in groupby(others, key=lambda item: len(tree.nodes[item[0]].tokens)))]


def pack(
    items: Sequence[T], count_tokens: Callable[[T], int], budget: Budget, *, tokens_before: int = 0
) -> list[list[T]]:
    """Items in batches within the budget, the longest first; those of equal length keep their order."""
    batches: list[list[T]] = []
    for item in sorted(items, key=count_tokens, reverse=True):
        longest = count_tokens(batches[-1][0]) if batches else 0
        if batches and budget.fits(len(batches[-1]) + 1, longest, tokens_before):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def choose_batch_tokens(batch_tokens: int, num_tokens: int) -> int:
    """At most that many tokens to a batch, and fewer where there is little to read, whatever the number of processes:
    batches decide how sums round."""
    return min(batch_tokens, max(num_tokens // NUM_BATCHES, LEAST_BATCH_TOKENS))


def share_out(costs: Sequence[int], world_size: int) -> list[int]:
    """The process that takes each item: runs of items in order, of about equal cost in all."""
    total, before = max(sum(costs), 1), 0
    owners: list[int] = []
    for cost in costs:
        owners.append(min((2 * before + cost) * world_size // (2 * total), world_size - 1))
        before += cost
    return owners
