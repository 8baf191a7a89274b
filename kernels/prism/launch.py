"""How each kernel of the chunk form is launched: block widths, warps, pipeline stages.

A fixed table, keyed by widths, written pairs and element size alone: nothing is tuned while a run is on, so every rank
and every step of it, and every T, B and number of documents, use the same kernels. The settings were measured on an
H200 (LOG.md); CANDIDATES lists those that were tried there and that the GPU tests hold against fp64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel's settings: block_v values (block_k key columns) a program, warps a program, stages of its loop, and
    a bound on registers a thread, so that more programs share a multiprocessor (None: the compiler's)."""

    block_v: int = 128
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None


class Shape(NamedTuple):
    """What the choice of a launch depends on."""

    num_pairs: int
    key_width: int
    value_width: int
    element_bytes: int
    chunk_tokens: int


CANDIDATES: dict[str, list[Launch]] = {
    "solve": [Launch(num_warps=4, max_registers=168), Launch(num_warps=4, max_registers=128)],
    "write": [Launch(block_v=64, num_warps=4), Launch(block_v=64, num_warps=8)],
    "state": [Launch(block_v=64, num_warps=4, num_stages=3), Launch(block_v=64, num_warps=4, num_stages=2)],
    "output": [Launch(num_warps=4), Launch(num_warps=4, max_registers=168)],
    "query_grad": [Launch(num_warps=4), Launch(num_warps=4, max_registers=168), Launch(block_v=64, num_warps=4)],
    "state_grad": [Launch(block_v=64, num_warps=4, num_stages=3), Launch(block_v=128, num_warps=8, num_stages=2)],
    "erase_grad": [Launch(num_warps=4), Launch(block_v=64, num_warps=4)],
    "write_grad": [Launch(block_v=64, num_warps=4), Launch(block_v=64, num_warps=8, max_registers=128)],
    "key_grad": [
        Launch(block_k=64, num_warps=4),
        Launch(block_v=64, block_k=64, num_warps=4),
        Launch(block_v=64, block_k=64, num_warps=4, max_registers=168),
    ],
}
WIDE = Launch(block_v=64, block_k=64, num_warps=4, num_stages=1)
# Triton 3.6 gives Hopper's matrix unit wrong addresses for second operands narrower than this, and only chunks of as
# many rows use that unit.
MIN_UNIT_BLOCK = 64
_overrides: dict[str, Launch] = {}


def choose(kernel: str, shape: Shape) -> Launch:
    """The launch of a kernel: an override, or the first candidate; small blocks where fp32 or wide heads fill the
    shared memory."""
    if kernel in _overrides:
        return _fit(_overrides[kernel], shape)
    is_wide = shape.element_bytes == 4 or max(shape.key_width, shape.value_width) > 128
    return _fit(WIDE if is_wide else CANDIDATES[kernel][0], shape)


def _fit(launch: Launch, shape: Shape) -> Launch:
    """Blocks no wider than the padded tensor, nor, in short chunks, than those; stages that fit in shared memory."""
    most = launch.block_v if shape.chunk_tokens >= MIN_UNIT_BLOCK else shape.chunk_tokens
    return replace(
        launch,
        block_v=min(launch.block_v, most, pad_width(shape.value_width, shape.chunk_tokens)),
        block_k=min(launch.block_k, pad_width(shape.key_width, shape.chunk_tokens)),
        num_stages=min(launch.num_stages, 3 if shape.num_pairs <= 2 else 2),
    )


def pad_width(width: int, chunk_tokens: int) -> int:
    """The power of two at or above `width` that a tile is padded to."""
    padded = 1 << (width - 1).bit_length()
    return max(padded, MIN_UNIT_BLOCK) if chunk_tokens >= MIN_UNIT_BLOCK else padded


@contextmanager
def override(kernel: str, launch: Launch) -> Iterator[None]:
    """Launch `kernel` with these settings inside the block; for measurements and tests."""
    before = dict(_overrides)
    _overrides[kernel] = launch
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
