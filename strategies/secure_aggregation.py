"""The server's half of secure aggregation: a round of five legs, after which it knows the mean change, no single one.

Bonawitz et al., CCS 2017, figure 4 (`common/secure_aggregation.py` has the arithmetic, `client/secure_aggregation.py`
the other half):

    keys       each client of the cohort sends two public keys, signed
    shares     each gets all keys, and deals sealed shares of its secrets; the server passes them on
    masked     each trains, and sends its change under masks
    confirm    each signs whose changes have come, and all that it was told
    unmask     each gets the signatures, and reveals shares that take the masks off the sum

A client that stays away from a leg is out of the later ones. With fewer than `threshold_of` the cohort left, the round
learns nothing. A strategy with `sums` set then learns as if every client had returned the mean: what it makes of a
weighted sum of replies is the same.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray

from hyperbloom.common.config import FEWEST_CLIENTS
from hyperbloom.common.errors import WireError
from hyperbloom.common.keys import verify
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    ConfirmOrder,
    ConfirmResult,
    KeysOrder,
    KeysResult,
    MaskedOrder,
    MaskedResult,
    Packable,
    SharesOrder,
    SharesResult,
    TrainResult,
    UnmaskOrder,
    UnmaskResult,
    Weights,
)
from hyperbloom.common.secure_aggregation import (
    DIGEST_BYTES,
    KEY_BYTES,
    LARGEST_LOSS_SUMMED,
    SEALED_BYTES,
    SHARE_BYTES,
    Agreement,
    Scale,
    Words,
    add_mask,
    agree,
    combine,
    commit,
    new_key,
    pair_mask,
    public_key,
    read_key,
    threshold_of,
)
from hyperbloom.common.secure_sum import pack_places, part_digests, signed_keys, signed_set, told
from hyperbloom.strategies.personalised import ClientUpdate, Leg, Order, PersonalisedStrategy
from hyperbloom.strategies.roster import Client

__all__ = ["secure_legs"]

log = logging.getLogger("hyperbloom.server")

ResultT = TypeVar("ResultT", bound=Packable)

Orders = Callable[[Sequence[Client]], Iterable[tuple[Client, Order]]]
Check = Callable[[Client, ResultT], None]
Asked = Generator[Leg, None, Mapping[int, ResultT]]


def secure_legs(strategy: PersonalisedStrategy, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
    """Yield the exchanges of a round of training in place of the strategy's own, where replies are to be summed."""
    if strategy.reply == "nothing":
        yield from strategy.legs(server_round, cohort)
        return
    try:
        yield from _SecureRound(strategy, server_round, cohort).legs()
    except _Dropped as why:
        for client in cohort:
            strategy.round.refused.setdefault(client.client_id, f"dropped: {why}")


class _Dropped(Exception):
    """The round cannot learn anything; says why."""


class _SecureRound:
    """One round; clients are known to each other by their places among those that have sent keys.

    All mappings are by row, unless they say that they are by place.
    """

    def __init__(self, strategy: PersonalisedStrategy, number: int, cohort: Sequence[Client]) -> None:
        self.strategy, self.number, self.cohort = strategy, number, cohort
        self.threshold = threshold_of(len(cohort), strategy.config.min_replies)
        self.clients: dict[int, Client] = {client.row: client for client in cohort}
        self._seen: set[bytes] = set()  # keys that have come
        self.keys: Mapping[int, KeysResult] = {}
        self.dealt: Mapping[int, SharesResult] = {}

    def legs(self) -> Iterator[Leg]:
        """Yield the legs, and let the strategy learn; _Dropped as soon as too few are left."""
        if len(self.cohort) < FEWEST_CLIENTS:
            raise _Dropped(f"secure aggregation needs {FEWEST_CLIENTS} clients, and {len(self.cohort)} could be asked")
        self.keys = yield from self._ask(self.cohort, self._keys_orders, KeysResult, self._check_keys)
        self.rows = tuple(self.keys)  # by place
        self.place = {row: place for place, row in enumerate(self.rows)}
        self.agreement = self._agree()
        self.digest = self.agreement.digest
        self.dealt = yield from self._ask(self._who(self.keys), self._shares_orders, SharesResult, self._check_dealt)
        self._plan()
        masked = yield from self._ask(self._who(self.dealt), self._masked_orders, MaskedResult, self._check_masked)
        self.alive, self.dead = tuple(masked), self.dealt.keys() - masked.keys()
        self.signed = yield from self._ask(
            self._who(masked), self._confirm_orders, ConfirmResult, self._check_signature
        )
        revealed = yield from self._ask(self._who(self.signed), self._unmask_orders, UnmaskResult, self._check_revealed)
        total = np.zeros(self.sum.total + 1, np.uint32)
        for result in masked.values():
            total += np.frombuffer(result.masked, "<u4")
        self._unmask(total, revealed)
        self._learn(total, masked)

    def _ask(
        self, clients: Sequence[Client], orders: Orders, kind: type[ResultT], check: Check[ResultT]
    ) -> Asked[ResultT]:
        """Yield a leg; return what it brought, in order of rows. _Dropped if that is too little."""
        answers: dict[int, ResultT] = {}

        def take(replies: Iterator[Any]) -> None:
            for client, result in self.strategy.collect(replies, kind, check, quorum=False):
                self.clients[client.row] = self._as_begun(client)
                answers[client.row] = result

        def post(some: Sequence[Client]) -> list[Message]:
            return self.strategy.post(self.number, orders([self._as_begun(client) for client in some]))

        yield Leg(clients, post, take)
        if len(answers) < self.threshold:
            raise _Dropped(
                f"only {len(answers)} of {len(self.cohort)} answered in full; secure aggregation needs {self.threshold}"
            )
        return answers

    def _as_begun(self, client: Client) -> Client:
        """Return a client with what it said of itself first: in the midst of a round it may say otherwise."""
        return replace(client, about=self.clients[client.row].about)

    def _who(self, answers: Mapping[int, object]) -> list[Client]:
        return [self.clients[row] for row in answers]

    def _places(self, rows: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.place[row] for row in rows))

    # ------------------------------------------------------------------ keys

    def _keys_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        order = KeysOrder(self.strategy.run_id, self.number)
        return [(client, order) for client in clients]

    def _check_keys(self, client: Client, result: KeysResult) -> None:
        keys = {result.cipher_key, result.mask_key}
        if len(keys) < 2 or any(len(key) != KEY_BYTES for key in keys) or keys & self._seen:
            raise WireError(f"expected two keys of {KEY_BYTES} bytes of its own")
        for key in keys:
            agree(new_key(), key, "trial", b"")  # one that nobody can use would put everybody out of the round
        content = signed_keys(self.strategy.run_id, self.number, result.cipher_key, result.mask_key)
        if result.identity in self._seen or not verify(result.identity, result.signature, content):
            raise WireError("expected keys that it has signed with a key of its own")
        self._seen |= keys | {result.identity}

    def _agree(self) -> Agreement:
        members = self._who(self.keys)
        examples = max(self.strategy.counts_of(members))
        return Agreement(
            self.strategy.run_id,
            self.number,
            self.threshold,
            Scale(len(members), self.strategy.config.privacy.largest_change, examples),
            tuple(keys.cipher_key for keys in self.keys.values()),
            tuple(keys.mask_key for keys in self.keys.values()),
            tuple(keys.identity for keys in self.keys.values()),
        )

    # ------------------------------------------------------------------ shares

    def _shares_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        agreed, signatures = self.agreement, tuple(keys.signature for keys in self.keys.values())
        for client in clients:
            yield (
                client,
                SharesOrder(
                    agreed.run_id,
                    agreed.round,
                    self.place[client.row],
                    agreed.threshold,
                    agreed.scale.bound,
                    agreed.scale.examples,
                    agreed.cipher_keys,
                    agreed.mask_keys,
                    agreed.identities,
                    signatures,
                ),
            )

    def _check_dealt(self, client: Client, result: SharesResult) -> None:
        own, count = self.place[client.row], len(self.rows)
        lengths = [0 if place == own else SEALED_BYTES for place in range(count)]
        digests = [result.secret, *result.secret_shares, *result.key_shares]
        if (
            [len(sealed) for sealed in result.sealed] != lengths
            or len(result.secret_shares) != count
            or [len(digest) for digest in digests] != [DIGEST_BYTES] * (1 + 2 * count)
        ):
            raise WireError(f"expected shares for {count - 1} others, and digests of all")

    # ------------------------------------------------------------------ masked changes

    def _plan(self) -> None:
        """Settle what each client is sent and what is summed, before the first of them is asked to train."""
        strategy, members = self.strategy, self._who(self.dealt)
        rows = strategy.weights_for(members)
        assert rows is not None, "who sums changes sends weights"
        layouts = {client.row: strategy.layout_for(client) for client in members}
        self.weights = {
            client.row: Weights(strategy.sent_layout_for(client), row)
            for client, row in zip(members, rows, strict=True)
        }
        self.sent = {row: Weights(layouts[row], each.part(layouts[row])) for row, each in self.weights.items()}
        self.sum = _Sum(self.sent, self.digest, self.threshold)
        count = len(self.rows)
        self.order = MaskedOrder(
            **strategy.training(self.number) | {"reply": "weights"},
            weights=None,
            there=self._places(self.dealt),
            parts=tuple(self.sum.slices),
            lengths=tuple(part.stop - part.start for part in self.sum.slices.values()),
            owners=tuple(pack_places(self._places(self.sum.owners[part]), count) for part in self.sum.slices),
        )
        self.told = told(self.digest, self.order)

    def _masked_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        if clients and self.strategy.config.privacy.where != "none":
            self.strategy.on_release([client.client_id for client in clients])
        dealers = [self.dealt[self.rows[place]] for place in self.order.there]
        for client in clients:
            place = self.place[client.row]
            yield (
                client,
                replace(
                    self.order,
                    weights=self.weights[client.row],
                    sealed=tuple(dealer.sealed[place] for dealer in dealers),
                    digests=tuple(dealer.secret_shares[place] + dealer.key_shares[place] for dealer in dealers),
                ),
            )

    def _check_masked(self, client: Client, result: MaskedResult) -> None:
        expected = 4 * (self.sum.total + 1)
        if len(result.masked) != expected:
            raise WireError(f"masked: expected {expected} bytes, found {len(result.masked)}")

    # ------------------------------------------------------------------ unmasking

    def _confirm_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        order = ConfirmOrder(self.strategy.run_id, self.number, self._places(self.alive), self._places(self.dead))
        return [(client, order) for client in clients]

    def _check_signature(self, client: Client, result: ConfirmResult) -> None:
        """One that does not hold would keep all others from revealing anything."""
        content = signed_set(self.told, self._places(self.alive), self._places(self.dead))
        if not verify(self.keys[client.row].identity, result.signature, content):
            raise WireError("expected a signature of what it was told")

    def _unmask_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        signed = {self.place[row]: result.signature for row, result in self.signed.items()}
        signatures = tuple(signed.get(place, b"") for place in self._places(self.alive))
        order = UnmaskOrder(self.strategy.run_id, self.number, signatures)
        return [(client, order) for client in clients]

    def _check_revealed(self, holder: Client, result: UnmaskResult) -> None:
        """A holder has compared what it was dealt with the digests: if they do not fit now, it is not the dealer."""
        if len(result.shares) != len(self.dealt):
            raise WireError(f"shares: expected {len(self.dealt)}, found {len(result.shares)}")
        place = self.place[holder.row]
        for dealer, share in zip(self.dealt, result.shares, strict=True):
            purpose, digests = self._digests(dealer)
            if share and (len(share) != SHARE_BYTES or commit(share, purpose, self.digest) != digests[place]):
                raise WireError("shares: expected those that it was dealt, found another")

    def _digests(self, dealer: int) -> tuple[str, tuple[bytes, ...]]:
        dealt = self.dealt[dealer]
        return ("share of key", dealt.key_shares) if dealer in self.dead else ("share of secret", dealt.secret_shares)

    def _unmask(self, total: Words, revealed: Mapping[int, UnmaskResult]) -> None:
        """Take off `total` the masks of those who live on, and those that they share with the dead."""
        for index, dealer in enumerate(self.dealt):
            shares = {self.place[row]: result.shares[index] for row, result in revealed.items()}
            readable = {place: share for place, share in shares.items() if share}
            secret = self._recover(dealer, readable, len(revealed))
            if dealer not in self.dead:
                add_mask(total, secret, -1)
                continue
            private = read_key(secret)
            for row in self.alive:
                place, key = self.place[row], self.keys[row].mask_key
                pair_mask(total, private, key, place, self.place[dealer], self.told, -1)

    def _recover(self, dealer: int, shares: Mapping[int, bytes], asked: int) -> bytes:
        """Return the secret of a client that lives on, or the private key of one that does not, from shares by place.

        Args:
            dealer: whose.
            shares: those that their holders could read.
            asked: how many holders answered.

        Raises:
            _Dropped: that cannot be done.
        """
        name = self.clients[dealer].client_id
        if len(shares) < self.threshold:
            # Of fewer it may be the holders who say so. Once a round is enough.
            if 2 * len(shares) < asked and name not in self.strategy.round.lied:
                self.strategy.refuse(name, WireError("most others cannot read the shares that it has dealt"))
            raise _Dropped(f"{len(shares)} clients could read the shares that {name} has dealt, not {self.threshold}")
        secret = combine(dict(list(shares.items())[: self.threshold]))
        if dealer in self.dead:
            sound = secret is not None and public_key(read_key(secret)) == self.keys[dealer].mask_key
        else:
            sound = secret is not None and commit(secret, "secret", self.digest) == self.dealt[dealer].secret
        if secret is None or not sound:
            self.strategy.refuse(name, WireError("the shares that it has dealt are not those of its secrets"))
            raise _Dropped(f"{name} has dealt shares that do not fit together")
        return secret

    def _learn(self, total: Words, masked: Mapping[int, MaskedResult]) -> None:
        """Let the strategy learn from the mean, as if each client had returned it."""
        scale, strategy = self.agreement.scale, self.strategy
        weights = {row: scale.weight(self.clients[row].about.train_examples) for row in masked}
        try:
            mean = self.sum.mean(total[:-1], scale, weights)
            loss = float(scale.decode(total[-1:], sum(weights.values()), LARGEST_LOSS_SUMMED)[0])
            if loss < 0:
                raise WireError("the sum of losses is below 0")
        except WireError as error:
            raise _Dropped(f"{error}; at least one has not sent what it should") from None
        updates = []
        for row, result in masked.items():
            layout, sent = self.sent[row].layout, self.sent[row].values
            change = torch.from_numpy(self.sum.gather(mean, row))
            returned = (change if strategy.reply == "delta" else sent.double() + change).to(sent.dtype)
            updates.append(
                ClientUpdate(self.clients[row], TrainResult(loss, result.seconds, None), sent, returned, layout)
            )
        strategy.round.results = {update.client.client_id: update.result for update in updates}
        strategy.update(updates)


class _Sum:
    """How the tensors of all clients lie in one sum.

    Those that too few clients have are left out: whoever vanishes, three must be left of those who have one, or its sum
    would tell too much of each. Clients that were sent different values have no tensor in common.

    Args:
        sent: by row, the values before the training of what clients train, for those that may be in the sum.
        digest: of the round.
        threshold: how many of them are left at least.

    Attributes:
        owners: by part, the rows of the clients that have it.
        slices: by part, where it lies in the sum.
    """

    def __init__(self, sent: Mapping[int, Weights], digest: bytes, threshold: int) -> None:
        self._layouts = {row: weights.layout for row, weights in sent.items()}
        known: dict[tuple[Layout, int], dict[bytes, str]] = {}  # most are sent the very same vector
        self._names: dict[int, dict[bytes, str]] = {}
        self.owners: dict[bytes, list[int]] = {}
        lengths: dict[bytes, int] = {}
        for row, weights in sent.items():
            key = weights.layout, weights.values.data_ptr()
            if key not in known:
                known[key] = part_digests(weights, digest)
            self._names[row] = known[key]
            places = {name: place for name, place, _ in weights.layout.slices()}
            for part, name in known[key].items():
                self.owners.setdefault(part, []).append(row)
                lengths[part] = places[name].stop - places[name].start
        fewest = len(sent) - threshold + FEWEST_CLIENTS
        self.slices: dict[bytes, slice] = {}
        self.total = 0
        for part, length in lengths.items():
            if len(self.owners[part]) >= fewest:
                self.slices[part] = slice(self.total, self.total + length)
                self.total += length
        left_out = sum(lengths.values()) - self.total
        if left_out:
            log.warning("%d weights are not summed: fewer than %d clients of the round have them", left_out, fewest)

    def mean(self, total: Words, scale: Scale, weights: Mapping[int, int]) -> NDArray[np.float64]:
        """Return the mean change `(total,)` of each part over those with `weights`, by row, that have it.

        Raises:
            WireError: no clients can have sent numbers with this sum.
        """
        mean = np.empty(len(total))
        for part, place in self.slices.items():
            weight = sum(weights.get(row, 0) for row in self.owners[part])
            mean[place] = scale.decode(total[place], weight)
        return mean

    def gather(self, values: NDArray[np.float64], row: int) -> NDArray[np.float64]:
        """Return of a sum's values those of a client's vector; zeros for what is not summed."""
        gathered = np.zeros(self._layouts[row].numel)
        parts = {name: part for part, name in self._names[row].items() if part in self.slices}
        for name, place, _ in self._layouts[row].slices():
            if name in parts:
                gathered[place] = values[self.slices[parts[name]]]
        return gathered
