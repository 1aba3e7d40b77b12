"""What the SuperLink says: which lines its log keeps, and which the server's user sees.

gRPC gives the reason of a failed TLS handshake only in its trace (`GRPC_TRACE=handshaker`), a dozen lines per
connection, on the process's standard error. They are read here and not kept. Strangers choose words of some lines,
and could write lines of their own there. So nothing but printable characters passes, lines that differ only in the
sender's port are shown and kept once in `AGAIN_AFTER_S` seconds, and no more than `MOST` lines in that time.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from hyperbloom.common.errors import attempt, printable

AGAIN_AFTER_S = 60.0
MOST, LONGEST = 100, 300  # different lines in that time, and characters of one that others write
LARGEST_LOG = 16 * 2**20

_TRACE = {"GRPC_TRACE": "handshaker", "GRPC_VERBOSITY": "info"}
_GRPC = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\.(cc|h):\d+\]")
_NOISE = re.compile(
    r"[IW]\d{4} \S+ +\d+ ((handshaker|trace|log|ssl_transport_security|chttp2_transport)\.cc|channel_trace\.h):|"
    r"=== Source Location Trace|src/core/| shutdown=|$"
)
_FAILURE = re.compile(r"I\d{4} \S+ +\d+ handshaker\.cc:\d+\] CallNextHandshakerLocked: error=(?!OK)(.*)")
_PEER = re.compile(r".*grpc\.internal\.endpoint_peer_address=([^,}]+)")
_ADDRESS = re.compile(r"ipv4:([\d.]+):\d+|ipv6:\[([^\]]+)\]:\d+")
_log, _flower = logging.getLogger("hyperbloom.superlink"), logging.getLogger("flwr")


def say(text: str) -> None:
    """Tell the server's user a line, and keep it in the SuperLink's log."""
    _log.warning("%s", printable(_ADDRESS.sub(r"\1\2", unquote(text))))


def trace() -> None:
    """Let gRPC trace handshakes in this process, if it is not imported yet, and not in processes that this one starts.

    Flower imports gRPC, which reads these variables once.
    """
    if "grpc" not in sys.modules:
        os.environ.update(_TRACE)
        import grpc  # noqa: F401

        for name in _TRACE:
            del os.environ[name]


class LogFile(RotatingFileHandler):
    """Starts a new file at 16 MiB, keeps three, and drops lines that a full disk does not take."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST_LOG, backupCount=3, encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error."""

    def close(self) -> None:
        """Close the file; on a full disk its last lines are lost."""
        attempt(super().close)


@contextmanager
def follow(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep what the SuperLink says in a file, and tell the server's user, until the body ends."""
    file, told = LogFile(path), _Told(tell)
    filters = {logger: _Once() for logger in (_log, _flower)}
    for handler in (file, told):
        _log.addHandler(handler)
    for logger, once in filters.items():
        logger.addFilter(once)
    try:
        with _standard_error_read(lambda text: file.handle(logging.makeLogRecord({"msg": text}))):
            yield
    finally:
        for handler in (file, told):
            _log.removeHandler(handler)
            handler.close()
        for logger, once in filters.items():
            logger.removeFilter(once)


@contextmanager
def _standard_error_read(keep: Callable[[str], object]) -> Iterator[None]:
    """Read what libraries write to standard error while the body runs. `sys.stderr` stays the real one."""
    before, saved = sys.stderr, os.dup(2)
    reading, writing = os.pipe()
    # A library that holds the interpreter's lock must not wait for our reader, which needs that lock.
    os.set_blocking(writing, False)
    with os.fdopen(saved, "w", buffering=1, errors="replace") as real:
        reader = threading.Thread(target=_read_trace, args=(os.fdopen(reading, "rb"), keep, real), daemon=True)
        reader.start()
        os.dup2(writing, 2)
        os.close(writing)
        if before is sys.__stderr__:
            sys.stderr = real
        try:
            yield
        finally:
            os.dup2(saved, 2)
            sys.stderr = before
            reader.join(5)  # longer only if a process that was started meanwhile holds the pipe


def _read_trace(lines: IO[bytes], keep: Callable[[str], object], other: IO[str]) -> None:
    """Tell of refused clients in gRPC's trace until it ends: `keep` gets what to keep, `other` what is not gRPC's."""
    reason, limit = "", _Once()
    with lines:
        for number, line in enumerate(lines):
            text = line.decode(errors="replace").rstrip()
            if found := _FAILURE.match(text):
                reason = found[1]
            elif reason and (found := _PEER.match(text)):
                say(_explain(found[1], reason)[:LONGEST])
                reason = ""
            elif not _NOISE.match(text) and limit.lets(number):
                text = printable(text[:LONGEST])
                if _GRPC.match(text):
                    keep(text)
                else:
                    attempt(os.write, other.fileno(), f"{text}\n".encode(errors="replace"))


class _Once(logging.Filter):
    """Lets each line pass once, and `MOST` in all, in `AGAIN_AFTER_S` seconds; Flower's are alike if from one place."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._said = -AGAIN_AFTER_S, set[object]()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.name == _flower.name:
            text, record.msg, record.args = f"{record.pathname}:{record.lineno}", printable(text[:LONGEST]), ()
        return self.lets(text)

    def lets(self, line: object) -> bool:
        """Return whether a line passes."""
        if (moment := time.monotonic()) - self._since >= AGAIN_AFTER_S:
            self._since, self._said = moment, set()
        passes = line not in self._said and len(self._said) < MOST
        if passes:
            self._said.add(line)
        return passes


class _Told(logging.Handler):
    """Tells the server's user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        attempt(self._tell, record.getMessage())  # whoever says a line that cannot be shown goes on


def _explain(peer: str, reason: str) -> str:
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
        return f"refused {peer}: it spoke plain text to the TLS port (is it a client with --insecure?)"
    if "Socket closed" in reason or "ALERT" in reason:
        return (
            f"{peer} broke off the TLS handshake: a client that does not trust this certificate "
            "(flower-client --root-certificates, an address that it does not name, a wrong clock), or a port scan"
        )
    more = "; does it speak HTTP (--http), or scan ports?" if "ALPN" in reason else ""
    return f"refused {peer}: the TLS handshake failed ({reason}){more}"
