"""Tokens, with which a client enrols: what checks the server, and a secret that the server knows hashed.

    HB1.IKaQ3vNUTnTfm5NWcs2vvb3Z0vSTw0gNFdbbVZ5m0ZI.nX1rZ0lF3nB2cV5mK8sQxw

The first part is the fingerprint of the server's CA, the second one the secret.
"""

import re
import secrets
from dataclasses import dataclass

from hyperbloom.common.errors import ConfigError

HEADER = "hyperbloom-token"
"""Header of a call whose key is not known yet: the secret, and the name that the client wants to have."""
REFUSED = "cannot enrol: "
"""Start of the server's text for a token that is not good."""
HAS_A_KEY, RETIRED = "has a key already", "this key was revoked or replaced"
"""Parts of the server's texts for a name that another key has, and for a key of the past: no token helps."""

_URL_SAFE, _PLAIN = str.maketrans("+/", "-_"), str.maketrans("-_", "+/")
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
        return cls(f"SHA256:{found[1].translate(_PLAIN)}", found[2])

    def __str__(self) -> str:
        return f"HB1.{self.server.removeprefix('SHA256:').translate(_URL_SAFE)}.{self.secret}"
