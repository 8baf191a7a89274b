"""Signals that ask the run to save and end."""

import os
import select
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal's Ctrl-C reaches a worker twice within moments, once directly and once through torchrun.
SAME_PRESS_S = 2.0


class StopSignal:
    """While entered, a stop signal sets `requested` and does nothing else.

    A further one, at least SAME_PRESS_S after the first, asks to stop at once: a watcher (`is_watched`) learns it from
    `wait`, whatever the main thread is doing; without a watcher SIGINT interrupts the main thread. The former handlers
    come back at exit. Outside the main thread, where Python allows no handlers, it sets none.
    """

    def __init__(self) -> None:
        self.requested = False
        self.is_watched = False
        self._first_at_s: float | None = None
        self._first_read_s: float | None = None
        self._former: dict[signal.Signals, Any] = {}
        self._former_wakeup: int | None = None
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> "StopSignal":
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        if threading.current_thread() is threading.main_thread():
            self._former_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._former = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._former_wakeup is not None:
            signal.set_wakeup_fd(self._former_wakeup)
        for end in self._pipe or ():
            os.close(end)
        self._former, self._former_wakeup, self._pipe = {}, None, None

    def wait(self, wait_s: float) -> bool:
        """Waits up to wait_s for a signal, or for `wake`; True once a further one asks to stop at once. For one thread,
        inside the block."""
        assert self._pipe is not None, "StopSignal must be entered"
        if not select.select([self._pipe[0]], [], [], wait_s)[0]:
            return False
        presses = [number for number in os.read(self._pipe[0], 512) if number in STOP_SIGNALS]
        if not presses:
            return False
        now_s, self.requested = time.monotonic(), True
        if self._first_read_s is None:
            self._first_read_s = now_s
        return now_s - self._first_read_s >= SAME_PRESS_S

    def wake(self) -> None:
        """Ends a `wait` that another thread is in."""
        if self._pipe is not None:
            os.write(self._pipe[1], b"\0")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._first_at_s is None:
            self.requested, self._first_at_s = True, now_s
        elif number == signal.SIGINT and not self.is_watched and now_s - self._first_at_s >= SAME_PRESS_S:
            raise KeyboardInterrupt
