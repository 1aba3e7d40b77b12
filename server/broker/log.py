"""The SuperLink's log: which lines are kept, and which the server's user sees.

gRPC gives the reason of a failed TLS handshake only in its trace (`GRPC_TRACE=handshaker`), a dozen lines per
connection. They are parsed here and not kept. To keep a stranger from flooding the terminal, lines that differ only in
the sender's port are shown and kept once in `AGAIN_AFTER_S` seconds.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO
from urllib.parse import unquote

__all__ = ["TRACE", "relay", "say"]

SAYS = "door: "  # prefix of lines for the server's user

TRACE = {"GRPC_TRACE": "handshaker", "GRPC_VERBOSITY": "info"}
"""Variables that the SuperLink needs in its environment."""

AGAIN_AFTER_S = 60.0
MOST = 1000  # different lines remembered

_NOISE = re.compile(
    r"[IW]\d{4} \S+ +\d+ (handshaker|trace|log|ssl_transport_security)\.cc:|[IW]\d{4} \S+ +\d+ channel_trace\.h:|"
    r"=== Source Location Trace|src/core/| shutdown=|$"
)
_FAILURE = re.compile(r".*CallNextHandshakerLocked: error=(?!OK)(.*)")
_PEER = re.compile(r".*grpc\.internal\.endpoint_peer_address=([^,}]+)")
_ADDRESS = re.compile(r"ipv4:([\d.]+):\d+|ipv6:\[([^\]]+)\]:\d+")


def say(text: str) -> None:
    """Show the server's user a line, from within the SuperLink's process."""
    # A single write, or gRPC's own lines could come between text and newline.
    sys.stderr.write(f"{SAYS}{text}\n")
    sys.stderr.flush()


def relay(lines: Iterable[bytes], log: IO[bytes], tell: Callable[[str], None]) -> None:
    """Copy the SuperLink's output to its log until it ends, and report refused clients.

    Args:
        lines: the child's output.
        log: receives the lines worth keeping.
        tell: receives each line for the server's user.
    """
    said: dict[str, float] = {}
    reason = ""
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        told = text.removeprefix(SAYS) if text.startswith(SAYS) else ""
        if found := _FAILURE.match(text):
            reason = found[1]
        elif reason and (found := _PEER.match(text)):
            told, reason = _explain(found[1], reason), ""
        if not told:
            if not _NOISE.match(text):
                log.write(line)
                log.flush()
            continue
        told = _ADDRESS.sub(r"\1\2", unquote(told))
        if time.monotonic() - said.get(told, -AGAIN_AFTER_S) < AGAIN_AFTER_S:
            continue
        if len(said) >= MOST:
            said.clear()
        said[told] = time.monotonic()
        log.write(f"{told}\n".encode())
        log.flush()
        tell(told)


def _explain(peer: str, reason: str) -> str:
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
        return f"refused {peer}: it spoke plain text to the TLS port (is it a client with --insecure?)"
    if "Socket closed" in reason or "ALERT" in reason:
        return (
            f"{peer} broke off the TLS handshake: a client that does not trust this certificate "
            "(flower-client --root-certificates, an address that it does not name, a wrong clock), or a port scan"
        )
    return f"refused {peer}: the TLS handshake failed ({reason})"
