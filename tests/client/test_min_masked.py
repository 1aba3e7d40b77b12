"""A client that insists on masks: what is made of its examples leaves in sums alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.worker import Worker
from hyperbloom.common.errors import ConfigError, HyperbloomError
from hyperbloom.common.messages import (
    BackpropOrder,
    DescribeOrder,
    FitOrder,
    MaskedOrder,
    MomentsOrder,
    RepresentOrder,
    SharesResult,
)
from hyperbloom.common.secure_sum import pack_places

from .conftest import SHARE
from .test_secure_aggregation import Four, in_place
from .test_worker import evaluate_order, initial, train_order


def make(folder: Path, least: int | None) -> Worker:
    return Worker(ClientSettings("a", SHARE, "cpu", state_dir=folder / "a", min_masked=least))


def begun(worker: Worker, threshold: int = 4) -> tuple[Four, list[SharesResult]]:
    """Take the worker, in the first place of four, to the point where it is to train."""
    four = Four(threshold=threshold)
    first = worker.deal_shares(in_place(four, worker))
    return four, [first, *(each.share(four.shares_order(place)) for place, each in enumerate(four.rounds) if place)]


def masked_order(four: Four, dealt: list[SharesResult], **changes: Any) -> MaskedOrder:
    """Return what an honest server orders then, for a network that this client has."""
    order = replace(train_order("none", "weights"), run_id="run", round=1)
    assert order.weights is not None
    four.dealt = dealt
    return four.masked_order(0, **vars(order) | changes)


def test_a_change_by_itself_and_whatever_else_is_made_of_examples_is_refused(tmp_path: Path) -> None:
    worker = make(tmp_path, 4)
    fields = vars(evaluate_order())
    shared = {name: fields[name] for name in ("run_id", "round", "model", "num_classes", "private", "seed", "weights")}
    for call in (
        lambda: worker.train(train_order()),
        lambda: worker.train(train_order(dp_clip=1.0, dp_noise=50.0)),
        lambda: worker.describe(DescribeOrder("r", 1, "deepset", 4, "v", False, initial())),
        lambda: worker.backprop(BackpropOrder("r", "deepset", 4, "v", initial())),
        lambda: worker.fit(FitOrder(**vars(train_order()), encoder="deepset")),
        lambda: worker.moments(MomentsOrder(**fields)),
        lambda: worker.represent(RepresentOrder(**shared, reference="d", rows=1, draw=0)),
    ):
        with pytest.raises(
            HyperbloomError, match=r"at least 4 clients alone \(--min-masked\), found a change by itself"
        ):
            call()


def test_what_sends_nothing_trains_and_tells_no_loss(tmp_path: Path) -> None:
    worker = make(tmp_path, 4)
    result = worker.train(train_order("all", "nothing"))
    assert (result.weights, result.loss) == (None, 0)
    assert worker.evaluate(evaluate_order()).test_total > 0
    diverging = train_order("all", "nothing", run_id="run-2", learning_rate=1e38, weight_decay=1e30)
    with pytest.raises(HyperbloomError, match=r"^training diverged; lower local\.learning_rate$"):
        worker.train(diverging)


@pytest.mark.parametrize("least", [None, 4])
def test_in_a_sum_of_so_many_it_is_the_same_change_as_ever(tmp_path: Path, least: int | None) -> None:
    worker = make(tmp_path, least)
    four, dealt = begun(worker)
    order = masked_order(four, dealt)
    assert len(worker.train_masked(order).masked) == 4 * (sum(order.lengths) + 1)


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
    monkeypatch.setattr(worker, "_load", lambda order: pytest.fail("it trains"))
    with pytest.raises(HyperbloomError, match=r"\(--min-masked\), found a part that 3 or more train$"):
        worker.train_masked(replace(order, owners=order.owners[:-1] + three))


def test_in_a_sum_the_loss_is_told_and_by_itself_it_is_not(tmp_path: Path) -> None:
    results = []
    for least in (None, 4):
        worker = make(tmp_path / str(least), least)
        four, dealt = begun(worker)
        results.append(worker.train(masked_order(four, dealt)).loss)
    assert results[0] == results[1] > 0


@pytest.mark.parametrize("least", [0, 2, -1])
def test_a_sum_of_fewer_than_three_is_no_demand(least: int) -> None:
    with pytest.raises(ConfigError, match="--min-masked: expected 3 clients in a sum or more, found"):
        ClientSettings("a", min_masked=least)
