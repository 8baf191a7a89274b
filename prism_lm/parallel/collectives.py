"""Named collectives over all processes of the run; each is the identity with one process.

Values decided on the host travel as CPU tensors, so that agreeing on them does not wait for the GPU's queue.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
_MISSING = "_prism_missing"
_finders: list[Callable[[], list[str]]] = []


class RunFailed(RuntimeError):
    """Ends the run; raised on every rank with the same text, so that it need be printed once only."""


def count_processes() -> int:
    """Processes in the default group; 1 where none is up."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_integers(values: Sequence[int]) -> list[int]:
    """Sums over all processes, value by value."""
    if count_processes() == 1:
        return list(values)
    total = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(total)
    return [int(value) for value in total.tolist()]


def sum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, as a new tensor on the same device."""
    total = tensor.detach().clone()
    if count_processes() > 1:
        dist.all_reduce(total)
    return total


def broadcast_tensor(tensor: torch.Tensor, *, source: int) -> torch.Tensor:
    """The tensor of the rank `source`, as a new tensor; those of the others have its shape and dtype."""
    received = tensor.detach().clone(memory_format=torch.contiguous_format)
    if count_processes() > 1:
        dist.broadcast(received, src=source)
    return received


def gather_objects(value: T) -> list[T]:
    """The value of every process, by rank. Meant for small, rare, host-side values."""
    if count_processes() == 1:
        return [value]
    gathered: list[T | None] = [None] * count_processes()
    dist.all_gather_object(gathered, value)
    return cast(list[T], gathered)


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank. Meant for small, rare, host-side values."""
    if count_processes() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def raise_together(error: Exception | None) -> None:
    """Raises RunFailed on every rank when any rank passes an error; its text names the first such rank's error."""
    if sum_integers([int(error is not None)])[0] == 0:
        return
    texts = gather_objects(None if error is None else describe_error(error))
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    place = "" if len(texts) == 1 else f" (rank {', '.join(str(rank) for rank, _ in failed)} of {len(texts)})"
    raise RunFailed(f"{failed[0][1]}{place}") from error


def call_together(function: Callable[[], T]) -> T:
    """What the function returns, once it has returned on every rank; an error it raises on any rank is raised on all of
    them, as RunFailed. The function must not wait for other ranks after the place where it may fail."""
    try:
        returned = function()
    except Exception as error:
        raise_together(error)
        raise
    raise_together(None)
    return returned


def iterate_together(items: Iterable[T], *, name: str) -> Iterator[T]:
    """The items, each once every rank has one; an error on any rank, or an end on some only, is raised on all."""
    iterator = call_together(lambda: iter(items))
    while True:
        item = call_together(lambda: next(iterator, None))
        ended, processes = sum_integers([int(item is None)])[0], count_processes()
        if 0 < ended < processes:
            raise RunFailed(f"{name} ended on {ended} of {processes} ranks only; pass loaders of equal length")
        if item is None:
            return
        yield item


@contextmanager
def naming_missing(find_missing: Callable[[], list[str]]) -> Generator[None, None, None]:
    """In the block the words for a lost process name the ranks that the function finds missing. It may wait some
    seconds; it is asked once for each error."""
    _finders.append(find_missing)
    try:
        yield
    finally:
        _finders.remove(find_missing)


def is_lost_process(error: BaseException) -> bool:
    """Whether it is what a collective raises where another process is gone."""
    return isinstance(error, dist.DistBackendError) or "gloo/transport" in str(error)


def describe_error(error: BaseException) -> str:
    """The error's own words; its type too where the words alone would not say what happened."""
    text = str(error).strip()
    if is_lost_process(error):
        lines = text.splitlines() or [type(error).__name__]
        missing = _find_missing(error)
        who = f"{', '.join(missing)} of the run" if missing else "another process of the run"
        return f"{who} ended or could not be reached; its own output says why ({lines[0]})"
    if isinstance(error, (OSError, ValueError, RuntimeError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find_missing(error: BaseException) -> list[str]:
    """What was found for this error before, if anything."""
    if not hasattr(error, _MISSING):
        setattr(error, _MISSING, _finders[-1]() if _finders else [])
    return getattr(error, _MISSING)
