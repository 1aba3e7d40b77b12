"""A client that insists on noise, or on masks: it takes the server's word for nothing."""

from pathlib import Path
from typing import Any

import pytest

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import training
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError
from hyperbloom.common.secrecy.sums import pack_places
from hyperbloom.common.wire.exchanges import BackpropOrder, DescribeOrder, Fit, FitOrder, MomentsOrder, RepresentOrder
from hyperbloom.common.wire.masks import MaskedOrder, SharesResult
from hyperbloom.common.wire.orders import Noise

from ..conftest import SHARE
from ..orders import Worker, change, evaluate_order, initial, train_order, values_of
from .test_masks import Four, in_place

# ---------------------------------------------------------------------- --min-noise


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """Return a worker that wants twice its norm."""
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=tmp_path / "a", min_noise=2.0))


@pytest.mark.parametrize("noise", [None, 0.5, 1.999])
def test_an_order_with_less_noise_is_refused_before_any_work(worker: Worker, noise: float | None) -> None:
    order = train_order(noise=None if noise is None else Noise(1.0, noise))
    with pytest.raises(HyperbloomError, match=r"noise below 2 times its norm \(--min-noise\)"):
        worker.answer(order)


def test_with_enough_noise_it_trains_and_with_nothing_to_send_too(worker: Worker) -> None:
    result = worker.answer(train_order(noise=Noise(0.1, 2.0)))
    change = values_of(result.weights)
    assert result.loss is None
    assert float(change.norm()) == pytest.approx(0.2 * change.numel() ** 0.5, rel=0.05)
    assert worker.answer(train_order("all", "nothing")).weights is None
    assert worker.answer(evaluate_order()).test.total > 0


def test_nothing_else_that_is_made_of_training_examples_leaves(worker: Worker) -> None:
    fit = FitOrder(**vars(train_order(noise=Noise(1.0, 50.0))), fit=Fit("deepset", "v", initial(), initial(), 1, 0.1))
    described = DescribeOrder("r", 1, "deepset", 4, "v", False, initial())
    order = evaluate_order()
    for call in (
        lambda: worker.answer(described),
        lambda: worker.answer(BackpropOrder("r", "deepset", 4, "v", initial())),
        lambda: worker.answer(fit),
        lambda: worker.answer(MomentsOrder(**vars(order))),
        lambda: worker.answer(RepresentOrder(order.scope, order.target, "d", 1, 0)),
    ):
        with pytest.raises(HyperbloomError, match="--min-noise"):
            call()


def test_no_loss_of_training_examples_leaves_in_any_answer(worker: Worker) -> None:
    assert worker.answer(train_order("all", "nothing")).loss is None
    diverging = train_order("head", run_id="run-2", noise=Noise(1.0, 8.0), learning_rate=1e38, weight_decay=1e30)
    with pytest.raises(HyperbloomError, match=r"^training diverged; lower local\.learning_rate$"):
        worker.answer(diverging)


@pytest.mark.parametrize("wrong", [Noise(0.0, 1.0), Noise(1.0, 0.0), Noise(-1.0, 1.0)])
def test_impossible_noise_is_refused(worker: Worker, wrong: Noise) -> None:
    with pytest.raises(WireError, match="expected noise with clip and scale above 0"):
        worker.answer(train_order(noise=wrong))


@pytest.mark.parametrize("least", [0.0, -1.0, float("nan")])
def test_no_noise_is_no_demand(least: float) -> None:
    with pytest.raises(ConfigError, match="--min-noise: expected a number above 0"):
        ClientSettings("a", min_noise=least)


def test_the_private_head_is_trained_without_noise(worker: Worker) -> None:
    """It never leaves, so it learns as always."""
    worker.answer(train_order("head", noise=Noise(0.1, 2.0)))
    plain = Worker(ClientSettings("a", SHARE, "cpu", state_dir=worker.state.folder.parent / "b"))
    plain.answer(train_order("head"))
    heads = [(each.state.folder / "personal" / "run-1.safetensors").read_bytes() for each in (worker, plain)]
    assert heads[0] == heads[1]


# ---------------------------------------------------------------------- --min-masked


def make(folder: Path, least: int | None) -> Worker:
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=folder / "a", min_masked=least))


def begun(worker: Worker, threshold: int = 4) -> tuple[Four, list[SharesResult]]:
    """Take the worker, in the first place of four, to the point where it is to train."""
    four = Four(threshold=threshold)
    first = worker.answer(in_place(four, worker))
    return four, [first, *(each.share(four.shares_order(place)) for place, each in enumerate(four.rounds) if place)]


def masked_order(four: Four, dealt: list[SharesResult], **changes: Any) -> MaskedOrder:
    """Return what an honest server orders then, for a network that this client has."""
    order = train_order("none", "weights", run_id="run")
    assert order.weights is not None
    four.dealt = dealt
    return four.masked_order(0, **vars(order) | changes)


def test_a_change_by_itself_and_whatever_else_is_made_of_examples_is_refused(tmp_path: Path) -> None:
    worker = make(tmp_path, 4)
    order, fit = evaluate_order(), Fit("deepset", "v", initial(), initial(), 1, 0.1)
    for call in (
        lambda: worker.answer(train_order()),
        lambda: worker.answer(train_order(noise=Noise(1.0, 50.0))),
        lambda: worker.answer(DescribeOrder("r", 1, "deepset", 4, "v", False, initial())),
        lambda: worker.answer(BackpropOrder("r", "deepset", 4, "v", initial())),
        lambda: worker.answer(FitOrder(**vars(train_order()), fit=fit)),
        lambda: worker.answer(MomentsOrder(**vars(order))),
        lambda: worker.answer(RepresentOrder(order.scope, order.target, "d", 1, 0)),
    ):
        with pytest.raises(
            HyperbloomError, match=r"at least 4 clients alone \(--min-masked\), found a change by itself"
        ):
            call()


def test_what_sends_nothing_trains_and_tells_no_loss(tmp_path: Path) -> None:
    worker = make(tmp_path, 4)
    result = worker.answer(train_order("all", "nothing"))
    assert (result.weights, result.loss) == (None, None)
    assert worker.answer(evaluate_order()).test.total > 0
    diverging = train_order("all", "nothing", run_id="run-2", learning_rate=1e38, weight_decay=1e30)
    with pytest.raises(HyperbloomError, match=r"^training diverged; lower local\.learning_rate$"):
        worker.answer(diverging)


@pytest.mark.parametrize("least", [None, 4])
def test_in_a_sum_of_so_many_it_is_the_same_change_as_ever(tmp_path: Path, least: int | None) -> None:
    worker = make(tmp_path, least)
    four, dealt = begun(worker)
    order = masked_order(four, dealt)
    assert len(worker.answer(order).masked) == 4 * (sum(order.masking.lengths) + 1)


def test_a_sum_that_may_become_smaller_is_refused_before_shares_are_dealt(tmp_path: Path) -> None:
    """Later is too late: the others would take its mask off without it."""
    with pytest.raises(HyperbloomError, match=r"of at least 4 .* \(--min-masked\), found sums of 3 or more$"):
        begun(make(tmp_path, 4), threshold=3)
    begun(make(tmp_path / "others", 3), threshold=3)


def test_a_part_that_fewer_train_is_refused_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(tmp_path, 4)
    four, dealt = begun(worker)
    order = masked_order(four, dealt)
    three = (pack_places((0, 1, 2), 4),)
    monkeypatch.setattr(training, "load", lambda *_: pytest.fail("it trains"))
    with pytest.raises(HyperbloomError, match=r"\(--min-masked\), found a part that 3 or more train$"):
        worker.answer(change(order, owners=order.masking.owners[:-1] + three))


def test_in_a_sum_the_loss_is_told_and_by_itself_it_is_not(tmp_path: Path) -> None:
    results = []
    for least in (None, 4):
        worker = make(tmp_path / str(least), least)
        four, dealt = begun(worker)
        results.append(training.train(worker, masked_order(four, dealt)).loss)
    assert results[0] == results[1] > 0
    noisy = make(tmp_path / "noisy", None)
    assert training.train(noisy, masked_order(*begun(noisy), noise=Noise(1.0, 2.0))).loss is None, "masks are no noise"


@pytest.mark.parametrize("least", [0, 2, -1])
def test_a_sum_of_fewer_than_three_is_no_demand(least: int) -> None:
    with pytest.raises(ConfigError, match="--min-masked: expected 3 clients in a sum or more, found"):
        ClientSettings("a", min_masked=least)
