"""A client compares its models with one that it trains alone, tells its user, and the server if the user wishes."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyperbloom.common.models import first_values
from hyperbloom.common.wire.orders import SGD, CompareOrder, CompareResult, TrainOrder
from hyperbloom.common.wire.weights import Weights

from ..orders import COMMON, FULL, SPEC, STEPS, Worker, arrange

SOUND = Weights(FULL, first_values(SPEC, FULL, 3))
USELESS = Weights(FULL, torch.zeros(FULL.numel))


def order(**changes: Any) -> CompareOrder:
    sgd = SGD(**{**STEPS, "learning_rate": 0.01})
    values = {**COMMON, "private": "none", "weights": SOUND, "metrics": ("accuracy",), "sgd": sgd, "rounds": 5}
    return arrange(CompareOrder, **(values | changes))


def disclosing(worker: Worker) -> Worker:
    return Worker(dataclasses.replace(worker.settings, disclose_gain=True))


def test_alone_is_what_the_strategy_local_trains_to_the_bit(make_worker: Callable[..., Worker]) -> None:
    """No step of the server's useless model helps at a rate of 0.01; nor is it better than zeros to begin with."""
    worker, local = disclosing(make_worker("ward-7")), make_worker("ward-7")
    asked = order(weights=USELESS, rounds=30)
    result = worker.answer(asked)
    assert result.gain is not None and result.gain.chosen == "alone"
    assert (result.gain.value, result.gain.low, result.gain.high) == (0, 0, 0)
    values, facts = worker.state.load_scored("run-1")
    target = dataclasses.replace(asked.target, private="all")
    trained = []
    for number in range(1, 31):
        scope = dataclasses.replace(asked.scope, run_id="local", round=number)
        local.answer(TrainOrder(scope, target, asked.sgd, "nothing"))
        trained.append(local.state.load_personal(scope, FULL)[0])  # type: ignore[index]
    kept = FULL.flatten(values)
    assert any(torch.equal(kept, each) for each in trained)
    assert facts.gain.startswith("ward-7: train alone") and facts.private == "all"


def test_a_gain_is_told_to_the_user_and_to_the_server_only_if_the_user_wishes(
    make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = make_worker("ward-7")
    silent = worker.answer(order())
    assert isinstance(silent, CompareResult) and silent.gain is None
    assert any(line.startswith("ward-7") and "train" in line for line in caplog.messages)
    told = disclosing(worker).answer(order())
    assert told.gain is not None and told.gain.models == ("personal", "tuned", "alone")
    assert (told.val, told.test) == (silent.val, silent.test)
    told.check()


def test_the_best_on_validation_examples_is_kept_and_its_gain_is_on_test_examples(
    make_worker: Callable[..., Worker],
) -> None:
    worker = disclosing(make_worker("ward-7"))
    trained = worker.answer(order(rounds=400, weights=USELESS))  # alone, for long
    assert trained.gain is not None and trained.gain.chosen == "alone"
    values, _ = worker.state.load_scored("run-1")
    good = Weights(FULL, FULL.flatten(values))
    found = worker.answer(order(weights=good, rounds=1))
    assert found.gain is not None and found.gain.chosen == "personal"
    of = dict(zip(found.gain.models, found.gain.test, strict=True))
    assert found.gain.value == pytest.approx(of["personal"] - of["alone"]) and found.gain.low <= found.gain.value
    assert found.gain.low > 0  # a digit is read by chance, or not
    kept, facts = worker.state.load_scored("run-1")
    assert torch.equal(FULL.flatten(kept), good.values) and "gains" in facts.gain


@pytest.mark.parametrize("changes", [{"rounds": 0}, {"rounds": 10**9}])
def test_an_order_without_sound_numbers_is_refused(make_worker: Callable[..., Worker], changes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="order: expected 1 to 100000 rounds of steps"):
        make_worker("ward-7").answer(order(**changes))
