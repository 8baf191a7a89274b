"""How far a scoring is: one line, rewritten on a terminal, printed now and then elsewhere."""

import time
from collections.abc import Callable
from typing import Protocol, TextIO

PRINT_EVERY_S = 30.0
REWRITE_EVERY_S = 0.2


class Progress(Protocol):
    """Is told what will be read and what was."""

    def begin(self, name: str, num_requests: int, num_tokens: int, /) -> None: ...
    def advance(self, num_requests: int, num_tokens: int, /) -> None: ...
    def end(self) -> None: ...


class Share:
    """This process's part of a work, told as if the others were as far with theirs; to nobody where there is no
    progress."""

    def __init__(
        self, progress: Progress | None, name: str, *, num_requests: int, num_tokens: int, own_tokens: int
    ) -> None:
        self._progress, self._own_tokens = progress, own_tokens
        self._totals, self._told, self._read_tokens = (num_requests, num_tokens), (0, 0), 0
        if progress is not None:
            progress.begin(name, num_requests, num_tokens)

    def advance(self, own_tokens: int) -> None:
        """So many more tokens of this process's are read."""
        self._read_tokens += own_tokens
        self._tell(tuple(total * self._read_tokens // self._own_tokens for total in self._totals))

    def end(self) -> None:
        """All processes have done their parts."""
        self._tell(self._totals)
        if self._progress is not None:
            self._progress.end()

    def _tell(self, done: tuple[int, ...]) -> None:
        if self._progress is not None and done != self._told:
            self._progress.advance(done[0] - self._told[0], done[1] - self._told[1])
        self._told = done


class ProgressLine:
    """Requests done and to do, tokens a second and the time left.

    Written to the stream; None writes nothing, as on all ranks but the first.
    """

    def __init__(self, stream: TextIO | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now = stream, now
        self._is_terminal = stream is not None and stream.isatty()

    def begin(self, name: str, num_requests: int, num_tokens: int, /) -> None:
        """A scoring starts that reads num_tokens."""
        self._name, self._num_requests, self._num_tokens = name, num_requests, num_tokens
        self._done_requests = self._done_tokens = 0
        self._began_s = self._written_s = self._now()

    def advance(self, num_requests: int, num_tokens: int, /) -> None:
        """So many more are done."""
        self._done_requests += num_requests
        self._done_tokens += num_tokens
        if self._now() - self._written_s >= (REWRITE_EVERY_S if self._is_terminal else PRINT_EVERY_S):
            self._write(end="" if self._is_terminal else "\n")

    def end(self) -> None:
        """The scoring is over."""
        self._write(end="\n")

    def _write(self, *, end: str) -> None:
        self._written_s = self._now()
        if self._stream is not None:
            start = "\r\x1b[K" if self._is_terminal else ""
            self._stream.write(f"{start}{self.describe()}{end}")
            self._stream.flush()

    def describe(self) -> str:
        """The line itself."""
        elapsed_s = max(self._now() - self._began_s, 1e-9)
        speed = self._done_tokens / elapsed_s
        line = f"{self._name} {self._done_requests:,}/{self._num_requests:,} requests  {speed:,.0f} tokens/s"
        left = self._num_tokens - self._done_tokens
        return f"{line}  {_spell_s(elapsed_s)}" if left <= 0 else f"{line}  ETA {_spell_s(left / max(speed, 1e-9))}"


def _spell_s(seconds: float) -> str:
    """1:02:03."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
