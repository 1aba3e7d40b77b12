"""A client that insists on noise: it takes the server's word for nothing."""

from dataclasses import replace
from typing import Any

import pytest

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.worker import Worker
from hyperbloom.common.errors import ConfigError, HyperbloomError, WireError
from hyperbloom.common.messages import BackpropOrder, DescribeOrder, FitOrder, MomentsOrder, RepresentOrder

from .conftest import SHARE
from .test_worker import evaluate_order, initial, train_order, values_of


@pytest.fixture
def worker(tmp_path: Any) -> Worker:
    """Return a worker that wants twice its norm."""
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=tmp_path / "a", min_noise=2.0))


@pytest.mark.parametrize("noise", [None, 0.5, 1.999])
def test_an_order_with_less_noise_is_refused_before_any_work(worker: Worker, noise: float | None) -> None:
    order = train_order(dp_clip=None if noise is None else 1.0, dp_noise=noise)
    with pytest.raises(HyperbloomError, match=r"noise below 2 times its norm \(--min-noise\)"):
        worker.train(order)


def test_with_enough_noise_it_trains_and_with_nothing_to_send_too(worker: Worker) -> None:
    result = worker.train(train_order(dp_clip=0.1, dp_noise=2.0))
    change = values_of(result.weights)
    assert result.loss == 0
    assert float(change.norm()) == pytest.approx(0.2 * change.numel() ** 0.5, rel=0.05)
    assert worker.train(train_order("all", "nothing")).weights is None
    assert worker.evaluate(evaluate_order()).test_total > 0


def test_nothing_else_that_is_made_of_training_examples_leaves(worker: Worker) -> None:
    described = DescribeOrder("r", 1, "deepset", 4, "v", False, initial())
    fields = vars(evaluate_order())
    shared = {name: fields[name] for name in ("run_id", "round", "model", "num_classes", "private", "seed", "weights")}
    fit = FitOrder(**vars(train_order(dp_clip=1.0, dp_noise=50.0)), encoder="deepset")
    for call in (
        lambda: worker.describe(described),
        lambda: worker.backprop(BackpropOrder("r", "deepset", 4, "v", initial())),
        lambda: worker.fit(fit),
        lambda: worker.moments(MomentsOrder(**fields)),
        lambda: worker.represent(RepresentOrder(**shared, reference="d", rows=1, draw=0)),
    ):
        with pytest.raises(HyperbloomError, match="--min-noise"):
            call()


def test_no_loss_of_training_examples_leaves_in_any_answer(worker: Worker) -> None:
    assert worker.train(train_order("all", "nothing")).loss == 0
    diverging = train_order("head", run_id="run-2", dp_clip=1.0, dp_noise=8.0, learning_rate=1e38, weight_decay=1e30)
    with pytest.raises(HyperbloomError, match=r"^training diverged; lower local\.learning_rate$"):
        worker.train(diverging)


@pytest.mark.parametrize("wrong", [{"dp_clip": 1.0}, {"dp_noise": 1.0}, {"dp_clip": -1.0, "dp_noise": 1.0}])
def test_half_an_order_for_noise_is_refused(worker: Worker, wrong: dict[str, float]) -> None:
    with pytest.raises(WireError, match="expected dp_clip and dp_noise above 0"):
        worker.train(replace(train_order(), **wrong))


@pytest.mark.parametrize("least", [0.0, -1.0, float("nan")])
def test_no_noise_is_no_demand(least: float) -> None:
    with pytest.raises(ConfigError, match="--min-noise: expected a number above 0"):
        ClientSettings("a", min_noise=least)


def test_the_private_head_is_trained_without_noise(worker: Worker) -> None:
    """It never leaves, so it learns as always."""
    worker.train(train_order("head", dp_clip=0.1, dp_noise=2.0))
    plain = Worker(ClientSettings("a", SHARE, "cpu", state_dir=worker.state.folder.parent / "b"))
    plain.train(train_order("head"))
    heads = [(each.state.folder / "personal" / "run-1.safetensors").read_bytes() for each in (worker, plain)]
    assert heads[0] == heads[1]
