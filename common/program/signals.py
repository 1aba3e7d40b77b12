"""Ending a process: SIGTERM, which supervisors send, does what Ctrl-C does, and neither in the middle of a message.

After its last line a program ends within `GRACE_S` seconds, whatever its threads do (`run_program`).
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["run_program", "terminate_as_interrupt", "uninterrupted"]

GRACE_S = 3.0


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and end the process with the exit code that it returns, at most `GRACE_S` seconds later.

    Python's own way out is not certain. It stops daemon threads wherever they are, and then runs the destructors of
    what is left. The one of a gRPC channel takes a lock that gRPC's polling thread may have held when it was stopped,
    and then waits for ever: about one exit in 200 of a client on a busy machine. A thread pool or a child process that
    does not end holds it up as well. This function writes out what is buffered and runs what `atexit` holds, for a
    limited time, and leaves all else to the operating system.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as stop:  # `--help`, and flags that argparse refuses
        code = stop.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
    status = code if isinstance(code, int) else int(code is not None)
    try:
        # In a thread, because each of these can block: a full pipe, a child process that does not end.
        last = threading.Thread(target=_last_steps, daemon=True)
        last.start()
        last.join(GRACE_S)
    finally:  # Ctrl-C, once more
        os._exit(status)


def _last_steps() -> None:
    """Write out what is buffered and run what `atexit` holds."""
    for step in (sys.stdout.flush, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        try:
            step()
        except BrokenPipeError:
            continue  # nobody reads the output any more
        except Exception:
            sys.excepthook(*sys.exc_info())


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
