"""Secure aggregation from end to end: the plain average to within its bound, whoever vanishes, and no more is seen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import masks as client_side
from hyperbloom.client.work import training
from hyperbloom.common.config import PrivacyConfig, RunConfig
from hyperbloom.common.errors import CohortError, HyperbloomError
from hyperbloom.common.graphs import SHARED
from hyperbloom.common.layout import Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy import noise as privacy
from hyperbloom.common.secrecy.keys import make_key, public_der, sign
from hyperbloom.common.secrecy.masks import Scale, commit, threshold_of
from hyperbloom.common.secrecy.sums import signed_keys
from hyperbloom.common.wire.masks import (
    ConfirmOrder,
    KeysOrder,
    MaskedOrder,
    SharesOrder,
    SharesResult,
    UnmaskOrder,
    UnmaskResult,
)
from hyperbloom.common.wire.orders import EvaluateOrder, Order, TrainOrder, TrainResult
from hyperbloom.server.loop.roster import PATIENCE
from hyperbloom.strategies.exchange import Update
from tests.strategies.conftest import (
    RUN_ID,
    History,
    Inline,
    assert_same,
    digits_config,
    digits_federation,
    introduction,
    scored,
    scripted_grid,
    texts,
)

EXAMPLES = (10, 20, 30, 45, 7, 12)
EXCHANGES: tuple[type[Order], ...] = (KeysOrder, SharesOrder, MaskedOrder, ConfirmOrder, UnmaskOrder)
LATE = (ConfirmOrder, UnmaskOrder)
Lie = Callable[[Any, "Crew"], Any]


class Crew:
    """Clients with given changes and true secrets; `fails` and `lies` say at which order, by its class.

    Attributes:
        sent: what the server sent to be trained.
        updates: what the algorithm has learned from.
    """

    def __init__(self, count: int, **config: Any) -> None:
        values: dict[str, Any] = {"strategy": "fedavg", "rounds": 1, "eval_every": 1, "clients": count}
        self.config = RunConfig(**(values | {"cohort": count, "secure_aggregation": True, "sizes": ("S",)} | config))
        self.names = [f"c{index}" for index in range(count)]
        self.fails: set[tuple[str, type[Order]]] = set()
        self.lies: dict[tuple[str, type[Order]], Lie] = {}
        self.changes: dict[str, Tensor] = {}
        self.sent: Tensor | None = None
        self.updates: list[Update] = []
        abouts = [introduction(name, train_examples=n) for name, n in zip(self.names, EXAMPLES, strict=False)]
        self.abouts = dict(zip(self.names, abouts, strict=True))
        self.grid = scripted_grid(
            abouts,
            {EvaluateOrder: lambda name, order: scored((5, 10, 1.0), (5, 10, 1.0))}
            | dict.fromkeys(EXCHANGES, self._answer),
        )
        self.inline = Inline(self.config, self.grid).join()
        self.algorithm = self.inline.algorithm
        learn = self.algorithm.learn
        self.algorithm.learn = lambda updates: (self.updates.extend(updates), learn(updates))

    def run(self) -> History:
        """Run a round, of which nothing is left on the clients."""
        history, _ = self.inline.run()
        return history

    def change(self, name: str) -> Tensor:
        """Return what training brings to a client: values that a float32 keeps whole beside zero."""
        if name not in self.changes:
            generator = torch.Generator().manual_seed(self.names.index(name))
            self.changes[name] = torch.randn(self.algorithm.global_weights.numel(), generator=generator) / 100
        return self.changes[name]

    def expected(self, names: Sequence[str]) -> Tensor:
        """Return what the sum of these clients' whole numbers stands for, computed apart: in Python's own."""
        assert self.sent is not None
        counts = {name: self.abouts[name].train_examples for name in self.names}
        members = [name for name in self.names if (name, KeysOrder) not in self.fails]
        step = 8.0 / Scale(len(members), 8.0, 1).limit
        most, total = max(counts[name] for name in members), [0] * self.sent.numel()
        for name in names:
            # What arrives at the client is the weight after its training, in float32.
            change = (self.sent + self.change(name)).double() - self.sent.double()
            for index, value in enumerate(change.tolist()):
                total[index] += round(value / step * counts[name] / most)
        factor = step * most / sum(counts[name] for name in names)
        return (self.sent.double() + torch.tensor(total, dtype=torch.float64) * factor).float()

    def plain(self, names: Sequence[str]) -> Tensor:
        """Return the average that the server would make of these clients' replies themselves."""
        assert self.sent is not None
        counts = [self.abouts[name].train_examples for name in names]
        rows = torch.stack([(self.sent + self.change(name)).double() for name in names])
        return torch.from_numpy(np.average(rows.numpy(), axis=0, weights=counts))

    def _answer(self, name: str, order: Order) -> Any:
        if (name, type(order)) in self.fails:
            raise ConnectionError(f"{name} is gone")
        result = self._answer_honestly(name, order)
        lie = self.lies.get((name, type(order)))
        return lie(result, self) if lie else result

    def _answer_honestly(self, name: str, order: Any) -> Any:
        settings = ClientSettings(name)
        client: Any = SimpleNamespace(settings=settings, releases=Releases(settings))  # no more is asked for
        handlers: dict[type[Order], Any] = {
            KeysOrder: client_side.make_keys,
            SharesOrder: client_side.deal_shares,
            ConfirmOrder: client_side.confirm,
            UnmaskOrder: client_side.unmask,
        }
        if type(order) in handlers:
            return handlers[type(order)](client, order)
        with client_side._current(client, order, order.scope.run_id, order.scope.round) as secure:
            secure.expect(order)
            self.sent = order.weights.values
            trained = Weights(order.weights.layout, self.sent + self.change(name))
            result = TrainResult(0.5, trained, loss=float(self.names.index(name)))
            return secure.mask(order, result, self.abouts[name].train_examples)


# ---------------------------------------------------------------------- the sum, whoever vanishes


def dropouts() -> Iterator[Any]:
    """Yield for four and for six clients who vanishes when, as long as enough are left."""
    yield pytest.param(4, {}, id="nobody")
    for kind in EXCHANGES:
        for index in range(4):
            yield pytest.param(4, {f"c{index}": kind}, id=f"4-c{index}-{kind.__name__}")
    for pair in combinations(range(6), 2):
        gone = {f"c{index}": MaskedOrder for index in pair}
        yield pytest.param(6, gone, id=f"6-{pair}")
    mixed = {"c1": SharesOrder, "c4": MaskedOrder}
    yield pytest.param(6, mixed, id="6-mixed")
    yield pytest.param(6, {"c0": MaskedOrder, "c5": UnmaskOrder}, id="6-late")
    yield pytest.param(6, {"c2": ConfirmOrder, "c5": UnmaskOrder}, id="6-later")


@pytest.mark.parametrize(("count", "gone"), list(dropouts()))
def test_the_result_is_the_average_over_those_whose_change_has_come(
    count: int, gone: Mapping[str, type[Order]]
) -> None:
    crew = Crew(count)
    crew.fails = set(gone.items())
    before = crew.algorithm.global_weights.clone()
    history = crew.run()
    summed = [name for name in crew.names if gone.get(name, UnmaskOrder) in LATE]
    assert [update.client.client_id for update in crew.updates] == summed == list(history.rounds[0].results)
    assert set(history.rounds[0].refused) == set(gone) - set(summed), "whose change is in the sum was not left out"
    for update in crew.updates:
        assert update.returned is not None and torch.equal(update.returned, crew.expected(summed))
    members = count - sum(kind == KeysOrder for kind in gone.values())
    counts = [crew.abouts[name].train_examples for name in summed]
    most = max(crew.abouts[name].train_examples for name in crew.names if gone.get(name) != KeysOrder)
    bound = 8.0 / Scale(members, 8.0, 1).limit / 2 * len(summed) * most / sum(counts)
    rounding = 4e-7 * float(crew.plain(summed).abs().max())
    assert float((crew.algorithm.global_weights - crew.plain(summed)).abs().max()) <= bound + rounding
    assert float((crew.algorithm.global_weights - before).abs().max()) > 1000 * (bound + rounding), "it learns at all"
    assert crew.updates[0].result.loss is None, "a loss tells which client has a class"
    left = [settings for settings in client_side._rounds if settings.client_id in crew.names]
    assert not left or gone, "secrets are gone with the round"


def test_changes_without_the_weights_are_summed_as_well() -> None:
    """An algorithm of one's own may want deltas: it gets the mean of these."""
    crew = Crew(3)
    crew.algorithm.reply = "delta"
    crew.algorithm.learn = crew.updates.extend
    crew.run()
    assert crew.sent is not None
    for update in crew.updates:
        assert update.returned is not None
        torch.testing.assert_close(crew.sent + update.returned, crew.expected(crew.names), rtol=0, atol=1e-7)


def test_nobody_counts_for_more_than_the_cap() -> None:
    crew = Crew(4, examples_cap=1.0)
    crew.run()
    capped = [10, 20, 20, 20]  # the lower of the two in the middle of 10, 20, 30 and 45
    assert crew.sent is not None and [update.examples for update in crew.updates] == capped
    change = np.average(torch.stack([crew.change(name) for name in crew.names]).numpy(), axis=0, weights=capped)
    torch.testing.assert_close(
        crew.algorithm.global_weights.double(),
        crew.sent.double() + torch.from_numpy(change).double(),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", EXCHANGES)
def test_a_round_with_too_few_learns_nothing_and_says_why(kind: type[Order]) -> None:
    crew = Crew(4)
    crew.fails = {("c1", kind), ("c3", kind)}
    before = crew.algorithm.global_weights.clone()
    (outcome,) = crew.run().rounds
    assert torch.equal(crew.algorithm.global_weights, before) and not outcome.results and not crew.updates
    why = "dropped: only 2 of 4 answered in full; secure aggregation needs 3"
    assert texts(outcome) == {name: f"ConnectionError: {name} is gone" for name in ("c1", "c3")} | {
        "c0": why,
        "c2": why,
    }
    assert not outcome.lied


def test_min_replies_may_ask_for_more_than_two_thirds() -> None:
    crew = Crew(4, min_replies=1.0)
    crew.fails = {("c1", MaskedOrder)}
    (outcome,) = crew.run().rounds
    assert not outcome.results and "only 3 of 4 answered in full; secure aggregation needs 4" in texts(outcome)["c0"]


def test_with_fewer_than_three_here_no_round_goes_by_before_another_comes() -> None:
    crew = Crew(4, join_timeout_s=0.2)
    for client in list(crew.inline.roster)[2:]:
        crew.inline.roster.leave(crew.inline.roster.node_of(client) or 0)
    with pytest.raises(CohortError, match=r"^too few of the clients that are here can be trained, and no other came"):
        crew.run()
    assert not crew.grid.sent(KeysOrder)


def left_by(crew: Crew, count: int) -> Crew:
    """Let the last `count` clients leave."""
    for client in list(crew.inline.roster)[-count:]:
        crew.inline.roster.leave(crew.inline.roster.node_of(client) or 0)
    return crew


def test_while_one_is_away_the_others_keep_the_threshold_of_a_whole_cohort() -> None:
    """Clients with --min-masked refuse a smaller one."""
    crew = left_by(Crew(6), 1)
    crew.run()
    assert {order.agreement.threshold for order in crew.grid.sent(SharesOrder)} == {threshold_of(6, 0.0)}
    assert threshold_of(5, 0.0) == threshold_of(6, 0.0) == 4
    crew = left_by(Crew(4, min_replies=0.8), 1)
    crew.run()
    assert {order.agreement.threshold for order in crew.grid.sent(SharesOrder)} == {3}  # not more than are here
    crew = left_by(Crew(6, min_replies=0.8), 1)
    crew.run()
    assert {order.agreement.threshold for order in crew.grid.sent(SharesOrder)} == {5}


@pytest.mark.parametrize(("insists", "rounds"), [(True, {1}), (False, {*range(1, 11)})])
def test_after_a_masked_round_that_clients_found_too_small_more_are_waited_for(insists: bool, rounds: set[int]) -> None:
    """A round that failed for another reason, such as a client that went, is tried again with those that are here."""
    crew = left_by(Crew(6, rounds=20, eval_every=20, min_replies=1.0, join_timeout_s=0.2), 1)

    def refuse(result: SharesResult, crew: Crew) -> Any:
        raise HyperbloomError("found sums of 5 or more", reason=Reason.FORBIDDEN)

    crew.lies = {("c1", SharesOrder): refuse} if insists else {}
    crew.fails = set() if insists else {("c1", MaskedOrder)}
    why = "too few of the clients that are here can be trained, and no other came" if insists else ".*in 10 rounds"
    with pytest.raises(CohortError, match=f"^{why}"):
        crew.run()
    assert {order.round for order in crew.grid.sent(KeysOrder)} == rounds


def test_who_trains_in_time_under_masks_has_no_missed_deadlines() -> None:
    crew = Crew(4)
    for _ in range(PATIENCE - 1):
        assert crew.inline.roster.conduct.failed("c2", 0, lie=False) is None
    crew.run()
    assert crew.inline.roster.conduct.failed("c2", 1, lie=False) is None


def test_while_a_quarantine_leaves_fewer_than_three_rounds_are_dropped_until_it_ends() -> None:
    crew = Crew(3)
    for _ in range(PATIENCE):
        crew.inline.roster.conduct.failed("c2", 0, lie=True)
    (outcome,) = crew.run().rounds
    assert texts(outcome)["c0"] == "dropped: secure aggregation needs 3 clients, and 2 could be asked"
    assert outcome.refused["c0"].reason is Reason.DROPPED and not crew.grid.sent(KeysOrder)


def test_the_next_round_has_secrets_of_its_own() -> None:
    crew = Crew(3, rounds=2, eval_every=2)
    crew.run()
    keys = [answer.mask_key for answer in crew.grid.answers(KeysOrder)]
    masked = [answer.masked for answer in crew.grid.answers(MaskedOrder)]
    assert len(set(keys)) == len(set(masked)) == 6


# ---------------------------------------------------------------------- what the server sees


def chi_square(data: bytes) -> float:
    """Return Pearson's statistic of bytes in units of its deviation from its mean, for noise."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float((((counts - expected) ** 2 / expected).sum() - 255) / np.sqrt(2 * 255))


def test_what_arrives_from_a_client_is_noise_and_nothing_else(tmp_path: Path) -> None:
    """Real clients: all fields of all messages to the server, and the masked ones told from noise by nobody."""
    config = digits_config(strategy="fedavg", options={}, cohort=3, rounds=2, secure_aggregation=True)
    federation = digits_federation(config, tmp_path)
    federation.run()
    assert not federation.grid.fields(TrainOrder)
    brought = {kind: federation.grid.fields(kind, orders=False) for kind in EXCHANGES}
    assert {len(found) for found in brought.values()} == {6}
    assert {kind: {key for fields in found for key in fields} for kind, found in brought.items()} == {
        KeysOrder: {"cipher_key", "mask_key", "identity", "signature"},
        SharesOrder: {"sealed", "secret", "secret_shares", "key_shares"},
        MaskedOrder: {"seconds", "masked"},
        ConfirmOrder: {"signature"},
        UnmaskOrder: {"shares"},
    }
    for fields in brought[MaskedOrder]:
        words = fields["masked"]
        assert len(words) == 4 * federation.algorithm.global_weights.numel()
        assert abs(chi_square(words)) < 8
        for bit in range(32):  # each bit of a word is a coin
            ones = (np.frombuffer(words, "<u4") >> np.uint32(bit)) & 1
            assert abs(ones.mean() - 0.5) < 8 * 0.5 / np.sqrt(len(ones))
    rows = np.stack([np.frombuffer(fields["masked"], "<u4")[:-1] for fields in brought[MaskedOrder]])
    assert np.abs(np.corrcoef(rows.astype(float)) - np.eye(6)).max() < 8 / np.sqrt(rows.shape[1])


def test_a_large_and_a_small_change_look_alike() -> None:
    """The words of a client differ from themselves in another run by noise, whatever its change."""
    seen = []
    for size in (0.0, 5.0):
        crew = Crew(3, model="mlp")
        crew.changes = {name: torch.full((crew.algorithm.global_weights.numel(),), size) for name in crew.names}
        crew.run()
        seen += [answer.masked for answer in crew.grid.answers(MaskedOrder)]
    words = np.stack([np.frombuffer(each, "<u4") for each in seen])
    for one, other in combinations(range(len(words)), 2):
        assert abs(chi_square((words[one] - words[other]).tobytes())) < 8


def test_losses_of_clients_are_nowhere_in_the_results(tmp_path: Path) -> None:
    """From a sum of losses, cut at a bound and weighted, a server could read which client has a class."""
    config = digits_config(strategy="fedavg", options={}, cohort=3, rounds=1, eval_every=1, secure_aggregation=True)
    federation = digits_federation(config, tmp_path)
    history, _ = federation.run()
    assert [result.loss for result in history.rounds[0].results.values()] == [None] * 3


# ---------------------------------------------------------------------- clients that lie


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def badly_dealt(result: SharesResult, crew: Crew) -> SharesResult:
    """Deal shares with true digests, of which no secret was made: only together they tell."""
    return replace(result, secret=commit(b"another", "secret", b""))


LIES: dict[str, tuple[type[Order], Callable[[Any], Any]]] = {
    "a key too short": (KeysOrder, lambda r: replace(r, mask_key=b"1234")),
    "a key that nobody can use": (KeysOrder, lambda r: replace(r, cipher_key=bytes(32))),
    "one key twice": (KeysOrder, lambda r: replace(r, mask_key=r.cipher_key)),
    "keys that it has not signed": (KeysOrder, lambda r: replace(r, signature=r.signature[:-1])),
    "an identity that is none": (KeysOrder, lambda r: replace(r, identity=b"key")),
    "another message": (KeysOrder, lambda r: UnmaskResult((b"",))),
    "no shares": (SharesOrder, lambda r: replace(r, sealed=())),
    "shares for one more": (SharesOrder, lambda r: replace(r, sealed=(*r.sealed, r.sealed[0]))),
    "shares of other lengths": (SharesOrder, lambda r: replace(r, sealed=tuple(s[:-1] for s in r.sealed))),
    "too few digests": (SharesOrder, lambda r: replace(r, key_shares=r.key_shares[1:])),
    "digests too long": (SharesOrder, lambda r: replace(r, secret=r.secret + b"1")),
    "too few words": (MaskedOrder, lambda r: replace(r, masked=r.masked[4:])),
    "bytes over": (MaskedOrder, lambda r: replace(r, masked=r.masked + b"1")),
    "no words": (MaskedOrder, lambda r: replace(r, masked=b"")),
    "weights in clear": (MaskedOrder, lambda r: TrainResult(0.5, None, 1.0)),
    "no signature": (ConfirmOrder, lambda r: replace(r, signature=b"")),
    "a false signature": (ConfirmOrder, lambda r: replace(r, signature=flipped(r.signature))),
    "too few shares": (UnmaskOrder, lambda r: replace(r, shares=r.shares[1:])),
    "shares for nobody": (UnmaskOrder, lambda r: replace(r, shares=(*r.shares, bytes(33)))),
    "a share of other length": (UnmaskOrder, lambda r: replace(r, shares=(r.shares[0][1:], *r.shares[1:]))),
    "a false share": (UnmaskOrder, lambda r: replace(r, shares=(flipped(r.shares[0]), *r.shares[1:]))),
    "shares of others": (UnmaskOrder, lambda r: replace(r, shares=(r.shares[1], r.shares[0], *r.shares[2:]))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_is_none_is_refused_by_name_and_the_others_go_on(lie: str) -> None:
    kind, make = LIES[lie]
    crew = Crew(4)
    crew.lies["c2", kind] = lambda result, crew: make(result)
    (outcome,) = crew.run().rounds
    assert outcome.lied == ["c2"] == list(outcome.refused)
    summed = [name for name in crew.names if name != "c2" or kind in LATE]
    assert list(outcome.results) == summed
    assert float((crew.algorithm.global_weights - crew.plain(summed)).abs().max()) < 1e-5


def test_a_key_that_is_another_clients_is_refused() -> None:
    crew, first = Crew(4), []
    crew.lies["c0", KeysOrder] = lambda result, crew: (first.append(result), result)[1]
    crew.lies["c2", KeysOrder] = lambda result, crew: replace(result, cipher_key=first[0].mask_key)
    (outcome,) = crew.run().rounds
    assert outcome.lied == ["c2"] and list(outcome.results) == ["c0", "c1", "c3"]


def test_a_second_client_that_signs_with_the_same_key_is_refused() -> None:
    """One member with several places would count as several."""
    crew, key = Crew(4), make_key()

    def signed(result: Any, crew: Crew) -> Any:
        content = signed_keys(RUN_ID, 1, result.cipher_key, result.mask_key)
        return replace(result, identity=public_der(key), signature=sign(key, content))

    crew.lies["c0", KeysOrder] = crew.lies["c2", KeysOrder] = signed
    (outcome,) = crew.run().rounds
    assert outcome.lied == ["c2"] and "expected keys that it has signed with a key of its own" in texts(outcome)["c2"]
    assert "c0" in outcome.refused, "the key is not the one that it signs with"


@pytest.mark.parametrize(
    ("taken", "why"), [(True, "expected two keys of 32 bytes of its own"), (False, "a client's public key is none")]
)
def test_a_key_that_is_anothers_or_none_is_the_lie_of_who_sends_it(taken: bool, why: str) -> None:
    """All others would refuse to deal shares beside it, and nobody would learn."""
    crew, first = Crew(4), list[Any]()

    def wrong(result: Any, crew: Crew) -> Any:
        key, cipher_key = make_key(), first[0].cipher_key if taken else bytes(32)
        content = signed_keys(RUN_ID, 1, cipher_key, result.mask_key)
        return replace(result, cipher_key=cipher_key, identity=public_der(key), signature=sign(key, content))

    crew.lies["c0", KeysOrder] = lambda result, crew: first.append(result) or result
    crew.lies["c2", KeysOrder] = wrong
    (outcome,) = crew.run().rounds
    assert outcome.lied == ["c2"] and why in texts(outcome)["c2"]
    assert outcome.results.keys() == {"c0", "c1", "c3"}


def test_whoever_deals_shares_that_do_not_fit_together_is_named() -> None:
    crew = Crew(4)
    crew.lies["c2", SharesOrder] = badly_dealt
    before = crew.algorithm.global_weights.clone()
    (outcome,) = crew.run().rounds
    assert outcome.lied == ["c2"] and not outcome.results and torch.equal(crew.algorithm.global_weights, before)
    assert texts(outcome)["c2"] == "the shares that it has dealt are not those of its secrets"
    assert texts(outcome)["c0"] == "dropped: c2 has dealt shares that do not fit together"


@pytest.mark.parametrize("vanishes", [False, True])
def test_shares_that_cannot_be_read_are_named(vanishes: bool) -> None:
    """The round goes on with enough readers, or learns nothing; whether dealer or readers lie, most of them tell."""

    def garbled(count: int) -> Lie:
        return lambda r, crew: replace(r, sealed=tuple(s and flipped(s) for s in r.sealed[:count]) + r.sealed[count:])

    for count, learns in ((1, True), (2, False), (3, False)):
        crew = Crew(4, min_replies=0.0)
        crew.lies["c3", SharesOrder] = garbled(count)
        if vanishes:
            crew.fails = {("c3", MaskedOrder)}
            learns = False  # of its readers one is away: itself
        (outcome,) = crew.run().rounds
        readers, asked = (3 - count, 3) if vanishes else (4 - count, 4)
        assert bool(outcome.results) == learns and outcome.lied == (["c3"] if 2 * readers < asked else [])
        if outcome.lied:
            assert texts(outcome)["c3"] == "most others cannot read the shares that it has dealt"
        if not learns:
            assert "clients could read the shares that c3 has dealt, not 3" in texts(outcome)["c0"]


def test_who_says_otherwise_in_the_midst_of_a_round_counts_as_it_began() -> None:
    """A second process under its name may introduce itself with other data, or another model."""
    crew = Crew(4)

    def grown(result: Any, crew: Crew) -> Any:
        about = replace(crew.abouts["c1"], train_examples=10_000)
        roster = crew.inline.roster
        client = roster.find("c1")
        assert client is not None
        roster.admit(roster.node_of(client) or 0, about)
        return result

    crew.lies["c1", MaskedOrder] = grown
    (outcome,) = crew.run().rounds
    assert list(outcome.results) == crew.names
    torch.testing.assert_close(crew.algorithm.global_weights, crew.expected(crew.names), rtol=0, atol=1e-7)


def test_noise_in_place_of_a_masked_change_does_not_become_the_model() -> None:
    crew = Crew(4)
    noise = np.random.default_rng(0)
    crew.lies["c1", MaskedOrder] = lambda r, crew: replace(r, masked=noise.bytes(len(r.masked)))
    before = crew.algorithm.global_weights.clone()
    (outcome,) = crew.run().rounds
    assert torch.equal(crew.algorithm.global_weights, before) and not outcome.results
    assert texts(outcome)["c0"].startswith("dropped: the sum is beyond what clients can have sent")


@pytest.mark.parametrize(
    ("kind", "learns", "lied", "why"),
    [
        (KeysOrder, True, ["c2"], "expected keys that it has signed"),
        (SharesOrder, False, ["c2"], "another"),
        (MaskedOrder, False, [], "the sum is beyond what clients can have sent"),
        (ConfirmOrder, True, ["c2"], "expected a signature of what it was told"),
        (UnmaskOrder, True, ["c2"], "expected those that it was dealt, found another"),
    ],
)
def test_an_answer_of_the_round_before_is_of_no_use(kind: Any, learns: bool, lied: list[str], why: str) -> None:
    crew, answers = Crew(4, rounds=2, eval_every=2), []  # type: ignore[var-annotated]
    crew.lies["c2", kind] = lambda result, crew: (answers.append(result), answers[0])[1]
    first, second = crew.run().rounds
    assert list(first.results) == crew.names and not first.refused
    assert bool(second.results) == learns and second.lied == lied and why in texts(second)["c2"]


# ---------------------------------------------------------------------- with real clients


@pytest.mark.parametrize("name", ["fedavg", "fedper", "hyperfl", "lg-fedavg", "pfedme", "fedprox"])
def test_strategies_learn_as_from_plain_replies(name: str, tmp_path: Path) -> None:
    plain = digits_config(strategy=name, options={}, cohort=3, rounds=2, local={"steps": 10, "batch_size": 16})
    states, selections = [], []
    for label, secure in (("plain", False), ("one", True), ("two", True))[: 3 if name == "fedavg" else 2]:
        config = plain.model_copy(update={"secure_aggregation": secure})
        federation = digits_federation(config, tmp_path / label)
        history, selection = federation.run()
        assert not any(outcome.refused for outcome in history.rounds)
        states.append(federation.state())
        selections.append(selection.metrics)
    if name == "fedavg":
        assert_same(states[1], states[2])  # masks cancel to the bit, whatever they are
        assert selections[1] == selections[2]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=2e-5)


def test_noise_of_the_clients_is_under_the_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence for noise, a norm that everybody reaches: the model moves by the mean of clipped changes."""
    moved: list[Tensor] = []

    def clipped(change: Tensor, clip: float, z: float) -> Tensor:
        moved.append(privacy.clip_norm(change, clip).float())
        return moved[-1]

    monkeypatch.setattr(training, "release", clipped)
    dp = PrivacyConfig(where="client", clip=0.01, noise=1.0)
    config = digits_config(
        strategy="fedavg", options={}, cohort=3, rounds=1, eval_every=1, privacy=dp, secure_aggregation=True
    )
    federation = digits_federation(config, tmp_path)
    before = federation.algorithm.global_weights.clone()
    history, _ = federation.run()
    examples = [client.about.train_examples for client in federation.roster]
    expected = np.average(torch.stack(moved).double().numpy(), axis=0, weights=examples)
    assert len(moved) == 3 and federation.released == ["client-0", "client-1", "client-2"]
    torch.testing.assert_close(
        (federation.algorithm.global_weights - before).double(), torch.from_numpy(expected), rtol=0, atol=1e-6
    )
    assert [result.loss for result in history.rounds[0].results.values()] == [None] * 3


def test_local_sends_nothing_that_would_be_summed_and_tells_no_loss(tmp_path: Path) -> None:
    config = digits_config(strategy="local", options={}, cohort=3, rounds=1, eval_every=1, secure_aggregation=True)
    federation = digits_federation(config, tmp_path)
    history, _ = federation.run()
    assert len(history.rounds[0].results) == 3 and not federation.grid.sent(KeysOrder)
    assert [(a.weights, a.encoded, a.loss) for a in federation.grid.answers(TrainOrder)] == [(None, None, None)] * 3


# ---------------------------------------------------------------------- a graph hypernetwork, part by part


SMALL = {"layers": 2, "latent": 8, "hidden": 4}


def test_ghn_sums_the_parts_of_at_least_three_and_keeps_the_others(tmp_path: Path) -> None:
    models = ("plain-4", "plain-4", "plain-4", "mlp")
    plain = digits_config(
        strategy="ghn", options=SMALL, models=models, clients=4, cohort=4, rounds=1, eval_every=1, min_replies=1.0
    )
    states = []
    for secure in (False, True):
        config = plain.model_copy(update={"secure_aggregation": secure})
        federation = digits_federation(config, tmp_path / str(secure))
        start = federation.state()
        history, _ = federation.run()
        assert len(history.rounds[0].results) == 4
        states.append(federation.state())
    types = [{SHARED, *(client.about.types or ())} for client in federation.roster]
    owners = {part: sum(part in each for each in types) for part in start}
    assert {3, 1} <= set(owners.values())
    for part, count in owners.items():
        if count >= 3:
            torch.testing.assert_close(states[1][part], states[0][part], rtol=0, atol=2e-6)
        else:
            torch.testing.assert_close(states[1][part], start[part], rtol=1e-6, atol=0)  # a mean of itself
            assert float((states[0][part] - start[part]).abs().max()) > 1e-4
    for answer in federation.grid.answers(MaskedOrder):  # as long for all, whatever they train
        assert len(answer.masked) == 4 * sum(len(start[part]) for part in start if owners[part] >= 3)


def test_ghn_does_not_sum_what_so_many_may_vanish_from(tmp_path: Path) -> None:
    """Of four clients one may vanish: parts of three would then be sums of two."""
    models = ("plain-4", "plain-4", "plain-4", "mlp")
    config = digits_config(
        strategy="ghn",
        options=SMALL,
        models=models,
        clients=4,
        cohort=4,
        rounds=1,
        eval_every=1,
        secure_aggregation=True,
    )
    assert threshold_of(4, 0.0) == 3
    federation = digits_federation(config, tmp_path)
    start = federation.state()
    federation.run()
    after = federation.state()
    types = [{SHARED, *(client.about.types or ())} for client in federation.roster]
    for part in start:
        moved = float((after[part] - start[part]).abs().max())
        assert (moved > 1e-4) == (sum(part in each for each in types) == 4)
