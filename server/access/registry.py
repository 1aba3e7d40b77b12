"""The registry of clients: a file that binds each client's name to its public key. A running server reads it.

    {"clients": {"ward-7": {"public_key": "-----BEGIN ...", "added": "2026-01-31", "revoked": null}},
     "retired": ["SHA256:..."]}

A revoked or replaced key is retired and never accepted again. The file holds no private keys.
"""

import datetime as dt
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import locked, write_json
from hyperbloom.common.program.names import check_name
from hyperbloom.common.secrecy.keys import fingerprint, parse_public_key
from hyperbloom.common.secrecy.token import HAS_A_KEY, RETIRED


@dataclass(frozen=True)
class RegisteredClient:
    """A client's key. Days are ISO dates; `revoked` is None while the client may join."""

    public_key: str
    added: str
    revoked: str | None = None


class ClientRegistry:
    """The registry in the file at `path`; a missing file is an empty registry."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clients(self) -> dict[str, RegisteredClient]:
        """Return all clients by name, including revoked ones; ConfigError if the file is damaged."""
        return self._read()[0]

    def keys(self) -> dict[str, str]:
        """Return the names of the clients that may join now, by public key."""
        return {client.public_key: name for name, client in self.clients().items() if client.revoked is None}

    def add(self, name: str, public_key: str, replace: bool = False) -> None:
        """Let a client join with a key in PEM; with `replace`, in place of the one that it has, which is then retired.

        Raises:
            ConfigError: the client has a key already, or the key is retired or belongs to another client.
        """
        check_name(name, "NAME")
        with locked(self.path):
            clients, retired = self._read()
            if fingerprint(public_key) in retired:
                raise ConfigError(f"{name}: {RETIRED}; make a new one, or delete servers/ in its state folder")
            owner = next((other for other, client in clients.items() if client.public_key == public_key), None)
            if owner == name:
                return  # a script may add all clients again
            if owner is not None:
                raise ConfigError(f"{name}: this is the key of {owner}; every client needs one of its own")
            old = clients.get(name)
            if old and old.revoked is None:
                if not replace:
                    how = "use its state folder, or another --client-id; `clients add --replace` takes this key"
                    raise ConfigError(f"{name} {HAS_A_KEY}: {how}")
                retired.append(fingerprint(old.public_key))
            clients[name] = RegisteredClient(public_key, _today())
            self._write(clients, retired)

    def revoke(self, name: str) -> None:
        """Revoke a client's key for good, which also ends its session; ConfigError if there is no such client."""
        with locked(self.path):
            clients, retired = self._read()
            client = clients.get(name)
            if client is None:
                raise ConfigError(f"{name}: expected one of {', '.join(clients) or 'no clients'} in {self.path}")
            if client.revoked is None:
                clients[name] = RegisteredClient(client.public_key, client.added, _today())
                self._write(clients, [*retired, fingerprint(client.public_key)])

    def _read(self) -> tuple[dict[str, RegisteredClient], list[str]]:
        try:
            stored = json.loads(self.path.read_bytes())
            clients = {name: RegisteredClient(**fields) for name, fields in stored["clients"].items()}
            for name, client in clients.items():
                check_name(name, "clients")
                if parse_public_key(client.public_key.encode(), name) != client.public_key:
                    raise ConfigError(f"{name}: its key was changed by hand")
            return clients, list(stored["retired"])
        except FileNotFoundError:
            return {}, []
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self.path}: expected the registry of clients, found it damaged ({error})") from None

    def _write(self, clients: dict[str, RegisteredClient], retired: list[str]) -> None:
        stored = {"clients": {name: asdict(client) for name, client in sorted(clients.items())}, "retired": retired}
        write_json(self.path, stored, mode=0o600)


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()
