"""What a client refuses to do for a server that would know more than the sum; its secrets live for one round.

The lying server here is the worst that can be: it is given every secret that it could collect shares of.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import masks as module
from hyperbloom.client.work.masks import SecureRound
from hyperbloom.common.compression import Codec
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import Aligned, FedProx
from hyperbloom.common.secrecy import masks as sa
from hyperbloom.common.secrecy.keys import fingerprint_of_der, make_key, public_der, write_private_key
from hyperbloom.common.secrecy.sums import check_parts, pack_places, part_digests, parts_of
from hyperbloom.common.wire.masks import (
    ConfirmOrder,
    KeysOrder,
    MaskedOrder,
    Masking,
    SharesOrder,
    SharesResult,
    UnmaskOrder,
)
from hyperbloom.common.wire.orders import Noise, TrainResult

from ..conftest import SHARE
from ..orders import Worker, arrange, change

Words = np.ndarray[Any, Any]

COUNT, SIZE = 4, 20_000
LAYOUT = Layout((("weight", (SIZE,)),))
TRAIN: dict[str, Any] = {
    "run_id": "run",
    "round": 1,
    "model": "mlp",
    "num_classes": 10,
    "private": "none",
    "reply": "weights",
    "seed": 0,
    "steps": 1,
    "batch_size": 4,
    "learning_rate": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip": 50.0,
    "weights": Weights(LAYOUT, torch.zeros(SIZE)),
}


ALIGNED = Aligned(eta=1.0, reference="d", rows=2, draw=0)


def replaced(order: SharesOrder, **changes: Any) -> SharesOrder:
    """Return the order with other values of its own, of what all are told alike, or of the scale."""
    of_scale, of_all = ("bound", "examples"), ("threshold", "cipher_keys", "mask_keys", "identities")
    scale = {name: changes.pop(name) for name in of_scale if name in changes}
    alike = {name: changes.pop(name) for name in of_all if name in changes}
    clients = len(alike.get("cipher_keys", order.agreement.cipher_keys))
    scaled = replace(order.agreement.scale, clients=clients, **scale)
    return replace(order, agreement=replace(order.agreement, scale=scaled, **alike), **changes)


class Four:
    """Clients of one round, four unless told otherwise, and what an honest server would order them."""

    def __init__(self, count: int = COUNT, threshold: int = 3) -> None:
        self.count = count
        self.rounds = [SecureRound("run", 1) for _ in range(count)]
        self.meet(threshold)

    def meet(self, threshold: int = 3) -> None:
        keys = [each.keys() for each in self.rounds]
        lists = (tuple(getattr(k, name) for k in keys) for name in ("cipher_key", "mask_key", "identity", "signature"))
        *agreed, signatures = lists
        self.order = SharesOrder(
            sa.Agreement("run", 1, threshold, sa.Scale(self.count, 8.0, 10), *agreed), 0, signatures
        )
        self.dealt: list[SharesResult] = []

    @property
    def digest(self) -> bytes:
        return self.order.agreement.digest

    def shares_order(self, place: int, **changes: Any) -> SharesOrder:
        return replaced(self.order, place=place, **changes)

    def deal(self) -> "Four":
        self.dealt = [each.share(self.shares_order(place)) for place, each in enumerate(self.rounds)]
        return self

    def masked_order(self, place: int, **changes: Any) -> MaskedOrder:
        there = changes.get("there", tuple(range(self.count)))
        dealers = [self.dealt[dealer] for dealer in there if dealer < self.count]
        weights = changes.get("weights", TRAIN["weights"])
        parts = tuple(part_digests(weights, self.digest))
        values: dict[str, Any] = {
            "there": there,
            "sealed": tuple(dealer.sealed[place] for dealer in dealers),
            "digests": tuple(dealer.secret_shares[place] + dealer.key_shares[place] for dealer in dealers),
            "parts": parts,
            "lengths": weights.layout.sizes,
            "owners": (pack_places(there, self.count),) * len(parts),
        }
        return arrange(MaskedOrder, **(TRAIN | values | changes))

    def mask(self, place: int, change: Tensor | None = None) -> Words:
        change = torch.full((SIZE,), 0.25) if change is None else change
        return self.mask_as(place, self.masked_order(place), change)

    def mask_as(self, place: int, order: MaskedOrder, change: Tensor) -> Words:
        self.rounds[place].expect(order)
        assert order.weights is not None
        result = TrainResult(0.5, Weights(LAYOUT, order.weights.values + change), 1.0)
        return np.frombuffer(self.rounds[place].mask(order, result, 10).masked, "<u4").copy()

    def confirm(self, places: Sequence[int], alive: tuple[int, ...], dead: tuple[int, ...] = ()) -> UnmaskOrder:
        """Let clients sign the set, and return the order to unmask that an honest server makes of it."""
        order = ConfirmOrder("run", 1, alive, dead)
        signed = {place: self.rounds[place].confirm(order).signature for place in places}
        return UnmaskOrder("run", 1, tuple(signed.get(place, b"") for place in alive))


@pytest.fixture
def four() -> Four:
    return Four().deal()


def looks_random(words: np.ndarray[Any, Any]) -> bool:
    """Pearson's test on bytes: its statistic has mean 255 and deviation 22.6 for noise."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() < 255 + 8 * 22.6)


def test_masked_words_are_noise_until_all_masks_are_off(four: Four) -> None:
    words = four.mask(0)
    assert looks_random(words) and not looks_random(np.tile(words[:4], SIZE // 4))
    first, digest = four.rounds[0], told_of(four)
    masks = list(range(1, COUNT))
    for known in chain.from_iterable(combinations(masks, count) for count in range(COUNT)):
        # Whoever knows the keys of some others, or the own secret and the keys of all but one, sees noise still.
        part = words.copy()
        for other in known:
            sa.pair_mask(part, first.mask_key, four.order.agreement.mask_keys[other], 0, other, digest, -1)
        assert looks_random(part)
        sa.add_mask(part, first.own_secret, -1)
        assert looks_random(part) == (len(known) < COUNT - 1)
    clear = part.view(np.int32)
    scale = sa.Scale(COUNT, 8.0, 10)
    assert set(clear) == {round(0.25 / (scale.bound / scale.limit))}


def told_of(four: Four) -> bytes:
    return module.told(four.digest, four.masked_order(0))


def test_all_must_have_been_told_the_same() -> None:
    """Else others could be told a number of examples beside which theirs count for nothing, and one singled out."""
    four = Four()
    for place, each in enumerate(four.rounds):
        four.dealt.append(each.share(four.shares_order(place, examples=10**9 if place else 10)))
    for place, readable in ((0, {0}), (1, {1, 2, 3})):
        four.rounds[place]._read(four.masked_order(place).masking)
        assert set(four.rounds[place]._held) == readable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 2}, "threshold of at least 3 of 4"),
        ({"place": 1}, "own keys in place 1"),
        ({"place": -4}, "own keys in place -4"),
        ({"place": 7}, "own keys in place 7"),
        ({"bound": 0.0}, "bound"),
        ({"examples": 0}, "examples"),
    ],
)
def test_shares_are_not_dealt_to_order(changes: dict[str, Any], message: str) -> None:
    four = Four()
    with pytest.raises(WireError, match=message):
        four.rounds[0].share(replaced(four.order, **changes))


@pytest.mark.parametrize("name", ["cipher_keys", "mask_keys", "identities"])
def test_shares_are_not_dealt_beside_a_key_that_is_not_its_own(name: str) -> None:
    """With a key of its own in this client's place, the server would read its shares, or know its masks, or sign."""
    four = Four()
    other = SecureRound("run", 1).keys()
    new = {"cipher_keys": other.cipher_key, "mask_keys": other.mask_key, "identities": other.identity}[name]
    with pytest.raises(WireError, match="own keys in place 0"):
        four.rounds[0].share(replaced(four.order, **{name: (new, *getattr(four.order.agreement, name)[1:])}))


def test_shares_are_not_dealt_to_too_few_or_to_the_same_client_twice() -> None:
    four = Four()
    ciphers, masks = four.order.agreement.cipher_keys, four.order.agreement.mask_keys
    two = replaced(
        four.order,
        cipher_keys=ciphers[:2],
        mask_keys=masks[:2],
        identities=four.order.agreement.identities[:2],
        threshold=2,
    )
    with pytest.raises(WireError, match="3 to 512 clients"):
        four.rounds[0].share(two)
    double = replaced(four.order, cipher_keys=(*ciphers[:3], ciphers[1]), mask_keys=masks)
    with pytest.raises(WireError, match="all different"):
        four.rounds[0].share(double)
    one = replaced(four.order, identities=(*four.order.agreement.identities[:3], four.order.agreement.identities[1]))
    with pytest.raises(WireError, match="4 clients that sign with keys of their own, found 3"):
        four.rounds[0].share(one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"there": (0, 1)}, "at least 3 clients"),
        ({"there": (1, 2, 3)}, "this one among them"),
        ({"there": (0, 1, 1, 2)}, "each once"),
        ({"there": (0, 2, 1)}, "in order"),
        ({"there": (0, 1, 2, 4)}, "places of clients"),
        ({"sealed": (b"",)}, "shares from 4 clients, found 1"),
        ({"reply": "delta"}, "reply 'weights'"),
        ({"codec": Codec.parse("int8")}, "no compression"),
        ({"resemble": Weights(LAYOUT, torch.zeros(SIZE))}, "nothing beside the weights"),
        ({"method": ALIGNED}, "nothing beside the weights"),
        ({"parts": (b"p",)}, "all tensors of the order among the parts, with the same values"),
        ({"parts": (b"p", b"p"), "lengths": (1, 1), "owners": (b"\x0f", b"\x0f")}, "parts, each once"),
        ({"lengths": ()}, "with lengths and owners"),
        ({"lengths": (-5,)}, "parts of at most"),
        ({"lengths": (2**29 + 1,)}, "parts of at most 536870912 numbers in all, found 536870913"),
        ({"owners": (b"\x1f",)}, "owners of parts among the clients that are there"),
        ({"owners": (b"\x0f\x00",)}, "owners of parts among the clients that are there"),
        ({"there": (0, 1, 2), "owners": (b"\x0f",)}, "owners of parts among the clients that are there"),
        ({"owners": (b"\x07",)}, "found one that 2 may be left with"),
    ],
)
def test_a_change_is_not_masked_to_order(four: Four, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        four.rounds[0].expect(four.masked_order(0, **changes))
    with pytest.raises(WireError, match="expected weights"):
        four.rounds[0].expect(replace(four.masked_order(0), weights=None))


TWO = Layout((("body", (SIZE - 4,)), ("head", (2, 2))))


def test_a_sum_has_room_for_parts_of_others_and_what_has_no_part_stays_here() -> None:
    four = Four(5, 4).deal()
    weights = Weights(TWO, torch.arange(float(SIZE)))
    body, head = part_digests(weights, four.digest)
    owners = [pack_places(places, 5) for places in ((0,), (1, 2, 3, 4), (0, 1, 2, 3))]
    alike = {"parts": (body, b"others", head), "lengths": (0, 3, 4), "owners": tuple(owners)}
    order = four.masked_order(0, weights=weights, **alike)
    assert four.rounds[0].expect(order) == 0, "nobody else has its body, and another client may vanish"
    with pytest.raises(WireError, match="all tensors of the order among the parts"):  # the body might learn nothing
        four.rounds[0].expect(change(order, parts=(head,), lengths=(4,), owners=(owners[2],)))
    placed = four.rounds[0]._placed(np.arange(SIZE), TWO)
    assert placed.tolist() == [0, 0, 0, *range(SIZE - 4, SIZE)]
    trained = TrainResult(0.0, Weights(Layout(TWO.shapes[:1]), torch.zeros(SIZE - 4)), 1.0)
    with pytest.raises(WireError, match="parts of the sum that are trained"):
        four.rounds[0].mask(order, trained, 10)
    longer = change(order, lengths=(0, 3, 5))
    four.rounds[0].expect(longer)
    with pytest.raises(WireError, match="and of their lengths"):
        four.rounds[0].mask(longer, TrainResult(0.0, weights, 1.0), 10)


def sent_alike(owners: Sequence[Sequence[int]], place: int, count: int = 7) -> int:
    """Return on how many clients the one in `place` counts, if these clients are sent the parts, one list for each."""
    masking = Masking(
        tuple(range(count)),
        tuple(bytes([number]) for number in range(len(owners))),
        (4,) * len(owners),
        tuple(pack_places(places, count) for places in owners),
    )
    check_parts(masking, count, count)
    return parts_of(masking, place, count)[1]


def test_only_clients_with_the_very_same_weights_hide_a_change() -> None:
    """Client 0 trains three tensors, each with two others, whose other tensors are zeros: they learn nothing.

    Every part has three clients or more. The sum of each part of client 0 is its change alone.
    """
    zeros = ((3, 4, 5, 6), (1, 2, 5, 6), (1, 2, 3, 4))
    assert sent_alike([(0, 1, 2), (0, 3, 4), (0, 5, 6), *zeros], 0) == 1
    assert sent_alike([(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6)], 0) == 4
    assert sent_alike([range(7), range(7)], 0) == 7
    assert sent_alike([range(7), (0, 1, 2, 3)], 5) == 3, "four have a tensor more, of which nothing is known here"


@pytest.mark.parametrize(
    ("alive", "dead", "message"),
    [
        ((0, 1, 2, 3), (3,), "each once, as alive or as dead"),
        ((0, 1, 2), (), "all clients that were there"),
        ((0, 1, 2, 2), (), "each once"),
        ((0, 1, 2), (4,), "all clients that were there"),
        ((0, 1), (2, 3), "3 clients or more"),
        ((1, 2, 3), (0,), "this one among them"),
    ],
)
def test_a_set_is_not_signed_to_order(four: Four, alive: tuple[int, ...], dead: tuple[int, ...], message: str) -> None:
    """Above all: not both kinds of share for one client, and not for a sum of too few."""
    four.mask(0)
    with pytest.raises(WireError, match=message):
        four.rounds[0].confirm(ConfirmOrder("run", 1, alive, dead))


def test_one_kind_of_share_is_revealed_for_each_client(four: Four) -> None:
    for place in (0, 1, 2):
        four.mask(place)
    order = four.confirm((0, 1, 2), (0, 1, 2), (3,))
    revealed = [four.rounds[place].unmask(order).shares for place in (0, 1, 2)]
    secrets = [each.own_secret for each in four.rounds[:3]] + [four.rounds[3].mask_key.private_bytes_raw()]
    for dealer, secret in enumerate(secrets):
        assert sa.combine({place: shares[dealer] for place, shares in enumerate(revealed)}) == secret


def test_a_share_that_is_not_as_its_dealer_says_is_kept_back(four: Four) -> None:
    order = four.masked_order(0)
    for place, digests in ((1, order.masking.digests[2]), (2, order.masking.digests[2])):
        changed = [*order.masking.digests]
        changed[place] = digests
        four.rounds[0].expect(change(order, digests=tuple(changed)))
        assert (place in four.rounds[0]._held) == (place == 2)
        four.rounds[0]._held.clear()
    sealed = (*order.masking.sealed[:3], order.masking.sealed[1])
    four.rounds[0].expect(change(order, sealed=sealed))
    for place in (1, 2, 3):  # told the same of what is signed
        four.rounds[place].expect(four.masked_order(place))
    shares = four.rounds[0].unmask(four.confirm((0, 1, 2, 3), (0, 1, 2, 3))).shares
    assert [bool(share) for share in shares] == [False, True, True, False]  # its own was cleared above


def test_a_change_beyond_the_bound_is_scaled_down_as_a_whole_and_told(
    four: Four, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut weight by weight, each would be the bound by the client's share: sums of these tell whose sign is whose."""
    encoded: list[np.ndarray] = []
    scale = type(four.rounds[0]._agreement.scale)
    real = scale.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scale, "encode", lambda self, values, weight: encoded.append(values) or real(self, values, weight)
        )
        four.mask(0, change=torch.linspace(-1e6, 5e5, SIZE))
    np.testing.assert_allclose(encoded[0], np.linspace(-8, 4, SIZE), rtol=1e-4, atol=1e-6)
    assert "a weight changes by 1e+06, beyond 8: the whole change was scaled down" in caplog.text


# ---------------------------------------------------------------------- a server that lies

CHANGES = [torch.randn(SIZE, generator=torch.Generator().manual_seed(place)) / 100 for place in range(9)]


def stretch(four: Four, place: int) -> dict[str, Any]:
    """Tell each client that its tensor has a place of its own in the sum, and that the others have all the rest."""
    everybody = tuple(range(four.count))
    own = four.masked_order(place).masking.parts[0]
    return {
        "parts": tuple(own if row == place else b"made up %d" % row for row in everybody),
        "lengths": (SIZE,) * four.count,
        "owners": tuple(pack_places(set(everybody) - ({place} - {row}), four.count) for row in everybody),
    }


def only(place: int, **lie: Any) -> Callable[[Four, int], dict[str, Any]]:
    """Tell one client something else than the others."""
    return lambda four, other: lie if other == place else {}


LIES: dict[str, Callable[[Four, int], dict[str, Any]]] = {
    "a stretch of its own": stretch,
    "others that are there": only(0, there=(0, 1, 2, 3, 4)),
    "others are not there": lambda four, place: {} if place == 0 else {"there": (1, 2, 3, 4, 5)},
    "weights that learn nothing": lambda four, place: (
        {} if place == 0 else {"weights": Weights(LAYOUT, torch.full((SIZE,), 1e-3))}
    ),
    "no steps to speak of": lambda four, place: {} if place == 0 else {"learning_rate": 1e-30},
    "other steps": only(0, steps=2),
    "noise": lambda four, place: {} if place == 0 else {"noise": Noise(1e-9, 1.0)},
    "another seed": only(0, seed=1),
    "another method": only(0, method=FedProx(mu=0.5)),
    "a loss that is left out": only(0, quiet=True),
}


def lied_to(four: Four, lie: Callable[[Four, int], dict[str, Any]]) -> list[Words]:
    """Return what each client sends, for a server that has all secrets of own masks, and has taken these off."""
    words = []
    for place in range(four.count):
        words.append(four.mask_as(place, four.masked_order(place, **lie(four, place)), CHANGES[place]))
        sa.add_mask(words[-1], four.rounds[place].own_secret, -1)
    return words


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_masks_of_clients_that_were_told_unlike_things_do_not_cancel(lie: Any) -> None:
    """So neither a single change nor any sum with it can be read, whatever shares the server collects."""
    words = lied_to(Four(6, 4).deal(), lie)
    for members in chain.from_iterable(combinations(range(6), count) for count in (1, 5, 6)):
        if 0 in members:
            assert looks_random(np.sum([words[place] for place in members], axis=0, dtype=np.uint32))


def test_masks_of_nothing_but_keys_would_let_it_read_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lie above is an attack: without what binds the orders it reads each client's change."""
    monkeypatch.setattr(module, "told", lambda digest, order: digest)
    total = np.sum(lied_to(Four(6, 4).deal(), stretch), axis=0, dtype=np.uint32)
    changes = sa.Scale(6, 8.0, 10).decode(total, 10).reshape(6, SIZE)
    assert np.abs(changes - torch.stack(CHANGES[:6]).numpy()).max() < 1e-6


def split_sets(four: Four) -> dict[int, ConfirmOrder]:
    """Tell each of nine clients that six are left, three dead, so that four of them are dead for six clients each."""
    votes = dict.fromkeys(range(4), 0)
    orders = {}
    for place in range(9):
        dead = sorted((each for each in votes if each != place), key=lambda each: votes[each])[:3]
        for each in dead:
            votes[each] += 1
        alive = tuple(each for each in range(9) if each not in dead)
        orders[place] = ConfirmOrder("run", 1, alive, tuple(sorted(dead)))
    assert min(votes.values()) >= 6
    return orders


@pytest.mark.parametrize("checked", [True, False])
def test_nobody_reveals_a_share_before_enough_have_signed_its_set(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server opens a sum of five of nine clients, each of which was told of six."""
    four = Four(9, 6).deal()
    words = [four.mask_as(place, four.masked_order(place), CHANGES[place]) for place in range(9)]
    orders = split_sets(four)
    signed = {place: four.rounds[place].confirm(order).signature for place, order in orders.items()}
    shares: dict[int, Sequence[bytes]] = {}
    if not checked:
        monkeypatch.setattr(module, "verify", lambda *signature: True)
    for place, order in orders.items():
        everything = UnmaskOrder("run", 1, tuple(signed[each] for each in order.alive))
        if checked:
            with pytest.raises(WireError, match="not all clients were told the same"):
                four.rounds[place].unmask(everything)
            few = UnmaskOrder("run", 1, tuple(b"" if each != place else signed[each] for each in order.alive))
            with pytest.raises(WireError, match="expected 6 signatures, found 1"):
                four.rounds[place].unmask(few)
        else:
            shares[place] = four.rounds[place].unmask(everything).shares
    if not checked:
        total = np.sum(words[4:], axis=0, dtype=np.uint32)
        told = module.told(four.digest, four.masked_order(0))
        for dealer in range(9):
            found = {p: s[dealer] for p, s in shares.items() if (dealer in orders[p].dead) == (dealer < 4)}
            secret = sa.combine(dict(list(found.items())[:6]))
            assert secret is not None
            if dealer >= 4:
                sa.add_mask(total, secret, -1)
            for place in range(4, 9) if dealer < 4 else ():
                sa.pair_mask(
                    total,
                    X25519PrivateKey.from_private_bytes(secret),
                    four.order.agreement.mask_keys[place],
                    place,
                    dealer,
                    told,
                    -1,
                )
        opened = sa.Scale(9, 8.0, 10).decode(total, 10)
        assert np.abs(opened - torch.stack(CHANGES[4:]).double().sum(0).numpy()).max() < 1e-5


def test_with_known_keys_clients_that_the_server_has_made_up_are_refused() -> None:
    four = Four()
    known = frozenset(fingerprint_of_der(public_der(each.identity)) for each in four.rounds)
    careful = four.rounds[0]
    careful.peers = known
    careful.share(four.shares_order(0))

    name = fingerprint_of_der(public_der(four.rounds[2].identity))
    careful.peers = known - {name}
    with pytest.raises(WireError, match=rf"those of known clients alone \(--peers\), found {re.escape(name)}"):
        careful.share(four.shares_order(0))

    careful.peers = known
    swapped = (
        *four.order.agreement.mask_keys[:2],
        sa.public_key(X25519PrivateKey.generate()),
        *four.order.agreement.mask_keys[3:],
    )
    with pytest.raises(WireError, match=f"keys that {re.escape(name)} has not signed"):
        careful.share(four.shares_order(0, mask_keys=swapped))
    with pytest.raises(WireError, match="a signature of each client's keys"):
        careful.share(four.shares_order(0, signatures=four.order.signatures[:3]))

    four.rounds[2] = SecureRound("run", 2, four.rounds[2].identity)  # keys of another round
    four.meet()
    with pytest.raises(WireError, match=f"keys that {re.escape(name)} has not signed"):
        careful.share(four.shares_order(0))


# ---------------------------------------------------------------------- one worker, one round after the other


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(ClientSettings("c", DataSpec(partition=0, partitions=4), device="cpu", size="S", state_dir=tmp_path))


def in_place(four: Four, worker: Worker) -> SharesOrder:
    """Put the worker in the first place, and return its order to deal."""
    keys = worker.answer(KeysOrder("run", 1))
    names = {"cipher_keys": "cipher_key", "mask_keys": "mask_key", "identities": "identity", "signatures": "signature"}
    lists = {
        each: (getattr(keys, one), *getattr(four.order if each == "signatures" else four.order.agreement, each)[1:])
        for each, one in names.items()
    }
    four.order = replaced(four.order, **lists)
    return four.shares_order(0)


def test_each_order_has_its_turn_once(worker: Worker) -> None:
    four = Four()
    unmask = UnmaskOrder("run", 1, (b"", b"", b"", b""))
    with pytest.raises(WireError, match="no keys of such a round are here; was this client started again"):
        worker.answer(four.shares_order(0))
    for order, call in ((four.shares_order(0), worker.answer), (unmask, worker.answer)):
        worker.answer(KeysOrder("run", 2))
        with pytest.raises(WireError, match="for round 1 of run, but keys are for 2 of run"):
            call(order)  # type: ignore[operator]
        worker.answer(KeysOrder("another", 1))
        with pytest.raises(WireError, match="for round 1 of run, but keys are for 1 of another"):
            call(order)  # type: ignore[operator]
    worker.answer(KeysOrder("run", 1))
    with pytest.raises(WireError, match=r"expected train\.shares at this point of the round, found train\.unmask"):
        worker.answer(unmask)

    order = in_place(four, worker)
    worker.answer(order)
    with pytest.raises(WireError, match=r"expected train\.masked at this point of the round, found train\.shares"):
        worker.answer(order)
    with pytest.raises(WireError, match="no keys of such a round are here"):
        worker.answer(order)  # what has failed once is over


def test_what_fails_leaves_no_secrets(worker: Worker) -> None:
    four = Four()
    order = in_place(four, worker)
    with pytest.raises(WireError):
        worker.answer(replaced(order, threshold=1))
    assert worker.settings not in module._rounds
    assert "own_secret" not in repr(SecureRound("run", 1)), "nor are they in a log"


def test_shares_are_revealed_once_and_no_secret_outlives_them(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = TrainResult(0.5, Weights(LAYOUT, torch.full((SIZE,), 0.25)), 1.0)
    monkeypatch.setattr(module, "train", lambda client, order: trained)
    four, everybody = Four(), (0, 1, 2, 3)
    dealt = worker.answer(in_place(four, worker))
    four.dealt = [dealt, *(four.rounds[place].share(four.shares_order(place)) for place in everybody[1:])]
    worker.answer(four.masked_order(0))
    for place in everybody[1:]:
        four.mask(place)
    signature = worker.answer(ConfirmOrder("run", 1, everybody, ())).signature
    others = four.confirm(everybody[1:], everybody).signatures[1:]
    unmask = UnmaskOrder("run", 1, (signature, *others))
    assert all(worker.answer(unmask).shares)
    assert worker.settings not in module._rounds
    with pytest.raises(WireError, match="no keys of such a round are here"):
        worker.answer(unmask)


def test_whoever_wants_noise_masks_no_change_without(tmp_path: Path) -> None:
    """Masks are no noise: the sum is seen."""
    settings = ClientSettings(
        "c", DataSpec(partition=0, partitions=4), device="cpu", size="S", state_dir=tmp_path, min_noise=1.0
    )
    worker, four = Worker(settings), Four()
    worker.answer(in_place(four, worker))
    four.dealt = [SharesResult((b"",) * 4, b"", (b"",) * 4, (b"",) * 4)] * 4
    with pytest.raises(HyperbloomError, match="--min-noise"):
        worker.answer(four.masked_order(0))
    assert settings not in module._rounds


def test_a_client_signs_with_its_own_key_if_it_has_one(tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "key.pem"
    write_private_key(path, key)
    (tmp_path / "peers").write_text(f"ward-7 {fingerprint_of_der(public_der(make_key()))} 2026-01-01\n")
    settings = ClientSettings("c", SHARE, "cpu", "S", tmp_path, key=path, peers=tmp_path / "peers")
    worker, four = Worker(ClientSettings.from_node_config(settings.to_node_config())), Four()
    assert worker.answer(KeysOrder("run", 1)).identity == public_der(key)
    with pytest.raises(WireError, match=r"\(--peers\), found SHA256:"):
        worker.answer(in_place(four, worker))
    (tmp_path / "peers").write_text(f"ward-8 {fingerprint_of_der(four.order.agreement.identities[1])} 2026-01-01\n")
    with pytest.raises(WireError, match=r"\(--peers\), found SHA256:") as found:  # the file is read anew
        worker.answer(in_place(four, worker))
    assert fingerprint_of_der(four.order.agreement.identities[1]) not in str(found.value)
    (tmp_path / "peers").write_text("nobody")
    with pytest.raises(HyperbloomError, match=r"^the client cannot read its --key or --peers; its log says why$"):
        worker.answer(KeysOrder("run", 1))
    with pytest.raises(ConfigError, match="--peers: expected fingerprints"):
        Worker(replace(settings, client_id="d"))
    with pytest.raises(ConfigError, match="--peers: expected with --key"):
        replace(settings, key=None)
