"""Signals that ask the run to save and end."""

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

    A further SIGINT, at least SAME_PRESS_S after the first signal, interrupts at once. The former handlers come back
    at exit. Outside the main thread, where Python allows no handlers, it sets none.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_at_s = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.requested:
            self.requested, self._first_at_s = True, now_s
        elif number == signal.SIGINT and now_s - self._first_at_s >= SAME_PRESS_S:
            raise KeyboardInterrupt
