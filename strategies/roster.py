"""Who is in the federation: stable clients on nodes that come and go. Pure bookkeeping; no Flower in here.

A node id changes with every process, so it is no identity. A client is known by its name and by the secret that it
made for itself; whoever shows both is that client, with its embedding row, wherever it comes from.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hyperbloom.common.errors import RefusedError
from hyperbloom.common.messages import Introduction
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.conduct import Conduct

__all__ = ["Client", "Roster"]


@dataclass(frozen=True)
class Client:
    """One client as the server knows it; `row` is its place in the embedding table, for ever."""

    client_id: str
    row: int
    token_hash: str
    node_id: int | None  # the node it lives on now, None while it is away
    about: Introduction


class Roster:
    """All clients that were ever admitted, in order of their rows.

    Args:
        seed: of the run; decides every cohort.
    """

    def __init__(self, seed: int) -> None:
        """Start empty."""
        self.seed = seed
        self.busy: set[int] = set()  # nodes that still work on an order
        self.round = 0  # the one that runs now, by which quarantine ends
        self.conduct = Conduct()
        self._clients: dict[str, Client] = {}
        self._names: dict[int, str] = {}  # of the clients that are on a node now, by node

    def __len__(self) -> int:
        """Number of clients ever admitted."""
        return len(self._clients)

    def __iter__(self) -> Iterator[Client]:
        """Iterate over all clients by row."""
        return iter(self._clients.values())

    @property
    def live(self) -> list[Client]:
        """Clients that are on a node now, by row."""
        return [client for client in self._clients.values() if client.node_id is not None]

    @property
    def live_count(self) -> int:
        """Number of clients that are on a node now."""
        return len(self._names)

    @property
    def idle_count(self) -> int:
        """Number of clients that are on a node now and have no order left to answer."""
        return len(self._names.keys() - self.busy)

    @property
    def trusted(self) -> list[Client]:
        """Clients that are on a node now and not in quarantine, by row."""
        return [client for client in self.live if not self.conduct.in_quarantine(client.client_id, self.round)]

    @property
    def idle(self) -> list[Client]:
        """Those of the trusted clients that have no order left to answer, by row."""
        return [client for client in self.trusted if client.node_id not in self.busy]

    def admit(self, node_id: int, about: Introduction) -> tuple[Client, int | None]:
        """Put a client on a node.

        Returns:
            the client, and the node that it lived on before if it has moved.

        Raises:
            RefusedError: the name belongs to a client with another secret.
        """
        token_hash = hashlib.sha256(about.token.encode()).hexdigest()
        known = self._clients.get(about.client_id)
        # The server has no use for the secret itself, and what is not kept cannot leak.
        about = replace(about, token="")
        if known is None:
            client = Client(about.client_id, len(self._clients), token_hash, node_id, about)
            self._place(client)
            return client, None
        if not hmac.compare_digest(known.token_hash, token_hash):
            where = "is connected" if known.node_id is not None else "took part before"
            raise RefusedError(
                f"a client named {about.client_id!r} with another identity {where}. Choose another --client-id, or, if "
                "this is that client, give it back the state folder (--state-dir) that it had"
            )
        client = replace(known, node_id=node_id, about=about)
        moved_from = known.node_id if known.node_id != node_id else None
        if moved_from is not None:
            del self._names[moved_from]
        self._place(client)
        return client, moved_from

    def _place(self, client: Client) -> None:
        assert client.node_id is not None
        self.leave(client.node_id)  # a node is one client, the one that it last said it is
        self._clients[client.client_id] = client
        self._names[client.node_id] = client.client_id

    def leave(self, node_id: int) -> Client | None:
        """Note that a node is gone; returns the client that lived there."""
        client = self.on_node(node_id)
        if client:
            del self._names[node_id]
            self._clients[client.client_id] = replace(client, node_id=None)
        return client

    def examples_of(self, name: str) -> int | None:
        """Return how many training examples a client said that it has; None if it is unknown."""
        client = self._clients.get(name)
        return client.about.train_examples if client else None

    def on_node(self, node_id: int) -> Client | None:
        """Return the client that lives on a node."""
        name = self._names.get(node_id)
        return None if name is None else self._clients[name]

    def sort(self, first: int) -> None:
        """Number the rows from `first` on by name, so that a run does not depend on who joined first.

        Only before those rows are used.
        """
        clients = list(self._clients.values())
        ordered = clients[:first] + sorted(clients[first:], key=lambda client: client.client_id)
        self._clients = {client.client_id: replace(client, row=row) for row, client in enumerate(ordered)}

    def draw(self, round_number: int, size: int, among: Iterable[Client] | None = None) -> list[Client]:
        """Draw the cohort of a round uniformly without replacement, in order of rows.

        Args:
            round_number: decides the draw together with the seed.
            size: clients to draw; fewer if fewer are there.
            among: the candidates; all idle clients by default.
        """
        candidates = list(self.idle if among is None else among)
        generator = torch.Generator().manual_seed(derive(self.seed, "cohort", round_number))
        chosen = torch.randperm(len(candidates), generator=generator)[:size].sort().values
        return [candidates[int(index)] for index in chosen]

    def to_json(self) -> dict[str, Any]:
        """Return the roster as it is stored in a run folder: names, rows, hashes of secrets, and what clients said."""
        return {
            "seed": self.seed,
            "conduct": self.conduct.to_json(),
            "clients": [
                {
                    "client_id": client.client_id,
                    "row": client.row,
                    "token_hash": client.token_hash,
                    "about": {
                        key: value for key, value in vars(client.about).items() if key not in ("token", "client_id")
                    },
                }
                for client in self
            ],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Roster":
        """Read what `to_json` returned; every client is away."""
        roster = cls(int(stored["seed"]))
        roster.conduct = Conduct.from_json(stored.get("conduct", {}))
        for entry in stored["clients"]:
            about: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in entry["about"].items()
            }
            introduction = Introduction(**about, client_id=entry["client_id"], token="")
            client = Client(entry["client_id"], int(entry["row"]), entry["token_hash"], None, introduction)
            roster._clients[client.client_id] = client
        return roster
