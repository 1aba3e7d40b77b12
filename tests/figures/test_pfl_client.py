"""What a client makes of other clients' models: each quantity against its definition."""

from pathlib import Path

import pytest
import torch

from figures.pfl_client import ErrorsOrder, MomentsOrder, TryOrder, domain_errors, moments_of, score_all
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import build
from hyperbloom.common.models.parts import features
from tests.client.conftest import SHARE
from tests.client.orders import FULL, SPEC, Worker, evaluate_order, initial
from tests.scores import count_right


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(ClientSettings("client-0", SHARE, "cpu", "M", tmp_path))


def rows(*seeds: int) -> Weights:
    """Return models as the rows of one tensor."""
    values = torch.cat([initial(seed=seed).values for seed in seeds])
    return Weights(Layout((("models", (len(seeds), FULL.numel)),)), values)


def try_order(weights: Weights, together: bool = False) -> TryOrder:
    return TryOrder(**vars(evaluate_order(weights=weights)), together=together)


def test_one_model_is_scored_as_ever_and_several_by_the_mean_of_their_answers(worker: Worker) -> None:
    alone = [worker.answer(evaluate_order(weights=initial(seed=seed))) for seed in (1, 2)]
    one = worker.answer(try_order(rows(1)))
    assert (count_right(one.test), one.test.total) == (count_right(alone[0].test), alone[0].test.total)
    both = worker.answer(try_order(rows(1, 2)))
    assert count_right(both.test) == count_right(alone[0].test) + count_right(alone[1].test)
    assert both.test.total == 2 * alone[0].test.total
    assert both.val.loss == pytest.approx((alone[0].val.loss + alone[1].val.loss) / 2, rel=1e-5)


def test_together_the_mean_of_logits_decides(worker: Worker) -> None:
    models = [build(SPEC) for _ in range(2)]
    for model, seed in zip(models, (1, 2), strict=True):
        model.load_state_dict(FULL.views(initial(seed=seed).values))
    data = worker.test_data
    logits = torch.stack([model(data.inputs) for model in models]).mean(0)
    found = worker.answer(try_order(rows(1, 2), together=True)).test
    assert (count_right(found), found.total) == (int((logits.argmax(1) == data.labels).sum()), len(data))
    assert found == score_all(models, data, together=True)
    assert count_right(score_all(models[:1], data, together=True)) == count_right(evaluate(models[0], data))


def test_moments_are_mean_and_covariance_of_what_the_head_sees(worker: Worker) -> None:
    model = build(SPEC)
    model.load_state_dict(FULL.views(initial().values))
    seen = features(model, worker.train_data.inputs)
    assert torch.equal(model.head(seen), model(worker.train_data.inputs))  # type: ignore[operator]
    found = worker.answer(MomentsOrder(**vars(evaluate_order()))).weights
    moments = found.values.view(*found.layout.shapes[0][1])
    torch.testing.assert_close(moments[0], seen.mean(0).detach())
    torch.testing.assert_close(moments[1:], seen.detach().T.cov(correction=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments_of(seen).detach(), moments)


def test_errors_are_the_shares_on_the_other_side(worker: Worker) -> None:
    seen = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    classifiers = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 3.0]])  # the last column is the threshold
    assert domain_errors(seen, classifiers, 1) == (0.5, 0.0)
    assert domain_errors(seen, classifiers, -1) == (0.75, 1.0)
    width = dict(FULL.shapes)["head.weight"][1] + 1
    sent = Weights(Layout((("classifiers", (2, width)),)), torch.randn(2 * width))
    order = ErrorsOrder(**vars(evaluate_order()), sign=1, classifiers=sent)
    model = build(SPEC)
    model.load_state_dict(FULL.views(initial().values))
    expected = domain_errors(features(model, worker.val_data.inputs), sent.values.view(2, width), 1)
    assert worker.answer(order).errors == expected


def test_what_does_not_fit_the_network_is_refused(worker: Worker) -> None:
    wrong = Weights(Layout((("models", (2, 3)),)), torch.zeros(6))
    with pytest.raises(WireError, match=rf"expected models of {FULL.numel} weights each, found"):
        worker.answer(try_order(wrong))
    with pytest.raises(WireError, match=r"expected classifiers of 100 features, found \(\('models', \(2, 3\)\),\)"):
        worker.answer(ErrorsOrder(**vars(evaluate_order()), sign=1, classifiers=wrong))
