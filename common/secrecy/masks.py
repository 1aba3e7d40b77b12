"""Secure aggregation: the cryptography by which the server learns a sum of changes and no single change.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical Secure Aggregation for
Privacy-Preserving Machine Learning, CCS 2017, https://doi.org/10.1145/3133956.3133982, figure 4, with a complete graph
of clients. Bell, Bonawitz, Gascon, Lepoint, Raykova: CCS 2020, https://eprint.iacr.org/2020/704 (SecAgg+) use a sparse
graph, which pays for hundreds of clients and more.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^32,   s_ij from the keys of i and j

The masks of a pair cancel in the sum of all clients. If a client vanishes after the keys were shared, the server
reconstructs its mask key from shares; for every other client it reconstructs b_i. Both secrets of one client together
would reveal x_i, so clients never reveal shares of both.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from hyperbloom.common.config import FEWEST_CLIENTS, MOST_CLIENTS
from hyperbloom.common.errors import WireError

Words = NDArray[np.uint32]

KEY_BYTES = DIGEST_BYTES = 32
SHARE_BYTES = 33
SEALED_BYTES = 2 * SHARE_BYTES + 16
LARGEST_BOUND = 1000.0  # beyond it small changes are rounded away, and what is left belongs to one client

_PRIME = 2**256 + 297
"""The smallest prime above 2^256: secrets have 32 bytes."""
_REACH = 2**27
"""Bound of honest sums, a sixteenth of the range of 32 bits. A sum with a mask left in it almost surely exceeds it."""

_AT_ONCE = 2**18  # words of a mask made at a time, few enough for the cache
_ZEROS = bytes(4 * _AT_ONCE)


def threshold_of(clients: int, share: float) -> int:
    """Return how many of `clients` must stay to the end: the larger of two thirds and `share` of them; at least three.

    Two sets of t out of n clients have at least 2t - n clients in common. If fewer clients than that collude with the
    server, one of them is honest. It signs one set only and reveals one kind of share only (Bonawitz et al., 6.2).
    """
    # Subtract 1e-9 because 0.68 * 75 is slightly more than 51 in floating point.
    return max(FEWEST_CLIENTS, -(-2 * clients // 3), math.ceil(share * clients - 1e-9))


@dataclass(frozen=True)
class Scale:
    """Fixed-point numbers for changes: multiples of a step, weighted by examples, whose sum cannot overflow.

    With `step = bound / limit`, a client with weight w_i of at most W sends `round(w_i / W * change / step)`, at most
    `limit` in size. For m clients whose changes are within `bound`, the rounding error of the mean is at most
    `step / 2 * m W / sum_i w_i` in each coordinate.

    Attributes:
        clients: most clients in the sum.
        bound: largest change of a coordinate; a client with a larger one scales its whole change down.
        examples: most examples that a client counts for.
    """

    clients: int
    bound: float
    examples: int

    def check(self) -> None:
        """Raise a WireError if a value is out of range."""
        if not FEWEST_CLIENTS <= self.clients <= MOST_CLIENTS:
            raise WireError(f"expected {FEWEST_CLIENTS} to {MOST_CLIENTS} clients, found {self.clients}")
        if not (0 < self.bound <= LARGEST_BOUND and self.examples > 0):
            raise WireError(
                f"expected a bound to {LARGEST_BOUND:g} and examples, found {self.bound} and {self.examples}"
            )

    @property
    def limit(self) -> int:
        """Largest number that a client sends."""
        return _REACH // self.clients

    @property
    def whole(self) -> int:
        """W: the largest weight, which is `examples` unless that exceeds `limit`."""
        return min(self.examples, self.limit)

    def weight(self, examples: int) -> int:
        """Return the weight w_i of a client with `examples`, from 1 to W."""
        return max(1, round(min(examples, self.examples) / self.examples * self.whole))

    def encode(self, values: NDArray[np.float64], weight: int) -> Words:
        """Return `(P,)` values, at most `bound` in size, which maps to `limit`, as words."""
        factor = self.limit / self.bound * weight / self.whole
        # Deterministic rounding to the nearest number is biased, but the steps are so small that it does not matter.
        return np.rint(np.clip(values, -self.bound, self.bound) * factor).astype(np.int32).view(np.uint32)

    def decode(self, total: Words, weight: int) -> NDArray[np.float64]:
        """Return the weighted mean `(P,)` from the sum of the clients' words and the sum of their weights.

        Raises:
            WireError: the sum is larger than clients can have sent.
        """
        signed = total.view(np.int32)
        if len(signed) and max(-int(signed.min()), int(signed.max())) > _REACH:
            raise WireError("the sum is beyond what clients can have sent")
        return signed.astype(np.float64) * (self.bound / self.limit * self.whole / weight)


@dataclass(frozen=True)
class Agreement:
    """The values that the server must tell all clients alike before they deal shares.

    The keys that encrypt the shares depend on its digest, so two clients with different values cannot read each other's
    shares. `secrecy.sums.told` extends the digest by the values of the training order.
    """

    run_id: str
    round: int
    threshold: int
    scale: Scale
    cipher_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]
    identities: tuple[bytes, ...]

    def check(self) -> None:
        """Raise a WireError if the lists of keys, or the threshold, would not protect every client."""
        self.scale.check()
        clients, keys = self.scale.clients, (*self.cipher_keys, *self.mask_keys)
        if len(self.cipher_keys) != clients or len(self.mask_keys) != clients:
            raise WireError(f"expected two keys for each of {clients} clients, found {len(keys)}")
        signers = len(set(self.identities))
        if not len(self.identities) == signers == clients:
            raise WireError(f"expected {clients} clients that sign with keys of their own, found {signers}")
        if len(set(keys)) != len(keys) or any(len(key) != KEY_BYTES for key in keys):
            raise WireError(f"expected keys of {KEY_BYTES} bytes, all different")
        least = threshold_of(clients, 0.0)
        if not least <= self.threshold <= clients:
            raise WireError(f"expected a threshold of at least {least} of {clients} clients, found {self.threshold}")

    @property
    def digest(self) -> bytes:
        """SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=bytes.hex).encode()).digest()


def public_key(private: X25519PrivateKey) -> bytes:
    """Return the 32 bytes of the public key, which other clients pass to `agree`."""
    return private.public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, public: bytes, purpose: str, digest: bytes) -> bytes:
    """Return the 32-byte key of two clients for one purpose in one round; WireError for an invalid public key."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError("a client's public key is none") from None
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=digest, info=purpose.encode()).derive(shared)


def seal(key: bytes, sender: int, receiver: int, text: bytes) -> bytes:
    """Encrypt a pair's only text from place `sender` to `receiver` in this round; a second would repeat the nonce."""
    return ChaCha20Poly1305(key).encrypt(_nonce(sender, receiver), text, None)


def unseal(key: bytes, sender: int, receiver: int, sealed: bytes) -> bytes | None:
    """Decrypt what `seal` returned, or return None if sender, receiver, key or content do not fit."""
    try:
        return ChaCha20Poly1305(key).decrypt(_nonce(sender, receiver), sealed, None)
    except InvalidTag:
        return None


def _nonce(sender: int, receiver: int) -> bytes:
    return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


def commit(secret: bytes, purpose: str, digest: bytes) -> bytes:
    """Return a hash that commits to a secret, or to a share of one, without revealing it."""
    return hashlib.sha256(b"\x1f".join([b"hyperbloom", purpose.encode(), digest, secret])).digest()


def add_mask(vector: Words, seed: bytes, sign: int = 1) -> None:
    """Add the mask of a 32-byte seed (AES-256 in counter mode) to `(P,)` words in place; `sign` -1 subtracts it."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    for start in range(0, len(vector), _AT_ONCE):
        part = vector[start : start + _AT_ONCE]
        mask = np.frombuffer(stream.update(_ZEROS[: 4 * len(part)]), dtype="<u4")
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def pair_mask(
    vector: Words, private: X25519PrivateKey, public: bytes, place: int, other: int, digest: bytes, sign: int = 1
) -> None:
    """Add the mask that the clients in `place` and `other` share to the words of `place`; `sign` -1 removes it."""
    add_mask(vector, agree(private, public, "mask", digest), sign if place < other else -sign)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return `count` shares of a 32-byte secret; place i has x = i + 1.

    Any `threshold` shares give the secret back, and fewer tell nothing about it. Shamir: How to share a secret,
    Communications of the ACM 22(11), 1979.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % _PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret from shares by place, or None if it does not fit into 32 bytes."""
    places = tuple(sorted(shares))
    terms = zip(_lagrange(places), (int.from_bytes(shares[place], "big") for place in places), strict=True)
    value = sum(factor * share for factor, share in terms) % _PRIME
    return value.to_bytes(KEY_BYTES, "big") if value < 2**256 else None


@lru_cache(64)
def _lagrange(places: Sequence[int]) -> tuple[int, ...]:
    """Return the Lagrange coefficients of these places. They are cached because most secrets of a round share them."""
    xs = [place + 1 for place in places]
    others = {x: [other for other in xs if other != x] for x in xs}
    below = {x: math.prod(other - x for other in rest) for x, rest in others.items()}
    return tuple(math.prod(rest) * pow(below[x], -1, _PRIME) % _PRIME for x, rest in others.items())
