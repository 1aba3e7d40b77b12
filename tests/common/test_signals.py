"""Signals that end a process: what becomes of them, and when."""

import os
import signal
import threading

import pytest

from hyperbloom.common.signals import terminate_as_interrupt, uninterrupted


def test_sigterm_is_what_ctrl_c_is_and_only_meanwhile() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_body_is_through(number: signal.Signals) -> None:
    steps = []
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        with uninterrupted():
            os.kill(os.getpid(), number)
            steps.append("through")
        steps.append("never")
    assert steps == ["through"]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_error_in_the_body_is_not_lost_without_a_signal() -> None:
    with pytest.raises(ValueError, match="broken"), uninterrupted():
        raise ValueError("broken")


def test_other_threads_are_left_alone() -> None:
    seen: list[object] = []

    def body() -> None:
        with uninterrupted(), terminate_as_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
