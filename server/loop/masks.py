"""The server's half of secure aggregation. After five exchanges it knows the mean change, but no single change.

Bonawitz et al., CCS 2017, figure 4. The arithmetic is in `common/secrecy/masks.py`, the client's half in
`client/work/masks.py`:

    keys       each client of the cohort sends two public keys, signed
    shares     each gets all keys, and deals sealed shares of its secrets; the server passes them on
    masked     each trains, and sends its change under masks
    confirm    each signs whose changes have come, and all that it was told
    unmask     each gets the signatures, and reveals shares that take the masks off the sum

A client that misses one exchange takes no part in the later ones. If fewer than `threshold_of` the cohort remain, the
server learns nothing in this round. Otherwise the algorithm receives the mean as the update of every client. An
algorithm with `sums` uses only the weighted mean of the updates, so its result is the same.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from hyperbloom.common.config import FEWEST_CLIENTS, RunConfig
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy import masks as protocol
from hyperbloom.common.secrecy.keys import verify
from hyperbloom.common.secrecy.sums import pack_places, part_digests, signed_keys, signed_set, told
from hyperbloom.common.wire import masks as wire
from hyperbloom.common.wire.orders import Order, TrainOrder, TrainResult
from hyperbloom.server.loop.exchange import Outcome, capped_examples, without_weights
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, Update, ask, through
from hyperbloom.strategies.turn import Turn

log = logging.getLogger("hyperbloom.server")

AnswerT = TypeVar("AnswerT")
Blame = Callable[[Client, str, Outcome], None]


def under_masks(
    exchanges: Exchanges[None], config: RunConfig, turn: Turn, outcome: Outcome, blame: Blame
) -> Exchanges[None]:
    """Play a round's exchanges, its training under masks; `blame` counts a refused answer against a client."""

    def train(wanted: Train) -> Exchanges[Sequence[Update]]:
        try:
            return (yield from _MaskedTraining(config, turn, outcome, blame, wanted).play())
        except _Dropped as why:
            for client in wanted.clients:
                if client.client_id not in outcome.refused:
                    outcome.leave_out(client, Reason.DROPPED, f"dropped: {why}")
            return []

    return through(exchanges, train)


class _Dropped(Exception):
    """The round learns nothing; the message says why."""


class MaskedSum:
    """Lays out the tensors of all clients in one sum.

    Clients share a tensor only if they were sent the same values for it. A tensor that too few have is left out: at
    least `FEWEST_CLIENTS` owners must remain after the worst loss of clients, or the sum would tell too much of each.

    Args:
        sent: what each client is sent, by row.
        trained: the layouts of what each client trains of it.
        digest: of the round's agreement.
        threshold: number of clients that have to be left.

    Attributes:
        owners: by part, the rows of the clients that are sent it.
        lengths: by part, how many numbers of it are in the sum, or 0.
        slices: by part in the sum, its place.
    """

    def __init__(
        self, sent: Mapping[int, Weights], trained: Mapping[int, Layout], digest: bytes, threshold: int
    ) -> None:
        self._layouts = trained
        known: dict[tuple[Layout, int], dict[bytes, str]] = {}  # most clients are sent the very same vector
        self._names: dict[int, dict[bytes, str]] = {}
        self.owners: dict[bytes, list[int]] = {}
        self.lengths: dict[bytes, int] = {}
        for row, weights in sent.items():
            key = weights.layout, weights.values.data_ptr()
            if key not in known:
                known[key] = part_digests(weights, digest)
            self._names[row] = known[key]
            places = {name: place for name, place, _ in trained[row].slices()}
            for part, name in known[key].items():
                self.owners.setdefault(part, []).append(row)
                self.lengths[part] = places[name].stop - places[name].start if name in places else 0
        fewest = len(sent) - threshold + FEWEST_CLIENTS
        self.slices: dict[bytes, slice] = {}
        self.total = left_out = 0
        for part, length in self.lengths.items():
            if len(self.owners[part]) < fewest:
                self.lengths[part], left_out = 0, left_out + length
            elif length:
                self.slices[part] = slice(self.total, self.total + length)
                self.total += length
        if left_out:
            log.warning("%d weights are not summed: fewer than %d clients of the round have them", left_out, fewest)

    def mean(self, total: protocol.Words, scale: protocol.Scale, weights: Mapping[int, int]) -> NDArray[np.float64]:
        """Return the mean change `(total,)` of the unmasked sum; `weights` has those of its clients by row.

        Raises:
            WireError: no honest clients can have sent numbers with this sum.
        """
        mean = np.empty(len(total))
        for part, place in self.slices.items():
            weight = sum(weights.get(row, 0) for row in self.owners[part])
            mean[place] = scale.decode(total[place], weight)
        return mean

    def gather(self, values: NDArray[np.float64], row: int) -> NDArray[np.float64]:
        """Return the values of a sum that belong to a client's vector `(P,)`, with zeros for tensors not in the sum."""
        gathered = np.zeros(self._layouts[row].numel)
        parts = {name: part for part, name in self._names[row].items() if part in self.slices}
        for name, place, _ in self._layouts[row].slices():
            if name in parts:
                gathered[place] = values[self.slices[parts[name]]]
        return gathered


class _MaskedTraining:
    """One training exchange. Clients know each other by their places among the clients that sent keys.

    Mappings are by row unless their names or comments say that they are by place.
    """

    def __init__(self, config: RunConfig, turn: Turn, outcome: Outcome, blame: Blame, wanted: Train) -> None:
        self.config, self.outcome, self.blame, self.wanted = config, outcome, blame, wanted
        self.run_id, self.number = turn.scope.run_id, turn.number
        self.cohort = wanted.clients
        # Of the configured cohort, not of those that are here: clients with --min-masked refuse a smaller one.
        self.threshold = min(len(self.cohort), protocol.threshold_of(config.cohort, config.min_replies))
        self.clients: dict[int, Client] = {client.row: client for client in self.cohort}
        self._seen: set[bytes] = set()  # keys received so far

    def play(self) -> Exchanges[Sequence[Update]]:
        """Play all exchanges; return the mean as every client's update. Raise _Dropped if too few clients are left."""
        if not self.cohort:
            return []
        if len(self.cohort) < FEWEST_CLIENTS:
            raise _Dropped(f"secure aggregation needs {FEWEST_CLIENTS} clients, and {len(self.cohort)} could be asked")
        keys_order = wire.KeysOrder(self.run_id, self.number)
        self.keys: Mapping[int, wire.KeysResult] = yield from self._ask(
            self.cohort, lambda client: keys_order, self._check_keys
        )
        self.rows = tuple(self.keys)  # by place
        self.place = {row: place for place, row in enumerate(self.rows)}
        agreement = self.agreement = self._agree()
        self.digest = agreement.digest
        proofs = tuple(keys.signature for keys in self.keys.values())
        self.dealt: Mapping[int, wire.SharesResult] = yield from self._ask(
            self._who(self.keys), lambda c: wire.SharesOrder(agreement, self.place[c.row], proofs), self._check_dealt
        )
        self._plan()
        masked: Mapping[int, wire.MaskedResult] = yield from self._ask(
            self._who(self.dealt), self._masked_order, self._check_masked
        )
        self.alive, self.dead = tuple(masked), self.dealt.keys() - masked.keys()
        confirm = wire.ConfirmOrder(self.run_id, self.number, self._places(self.alive), self._places(self.dead))
        signed: Mapping[int, wire.ConfirmResult] = yield from self._ask(
            self._who(masked), lambda client: confirm, self._check_signature
        )
        by_place = {self.place[row]: result.signature for row, result in signed.items()}
        unmask = wire.UnmaskOrder(
            self.run_id, self.number, tuple(by_place.get(place, b"") for place in self._places(self.alive))
        )
        revealed: Mapping[int, wire.UnmaskResult] = yield from self._ask(
            self._who(signed), lambda client: unmask, self._check_revealed
        )
        total = np.zeros(self.sum.total, np.uint32)
        for result in masked.values():
            total += np.frombuffer(result.masked, "<u4")
        self._unmask(total, revealed)
        return self._updates(total, masked)

    def _ask(
        self, clients: Sequence[Client], order: Callable[[Client], Order], check: Callable[[Client, AnswerT], None]
    ) -> Exchanges[Mapping[int, AnswerT]]:
        """Play one exchange; return the answers by row. Raise _Dropped if fewer than the threshold answered."""

        def orders(some: Sequence[Client]) -> list[Order]:
            return [order(self.clients[client.row]) for client in some]

        answers = yield from ask(Ask(clients, orders, check, self.wanted.size, quorum=False))
        if len(answers) < self.threshold:
            raise _Dropped(
                f"only {len(answers)} of {len(self.cohort)} answered in full; secure aggregation needs {self.threshold}"
            )
        return {client.row: answer for client, answer in answers}

    def _who(self, answers: Mapping[int, object]) -> list[Client]:
        """Return clients as they were at the start of the round; one that rejoins may describe itself anew."""
        return [self.clients[row] for row in answers]

    def _places(self, rows: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.place[row] for row in rows))

    def _check_keys(self, client: Client, result: wire.KeysResult) -> None:
        keys = {result.cipher_key, result.mask_key}
        if len(keys) < 2 or any(len(key) != protocol.KEY_BYTES for key in keys) or keys & self._seen:
            raise WireError(f"expected two keys of {protocol.KEY_BYTES} bytes of its own")
        for key in keys:  # one that nobody can use, which would stop all other clients, raises an error
            protocol.agree(X25519PrivateKey.generate(), key, "trial", b"")
        content = signed_keys(self.run_id, self.number, result.cipher_key, result.mask_key)
        if result.identity in self._seen or not verify(result.identity, result.signature, content):
            raise WireError("expected keys that it has signed with a key of its own")
        self._seen |= keys | {result.identity}

    def _agree(self) -> protocol.Agreement:
        members = self._who(self.keys)
        examples = max(capped_examples(members, self.config.examples_cap))
        return protocol.Agreement(
            self.run_id,
            self.number,
            self.threshold,
            protocol.Scale(len(members), self.config.privacy.largest_change, examples),
            tuple(keys.cipher_key for keys in self.keys.values()),
            tuple(keys.mask_key for keys in self.keys.values()),
            tuple(keys.identity for keys in self.keys.values()),
        )

    def _check_dealt(self, client: Client, result: wire.SharesResult) -> None:
        own, count = self.place[client.row], len(self.rows)
        lengths = [0 if place == own else protocol.SEALED_BYTES for place in range(count)]
        digests = [result.secret, *result.secret_shares, *result.key_shares]
        if (
            [len(sealed) for sealed in result.sealed] != lengths
            or len(result.secret_shares) != count
            or [len(digest) for digest in digests] != [protocol.DIGEST_BYTES] * (1 + 2 * count)
        ):
            raise WireError(f"expected shares for {count - 1} others, and digests of all")

    def _plan(self) -> None:
        """Fix what each client is sent and what is summed, before any client trains."""
        members = self._who(self.dealt)
        self.orders: dict[int, TrainOrder] = {
            client.row: order for client, order in zip(members, self.wanted.orders(members), strict=True)
        }
        self.sent: dict[int, Weights] = {}
        whole: dict[int, Weights] = {}
        for client in members:
            layout, weights = self.wanted.layout(client), self.orders[client.row].weights
            assert weights is not None, "who sums changes sends weights"
            whole[client.row], self.sent[client.row] = weights, Weights(layout, weights.part(layout))
        self.sum = MaskedSum(whole, {row: each.layout for row, each in self.sent.items()}, self.digest, self.threshold)
        count = len(self.rows)
        self.masking = wire.Masking(
            there=self._places(self.dealt),
            parts=tuple(self.sum.lengths),
            lengths=tuple(self.sum.lengths.values()),
            owners=tuple(pack_places(self._places(self.sum.owners[part]), count) for part in self.sum.lengths),
        )
        order = next(iter(self.orders.values()))
        self.told = told(self.digest, self._masked(order, self.masking))

    def _masked(self, order: TrainOrder, masking: wire.Masking) -> wire.MaskedOrder:
        return wire.MaskedOrder(**(vars(order) | {"reply": "weights"}), masking=masking)

    def _masked_order(self, client: Client) -> wire.MaskedOrder:
        place, dealers = self.place[client.row], [self.dealt[self.rows[place]] for place in self.masking.there]
        masking = replace(
            self.masking,
            sealed=tuple(dealer.sealed[place] for dealer in dealers),
            digests=tuple(dealer.secret_shares[place] + dealer.key_shares[place] for dealer in dealers),
        )
        return self._masked(self.orders[client.row], masking)

    def _check_masked(self, client: Client, result: wire.MaskedResult) -> None:
        expected = 4 * self.sum.total
        if len(result.masked) != expected:
            raise WireError(f"masked: expected {expected} bytes, found {len(result.masked)}")

    def _check_signature(self, client: Client, result: wire.ConfirmResult) -> None:
        """Check the signature now: an invalid one would keep all other clients from revealing their shares."""
        content = signed_set(self.told, self._places(self.alive), self._places(self.dead))
        if not verify(self.keys[client.row].identity, result.signature, content):
            raise WireError("expected a signature of what it was told")

    def _check_revealed(self, holder: Client, result: wire.UnmaskResult) -> None:
        """Check shares against the dealer's digests. The holder did so before; a mismatch is the holder's fault."""
        if len(result.shares) != len(self.dealt):
            raise WireError(f"shares: expected {len(self.dealt)}, found {len(result.shares)}")
        place = self.place[holder.row]
        for (dealer, dealt), share in zip(self.dealt.items(), result.shares, strict=True):
            is_dead = dealer in self.dead
            purpose, digests = ("key", dealt.key_shares) if is_dead else ("secret", dealt.secret_shares)
            if share and (
                len(share) != protocol.SHARE_BYTES
                or protocol.commit(share, f"share of {purpose}", self.digest) != digests[place]
            ):
                raise WireError("shares: expected those that it was dealt, found another")

    def _unmask(self, total: protocol.Words, revealed: Mapping[int, wire.UnmaskResult]) -> None:
        """Remove from `total` the survivors' own masks, and the pair masks that survivors share with the dead."""
        for index, dealer in enumerate(self.dealt):
            shares = {self.place[row]: share for row, result in revealed.items() if (share := result.shares[index])}
            secret = self._recover(dealer, shares, len(revealed))
            if dealer not in self.dead:
                protocol.add_mask(total, secret, -1)
                continue
            private = X25519PrivateKey.from_private_bytes(secret)
            for row in self.alive:
                place, key = self.place[row], self.keys[row].mask_key
                protocol.pair_mask(total, private, key, place, self.place[dealer], self.told, -1)

    def _recover(self, dealer: int, shares: Mapping[int, bytes], asked: int) -> bytes:
        """Return a survivor's secret, or the private key of a client that dropped out, from the shares by place."""
        client = self.clients[dealer]
        name = client.client_id
        if len(shares) < self.threshold:
            # Blame the dealer only if most holders complain; a minority may lie. Once a round is enough.
            if 2 * len(shares) < asked and name not in self.outcome.lied:
                self.blame(client, "most others cannot read the shares that it has dealt", self.outcome)
            raise _Dropped(f"{len(shares)} clients could read the shares that {name} has dealt, not {self.threshold}")
        secret = protocol.combine(dict(list(shares.items())[: self.threshold]))
        if dealer in self.dead:
            sound = (
                secret is not None
                and protocol.public_key(X25519PrivateKey.from_private_bytes(secret)) == self.keys[dealer].mask_key
            )
        else:
            sound = secret is not None and protocol.commit(secret, "secret", self.digest) == self.dealt[dealer].secret
        if secret is None or not sound:
            self.blame(client, "the shares that it has dealt are not those of its secrets", self.outcome)
            raise _Dropped(f"{name} has dealt shares that do not fit together")
        return secret

    def _updates(self, total: protocol.Words, masked: Mapping[int, wire.MaskedResult]) -> list[Update]:
        """Return the mean as every client's update. Raise _Dropped if no honest clients can have sent this sum."""
        scale = self.agreement.scale
        weights = {row: scale.weight(self.clients[row].about.train_examples) for row in masked}
        try:
            mean = self.sum.mean(total, scale, weights)
        except WireError as error:
            raise _Dropped(f"{error}; at least one has not sent what it should") from None
        members = self._who(masked)
        counts = capped_examples(members, self.config.examples_cap)
        updates = []
        for client, examples in zip(members, counts, strict=True):
            sent = self.sent[client.row]
            change = torch.from_numpy(self.sum.gather(mean, client.row))
            by_weights = self.orders[client.row].reply == "weights"
            returned = (sent.values.double() + change if by_weights else change).to(sent.values.dtype)
            result = TrainResult(masked[client.row].seconds)
            updates.append(Update(client, result, sent.values, returned, sent.layout, examples))
        # Those who fell silent later are in the sum nevertheless.
        used, refused = {client.client_id for client in members}, self.outcome.refused
        self.outcome.refused = {who: why for who, why in refused.items() if who not in used or why.reason.is_lie}
        self.outcome.results = {update.client.client_id: without_weights(update.result) for update in updates}
        return updates
