"""Orders and answers of a round of secure aggregation, in place of `TrainOrder` (common/secrecy/masks.py)."""

from dataclasses import dataclass

from hyperbloom.common.secrecy.masks import Agreement
from hyperbloom.common.wire.orders import Order, TrainOrder


@dataclass(frozen=True)
class KeysResult:
    """Public keys of one round, signed by the client.

    Attributes:
        cipher_key: for messages that other clients seal for this one.
        mask_key: for the masks that it shares with other clients.
        identity: public key of the signature, in DER.
    """

    cipher_key: bytes
    mask_key: bytes
    identity: bytes
    signature: bytes


@dataclass(frozen=True)
class KeysOrder(Order, message_type="train.keys", answer=KeysResult):
    """Make keys and a secret for a round of secure aggregation, and forget those of earlier rounds."""

    run_id: str
    round: int


@dataclass(frozen=True)
class SharesResult:
    """The client's sealed shares, and commitments to its secret and to each share.

    Attributes:
        sealed: sealed shares for each place; empty for the client's own.
        secret: digest of the secret of the client's own mask.
        secret_shares: digests of the shares of that secret.
        key_shares: digests of the shares of the private mask key.
    """

    sealed: tuple[bytes, ...]
    secret: bytes
    secret_shares: tuple[bytes, ...]
    key_shares: tuple[bytes, ...]


@dataclass(frozen=True)
class SharesOrder(Order, message_type="train.shares", answer=SharesResult):
    """Deal shares of the round's secrets. Clients know each other only by their places in the lists of keys.

    `place` is that of the client itself, and `signatures` are the clients' signatures of their keys.
    """

    agreement: Agreement
    place: int
    signatures: tuple[bytes, ...]


@dataclass(frozen=True)
class MaskedResult:
    """The masked words of four bytes: the weighted change, then the weighted loss."""

    seconds: float
    masked: bytes


@dataclass(frozen=True)
class Masking:
    """What a client needs to mask its change.

    The sum is a sequence of parts, one for each tensor. `parts`, `lengths` and `owners` describe it and are the same
    for all clients. They name all tensors that clients are sent. What is trained of a tensor of length 0 stays there.

    Attributes:
        there: places of the clients that have dealt shares.
        parts: digest of each tensor's name, shape and values.
        lengths: count of numbers of each part in the sum, or 0.
        owners: places of the clients that are sent each part, one bit for each place.
        sealed: the shares that each client in `there` has sealed for this client.
        digests: for each of these clients the digests of its two shares, concatenated.
    """

    there: tuple[int, ...]
    parts: tuple[bytes, ...]
    lengths: tuple[int, ...]
    owners: tuple[bytes, ...]
    sealed: tuple[bytes, ...] = ()
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MaskedOrder(TrainOrder, message_type="train.masked", answer=MaskedResult):
    """Train, and send the masked change."""

    masking: Masking


@dataclass(frozen=True)
class ConfirmResult:
    """A signature of the set of clients in the sum, and of all else that the client was told in this round."""

    signature: bytes


@dataclass(frozen=True)
class ConfirmOrder(Order, message_type="train.confirm", answer=ConfirmResult):
    """Sign that the masked changes of `alive` are in the sum. `alive` and `dead` together dealt shares."""

    run_id: str
    round: int
    alive: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class UnmaskResult:
    """The shares in order of places; empty if the client could not read the one that it was dealt."""

    shares: tuple[bytes, ...]


@dataclass(frozen=True)
class UnmaskOrder(Order, message_type="train.unmask", answer=UnmaskResult):
    """Reveal shares of the secrets of clients that are alive, and of the mask keys of dead ones.

    Attributes:
        signatures: signatures of the clients that are alive, in order of places; empty for those that did not sign.
    """

    run_id: str
    round: int
    signatures: tuple[bytes, ...]
