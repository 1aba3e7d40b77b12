"""Ending a process: SIGTERM, which supervisors send, does what Ctrl-C does."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["terminate_as_interrupt"]


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
