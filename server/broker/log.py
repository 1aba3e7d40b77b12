"""What the SuperLink says: which lines its log keeps, and which the server's user sees.

gRPC gives the reason of a failed TLS handshake only in its trace (`GRPC_TRACE=handshaker`), a dozen lines per
connection, on the process's standard error. They are read here and not kept. To keep a stranger from flooding the
terminal, lines that differ only in the sender's port are shown and kept once in `AGAIN_AFTER_S` seconds.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from hyperbloom.common.errors import attempt, printable

AGAIN_AFTER_S = 60.0
MOST, LONGEST = 1000, 300  # different lines remembered, and characters of one of Flower's

_TRACE = {"GRPC_TRACE": "handshaker", "GRPC_VERBOSITY": "info"}
_GRPC = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\.(cc|h):\d+\]")
_NOISE = re.compile(
    r"[IW]\d{4} \S+ +\d+ (handshaker|trace|log|ssl_transport_security)\.cc:|[IW]\d{4} \S+ +\d+ channel_trace\.h:|"
    r"=== Source Location Trace|src/core/| shutdown=|$"
)
_FAILURE = re.compile(r".*CallNextHandshakerLocked: error=(?!OK)(.*)")
_PEER = re.compile(r".*grpc\.internal\.endpoint_peer_address=([^,}]+)")
_ADDRESS = re.compile(r"ipv4:([\d.]+):\d+|ipv6:\[([^\]]+)\]:\d+")
_log, _flower = logging.getLogger("hyperbloom.superlink"), logging.getLogger("flwr")


def say(text: str) -> None:
    """Tell the server's user a line, and keep it in the SuperLink's log."""
    _log.warning("%s", _ADDRESS.sub(r"\1\2", unquote(text)))


def trace() -> None:
    """Let gRPC trace handshakes in this process, if it is not imported yet, and not in processes that this one starts.

    Flower imports gRPC, which reads these variables once.
    """
    if "grpc" not in sys.modules:
        os.environ.update(_TRACE)
        import grpc  # noqa: F401

        for name in _TRACE:
            del os.environ[name]


@contextmanager
def follow(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep what the SuperLink says in a file, and tell the server's user, until the body ends."""
    with path.open("ab") as file:
        handler, once = _Told(file, tell), _Once()
        _log.addHandler(handler)
        for logger in (_log, _flower):
            logger.addFilter(once)
        try:
            with _standard_error_read(file):
                yield
        finally:
            _log.removeHandler(handler)
            for logger in (_log, _flower):
                logger.removeFilter(once)


@contextmanager
def _standard_error_read(log: IO[bytes]) -> Iterator[None]:
    """Read what libraries write to standard error while the body runs. `sys.stderr` stays the real one."""
    before, saved = sys.stderr, os.dup(2)
    reading, writing = os.pipe()
    # A library that holds the interpreter's lock must not wait for our reader, which needs that lock.
    os.set_blocking(writing, False)
    with os.fdopen(saved, "w", buffering=1, errors="replace") as real:
        reader = threading.Thread(target=_read_trace, args=(os.fdopen(reading, "rb"), log, real), daemon=True)
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


def _read_trace(lines: IO[bytes], log: IO[bytes], other: IO[str]) -> None:
    """Tell of refused clients in gRPC's trace until it ends: `log` gets what to keep, `other` what is not gRPC's."""
    reason = ""
    with lines:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if found := _FAILURE.match(text):
                reason = found[1]
            elif reason and (found := _PEER.match(text)):
                say(_explain(found[1], reason))
                reason = ""
            elif not _NOISE.match(text):
                _put(log if _GRPC.match(text) else other, text)


class _Once(logging.Filter):
    """Lets each line pass once in `AGAIN_AFTER_S` seconds; Flower's are alike if their templates are."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text, moment = record.getMessage(), time.monotonic()
        if record.name == _flower.name:
            text, record.msg, record.args = str(record.msg), printable(text[:LONGEST]), ()
        if moment - self._said.get(text, -AGAIN_AFTER_S) < AGAIN_AFTER_S:
            return False
        if len(self._said) >= MOST:
            self._said.clear()
        self._said[text] = moment
        return True


class _Told(logging.Handler):
    """Writes lines to the SuperLink's log and tells the server's user."""

    def __init__(self, file: IO[bytes], tell: Callable[[str], None]) -> None:
        super().__init__()
        self._file, self._tell = file, tell

    def emit(self, record: logging.LogRecord) -> None:
        _put(self._file, record.getMessage())
        attempt(self._tell, record.getMessage())  # whoever says a line that cannot be shown goes on


def _put(file: IO[Any], text: str) -> None:
    """Write a line; on a full disk it is lost, and who says it goes on."""
    with suppress(OSError):
        os.write(file.fileno(), f"{text}\n".encode(errors="replace"))


def _explain(peer: str, reason: str) -> str:
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
        return f"refused {peer}: it spoke plain text to the TLS port (is it a client with --insecure?)"
    if "Socket closed" in reason or "ALERT" in reason:
        return (
            f"{peer} broke off the TLS handshake: a client that does not trust this certificate "
            "(flower-client --root-certificates, an address that it does not name, a wrong clock), or a port scan"
        )
    return f"refused {peer}: the TLS handshake failed ({reason})"
