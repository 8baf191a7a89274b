"""One short text that says which rows a run has trained on, step by step.

A step's part is the sum of its rows' hashes modulo 2^63: the same for every number of processes, ZeRO stage, sequence
degree and micro-batch size. The running hash chains these sums, so that it tells their order as well.
"""

import hashlib
from collections.abc import Iterable

import torch

SUM_MASK = 2**63 - 1
"Keeps a sum modulo 2^63, also one that wrapped around in int64 on its way through a collective."


def hash_batch(row_hashes: Iterable[torch.Tensor]) -> int:
    """The sum modulo 2^63 of the hashes of all these rows: int64 vectors, of any lengths and in any order."""
    return sum(int(hashes_B.sum()) for hashes_B in row_hashes) & SUM_MASK


def extend(running: str, batch_sum: int) -> str:
    """The running hash after a step with this sum over the global batch: 16 hexadecimal digits; before the first step
    it is empty."""
    return hashlib.blake2b(f"{running} {batch_sum}".encode(), digest_size=8).hexdigest()
