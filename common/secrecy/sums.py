"""The parts of a secure sum, and how the masks depend on them.

The server tells all clients the same parts, and which clients were sent each. Each client checks its own entries. The
masks of two clients depend on `told`, a digest of everything that both were told alike. If the server tells them
different things, their masks do not cancel, and the server can read neither change.

A digest of a tensor's name, shape and values before training identifies a part. Clients that received different values
therefore share no part. Every tensor that a client is sent is a part, even if it is in no sum. So a client knows how
many others have exactly its weights, and counts on no more. Otherwise a server could send all but one client weights
that learn nothing, or one tensor of them (Pasquini, Francati, Ateniese: Eluding Secure Aggregation in Federated
Learning via Model Inconsistency, CCS 2022, https://arxiv.org/abs/2111.07380).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hyperbloom.common.config import FEWEST_CLIENTS
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.methods import Method
from hyperbloom.common.wire.masks import MaskedOrder, Masking

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


def check_parts(masking: Masking, clients: int, threshold: int) -> None:
    """Raise a WireError if the parts are inconsistent, or if too few of `clients` may remain in one."""
    count, total = len(masking.parts), sum(masking.lengths)
    if not count == len(set(masking.parts)) == len(masking.lengths) == len(masking.owners):
        raise WireError(f"order: expected parts, each once, with lengths and owners, found {count}")
    if any(length < 0 for length in masking.lengths) or total > LARGEST_SUM:
        raise WireError(f"order: expected parts of at most {LARGEST_SUM} numbers in all, found {total}")
    everybody = int.from_bytes(pack_places(masking.there, clients), "little")
    for packed, length in zip(masking.owners, masking.lengths, strict=True):
        if len(packed) != (clients + 7) // 8 or int.from_bytes(packed, "little") & ~everybody:
            raise WireError("order: expected owners of parts among the clients that are there")
        left = _left(masking, int.from_bytes(packed, "little"), threshold)
        if length and left < FEWEST_CLIENTS:
            raise WireError(
                f"order: expected parts that {FEWEST_CLIENTS} clients have whoever vanishes, found one that "
                f"{left} may be left with"
            )


def parts_of(masking: Masking, place: int, threshold: int) -> tuple[set[bytes], int]:
    """Return the parts of the client in `place`, and how many clients with these and no others are in the sum at least.

    A client with another part may learn nothing from the parts that it shares, so that they do not hide this client's.
    """
    parts, alike = set(), int.from_bytes(pack_places(masking.there, masking.there[-1] + 1), "little")
    for part, packed in zip(masking.parts, masking.owners, strict=True):
        owners = int.from_bytes(packed, "little")
        own = owners >> place & 1
        parts |= {part} if own else set()
        alike &= owners if own else ~owners
    return parts, max(0, _left(masking, alike, threshold))


def _left(masking: Masking, places: int, threshold: int) -> int:
    return places.bit_count() - (len(masking.there) - threshold)


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
        return value.model_dump_json()
    if isinstance(value, bytes):
        return value.hex()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def signed_keys(run_id: str, number: int, cipher_key: bytes, mask_key: bytes) -> bytes:
    """Return the bytes that a client signs when it sends its keys for a round."""
    return json.dumps(["hyperbloom keys", run_id, number, cipher_key.hex(), mask_key.hex()]).encode()


def signed_set(told_digest: bytes, alive: Sequence[int], dead: Sequence[int]) -> bytes:
    """Return the bytes that a client signs before it reveals shares: the digest `told`, and the clients in the sum."""
    return json.dumps(["hyperbloom set", told_digest.hex(), list(alive), list(dead)]).encode()
