"""Evaluation is on the client's validation and test examples, with the weights that were sent."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyperbloom.common.data import load_client_data
from hyperbloom.common.models import build
from hyperbloom.common.wire.orders import EvaluateResult

from ...scores import count_right
from ..conftest import SHARE
from ..orders import SPEC, Worker, evaluate_order

MakeWorker = Callable[..., Worker]


def test_evaluation_is_on_validation_and_test_examples_with_the_weights_sent(make_worker: MakeWorker) -> None:
    data = load_client_data(SHARE)
    torch.manual_seed(0)
    module = build(SPEC)
    counts = []
    for part in (data.val, data.test):
        logits = module(part.inputs)
        counts += [int((logits.argmax(1) == part.labels).sum()), len(part)]
    result = make_worker().answer(evaluate_order())
    assert isinstance(result, EvaluateResult)
    assert [count_right(result.val), result.val.total, count_right(result.test), result.test.total] == counts
    assert result.val.loss == pytest.approx(
        nn.functional.cross_entropy(module(data.val.inputs), data.val.labels).item(), rel=1e-5
    )
    assert result.test.loss == pytest.approx(
        nn.functional.cross_entropy(module(data.test.inputs), data.test.labels).item(), rel=1e-5
    )
