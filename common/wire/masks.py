"""Orders and answers of a round of secure aggregation, in place of `TrainOrder` (common/secrecy/masks.py).

| -- KeysOrder (train.keys) ----------->  |
| <-------------------- KeysResult ------- |   keys for this round
| -- SharesOrder (train.shares) ------->  |   everybody's keys
| <------------------ SharesResult ------- |   sealed shares of its secrets, one for each of the others
| -- MaskedOrder (train.masked) ------->  |   train; the shares that the others have sealed for this client
| <------------------ MaskedResult ------- |   the change, masked
| -- ConfirmOrder (train.confirm) ----->  |   who has sent one, and who has vanished
| <----------------- ConfirmResult ------- |   a signature: this is what I was told
| -- UnmaskOrder (train.unmask) ------->  |   everybody's signatures
| <------------------ UnmaskResult ------- |   shares of what takes the masks off the sum
"""

from dataclasses import dataclass
from typing import ClassVar

from hyperbloom.common.wire.orders import Order, TrainOrder

__all__ = [
    "ConfirmOrder",
    "ConfirmResult",
    "KeysOrder",
    "KeysResult",
    "MaskedOrder",
    "MaskedResult",
    "Masking",
    "SharesOrder",
    "SharesResult",
    "UnmaskOrder",
    "UnmaskResult",
]


@dataclass(frozen=True)
class KeysResult:
    """Public keys of one round, signed by the client.

    Attributes:
        cipher_key: for what other clients seal for this one.
        mask_key: for the masks that it shares with them.
        identity: the public key of the signature, DER.
    """

    cipher_key: bytes
    mask_key: bytes
    identity: bytes
    signature: bytes


@dataclass(frozen=True)
class KeysOrder(Order):
    """Make keys and a secret for a round of secure aggregation; what is left of an earlier round is forgotten."""

    message_type: ClassVar[str] = "train.keys"
    answer: ClassVar[type] = KeysResult
    run_id: str
    round: int


@dataclass(frozen=True)
class SharesResult:
    """For each place the sealed shares, none for the client's own, and by what its secret and each share are known.

    Attributes:
        secret: digest of the secret of which its own mask is made.
        secret_shares: digests of the shares of that.
        key_shares: digests of the shares of the private key of its masks.
    """

    sealed: tuple[bytes, ...]
    secret: bytes
    secret_shares: tuple[bytes, ...]
    key_shares: tuple[bytes, ...]


@dataclass(frozen=True)
class SharesOrder(Order):
    """Deal shares of the round's secrets. Clients know each other by their places in the lists of keys only.

    Attributes:
        place: of the client itself.
        threshold: clients whose shares put a secret together.
        bound: largest change of a coordinate.
        examples: beyond which a client counts for no more.
        signatures: of the keys, as each client has sent them.
    """

    message_type: ClassVar[str] = "train.shares"
    answer: ClassVar[type] = SharesResult
    run_id: str
    round: int
    place: int
    threshold: int
    bound: float
    examples: int
    cipher_keys: tuple[bytes, ...]
    mask_keys: tuple[bytes, ...]
    identities: tuple[bytes, ...]
    signatures: tuple[bytes, ...]


@dataclass(frozen=True)
class MaskedResult:
    """The weighted change as words of four bytes, the weighted loss behind it, under masks."""

    seconds: float
    masked: bytes


@dataclass(frozen=True)
class Masking:
    """What a client needs to mask its change.

    The sum has one part for each tensor, one after the other. `parts`, `lengths` and `owners` describe it, the same to
    all clients. What a client trains and finds no part for stays there.

    Attributes:
        there: places of the clients that have dealt shares.
        parts: digest of each tensor's name, shape and values.
        lengths: numbers in each.
        owners: for each the places of the clients that train it, a bit for a place.
        sealed: the shares that each of those in `there` has sealed for this client.
        digests: for each the digests of its two shares, one behind the other.
    """

    there: tuple[int, ...]
    parts: tuple[bytes, ...]
    lengths: tuple[int, ...]
    owners: tuple[bytes, ...]
    sealed: tuple[bytes, ...] = ()
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MaskedOrder(TrainOrder):
    """Train as ordered, and send the change masked."""

    message_type: ClassVar[str] = "train.masked"
    answer: ClassVar[type] = MaskedResult
    masking: Masking


@dataclass(frozen=True)
class ConfirmResult:
    """A signature of whose changes are in the sum, and of all else that the client was told in this round."""

    signature: bytes


@dataclass(frozen=True)
class ConfirmOrder(Order):
    """Sign whose masked changes are in the sum: those of `alive`. They and `dead` are those that dealt shares."""

    message_type: ClassVar[str] = "train.confirm"
    answer: ClassVar[type] = ConfirmResult
    run_id: str
    round: int
    alive: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class UnmaskResult:
    """The shares, in order of places; empty where the one that was dealt cannot be read."""

    shares: tuple[bytes, ...]


@dataclass(frozen=True)
class UnmaskOrder(Order):
    """Reveal shares of the secrets of those who are alive, and of the keys of the dead.

    Attributes:
        signatures: of those who are alive, in order of places; empty for who has not signed.
    """

    message_type: ClassVar[str] = "train.unmask"
    answer: ClassVar[type] = UnmaskResult
    run_id: str
    round: int
    signatures: tuple[bytes, ...]
