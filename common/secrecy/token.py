"""Tokens, with which a client enrols: what checks the server, and a secret that the server knows hashed.

    HB1.IKaQ3vNUTnTfm5NWcs2vvb3Z0vSTw0gNFdbbVZ5m0ZI.nX1rZ0lF3nB2cV5mK8sQxw

The first part is the fingerprint of the server's CA, the second one the secret.
"""

import base64
import re
import secrets
from dataclasses import dataclass

from hyperbloom.common.errors import ConfigError

HEADER = "hyperbloom-token"
"""Header of a call whose key is not known yet: the secret, and the name that the client wants to have."""

REFUSED = "cannot enrol: "
"""Start of the server's text for a token that is not good."""

HAS_A_KEY = "has a key already"
"""Part of the server's text for a name that another key has: no token helps."""

_FORM = re.compile(r"HB1\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{22})")


@dataclass(frozen=True)
class Token:
    """A token; `server` is the fingerprint of a CA's certificate as `server_of` returns it."""

    server: str
    secret: str

    @classmethod
    def of(cls, server: str) -> "Token":
        """Return a new token of a server, with 128 random bits."""
        return cls(server, secrets.token_urlsafe(16))

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Read what `str` has written; ConfigError if it is no token."""
        found = _FORM.fullmatch(text.strip())
        if not found:
            raise ConfigError("--token: expected what the server printed, HB1. and two more parts; copy all of it")
        plain = base64.b64encode(base64.urlsafe_b64decode(f"{found[1]}=")).decode().rstrip("=")
        return cls(f"SHA256:{plain}", found[2])

    def __str__(self) -> str:
        digest = base64.b64decode(self.server.removeprefix("SHA256:") + "=")
        return f"HB1.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}.{self.secret}"
