"""A client that insists on noise: it takes the server's word for nothing."""

from typing import Any

import pytest

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError
from hyperbloom.common.wire import BackpropOrder, DescribeOrder, Fit, FitOrder, MomentsOrder, Noise, RepresentOrder

from ..conftest import SHARE
from ..orders import Worker, evaluate_order, initial, train_order, values_of


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
