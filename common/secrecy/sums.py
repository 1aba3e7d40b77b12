"""What a secure sum is of, and how that is bound to its masks.

All clients are told of the same sum: its parts, and which clients train each of them. Each client checks its own
entries. The masks between two clients are made with `told`, a digest of everything that both were told alike. If the
server tells two of them different things, their masks do not cancel, and nothing can be read from either.

A part is known by a digest of its tensor's name, shape and values before the training. Clients that were sent
different values thus have no part in common: else a server could send all but one of them weights that learn nothing
(Pasquini, Francati, Ateniese: Eluding Secure Aggregation in Federated Learning via Model Inconsistency, CCS 2022,
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

__all__ = ["LARGEST_SUM", "Parts", "pack_places", "part_digests", "signed_keys", "signed_set", "told"]

LARGEST_SUM = 2**29
"""Numbers in a sum, beyond which a server asks for memory rather than for a change."""


def part_digests(weights: Weights, digest: bytes) -> dict[bytes, str]:
    """Return the names of the tensors in `weights`, by what each is known as in the round with this digest."""
    layout, values = weights.layout, weights.values.detach().cpu().contiguous().numpy()
    found = {}
    for (name, place, shape), size in zip(layout.slices(), layout.sizes, strict=True):
        if size:
            hashed = hashlib.sha256(digest + json.dumps([name, shape, values.dtype.str]).encode())
            hashed.update(values[place].data)
            found[hashed.digest()] = name
    return found


def pack_places(places: Iterable[int], clients: int) -> bytes:
    """Return places of `clients` as bits."""
    return sum(1 << place for place in places).to_bytes((clients + 7) // 8, "little")


@dataclass(frozen=True)
class Parts:
    """The parts of a sum, as a `MaskedOrder` lists them.

    Args:
        digests: what each is known as.
        lengths: numbers in each.
        owners: places of the clients that train each, packed.
        there: places of all clients that may be in the sum.
        threshold: how many of these are in it at least.
    """

    digests: tuple[bytes, ...]
    lengths: tuple[int, ...]
    owners: tuple[bytes, ...]
    there: tuple[int, ...]
    threshold: int

    @property
    def total(self) -> int:
        """Numbers in the sum."""
        return sum(self.lengths)

    @property
    def slices(self) -> dict[bytes, slice]:
        """Where each part lies."""
        found, start = {}, 0
        for digest, length in zip(self.digests, self.lengths, strict=True):
            found[digest] = slice(start, start + length)
            start += length
        return found

    def check(self, clients: int) -> None:
        """Refuse with a WireError parts that do not fit together, or in which too few of `clients` would be left."""
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
        """Return the parts that a client trains, and how many clients are in the sum of each at least."""
        owners = (int.from_bytes(packed, "little") for packed in self.owners)
        return {d: self._left(each) for d, each in zip(self.digests, owners, strict=True) if each >> place & 1}

    def _left(self, owners: int) -> int:
        return owners.bit_count() - (len(self.there) - self.threshold)


def told(agreement: bytes, order: MaskedOrder) -> bytes:
    """Return a digest of all that clients are told alike until they have trained, of which their masks are made.

    Every field of the order is in it but those that differ between clients by their nature.
    """
    masking = replace(order.masking, sealed=(), digests=())
    # The weights are bound by the digests of the parts.
    alike = _plain(replace(order, weights=None, resemble=None, masking=masking))
    return hashlib.sha256(agreement + json.dumps(alike, sort_keys=True).encode()).digest()


def _plain(value: Any) -> Any:
    """Return a value of the wire as JSON knows it; a whole number is the same where a fraction may stand."""
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
    """Return what a client signs when it sends its keys for a round."""
    return json.dumps(["hyperbloom keys", run_id, number, cipher_key.hex(), mask_key.hex()]).encode()


def signed_set(told_digest: bytes, alive: Sequence[int], dead: Sequence[int]) -> bytes:
    """Return what a client signs before it reveals a share: all it was told, and whose changes are in the sum."""
    return json.dumps(["hyperbloom set", told_digest.hex(), list(alive), list(dead)]).encode()
