"""Which rows of each source an epoch holds: pure.

Each source is read in passes; a pass visits every row once, shard after shard in an order of its own. Epoch e takes the
next `quota` rows of that endless reading, so that a source weighed down is covered completely before a row repeats, and
touches few shards an epoch, and a source weighed up repeats evenly.
"""

from collections.abc import Mapping, Sequence

import numpy as np

Span = tuple[int, int]


def compute_quotas(rows_by_source: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Return source -> rows in an epoch; an epoch has as many rows as the sources of positive weight hold.

    Empty weights are natural proportions: every row once. Raises ValueError unless the weights name exactly the
    sources.
    """
    if not weights:
        return dict(rows_by_source)
    check_names(rows_by_source, weights)
    positive = {source: weights[source] for source in sorted(rows_by_source) if weights[source] > 0}
    quotas = apportion(sum(rows_by_source[source] for source in positive), positive)
    return {source: quotas.get(source, 0) for source in rows_by_source}


def apportion(rows: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Return source -> rows of so many in all, each within one row of its share. Shares are positive, of any scale."""
    total = sum(shares.values())
    exact = {source: rows * share / total for source, share in shares.items()}
    quotas = {source: int(share) for source, share in exact.items()}
    by_remainder = sorted(shares, key=lambda source: (quotas[source] - exact[source], source))
    for source in by_remainder[: rows - sum(quotas.values())]:
        quotas[source] += 1
    return quotas


def check_names(rows_by_source: Mapping[str, int], weights: Mapping[str, float]) -> None:
    """Raise ValueError for a weight of an unknown source or a source without one."""
    known = ", ".join(sorted(rows_by_source))
    for source in weights:
        if source not in rows_by_source:
            raise ValueError(f"data.weights.{source}={weights[source]} must name a source of the data; use {known}")
    for source in sorted(rows_by_source):
        if source not in weights:
            raise ValueError(
                f"data.weights must name every source of the data, and {source} is missing; "
                f"add data.weights.{source}=0 to leave it out"
            )


def select_spans(
    shard_spans: Sequence[Span], quota: int, *, epoch: int, seed: Sequence[int], shuffle: bool
) -> list[Span]:
    """Return the rows [begin, end) of one source in one epoch, as spans that each lie within a shard.

    shard_spans: the shards' row ranges. seed: entropy of this source's order of shards, ignored without shuffle.
    """
    rows = sum(end - begin for begin, end in shard_spans)
    position, stop = epoch * quota, (epoch + 1) * quota
    spans: list[Span] = []
    while position < stop:
        offset = position // rows * rows
        order = (
            np.random.default_rng([*seed, position // rows]).permutation(len(shard_spans))
            if shuffle
            else range(len(shard_spans))
        )
        for shard in order:
            begin, end = shard_spans[int(shard)]
            first, last = max(position, offset), min(stop, offset + end - begin)
            if first < last:
                spans.append((begin + first - offset, begin + last - offset))
                position = last
            offset += end - begin
    return spans
