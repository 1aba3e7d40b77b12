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

    Python's own way out waits for threads, and then frees what is left while its daemon threads stand still. A gRPC
    channel or a thread pool that waits for such a thread waits for ever, and the process never ends. This function
    runs what has to run at the exit (output, `atexit`) for a limited time and leaves all else to the system.
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
