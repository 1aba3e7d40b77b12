"""A client's half of secure aggregation: secrets of one round, each used once, and what it refuses to do.

The server relays the keys of the others, so a server that makes them up is not kept out; one that follows the protocol
and looks at all it gets learns the sum and nothing else of a client (`common/secure_aggregation.py` has the protocol).
Beyond that a client sees to it that

* the threshold is more than half of the clients, and as many are left at each stage;
* of one client it never reveals both kinds of shares, nor any before it has masked, nor any twice;
* its masks hide one change only.

Secrets are in memory alone: a client that is started again is out of the round.
"""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import Client
from hyperbloom.client.work.permissions import check_sum
from hyperbloom.client.work.training import train
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secure_aggregation import (
    KEY_BYTES,
    LARGEST_LOSS_SUMMED,
    SHARE_BYTES,
    Agreement,
    Scale,
    add_mask,
    agree,
    commit,
    new_key,
    pair_mask,
    public_key,
    seal,
    split,
    unseal,
)
from hyperbloom.common.wire.masks import (
    KeysOrder,
    KeysResult,
    MaskedOrder,
    MaskedResult,
    SharesOrder,
    SharesResult,
    UnmaskOrder,
    UnmaskResult,
)
from hyperbloom.common.wire.orders import Order, TrainResult

__all__ = ["SecureRound", "deal_shares", "make_keys", "train_masked", "unmask"]

log = logging.getLogger("hyperbloom.client")

LARGEST_SUM = 2**29
"""Numbers in a sum, beyond which a server asks for memory rather than for a change."""

_rounds: dict[ClientSettings, "SecureRound"] = {}

_STAGES = (KeysOrder, SharesOrder, MaskedOrder, UnmaskOrder)


def make_keys(client: Client, order: KeysOrder) -> KeysResult:
    """Forget the last round's secrets, and make new ones; nothing of them is kept on the disk."""
    _rounds[client.settings] = SecureRound(order.run_id, order.round)
    return _rounds[client.settings].keys()


def deal_shares(client: Client, order: SharesOrder) -> SharesResult:
    """Deal shares of the round's secrets; WireError if the order would not keep them."""
    with _current(client, order, order.run_id, order.round) as secure:
        return secure.share(order)


def train_masked(client: Client, order: MaskedOrder) -> MaskedResult:
    """Train as ordered, and return the change masked.

    Raises:
        WireError: the order does not fit this client, or this point of the round.
    """
    with _current(client, order, order.scope.run_id, order.scope.round) as secure:
        secure.expect(order)
        return secure.mask(order, train(client, order), len(client.train_data))


def unmask(client: Client, order: UnmaskOrder) -> UnmaskResult:
    """Reveal what takes the masks off a sum; WireError if that would take them off a summand."""
    with _current(client, order, order.run_id, order.round) as secure:
        check_sum(client.settings, len(order.alive))
        return secure.unmask(order)


@contextmanager
def _current(client: Client, order: Order, run_id: str, number: int) -> Iterator["SecureRound"]:
    """Yield the round that an order is for; whatever fails meanwhile, its secrets are forgotten.

    Raises:
        WireError: there is none, or it is not the order's turn.
    """
    found = _rounds.pop(client.settings, None)
    if found is None:
        raise WireError("order: no keys of such a round are here; was this client started again?")
    found.advance(type(order), run_id, number)
    yield found
    if not isinstance(order, UnmaskOrder):
        _rounds[client.settings] = found


@dataclass
class SecureRound:
    """The secrets of one round, and how far it has come."""

    run_id: str
    round: int
    cipher_key: X25519PrivateKey = field(default_factory=new_key, repr=False)
    mask_key: X25519PrivateKey = field(default_factory=new_key, repr=False)
    own_secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)

    def __post_init__(self) -> None:
        """Be at the first stage."""
        self._stage = 0
        self._place = 0
        self._pairs: dict[int, bytes] = {}  # by place, keys of what is sealed between this client and that
        self._held: dict[int, tuple[bytes, bytes]] = {}  # by place, shares of its secret and of its key
        self._there: tuple[int, ...] = ()

    def advance(self, kind: type[Order], run_id: str, number: int) -> None:
        """Move on to the stage of a kind of order; WireError if it is not that order's turn."""
        if (run_id, number) != (self.run_id, self.round):
            raise WireError(
                f"order: for round {number} of {run_id}, but the keys here are for round {self.round} of {self.run_id}"
            )
        expected = _STAGES[self._stage + 1] if self._stage + 1 < len(_STAGES) else None
        if expected is None or kind is not expected:
            due = "nothing" if expected is None else expected.message_type
            raise WireError(f"order: expected {due} at this point of the round, found {kind.message_type}")
        self._stage += 1

    def keys(self) -> KeysResult:
        """Return the public keys."""
        return KeysResult(public_key(self.cipher_key), public_key(self.mask_key))

    def share(self, order: SharesOrder) -> SharesResult:
        """Deal shares of what takes this client's masks off to all clients.

        Raises:
            WireError: the clients are too few, or their keys are not what they should be.
        """
        scale = Scale(len(order.cipher_keys), order.bound, order.examples)
        agreement = Agreement(self.run_id, self.round, order.threshold, scale, order.cipher_keys, order.mask_keys)
        agreement.check()
        mine = self.keys()
        if not 0 <= order.place < scale.clients or mine != KeysResult(
            order.cipher_keys[order.place], order.mask_keys[order.place]
        ):
            raise WireError(f"order: expected this client's own keys in place {order.place}")
        self._agreement, self._place, self._digest = agreement, order.place, agreement.digest
        self._pairs = {
            place: agree(self.cipher_key, key, "shares", self._digest)
            for place, key in enumerate(order.cipher_keys)
            if place != self._place
        }
        dealt = (self.own_secret, self.mask_key.private_bytes_raw())
        of_secret, of_key = (split(secret, order.threshold, scale.clients) for secret in dealt)
        self._held[self._place] = of_secret[self._place], of_key[self._place]
        sealed = [b""] * scale.clients
        for place, key in self._pairs.items():
            sealed[place] = seal(key, self._place, place, of_secret[place] + of_key[place])
        return SharesResult(
            tuple(sealed),
            commit(self.own_secret, "secret", self._digest),
            tuple(self._commit("secret", share) for share in of_secret),
            tuple(self._commit("key", share) for share in of_key),
        )

    def _commit(self, what: str, share: bytes) -> bytes:
        return commit(share, f"share of {what}", self._digest)

    def expect(self, order: MaskedOrder) -> None:
        """Take over who is still there and what they have dealt, before anything is trained.

        Raises:
            WireError: too few are there, or the order is not for a masked change.
        """
        masking = order.masking
        clients, threshold = self._agreement.scale.clients, self._agreement.threshold
        if order.reply != "weights" or order.codec is not None:
            raise WireError("order: expected reply 'weights' and no compression for a change that is masked")
        if list(masking.there) != sorted(set(masking.there)) or not set(masking.there) <= set(range(clients)):
            raise WireError("order: expected the places of clients that are there, each once, in order")
        if self._place not in masking.there or len(masking.there) < threshold:
            raise WireError(f"order: expected at least {threshold} clients, this one among them, to be there")
        if not len(masking.sealed) == len(masking.digests) == len(masking.there):
            raise WireError(f"order: expected shares from {len(masking.there)} clients, found {len(masking.sealed)}")
        self._there = masking.there
        for place, sealed, digests in zip(masking.there, masking.sealed, masking.digests, strict=True):
            if place == self._place:
                continue
            text = unseal(self._pairs[place], place, self._place, sealed) or b""
            of_secret, of_key = text[:SHARE_BYTES], text[SHARE_BYTES:]
            # What is not as its dealer says is not revealed: it would look like this client's lie.
            if digests == self._commit("secret", of_secret) + self._commit("key", of_key):
                self._held[place] = of_secret, of_key

    def mask(self, order: MaskedOrder, result: TrainResult, examples: int) -> MaskedResult:
        """Return the change that training brought, weighted by examples, under masks.

        Raises:
            WireError: the order's pieces do not fit the weights.
            HyperbloomError: the training diverged; nobody could see it in the sum.
        """
        if result.weights is None or order.weights is None:
            raise WireError("order: expected weights to sum")
        sent = order.weights.part(result.weights.layout)
        change = (result.weights.values.double() - sent.double()).numpy()
        if not np.isfinite(change).all():
            raise HyperbloomError(
                "training diverged (weights are not finite); lower local.learning_rate", reason=Reason.DIVERGED
            )
        scale = self._agreement.scale
        weight, beyond = scale.weight(examples), int((np.abs(change) > scale.bound).sum())
        if beyond:
            log.warning("%d of %d changes are beyond %g and were cut", beyond, len(change), scale.bound)
        loss = np.array([result.loss or 0.0])  # None with noise, when the sum tells no loss either
        words = np.append(
            scale.encode(_placed(change, order.masking.pieces, order.masking.total), weight),
            scale.encode(loss, weight, LARGEST_LOSS_SUMMED),
        )
        add_mask(words, self.own_secret)
        for place in self._there:
            if place != self._place:
                key = self._agreement.mask_keys[place]
                pair_mask(words, self.mask_key, key, self._place, place, self._digest)
        return MaskedResult(result.seconds, words.astype("<u4").tobytes())

    def unmask(self, order: UnmaskOrder) -> UnmaskResult:
        """Reveal one share for each client that was there: of its secret if it lives on, else of its key.

        Raises:
            WireError: too few live on, or it is not clear of whom which share is wanted.
        """
        alive, dead = set(order.alive), set(order.dead)
        if len(order.alive) + len(order.dead) != len(self._there) or alive | dead != set(self._there):
            raise WireError("order: expected all clients that were there, each once, as alive or as dead")
        if self._place not in alive or len(alive) < self._agreement.threshold:
            raise WireError(
                f"order: expected at least {self._agreement.threshold} clients, this one among them, to be alive"
            )
        none = (b"", b"")
        return UnmaskResult(tuple(self._held.get(place, none)[place in dead] for place in self._there))


def _placed(change: NDArray[np.float64], pieces: tuple[int, ...], total: int) -> NDArray[np.float64]:
    """Return the pieces of a change `(P,)` where they belong in a sum `(total,)`, zeros elsewhere."""
    triples = list(zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False))
    inside = all(
        min(start, to) >= 0 and length > 0 and start + length <= len(change) and to + length <= total
        for start, to, length in triples
    )
    # Each number of a change must be in the sum once: it would tell more of itself twice.
    once = not _overlap([(start, length) for start, _, length in triples])
    if (
        not 0 <= total <= LARGEST_SUM
        or len(pieces) % 3
        or not inside
        or not once
        or _overlap([(to, n) for _, to, n in triples])
    ):
        raise WireError("order: expected pieces of the change, each in a place of its own in the sum")
    placed = np.zeros(total)
    for start, to, length in triples:
        placed[to : to + length] = change[start : start + length]
    return placed


def _overlap(stretches: list[tuple[int, int]]) -> bool:
    ordered = sorted(stretches)
    return any(start + length > after for (start, length), (after, _) in pairwise(ordered))
