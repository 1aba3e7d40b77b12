"""A client's part of secure aggregation: the secrets of one round, each used once, and the checks of a server's orders.

`common/secrecy/masks.py` describes the protocol. A server that follows it learns only the sum. A server that deviates
learns no more if it controls few enough of the clients in the sum, because a client enforces these rules:

* Its masks depend on all that it was told. They cancel only against those of clients that were told the same.
* Each number of its change is in a sum with numbers of at least two other clients, whichever clients vanish.
* It reveals shares only after as many clients as the threshold have signed the same set of survivors.
* It never reveals both kinds of shares of one client, never before it has sent its masked change, and never twice.
* It uses its masks for one change only.
* If the user names keys (`--peers`), it takes part only with clients that have these keys. Otherwise the server can
  invent all other clients.

Secrets are only in memory, so a client that restarts drops out of the round.
"""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import Client, identity_of
from hyperbloom.client.work.training import train
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.methods import Aligned
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy import masks as protocol
from hyperbloom.common.secrecy.keys import fingerprint_of_der, make_key, public_der, sign, verify
from hyperbloom.common.secrecy.sums import check_parts, part_digests, parts_of, signed_keys, signed_set, told
from hyperbloom.common.wire import masks as wire
from hyperbloom.common.wire.orders import Order, TrainResult

log = logging.getLogger("hyperbloom.client")

_rounds: dict[ClientSettings, "SecureRound"] = {}

_STAGES = (wire.KeysOrder, wire.SharesOrder, wire.MaskedOrder, wire.ConfirmOrder, wire.UnmaskOrder)


def make_keys(client: Client, order: wire.KeysOrder) -> wire.KeysResult:
    """Forget the secrets of the last round and make new ones, in memory only.

    A client without its own signing key makes one for the round.
    """
    try:
        key, peers = identity_of(client.settings)  # read anew, because its user may have taken somebody off the list
    except ConfigError as error:
        log.error("%s", error)  # it names a file, which is not the server's business
        raise HyperbloomError("the client cannot read its --key or --peers; its log says why") from None
    _rounds[client.settings] = SecureRound(order.run_id, order.round, key or make_key(), peers)
    return _rounds[client.settings].keys()


def deal_shares(client: Client, order: wire.SharesOrder) -> wire.SharesResult:
    """Deal shares of the round's secrets; WireError if the order would not protect them."""
    # Nobody reveals a share unless as many clients as the threshold stay to the end.
    agreement = order.agreement
    client.releases.check_sum(f"sums of {agreement.threshold} or more", agreement.threshold)
    with _current(client, order, agreement.run_id, agreement.round) as secure:
        return secure.share(order)


def train_masked(client: Client, order: wire.MaskedOrder) -> wire.MaskedResult:
    """Train, and return the masked change."""
    with _current(client, order, order.scope.run_id, order.scope.round) as secure:
        alike = secure.expect(order)
        client.releases.check_sum(f"a sum in which only {max(1, alike)} may train the same weights", alike)
        return secure.mask(order, train(client, order), len(client.train_data))


def confirm(client: Client, order: wire.ConfirmOrder) -> wire.ConfirmResult:
    """Sign the set of clients in the sum, and all that this client was told; WireError if they are too few."""
    with _current(client, order, order.run_id, order.round) as secure:
        return secure.confirm(order)


def unmask(client: Client, order: wire.UnmaskOrder) -> wire.UnmaskResult:
    """Reveal the shares that unmask the sum; WireError if they could unmask a single change."""
    with _current(client, order, order.run_id, order.round) as secure:
        return secure.unmask(order)


@contextmanager
def _current(client: Client, order: Order, run_id: str, number: int) -> Iterator["SecureRound"]:
    """Yield the round of an order, or raise a WireError. Any failure in the body forgets the round's secrets."""
    found = _rounds.pop(client.settings, None)
    if found is None:
        raise WireError("order: no keys of such a round are here; was this client started again?")
    found.advance(type(order), run_id, number)
    yield found
    if not isinstance(order, wire.UnmaskOrder):
        _rounds[client.settings] = found


@dataclass
class SecureRound:
    """The secrets and the stage of one round: `peers` are fingerprints of those that may be in the sum (None: any)."""

    run_id: str
    round: int
    identity: EllipticCurvePrivateKey = field(default_factory=make_key, repr=False)
    peers: frozenset[str] | None = None
    cipher_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    mask_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    own_secret: bytes = field(default_factory=lambda: secrets.token_bytes(protocol.KEY_BYTES), repr=False)

    def __post_init__(self) -> None:
        self._stage = 0
        self._place = 0
        self._pairs: dict[int, bytes] = {}  # by place: key of the shares sealed with that client
        self._held: dict[int, tuple[bytes, bytes]] = {}  # by place: shares of that client's secret and key
        self._there: tuple[int, ...] = ()
        self._alive: tuple[int, ...] = ()
        self._dead: tuple[int, ...] = ()

    def advance(self, kind: type[Order], run_id: str, number: int) -> None:
        """Advance to the stage of a kind of order; WireError if it is not the next one."""
        if (run_id, number) != (self.run_id, self.round):
            raise WireError(f"order: for round {number} of {run_id}, but keys are for {self.round} of {self.run_id}")
        expected = _STAGES[self._stage + 1] if self._stage + 1 < len(_STAGES) else None
        if expected is None or kind is not expected:
            due = "nothing" if expected is None else expected.message_type
            raise WireError(f"order: expected {due} at this point of the round, found {kind.message_type}")
        self._stage += 1

    def keys(self) -> wire.KeysResult:
        """Return the signed public keys."""
        keys = protocol.public_key(self.cipher_key), protocol.public_key(self.mask_key)
        signature = sign(self.identity, signed_keys(self.run_id, self.round, *keys))
        return wire.KeysResult(*keys, public_der(self.identity), signature)

    def share(self, order: wire.SharesOrder) -> wire.SharesResult:
        """Deal shares of this client's secrets to all clients; WireError for too few clients, or wrong keys."""
        agreement, scale = order.agreement, order.agreement.scale
        agreement.check()
        lists = agreement.cipher_keys, agreement.mask_keys, agreement.identities
        mine = protocol.public_key(self.cipher_key), protocol.public_key(self.mask_key), public_der(self.identity)
        if not 0 <= order.place < scale.clients or mine != tuple(each[order.place] for each in lists):
            raise WireError(f"order: expected this client's own keys in place {order.place}")
        self._agreement, self._place, self._digest = agreement, order.place, agreement.digest
        self._know(order)
        self._pairs = {
            place: protocol.agree(self.cipher_key, key, "shares", self._digest)
            for place, key in enumerate(agreement.cipher_keys)
            if place != self._place
        }
        dealt = (self.own_secret, self.mask_key.private_bytes_raw())
        of_secret, of_key = (protocol.split(secret, agreement.threshold, scale.clients) for secret in dealt)
        self._held[self._place] = of_secret[self._place], of_key[self._place]
        sealed = [b""] * scale.clients
        for place, key in self._pairs.items():
            sealed[place] = protocol.seal(key, self._place, place, of_secret[place] + of_key[place])
        return wire.SharesResult(
            tuple(sealed),
            protocol.commit(self.own_secret, "secret", self._digest),
            tuple(self._commit("secret", share) for share in of_secret),
            tuple(self._commit("key", share) for share in of_key),
        )

    def _know(self, order: wire.SharesOrder) -> None:
        """Raise a WireError for clients that the user does not know; without --peers, signatures prove nothing."""
        if self.peers is None:
            return
        if len(order.signatures) != self._agreement.scale.clients:
            raise WireError("order: expected a signature of each client's keys")
        keys_of_all = self._agreement.cipher_keys, self._agreement.mask_keys
        for place, identity in enumerate(self._agreement.identities):
            if place == self._place:
                continue
            name = fingerprint_of_der(identity)
            if name not in self.peers:
                raise WireError(
                    f"the client adds its change to those of known clients alone (--peers), found {name}",
                    reason=Reason.FORBIDDEN,
                )
            content = signed_keys(self.run_id, self.round, *(keys[place] for keys in keys_of_all))
            if not verify(identity, order.signatures[place], content):
                raise WireError(f"order: keys that {name} has not signed")

    def _commit(self, what: str, share: bytes) -> bytes:
        return protocol.commit(share, f"share of {what}", self._digest)

    def expect(self, order: wire.MaskedOrder) -> int:
        """Check and keep the remaining clients, their shares and the parts of the sum, before training.

        Return the least number of clients in the sum that train the same weights as this one.

        Raises:
            WireError: too few clients are left, or the order does not fit a masked change.
        """
        masking = order.masking
        clients, threshold = self._agreement.scale.clients, self._agreement.threshold
        if order.reply != "weights" or order.codec is not None or order.weights is None:
            raise WireError("order: expected weights, reply 'weights' and no compression for a change that is masked")
        if order.resemble is not None or isinstance(order.method, Aligned):
            raise WireError("order: expected a method that needs nothing beside the weights for a masked change")
        if list(masking.there) != sorted(set(masking.there)) or not set(masking.there) <= set(range(clients)):
            raise WireError("order: expected the places of clients that are there, each once, in order")
        if self._place not in masking.there or len(masking.there) < threshold:
            raise WireError(f"order: expected at least {threshold} clients, this one among them, to be there")
        if not len(masking.sealed) == len(masking.digests) == len(masking.there):
            raise WireError(f"order: expected shares from {len(masking.there)} clients, found {len(masking.sealed)}")
        self._there, self._told = masking.there, told(self._digest, order)
        check_parts(masking, clients, threshold)
        (own, alike), names = parts_of(masking, self._place, threshold), part_digests(order.weights, self._digest)
        if own != names.keys():
            raise WireError("order: expected all tensors of the order among the parts, with the same values")
        pairs = zip(masking.parts, masking.lengths, strict=True)
        self._parts = [(names.get(part), length) for part, length in pairs if length]
        self._read(masking)
        return alike

    def _read(self, masking: wire.Masking) -> None:
        """Keep the shares that match their dealers' digests. If revealed, others would look like this client's lie."""
        for place, sealed, digests in zip(masking.there, masking.sealed, masking.digests, strict=True):
            if place == self._place:
                continue
            text = protocol.unseal(self._pairs[place], place, self._place, sealed) or b""
            of_secret, of_key = text[: protocol.SHARE_BYTES], text[protocol.SHARE_BYTES :]
            if digests == self._commit("secret", of_secret) + self._commit("key", of_key):
                self._held[place] = of_secret, of_key

    def mask(self, order: wire.MaskedOrder, result: TrainResult, examples: int) -> wire.MaskedResult:
        """Return the change, weighted and masked; WireError if the parts of the sum do not fit the trained tensors."""
        assert result.weights is not None and order.weights is not None, "`expect` has refused other orders"
        layout = result.weights.layout
        change = (result.weights.values.double() - order.weights.part(layout).double()).numpy()
        scale = self._agreement.scale
        largest = float(np.abs(change).max(initial=0.0))
        if largest > scale.bound:  # each weight by itself would leave signs, and weights tell whose sign is whose
            log.warning("a weight changes by %g, beyond %g: the whole change was scaled down", largest, scale.bound)
            change *= scale.bound / largest
        words = scale.encode(self._placed(change, layout), scale.weight(examples))
        protocol.add_mask(words, self.own_secret)
        for place in self._there:
            if place != self._place:
                key = self._agreement.mask_keys[place]
                protocol.pair_mask(words, self.mask_key, key, self._place, place, self._told)
        return wire.MaskedResult(result.seconds, words.astype("<u4").tobytes())

    def _placed(self, change: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the vector `(total,)` of the sum, with the tensors of a change `(P,)` in their parts."""
        trained = {name: change[place] for name, place, _ in layout.slices()}
        placed = [np.zeros(0)]
        for name, length in self._parts:
            part = np.zeros(length) if name is None else trained.get(name)
            if part is None or len(part) != length:
                raise WireError("order: expected parts of the sum that are trained, and of their lengths")
            placed.append(part)
        return np.concatenate(placed)

    def confirm(self, order: wire.ConfirmOrder) -> wire.ConfirmResult:
        """Sign the set of clients in the sum; WireError if they are too few, or not all are named exactly once."""
        alive, dead = set(order.alive), set(order.dead)
        if len(order.alive) + len(order.dead) != len(self._there) or alive | dead != set(self._there):
            raise WireError("order: expected all clients that were there, each once, as alive or as dead")
        if self._place not in alive or len(alive) < self._agreement.threshold:
            raise WireError(f"order: expected {self._agreement.threshold} clients or more alive, this one among them")
        self._alive, self._dead = tuple(sorted(alive)), tuple(sorted(dead))
        return wire.ConfirmResult(sign(self.identity, self._set))

    @property
    def _set(self) -> bytes:
        return signed_set(self._told, self._alive, self._dead)

    def unmask(self, order: wire.UnmaskOrder) -> wire.UnmaskResult:
        """Reveal one share for each client that dealt shares: of its secret if it is alive, else of its mask key.

        Raises:
            WireError: too few clients have signed the set that this client has signed.
        """
        if len(order.signatures) != len(self._alive):
            raise WireError(f"order: expected {len(self._alive)} signatures, found {len(order.signatures)}")
        signed = [each for each in zip(self._alive, order.signatures, strict=True) if each[1]]
        for place, signature in signed[: self._agreement.threshold]:
            if not verify(self._agreement.identities[place], signature, self._set):
                raise WireError("order: not all clients were told the same of this round, so no mask is taken off")
        if len(signed) < self._agreement.threshold:
            raise WireError(f"order: expected {self._agreement.threshold} signatures, found {len(signed)}")
        none = (b"", b"")
        return wire.UnmaskResult(tuple(self._held.get(place, none)[place in self._dead] for place in self._there))
