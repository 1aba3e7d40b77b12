"""Enrolment with a token: the server shows who it is, then the client's first call shows the token."""

import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from hyperbloom.client.link.server import PROBE_S
from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.common.program.plain import place_of
from hyperbloom.common.secrecy.keys import make_key, name_of, server_of, shown_certificates, write_private_key
from hyperbloom.common.secrecy.token import Token

log = logging.getLogger("hyperbloom.client")

RETRY_S = 2.0


def enrol(address: str, text: str | None, name: str, folder: Path) -> dict[str, Any]:
    """Return the flags `root_certificates`, `key` and `secret` of the client `name`, whose state is in `folder`.

    A client has a key of its own for each server. What it has stays; only a token of another CA replaces it.

    Raises:
        ConfigError: the token is damaged.
        ConnectionFailed: the server is another one than the token's.
    """
    here, token = folder / "servers" / re.sub(r"[^A-Za-z0-9.-]", "_", address), Token.parse(text) if text else None
    known = [each.parent for each in folder.glob("servers/*/ca.pem") if not token or server_of(each) == token.server]
    if len(known) == 1:
        here = known[0]  # the server may have moved; its certificate says that it is the same
    ca, key = here / "ca.pem", here / "key.pem"
    if token and server_of(ca) != token.server:
        content = _ca(address, token.server)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private_key(key, make_key())
        write_bytes(ca, content)  # last: without it, all is done again
    if not ca.exists():
        return {"secret": ""}
    return {"root_certificates": ca, "key": key, "secret": f"{token.secret} {name}" if token else ""}


def _ca(address: str, expected: str) -> bytes:
    """Wait for a server; return the CA's certificate in PEM that it shows, if it has the expected fingerprint."""
    place, told = place_of(address), False
    while not (shown := shown_certificates(*place, PROBE_S)):
        if not told:
            why = _refused(place) or "it shows no certificate; is it the Fleet port, and started with --insecure?"
            log.warning("%s does not answer (%s); trying until it does (Ctrl-C leaves)", address, why)
        told = True
        time.sleep(RETRY_S)
    for each in shown:
        if name_of(each) == expected:
            return each.public_bytes(Encoding.PEM)
    raise ConnectionFailed(
        f"--token: {address} is another server than the token's; nothing was sent to it. Ask whoever runs the server"
    )


def _refused(place: tuple[str, int]) -> str:
    """Return why no connection can be made; an empty text if one can."""
    try:
        socket.create_connection(place, PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
