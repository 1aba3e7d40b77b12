"""Invitations: a file of tokens that let clients enrol, each with the names, the uses and the time that are left.

    {"invitations": [{"digest": "...", "name": "ward-7", "uses": 1, "until": "2026-01-31T12:00:00+00:00"}]}

It holds no secret, only digests of secrets. Tokens are random, so their digests need no salt.
"""

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import locked, write_json
from hyperbloom.common.program.names import check_name
from hyperbloom.common.secrecy.keys import parse_public_key, server_of
from hyperbloom.common.secrecy.token import Token
from hyperbloom.server.access.certificates import Certificates, now
from hyperbloom.server.access.registry import ClientRegistry

KEPT = dt.timedelta(days=1)
"""How long one that is used up or over is kept, so that whoever comes with it is told why it is refused."""


@dataclass(frozen=True)
class Invitation:
    """A token that was given out; `name` is the one client that may use it, None any."""

    digest: str
    name: str | None
    uses: int
    until: str

    @property
    def is_over(self) -> bool:
        """Return whether its time is over."""
        return dt.datetime.fromisoformat(self.until) < now()


class Invitations:
    """The invitations of a folder of certificates; a missing file is none."""

    def __init__(self, files: Certificates) -> None:
        self._files, self.path = files, files.invitations

    def all(self) -> Sequence[Invitation]:
        """Return all that are kept; ConfigError if the file is damaged."""
        try:
            return [Invitation(**fields) for fields in json.loads(self.path.read_bytes())["invitations"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{self.path}: expected invitations, found it damaged ({error}); delete it") from None

    def invite(self, name: str | None, uses: int, seconds: float) -> Token:
        """Return a new token for a client, or for so many clients of any name."""
        token = Token.of(server_of(self._files.ca))
        if not token.server:
            raise ConfigError(f"{self._files.ca}: expected one certificate, the CA's, by which clients know the server")
        until = (now() + dt.timedelta(seconds=seconds)).isoformat(timespec="seconds")
        with locked(self.path):
            new = Invitation(_digest(token.secret), name and check_name(name, "NAME"), uses, until)
            self._write([*self.all(), new])
        return token

    def cancel(self, name: str) -> list[Invitation]:
        """Take back a client's tokens, and those for any name, which it may know; return them."""
        with locked(self.path):
            found = self.all()
            self._write([each for each in found if each.name not in (None, name)])
        return [each for each in found if each.name in (None, name)]

    def redeem(self, secret: str, name: str, public_key: str) -> None:
        """Enter a client's key into the registry, and count the use.

        Raises:
            ConfigError: the token is unknown, used up, over or another client's, or the registry refuses name or key.
        """
        with locked(self.path):
            invitations = {each.digest: each for each in self.all()}
            found = invitations.get(_digest(secret))
            if found is None:
                raise ConfigError("its token is unknown")
            if found.uses < 1:
                raise ConfigError("its token was used before")
            if found.is_over:
                raise ConfigError(f"its token has expired at {found.until}")
            if found.name not in (None, name):
                raise ConfigError("its token is for a client of another name")
            if parse_public_key(public_key.encode(), "its key") != public_key:
                raise ConfigError("its key: expected PEM as flower-client writes it")  # or the registry is damaged
            ClientRegistry(self._files.clients).add(name, public_key)
            invitations[found.digest] = replace(found, uses=found.uses - 1)
            self._write(invitations.values())

    def _write(self, invitations: Iterable[Invitation]) -> None:
        kept = [each for each in invitations if dt.datetime.fromisoformat(each.until) + KEPT > now()]
        write_json(self.path, {"invitations": [asdict(each) for each in kept]}, mode=0o600)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
