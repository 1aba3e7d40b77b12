"""Evaluation is what one would compute by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from hyperbloom.client.work import scoring
from hyperbloom.client.work.scoring import EVALUATION_BATCH, evaluate, settle_norms
from hyperbloom.common.data import Examples

from ...scores import count_right
from .test_sgd import build, network, some_examples


class Memory(nn.Module):
    """Returns its inputs, which are the logits then, and remembers the sizes of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return x


def test_a_score_computed_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    score = evaluate(Memory(), Examples(logits, torch.tensor([0, 0, 1, 1])))
    losses = [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(3)), math.log(2)]
    assert (count_right(score), score.total, score.value("accuracy")) == (1, 4, 0.25)
    assert score.loss == pytest.approx(sum(losses) / 4, rel=1e-6)


@pytest.mark.parametrize("count", [1, EVALUATION_BATCH - 1, EVALUATION_BATCH, EVALUATION_BATCH + 1, 2500])
def test_batches_of_the_evaluation_do_not_show(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, 3, generator=generator)
    labels = torch.randint(3, (count,), generator=generator)
    module = Memory()
    score = evaluate(module, Examples(logits, labels))
    picked = logits.double()[torch.arange(count), labels]
    rows = zip(logits, labels.tolist(), strict=True)
    assert count_right(score) == sum(int(row.argmax()) == label for row, label in rows)
    assert score.total == count
    assert score.loss == pytest.approx((logits.double().logsumexp(1) - picked).mean().item(), rel=1e-5)
    assert module.sizes == [EVALUATION_BATCH] * (count // EVALUATION_BATCH) + [count % EVALUATION_BATCH] * bool(
        count % EVALUATION_BATCH
    )


def test_evaluating_changes_nothing() -> None:
    module = build("lenet", torch.float32)
    part = network(module, "none").shared
    before = part.values.clone()
    evaluate(module, some_examples("lenet", 5, torch.float32))
    assert torch.equal(part.values, before)
    assert not part.gradient.any()
    assert part.momentum is None


def test_counts_of_very_many_classes_are_not_sent() -> None:
    for classes, sent in ((512, 512**2), (513, 0)):
        score = evaluate(Memory(), Examples(torch.eye(classes)[:9], torch.arange(9)), disclose=True)
        assert len(score.counts) == sent and score.value("accuracy") == 1


def test_running_statistics_count_every_example_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a last batch of few examples each would count for many."""
    monkeypatch.setattr(scoring, "EVALUATION_BATCH", 8)
    inputs = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.BatchNorm1d(3))
    settle_norms(module, Examples(inputs, torch.zeros(10, dtype=torch.int64)))
    torch.testing.assert_close(module[0].running_mean, inputs.mean(0))


def test_running_statistics_do_not_depend_on_the_order_of_the_file() -> None:
    """Files are often sorted by class; the spread of a batch from one class is not that of the data."""
    labels = torch.arange(4).repeat_interleave(1000)
    inputs = 10.0 * labels[:, None] + torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.BatchNorm1d(3))
    settle_norms(module, Examples(inputs, labels))
    torch.testing.assert_close(module[0].running_mean, inputs.mean(0))
    torch.testing.assert_close(module[0].running_var, inputs.var(0), rtol=5e-3, atol=0)
