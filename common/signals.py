"""Ending a process: SIGTERM, which supervisors send, does what Ctrl-C does, and neither in the middle of a message."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["terminate_as_interrupt", "uninterrupted"]


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM while the body runs; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until the body is through; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda signum, frame: came.append(signum)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
