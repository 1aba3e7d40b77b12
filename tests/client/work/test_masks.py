"""What a client refuses to do for a server that would know more than the sum; its secrets live for one round."""

from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperbloom.client import secure_aggregation as client
from hyperbloom.client.secure_aggregation import SecureRound
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.worker import Worker
from hyperbloom.common import secure_aggregation as sa
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    KeysOrder,
    MaskedOrder,
    SharesOrder,
    SharesResult,
    TrainResult,
    UnmaskOrder,
    Weights,
)

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


class Four:
    """Four clients of one round, and what an honest server would order them."""

    def __init__(self) -> None:
        self.rounds = [SecureRound("run", 1) for _ in range(COUNT)]
        keys = [each.keys() for each in self.rounds]
        self.order = SharesOrder(
            "run", 1, 0, 3, 8.0, 10, tuple(k.cipher_key for k in keys), tuple(k.mask_key for k in keys)
        )
        self.dealt: list[SharesResult] = []

    def shares_order(self, place: int, **changes: Any) -> SharesOrder:
        return replace(self.order, place=place, **changes)

    def deal(self) -> "Four":
        self.dealt = [each.share(self.shares_order(place)) for place, each in enumerate(self.rounds)]
        return self

    def masked_order(self, place: int, **changes: Any) -> MaskedOrder:
        there = changes.get("there", tuple(range(COUNT)))
        dealers = [self.dealt[dealer] for dealer in there if dealer < COUNT]
        values: dict[str, Any] = {
            "there": there,
            "sealed": tuple(dealer.sealed[place] for dealer in dealers),
            "digests": tuple(dealer.secret_shares[place] + dealer.key_shares[place] for dealer in dealers),
            "pieces": (0, 0, SIZE),
            "total": SIZE,
        }
        return MaskedOrder(**(TRAIN | values | changes))

    def mask(self, place: int, change: float = 0.25) -> np.ndarray[Any, Any]:
        order = self.masked_order(place)
        self.rounds[place].expect(order)
        result = TrainResult(1.0, 0.5, Weights(LAYOUT, torch.full((SIZE,), change)))
        return np.frombuffer(self.rounds[place].mask(order, result, 10).masked, "<u4").copy()


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
    first, digest = four.rounds[0], first_digest(four)
    masks = list(range(1, COUNT))
    for known in chain.from_iterable(combinations(masks, count) for count in range(COUNT)):
        # Whoever knows the keys of some others, or the own secret and the keys of all but one, sees noise still.
        part = words.copy()
        for other in known:
            sa.pair_mask(part, first.mask_key, four.order.mask_keys[other], 0, other, digest, -1)
        assert looks_random(part)
        sa.add_mask(part, first.own_secret, -1)
        assert looks_random(part) == (len(known) < COUNT - 1)
    clear = part.view(np.int32)
    scale = sa.Scale(COUNT, 8.0, 10)
    assert set(clear[:-1]) == {round(0.25 / scale.step)} and clear[-1] == round(scale.limit / 64)


def first_digest(four: Four) -> bytes:
    scale = sa.Scale(COUNT, four.order.bound, four.order.examples)
    return sa.Agreement("run", 1, 3, scale, four.order.cipher_keys, four.order.mask_keys).digest


def test_all_must_have_been_told_the_same() -> None:
    """Else others could be told a number of examples beside which theirs count for nothing, and one singled out."""
    four = Four()
    for place, each in enumerate(four.rounds):
        four.dealt.append(each.share(four.shares_order(place, examples=10**9 if place else 10)))
    for place, readable in ((0, {0}), (1, {1, 2, 3})):
        four.rounds[place].expect(four.masked_order(place))
        assert set(four.rounds[place]._held) == readable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 2}, "threshold of more than half"),
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
        four.rounds[0].share(replace(four.order, **changes))


def test_shares_are_not_dealt_to_too_few_or_to_the_same_client_twice() -> None:
    four = Four()
    ciphers, masks = four.order.cipher_keys, four.order.mask_keys
    two = replace(four.order, cipher_keys=ciphers[:2], mask_keys=masks[:2], threshold=2)
    with pytest.raises(WireError, match="3 to 512 clients"):
        four.rounds[0].share(two)
    double = replace(four.order, cipher_keys=(*ciphers[:3], ciphers[1]), mask_keys=masks)
    with pytest.raises(WireError, match="all different"):
        four.rounds[0].share(double)


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
        ({"compression": "int8"}, "no compression"),
    ],
)
def test_a_change_is_not_masked_to_order(four: Four, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        four.rounds[0].expect(four.masked_order(0, **changes))


@pytest.mark.parametrize(
    "pieces",
    [(0, 0), (-1, 0, 5), (0, 0, SIZE + 1), (0, SIZE - 4, 5), (0, 0, 5, 4, 9, 5), (0, 0, 5, 9, 4, 5), (0, 0, 0)],
)
def test_pieces_that_do_not_fit_or_would_send_a_number_twice_are_refused(four: Four, pieces: tuple[int, ...]) -> None:
    order = four.masked_order(0, pieces=pieces)
    four.rounds[0].expect(order)
    with pytest.raises(WireError, match="pieces"):
        four.rounds[0].mask(order, TrainResult(1.0, 0.0, Weights(LAYOUT, torch.zeros(SIZE))), 10)


@pytest.mark.parametrize("total", [-1, 2**29 + 1, 2**62])
def test_a_sum_of_no_length_or_beyond_memory_is_refused(total: int) -> None:
    with pytest.raises(WireError, match="pieces"):
        client._placed(np.zeros(3), (), total)


def test_pieces_lie_where_they_belong_and_the_rest_stays(four: Four) -> None:
    change = np.arange(6.0)
    assert client._placed(change, (4, 0, 2, 0, 5, 1), 7).tolist() == [4, 5, 0, 0, 0, 0, 0]
    assert client._placed(change, (), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("alive", "dead", "message"),
    [
        ((0, 1, 2, 3), (3,), "each once, as alive or as dead"),
        ((0, 1, 2), (), "all clients that were there"),
        ((0, 1, 2, 2), (), "each once"),
        ((0, 1, 2), (4,), "all clients that were there"),
        ((0, 1), (2, 3), "at least 3 clients"),
        ((1, 2, 3), (0,), "this one among them"),
    ],
)
def test_shares_are_not_revealed_to_order(
    four: Four, alive: tuple[int, ...], dead: tuple[int, ...], message: str
) -> None:
    """Above all: not both kinds for one client, and not for a sum of too few."""
    four.mask(0)
    with pytest.raises(WireError, match=message):
        four.rounds[0].unmask(UnmaskOrder("run", 1, alive, dead))


def test_one_kind_of_share_is_revealed_for_each_client(four: Four) -> None:
    for place in (0, 1, 2):
        four.mask(place)
    revealed = [four.rounds[place].unmask(UnmaskOrder("run", 1, (0, 1, 2), (3,))).shares for place in (0, 1, 2)]
    secrets = [each.own_secret for each in four.rounds[:3]] + [four.rounds[3].mask_key.private_bytes_raw()]
    for dealer, secret in enumerate(secrets):
        assert sa.combine({place: shares[dealer] for place, shares in enumerate(revealed)}) == secret


def test_a_share_that_is_not_as_its_dealer_says_is_kept_back(four: Four) -> None:
    order = four.masked_order(0)
    for place, digests in ((1, order.digests[2]), (2, order.digests[2])):
        changed = [*order.digests]
        changed[place] = digests
        four.rounds[0].expect(replace(order, digests=tuple(changed)))
        assert (place in four.rounds[0]._held) == (place == 2)
        four.rounds[0]._held.clear()
    sealed = (*order.sealed[:3], order.sealed[1])
    four.rounds[0].expect(replace(order, sealed=sealed))
    shares = four.rounds[0].unmask(UnmaskOrder("run", 1, (0, 1, 2, 3), ())).shares
    assert [bool(share) for share in shares] == [False, True, True, False]  # its own was cleared above


def test_a_change_that_is_not_finite_stays_here(four: Four) -> None:
    for change in (float("nan"), float("inf")):
        with pytest.raises(HyperbloomError, match="training diverged"):
            four.mask(0, change)


def test_a_change_beyond_the_bound_is_cut_and_told(four: Four, caplog: pytest.LogCaptureFixture) -> None:
    four.mask(0, change=1e6)
    assert f"{SIZE} of {SIZE} changes are beyond 8 and were cut" in caplog.text


# ---------------------------------------------------------------------- one worker, one round after the other


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(ClientSettings("c", DataSpec(partition=0, partitions=4), device="cpu", size="S", state_dir=tmp_path))


def in_place(four: Four, worker: Worker) -> SharesOrder:
    """Put the worker in the first place, and return its order to deal."""
    keys = worker.make_keys(KeysOrder("run", 1))
    ciphers, masks = (keys.cipher_key, *four.order.cipher_keys[1:]), (keys.mask_key, *four.order.mask_keys[1:])
    four.order = replace(four.order, cipher_keys=ciphers, mask_keys=masks)
    return four.shares_order(0)


def test_each_order_has_its_turn_once(worker: Worker) -> None:
    four = Four()
    unmask = UnmaskOrder("run", 1, (0, 1, 2, 3), ())
    with pytest.raises(WireError, match="no keys of such a round are here; was this client started again"):
        worker.deal_shares(four.shares_order(0))
    for order, call in ((four.shares_order(0), worker.deal_shares), (unmask, worker.unmask)):
        worker.make_keys(KeysOrder("run", 2))
        with pytest.raises(WireError, match="for round 1 of run, but the keys here are for round 2 of run"):
            call(order)  # type: ignore[operator]
    worker.make_keys(KeysOrder("run", 1))
    with pytest.raises(WireError, match=r"expected train\.shares at this point of the round, found train\.unmask"):
        worker.unmask(unmask)

    order = in_place(four, worker)
    worker.deal_shares(order)
    with pytest.raises(WireError, match=r"expected train\.masked at this point of the round, found train\.shares"):
        worker.deal_shares(order)
    with pytest.raises(WireError, match="no keys of such a round are here"):
        worker.deal_shares(order)  # what has failed once is over


def test_what_fails_leaves_no_secrets(worker: Worker) -> None:
    four = Four()
    order = in_place(four, worker)
    with pytest.raises(WireError):
        worker.deal_shares(replace(order, threshold=1))
    assert worker.settings not in client._rounds
    assert "own_secret" not in repr(SecureRound("run", 1)), "nor are they in a log"


def test_whoever_wants_noise_masks_no_change_without(tmp_path: Path) -> None:
    """Masks are no noise: the sum is seen."""
    settings = ClientSettings(
        "c", DataSpec(partition=0, partitions=4), device="cpu", size="S", state_dir=tmp_path, min_noise=1.0
    )
    worker, four = Worker(settings), Four()
    worker.deal_shares(in_place(four, worker))
    four.dealt = [SharesResult((b"",) * 4, b"", (b"",) * 4, (b"",) * 4)] * 4
    with pytest.raises(HyperbloomError, match="--min-noise"):
        worker.train_masked(four.masked_order(0))
    assert settings not in client._rounds
