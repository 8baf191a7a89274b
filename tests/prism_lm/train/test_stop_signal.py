"""Stop signals set a flag and nothing else."""

import os
import signal
import threading
import time

import pytest

from prism_lm.train import stop_signal
from prism_lm.train.stop_signal import STOP_SIGNALS, StopSignal

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag_and_the_former_handler_returns(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is former


def test_one_press_that_arrives_twice_does_not_interrupt() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_second_press_later_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "SAME_PRESS_S", 0.0)
    with StopSignal(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def test_watcher_learns_of_a_further_signal_only_when_it_is_another_press(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "SAME_PRESS_S", 0.3)
    with StopSignal() as stop:
        stop.is_watched = True
        assert not stop.wait(0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.wait(1.0) and stop.requested
        time.sleep(0.4)
        assert not stop.wait(0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(1.0)


def test_signal_read_late_by_the_watcher_is_still_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signal, "SAME_PRESS_S", 0.1)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        assert not stop.wait(1.0)


def test_waiting_watcher_is_woken_by_another_thread() -> None:
    with StopSignal() as stop:
        threading.Timer(0.1, stop.wake).start()
        began_s = time.monotonic()
        assert not stop.wait(10.0) and not stop.requested
        assert time.monotonic() - began_s < 5.0


def test_former_wakeup_descriptor_returns() -> None:
    with StopSignal():
        pass
    assert signal.set_wakeup_fd(-1) == -1
