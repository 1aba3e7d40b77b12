"""The roster: stable clients on nodes that come and go. Pure bookkeeping without Flower.

A node id changes with every process, so it identifies nobody. A client is known by its name and by its key, or, where
nodes have no keys, by a secret that it has generated. A process that shows both is that client and keeps its embedding
row, on whatever machine it runs. So a client with a key may lose its state folder.

Clients whose replies are refused for their content are counted, and left out for some rounds: quarantine. Only wrong
names, shapes or numbers, values that are not finite, and excessive norms or sizes count. A client that is away, out of
memory or reports that its training diverged has failed; it is asked again. One that is late each time is left out too,
because each round that it is in waits for it in vain.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.wire.orders import Introduction
from hyperbloom.strategies.exchange import Client

PATIENCE = 3
"""Number of refused replies, or of deadlines missed in a row, that lead to a quarantine."""
FIRST_TERM = 10
"""Rounds of the first quarantine. Each further quarantine of a client is twice as long."""


@dataclass
class _Record:
    lies: int = 0  # refused replies since the last quarantine
    missed: int = 0  # deadlines since the last quarantine, or training in time
    terms: int = 0  # quarantines so far
    until: int = 0  # last round of the latest quarantine


class Conduct:
    """Counts refused replies and missed deadlines by client, and knows who is in quarantine."""

    def __init__(self, stored: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._records = {name: _Record(**record) for name, record in stored.items()}

    def failed(self, name: str, round_number: int, lie: bool) -> int | None:
        """Count a refused reply (`lie`) or a missed deadline; return the last round of its quarantine, or None."""
        record = self._records.setdefault(name, _Record())
        record.lies, record.missed = record.lies + lie, record.missed + (not lie)
        if max(record.lies, record.missed) < PATIENCE:
            return None
        term = FIRST_TERM * 2**record.terms
        record.lies, record.missed, record.terms, record.until = 0, 0, record.terms + 1, round_number + term
        return record.until

    def in_time(self, name: str) -> None:
        """Forget the missed deadlines of a client that has trained in time."""
        if name in self._records:
            self._records[name].missed = 0

    def in_quarantine(self, name: str, round_number: int) -> bool:
        """Return whether a client gets no orders in this round; round 0 exists."""
        record = self._records.get(name)
        return record is not None and record.terms > 0 and round_number <= record.until

    def begin_anew(self, done: int | None = None) -> None:
        """Count rounds from 1 again, after `done` of them; None: after so many that all quarantines are over."""
        for record in self._records.values():
            record.until = -1 if done is None else record.until - done

    def to_json(self) -> dict[str, Any]:
        """Return all records as the roster stores them, and as a new object takes them."""
        return {name: asdict(record) for name, record in self._records.items()}


class Roster:
    """All clients ever admitted, in order of their rows."""

    def __init__(self) -> None:
        self.conduct = Conduct()
        self.moments: tuple[float, ...] = ()  # by which clients standardise targets, from the first round on
        self._clients: dict[str, Client] = {}
        self._secrets: dict[str, str] = {}  # by name, the hash of a client's secret
        self._nodes: dict[str, int] = {}  # by name, the client's current node
        self._names: dict[int, str] = {}  # by node, the client's name

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    @property
    def live(self) -> list[Client]:
        """Return the clients that are on a node now, by row."""
        return [client for client in self if client.client_id in self._nodes]

    @property
    def live_count(self) -> int:
        """Return the number of clients that are on a node now."""
        return len(self._names)

    def node_of(self, client: Client) -> int | None:
        """Return the client's current node, or None while it is away."""
        return self._nodes.get(client.client_id)

    def on_node(self, node_id: int) -> Client | None:
        """Return the client on a node, or None."""
        name = self._names.get(node_id)
        return None if name is None else self._clients[name]

    def find(self, name: str) -> Client | None:
        """Return the client with this name, or None."""
        return self._clients.get(name)

    def admit(self, node_id: int, about: Introduction, by_key: bool = False) -> tuple[Client, int | None]:
        """Put a client on a node; return it, and its previous node if it has moved.

        Raises:
            RefusedError: the name belongs to a client with another secret, and no key shows that it is its own.
        """
        name, secret = about.client_id, hashlib.sha256(about.token.encode()).hexdigest()
        # Keep only the hash: the server does not need the secret, and what it does not keep cannot leak.
        about = replace(about, token="")
        known = self._clients.get(name)
        if known and not by_key and not hmac.compare_digest(self._secrets[name], secret):
            where = "is connected" if name in self._nodes else "took part before"
            raise RefusedError(
                f"a client named {name!r} with another identity {where}. Choose another --client-id, or, if "
                "this is that client, give it back the state folder (--state-dir) that it had"
            )
        before = self._nodes.pop(name, None)
        if before is not None:
            del self._names[before]
        self.leave(node_id)  # a node is one client: the one that it named last
        client = Client(name, known.row if known else len(self._clients), about)
        self._clients[name], self._secrets[name] = client, secret
        self._nodes[name], self._names[node_id] = node_id, name
        return client, before if before != node_id else None

    def leave(self, node_id: int) -> None:
        """Record that a node has left."""
        if name := self._names.pop(node_id, None):
            del self._nodes[name]

    def clear(self) -> None:
        """Forget all clients."""
        for each in (self._clients, self._secrets, self._nodes, self._names):
            each.clear()

    def sort(self, first: int) -> None:
        """Number the rows from `first` on by name, so that a run does not depend on the order of joining.

        Call it only before these rows are used.
        """
        clients = list(self)
        ordered = clients[:first] + sorted(clients[first:], key=lambda client: client.client_id)
        self._clients = {client.client_id: replace(client, row=row) for row, client in enumerate(ordered)}

    def to_json(self) -> dict[str, Any]:
        """Return the roster as a run folder stores it: names, rows, hashes of secrets, and introductions."""
        return {
            "conduct": self.conduct.to_json(),
            "moments": list(self.moments),
            "clients": [
                {
                    "client_id": client.client_id,
                    "row": client.row,
                    "token_hash": self._secrets[client.client_id],
                    "about": {
                        key: value for key, value in vars(client.about).items() if key not in ("token", "client_id")
                    },
                }
                for client in self
            ],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Roster":
        """Read what `to_json` returned, with every client away; ConfigError if a row is missing or there twice."""
        roster = cls()
        roster.conduct = Conduct(stored.get("conduct", {}))
        roster.moments = tuple(stored.get("moments", ()))
        for entry in stored["clients"]:
            about: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in entry["about"].items()
            }
            introduction = Introduction(**about, client_id=entry["client_id"], token="")
            client = Client(entry["client_id"], int(entry["row"]), introduction)
            roster._clients[client.client_id], roster._secrets[client.client_id] = client, entry["token_hash"]
        if [client.row for client in roster] != list(range(len(stored["clients"]))):
            raise ConfigError("the roster: expected clients with the rows 0, 1, 2 and so on, found others")
        return roster
