"""End of a process: SIGTERM, which supervisors send, works like Ctrl-C, and both can wait for a critical section.

After its last line a program ends within `GRACE_S` seconds, whatever its threads do (`run_program`).
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import methodcaller
from typing import Any, NoReturn

GRACE_S = 3.0
KILLED_S = 10.0
LOOK_EVERY_S = 0.5


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and end the process with the exit code that it returns, at most `GRACE_S` seconds later.

    Python's own exit can hang. It stops daemon threads at any point and then runs the remaining destructors. The
    destructor of a gRPC channel takes a lock that gRPC's polling thread may hold when it is stopped, and then waits
    forever: in about one of 200 exits of a client on a busy machine. A thread pool or a child process that does not end
    also blocks the exit. This function flushes the output and runs the `atexit` functions for a limited time, and
    leaves the rest to the operating system.
    """
    code: object = 1
    sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    try:
        code = main()
    except SystemExit as stop:  # raised by libraries
        code = stop.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
    status = code if isinstance(code, int) else int(code is not None)
    try:
        # In a thread, because each step can block, on a full pipe or on a child process that does not end.
        last = threading.Thread(target=_last_steps, daemon=True)
        last.start()
        last.join(GRACE_S)
    finally:  # also on another Ctrl-C
        os._exit(status)


def _last_steps() -> None:
    """Flush the output and run the `atexit` functions."""
    for step in (sys.stdout.flush, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        try:
            step()
        except OSError:
            continue  # the reader of the output has gone, or its disk is full
        except Exception:
            sys.excepthook(*sys.exc_info())


@contextmanager
def _handling(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """Let a function handle signals while the body runs, if this is the main thread."""
    here = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers if here}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def terminate_as_interrupt() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on SIGTERM while the body runs, if this is the main thread."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    return _handling(interrupt, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the body ends, if this is the main thread."""
    came: list[int] = []
    try:
        with _handling(lambda signum, frame: came.append(signum), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def end_children(children: Sequence[subprocess.Popen[Any]], patience_s: float) -> None:
    """Wait for processes to end; terminate those that take `patience_s`, and kill those that then take `KILLED_S`."""
    for end, seconds in ((methodcaller("terminate"), patience_s), (methodcaller("kill"), KILLED_S)):
        deadline = time.monotonic() + seconds
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.0, deadline - time.monotonic()))
        children = [child for child in children if child.poll() is None]
        for child in children:
            end(child)
    for child in children:
        child.wait()


def end_with(parent: int) -> None:
    """Send this process SIGTERM once the process that has started it has ended, or was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)  # what a script starts in the background ignores SIGINT

    threading.Thread(target=watch, daemon=True).start()
