"""Secure aggregation: what server and clients compute alike, so that the server learns a sum and no summand.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical Secure Aggregation for
Privacy-Preserving Machine Learning, CCS 2017, https://doi.org/10.1145/3133956.3133982, figure 4, with every client a
neighbour of every other. Bell, Bonawitz, Gascon, Lepoint, Raykova: CCS 2020, https://eprint.iacr.org/2020/704 (SecAgg+)
replaces that by a sparse graph, which pays from hundreds of clients on.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^32,   s_ij from the keys of i and j

Masks between two cancel in the sum of all. For those who vanish after the keys were shared their half of s_ij is put
together from shares, for the others b_i is; never both for one client, or its y_i would be an open book.

Flower has the same parts (`flwr.common.secure_aggregation`, 1.39), but its generator folds a seed into 32 bits of a
Mersenne Twister, which whoever sees a vector can search; its shares of two secrets of 64 clients take 0.5 s to make
and 36 s to put together, its P-384 keys six times as long as X25519. So these are `cryptography`'s primitives, and
Shamir's scheme over one prime field, where the Lagrange coefficients are computed once for all secrets.
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

__all__ = [
    "DIGEST_BYTES",
    "KEY_BYTES",
    "LARGEST_LOSS_SUMMED",
    "SEALED_BYTES",
    "SHARE_BYTES",
    "Agreement",
    "Scale",
    "Words",
    "add_mask",
    "agree",
    "combine",
    "commit",
    "new_key",
    "pair_mask",
    "public_key",
    "read_key",
    "seal",
    "split",
    "threshold_of",
    "unseal",
]

Words = NDArray[np.uint32]

KEY_BYTES = DIGEST_BYTES = 32
SHARE_BYTES = 33
SEALED_BYTES = 2 * SHARE_BYTES + 16
LARGEST_LOSS_SUMMED = 64.0

_PRIME = 2**256 + 297
"""The smallest prime above all secrets, which are of 32 bytes."""

_REACH = 2**27
"""What honest sums stay within, a sixteenth of what 32 bits hold: a sum with masks left in it gives itself away."""

_AT_ONCE = 2**18  # words of a mask that are made at a time, so that they stay in the cache
_ZEROS = bytes(4 * _AT_ONCE)


def threshold_of(clients: int, share: float) -> int:
    """Return how many of `clients` must stay to the end: two thirds, or `share` of them if that is more, and three.

    With t of n, two sets of t clients have 2t - n in common. As long as fewer than that lie with the server, an honest
    one is among them, which reveals one kind of share only and signs one set only (Bonawitz et al., section 6.2).
    """
    # A hair less, as 0.14 * 50 is a little more than 7.
    return max(FEWEST_CLIENTS, -(-2 * clients // 3), math.ceil(share * clients - 1e-9))


# ---------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Scale:
    """Changes as whole numbers: multiples of `step`, weighted by examples, whose sum cannot overflow.

    A client with w_i of W examples sends `round(w_i / W * change / step)`, at most `limit` in size. The mean differs
    from that of the changes themselves by at most `step / 2 * m W / sum_i w_i` in each coordinate, for m clients, as
    long as no change is beyond `bound`.

    Attributes:
        clients: that may be in the sum.
        bound: largest change of a coordinate; beyond it, it is cut.
        examples: of the client with the most; no client counts for more.
    """

    clients: int
    bound: float
    examples: int

    def check(self) -> None:
        """Refuse what cannot be computed with, with a WireError."""
        if not FEWEST_CLIENTS <= self.clients <= MOST_CLIENTS:
            raise WireError(f"expected {FEWEST_CLIENTS} to {MOST_CLIENTS} clients, found {self.clients}")
        if not (math.isfinite(self.bound) and self.bound > 0 and self.examples > 0):
            raise WireError(f"expected a bound and examples above 0, found {self.bound} and {self.examples}")

    @property
    def limit(self) -> int:
        """Largest number that a client sends."""
        return _REACH // self.clients

    @property
    def step(self) -> float:
        """What one of them stands for, times W / w_i."""
        return self.bound / self.limit

    @property
    def whole(self) -> int:
        """W: the largest weight; numbers of examples themselves, unless they are millions."""
        return min(self.examples, self.limit)

    def weight(self, examples: int) -> int:
        """Return w_i, from 1 to W."""
        return max(1, round(min(examples, self.examples) / self.examples * self.whole))

    def encode(self, values: NDArray[np.float64], weight: int, bound: float | None = None) -> Words:
        """Return `(P,)` values as words, cut to `bound` (by default the scale's own), which `limit` stands for."""
        bound = self.bound if bound is None else bound
        factor = self.limit / bound * weight / self.whole
        # To the nearest, the same for everyone and every time: steps are so small that a bias does not matter.
        return np.rint(np.clip(values, -bound, bound) * factor).astype(np.int32).view(np.uint32)

    def decode(self, total: Words, weight: int, bound: float | None = None) -> NDArray[np.float64]:
        """Return the weighted mean `(P,)` that a sum of words of clients with `weight` in all stands for.

        Raises:
            WireError: no clients can have sent numbers with this sum.
        """
        signed = total.view(np.int32)
        if len(signed) and max(-int(signed.min()), int(signed.max())) > _REACH:
            raise WireError("the sum is beyond what clients can have sent")
        bound = self.bound if bound is None else bound
        return signed.astype(np.float64) * (bound / self.limit * self.whole / weight)


# ---------------------------------------------------------------------- keys and masks


@dataclass(frozen=True)
class Agreement:
    """What all clients must have been told alike when they deal shares; the keys for these are made with its digest.

    Two clients that were told different things cannot read each other's shares. `secure_sum.told` adds to the digest
    what they are told before they train.
    """

    run_id: str
    round: int
    threshold: int
    scale: Scale
    cipher_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]
    identities: tuple[bytes, ...]

    def check(self) -> None:
        """Refuse with a WireError a list of keys that would not hide a client."""
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
        """Hash of all."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=bytes.hex).encode()).digest()


def new_key() -> X25519PrivateKey:
    """Return a private key for one round."""
    return X25519PrivateKey.generate()


def read_key(secret: bytes) -> X25519PrivateKey:
    """Return the private key of which these 32 bytes are the secret."""
    return X25519PrivateKey.from_private_bytes(secret)


def public_key(private: X25519PrivateKey) -> bytes:
    """Return what others need for `agree`."""
    return private.public_key().public_bytes_raw()


def agree(private: X25519PrivateKey, public: bytes, purpose: str, digest: bytes) -> bytes:
    """Return the 32 bytes that two clients share for one purpose of one round.

    Raises:
        WireError: the public key is none.
    """
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError("a client's public key is none") from None
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=digest, info=purpose.encode()).derive(shared)


def seal(key: bytes, sender: int, receiver: int, text: bytes) -> bytes:
    """Encrypt with a pair's key of this round what one of them, by place, tells the other: one text each way."""
    return ChaCha20Poly1305(key).encrypt(_nonce(sender, receiver), text, None)


def unseal(key: bytes, sender: int, receiver: int, sealed: bytes) -> bytes | None:
    """Return what was sealed, or None if it is not what that sender sealed for this receiver in this round."""
    try:
        return ChaCha20Poly1305(key).decrypt(_nonce(sender, receiver), sealed, None)
    except InvalidTag:
        return None


def _nonce(sender: int, receiver: int) -> bytes:
    return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


def commit(secret: bytes, purpose: str, digest: bytes) -> bytes:
    """Return what tells a secret or a share of one from others, and nothing else of it."""
    return hashlib.sha256(b"\x1f".join([b"hyperbloom", purpose.encode(), digest, secret])).digest()


def add_mask(vector: Words, seed: bytes, sign: int = 1) -> None:
    """Add the mask of a 32-byte seed to `(P,)` words in place, or take it away: AES-256 in counter mode."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    for start in range(0, len(vector), _AT_ONCE):
        part = vector[start : start + _AT_ONCE]
        mask = np.frombuffer(stream.update(_ZEROS[: 4 * len(part)]), dtype="<u4")
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def pair_mask(
    vector: Words, private: X25519PrivateKey, public: bytes, place: int, other: int, digest: bytes, sign: int = 1
) -> None:
    """Add to the words of the client in `place` the mask that it shares with `other`, or take it away (`sign` -1)."""
    seed = agree(private, public, "mask", digest)
    add_mask(vector, seed, sign if place < other else -sign)


# ---------------------------------------------------------------------- Shamir's shares


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares of 32 bytes, of which any `threshold` give them back and fewer tell nothing; place i has x = i + 1.

    Shamir: How to share a secret, Communications of the ACM 22(11), 1979.
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
    """Return what shares, by place, were split from; None if they cannot be shares of 32 bytes."""
    places = tuple(sorted(shares))
    terms = zip(_lagrange(places), (int.from_bytes(shares[place], "big") for place in places), strict=True)
    value = sum(factor * share for factor, share in terms) % _PRIME
    return value.to_bytes(KEY_BYTES, "big") if value < 2**256 else None


@lru_cache(64)
def _lagrange(places: Sequence[int]) -> tuple[int, ...]:
    """Return by what the shares of these places are multiplied: most secrets of a round have shares of the same."""
    xs = [place + 1 for place in places]
    factors = []
    for x in xs:
        above = below = 1
        for other in xs:
            if other != x:
                above, below = above * other % _PRIME, below * (other - x) % _PRIME
        factors.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(factors)
