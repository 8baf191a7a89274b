"""Stop signals set a flag and nothing else."""

import os
import signal

import pytest

from prism_lm.train import stop_signal
from prism_lm.train.stop_signal import STOP_SIGNALS, StopSignal


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
