"""Waiting for something slow while a stop signal is still noticed."""

import threading
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


class Wait(Enum):
    """What a wait can end with instead of its result."""

    STOPPED = "stopped"
    "A stop was asked for first."


STOPPED: Literal[Wait.STOPPED] = Wait.STOPPED


def call_interruptibly(
    function: Callable[[], T], should_stop: Callable[[], bool], poll_s: float = 0.1
) -> T | Literal[Wait.STOPPED]:
    """What the function returns, or STOPPED where should_stop, asked every poll_s seconds, said so first.

    The function runs in a thread, so that this one stays free for signals; what it raises is raised here with its
    traceback. After STOPPED the thread may still run, and what the function works on must not be used again.
    """
    if should_stop():
        return STOPPED
    call = _Call(function)
    thread = threading.Thread(target=call.run, name="interruptible", daemon=True)
    thread.start()
    while not call.done.wait(poll_s):
        if should_stop():
            return STOPPED
    thread.join()
    if call.error is not None:
        raise call.error
    return call.returned[0]


class _Call(Generic[T]):
    """A call in another thread, and what became of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.done = threading.Event()
        self.returned: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.returned.append(self._function())
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


def iterate_interruptibly(items: Iterable[T], should_stop: Callable[[], bool]) -> Iterator[T | Literal[Wait.STOPPED]]:
    """The items, none of them None; STOPPED is the last one where a stop was asked for while the next was awaited."""
    iterator = iter(items)
    while (item := call_interruptibly(lambda: next(iterator, None), should_stop)) is not None:
        yield item
        if item is STOPPED:
            return
