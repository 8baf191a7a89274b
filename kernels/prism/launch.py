"""How each kernel of the chunk form is launched: block widths, warps, pipeline stages.

A fixed table, keyed by widths, written pairs, element size and chunk alone: nothing is tuned while a run is on, so
every rank and every step of it, and every T, B and number of documents, use the same kernels. The settings were
measured on an H200 (LOG.md), and the GPU tests hold each of them against fp64 for both numbers of pairs.
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


class Choice(NamedTuple):
    """The settings of a kernel for one written pair, and for more."""

    one: Launch
    more: Launch


def _always(launch: Launch) -> Choice:
    return Choice(launch, launch)


LAUNCHES: dict[str, Choice] = {
    "solve": _always(Launch(max_registers=168)),
    "write": _always(Launch(num_warps=8, max_registers=128)),
    "state": _always(Launch(block_v=64, num_stages=3)),
    "output": Choice(Launch(), Launch(max_registers=168)),
    "query_grad": _always(Launch()),
    "state_grad": _always(Launch(block_v=64, num_stages=3)),
    "erase_grad": _always(Launch()),
    "write_grad": _always(Launch()),
    "solver_grad": Choice(Launch(block_v=64, num_warps=8), Launch(block_v=32, num_warps=4)),
    "key_grad": Choice(Launch(block_v=64, block_k=64, max_registers=168), Launch(block_k=64)),
}
WIDE = Launch(block_v=64, block_k=64, num_warps=4, num_stages=1)
# Triton 3.6 gives Hopper's matrix unit wrong addresses for second operands narrower than this, and only chunks of as
# many rows use that unit.
MIN_UNIT_BLOCK = 64
_overrides: dict[str, Launch] = {}


def choose(kernel: str, shape: Shape) -> Launch:
    """The launch of a kernel: an override, or the table's; small blocks where fp32 or wide heads fill the shared
    memory."""
    if kernel in _overrides:
        return _fit(_overrides[kernel], shape)
    is_wide = shape.element_bytes == 4 or max(shape.key_width, shape.value_width) > 128
    return _fit(WIDE if is_wide else LAUNCHES[kernel][shape.num_pairs > 1], shape)


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
