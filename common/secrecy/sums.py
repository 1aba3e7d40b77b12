"""The parts of a secure sum, and how the masks depend on them.

The server tells all clients the same parts of the sum, and which clients train each part. Each client checks its own
entries. The masks of two clients depend on `told`, a digest of everything that both were told alike. If the server
tells them different things, their masks do not cancel, and the server can read neither change.

A digest of a tensor's name, shape and values before training identifies a part. Clients that received different values
therefore share no part. Otherwise a server could send all but one client weights that learn nothing (Pasquini,
Francati, Ateniese: Eluding Secure Aggregation in Federated Learning via Model Inconsistency, CCS 2022,
https://arxiv.org/abs/2111.07380).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from hyperbloom.common.config import FEWEST_CLIENTS
from hyperbloom.common.errors import WireError
from hyperbloom.common.methods import Method
from hyperbloom.common.wire.masks import MaskedOrder
from hyperbloom.common.wire.weights import Weights

LARGEST_SUM = 2**29
"""Most numbers in a sum, so that a server cannot exhaust a client's memory."""


def part_digests(weights: Weights, digest: bytes) -> dict[bytes, str]:
    """Return the names of the tensors in `weights` by their part digests in the round with this `digest`."""
    layout, values = weights.layout, weights.values.detach().cpu().contiguous().numpy()
    found = {}
    for (name, place, shape), size in zip(layout.slices(), layout.sizes, strict=True):
        if size:
            hashed = hashlib.sha256(digest + json.dumps([name, shape, values.dtype.str]).encode())
            hashed.update(values[place].data)
            found[hashed.digest()] = name
    return found


def pack_places(places: Iterable[int], clients: int) -> bytes:
    """Return a set of places as bytes with one bit for each of `clients`."""
    return sum(1 << place for place in places).to_bytes((clients + 7) // 8, "little")


@dataclass(frozen=True)
class Parts:
    """The parts of a sum, as a `MaskedOrder` lists them.

    Args:
        digests: digest of each part.
        lengths: count of numbers in each part.
        owners: packed places of the clients that train each part.
        there: places of all clients that may be in the sum.
        threshold: least number of these that are in the sum.
    """

    digests: tuple[bytes, ...]
    lengths: tuple[int, ...]
    owners: tuple[bytes, ...]
    there: tuple[int, ...]
    threshold: int

    @property
    def total(self) -> int:
        """Count of numbers in the sum."""
        return sum(self.lengths)

    @property
    def slices(self) -> dict[bytes, slice]:
        """Slice of the sum for each part."""
        found, start = {}, 0
        for digest, length in zip(self.digests, self.lengths, strict=True):
            found[digest] = slice(start, start + length)
            start += length
        return found

    def check(self, clients: int) -> None:
        """Raise a WireError if the parts are inconsistent, or if too few of `clients` may remain in one."""
        count = len(self.digests)
        if not count == len(set(self.digests)) == len(self.lengths) == len(self.owners):
            raise WireError(f"order: expected parts, each once, with lengths and owners, found {count}")
        if any(length < 1 for length in self.lengths) or self.total > LARGEST_SUM:
            raise WireError(f"order: expected parts of 1 to {LARGEST_SUM} numbers in all, found {self.total}")
        everybody = int.from_bytes(pack_places(self.there, clients), "little")
        for packed in self.owners:
            owners = int.from_bytes(packed, "little")
            if len(packed) != (clients + 7) // 8 or owners & ~everybody:
                raise WireError("order: expected owners of parts among the clients that are there")
            if self._left(owners) < FEWEST_CLIENTS:
                raise WireError(
                    f"order: expected parts that {FEWEST_CLIENTS} clients have whoever vanishes, found one that "
                    f"{self._left(owners)} may be left with"
                )

    def owned_by(self, place: int) -> dict[bytes, int]:
        """Return the parts that the client in `place` trains, and the least number of clients in the sum of each."""
        owners = (int.from_bytes(packed, "little") for packed in self.owners)
        return {d: self._left(each) for d, each in zip(self.digests, owners, strict=True) if each >> place & 1}

    def _left(self, owners: int) -> int:
        return owners.bit_count() - (len(self.there) - self.threshold)


def told(agreement: bytes, order: MaskedOrder) -> bytes:
    """Return a digest of everything that the server tells all clients alike before they train; masks depend on it.

    It covers every field of the order except those that necessarily differ between clients.
    """
    masking = replace(order.masking, sealed=(), digests=())
    # The digests of the parts cover the weights.
    alike = _plain(replace(order, weights=None, resemble=None, masking=masking))
    return hashlib.sha256(agreement + json.dumps(alike, sort_keys=True).encode()).digest()


def _plain(value: Any) -> Any:
    """Return a value of the wire as JSON. A whole float becomes an int, because the wire may turn ints into floats."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Method):
        return value.to_json()
    if isinstance(value, bytes):
        return value.hex()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def signed_keys(run_id: str, number: int, cipher_key: bytes, mask_key: bytes) -> bytes:
    """Return the bytes that a client signs when it sends its keys for a round."""
    return json.dumps(["hyperbloom keys", run_id, number, cipher_key.hex(), mask_key.hex()]).encode()


def signed_set(told_digest: bytes, alive: Sequence[int], dead: Sequence[int]) -> bytes:
    """Return the bytes that a client signs before it reveals shares: the digest `told`, and the clients in the sum."""
    return json.dumps(["hyperbloom set", told_digest.hex(), list(alive), list(dead)]).encode()
