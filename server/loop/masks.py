"""The server's half of secure aggregation: a round of four legs, after which it knows the mean change, no single one.

Bonawitz et al., CCS 2017, figure 4 (`common/secure_aggregation.py` has the arithmetic, `client/secure_aggregation.py`
the other half):

    keys       each client of the cohort sends two public keys
    shares     each gets all keys, and deals sealed shares of its secrets; the server passes them on
    masked     each trains, and sends its change under masks
    unmask     each reveals shares that take the masks off the sum, of those whose change has come and of the others

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
from torch import Tensor

from hyperbloom.common.config import FEWEST_CLIENTS
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
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
from hyperbloom.strategies.exchange import Client
from hyperbloom.strategies.personalised import ClientUpdate, Leg, Order

__all__ = ["secure_legs"]

log = logging.getLogger("hyperbloom.server")

ResultT = TypeVar("ResultT", bound=Packable)

Orders = Callable[[Sequence[Client]], Iterable[tuple[Client, Order]]]
Check = Callable[[Client, ResultT], None]
Asked = Generator[Leg, None, Mapping[int, ResultT]]


def secure_legs(strategy: Algorithm, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
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

    def __init__(self, strategy: Algorithm, number: int, cohort: Sequence[Client]) -> None:
        self.strategy, self.number, self.cohort = strategy, number, cohort
        self.threshold = threshold_of(len(cohort), strategy.config.min_replies)
        self.clients: dict[int, Client] = {client.row: client for client in cohort}
        self._seen: set[bytes] = set()  # keys that have come
        self.keys: Mapping[int, KeysResult] = {}
        self.dealt: Mapping[int, SharesResult] = {}

    def legs(self) -> Iterator[Leg]:
        """Yield the four legs, and let the strategy learn; _Dropped as soon as too few are left."""
        if len(self.cohort) < FEWEST_CLIENTS:
            raise _Dropped(f"secure aggregation needs {FEWEST_CLIENTS} clients, and {len(self.cohort)} could be asked")
        self.keys = yield from self._ask(self.cohort, self._keys_orders, KeysResult, self._check_keys)
        self.rows = tuple(self.keys)  # by place
        self.place = {row: place for place, row in enumerate(self.rows)}
        self.agreement = self._agree()
        self.digest = self.agreement.digest
        self.dealt = yield from self._ask(self._who(self.keys), self._shares_orders, SharesResult, self._check_dealt)
        self.sum = _Sum({row: self.strategy.layout_for(self.clients[row]) for row in self.dealt}, self.threshold)
        self.sent: dict[int, Tensor] = {}
        masked = yield from self._ask(self._who(self.dealt), self._masked_orders, MaskedResult, self._check_masked)
        self.dead = self.dealt.keys() - masked.keys()
        self.alive = tuple(masked)
        revealed = yield from self._ask(self._who(masked), self._unmask_orders, UnmaskResult, self._check_revealed)
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
        self._seen |= keys

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
        )

    # ------------------------------------------------------------------ shares

    def _shares_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        agreed = self.agreement
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

    def _masked_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        strategy = self.strategy
        if clients and strategy.config.privacy.where != "none":
            strategy.on_release([client.client_id for client in clients])
        there = self._places(self.dealt)
        rows = strategy.weights_for(clients) if clients else []
        assert rows is not None, "who sums changes sends weights"
        for client, row in zip(clients, rows, strict=True):
            place, layout = self.place[client.row], strategy.layout_for(client)
            weights = Weights(strategy.sent_layout_for(client), row)
            self.sent[client.row] = weights.part(layout)
            dealers = [self.dealt[self.rows[dealer]] for dealer in there]
            yield (
                client,
                MaskedOrder(
                    **strategy.training(self.number) | {"reply": "weights"},
                    weights=weights,
                    there=there,
                    sealed=tuple(dealer.sealed[place] for dealer in dealers),
                    digests=tuple(dealer.secret_shares[place] + dealer.key_shares[place] for dealer in dealers),
                    pieces=self.sum.pieces(layout),
                    total=self.sum.total,
                ),
            )

    def _check_masked(self, client: Client, result: MaskedResult) -> None:
        expected = 4 * (self.sum.total + 1)
        if len(result.masked) != expected:
            raise WireError(f"masked: expected {expected} bytes, found {len(result.masked)}")

    # ------------------------------------------------------------------ unmasking

    def _unmask_orders(self, clients: Sequence[Client]) -> Iterable[tuple[Client, Order]]:
        alive, dead = self._places(self.alive), self._places(self.dead)
        order = UnmaskOrder(self.strategy.run_id, self.number, alive, dead)
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
                pair_mask(total, private, key, place, self.place[dealer], self.digest, -1)

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
            layout, sent = strategy.layout_for(self.clients[row]), self.sent[row]
            change = torch.from_numpy(self.sum.gather(mean, layout))
            returned = (change if strategy.reply == "delta" else sent.double() + change).to(sent.dtype)
            told = TrainResult(loss, result.seconds, None)
            updates.append(ClientUpdate(self.clients[row], told, sent, returned, layout))
        strategy.round.results = {update.client.client_id: update.result for update in updates}
        strategy.update(updates)


class _Sum:
    """How the parameters of all clients lie in one sum.

    Those that too few clients have are left out: whoever vanishes, three must be left of those who have one, or its sum
    would tell too much of each.

    Args:
        layouts: by row, of the clients that may be in the sum.
        threshold: how many of them are left at least.
    """

    def __init__(self, layouts: Mapping[int, Layout], threshold: int) -> None:
        self._owners: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        lengths: dict[tuple[str, tuple[int, ...]], int] = {}
        for row, layout in layouts.items():
            for shape, length in zip(layout.shapes, layout.sizes, strict=True):
                self._owners.setdefault(shape, []).append(row)
                lengths[shape] = length
        fewest = len(layouts) - threshold + FEWEST_CLIENTS
        self._places: dict[tuple[str, tuple[int, ...]], slice] = {}
        self.total = 0
        for shape, length in lengths.items():
            if length and len(self._owners[shape]) >= fewest:
                self._places[shape] = slice(self.total, self.total + length)
                self.total += length
        left_out = sum(lengths.values()) - self.total
        if left_out:
            log.warning("%d weights are not summed: fewer than %d clients of the round have them", left_out, fewest)

    def pieces(self, layout: Layout) -> tuple[int, ...]:
        """Return the pieces of a client's vector, as a `MaskedOrder` has them."""
        found: list[list[int]] = []
        start = 0
        for shape, length in zip(layout.shapes, layout.sizes, strict=True):
            place = self._places.get(shape)
            if (
                place is not None
                and found
                and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2])
                == (
                    start,
                    place.start,
                )
            ):
                found[-1][2] += length
            elif place is not None:
                found.append([start, place.start, length])
            start += length
        return tuple(number for piece in found for number in piece)

    def mean(self, total: Words, scale: Scale, weights: Mapping[int, int]) -> NDArray[np.float64]:
        """Return the mean change `(total,)` of each parameter over those with `weights`, by row, that have it.

        Raises:
            WireError: no clients can have sent numbers with this sum.
        """
        mean = np.empty(len(total))
        for shape, place in self._places.items():
            weight = sum(weights.get(row, 0) for row in self._owners[shape])
            mean[place] = scale.decode(total[place], weight)
        return mean

    def gather(self, values: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return of a sum's values those of a client's vector; zeros for what is not summed."""
        gathered = np.zeros(layout.numel)
        numbers = iter(self.pieces(layout))
        for start, place, length in zip(numbers, numbers, numbers, strict=True):
            gathered[start : start + length] = values[place : place + length]
        return gathered
