"""Answers that cannot be true are refused."""

import pytest

from hyperbloom.common.errors import WireError
from hyperbloom.common.wire.orders import EvaluateResult, SplitScore, TrainResult

GOOD = SplitScore(1, 2, 0.5)


def test_an_accuracy_is_a_share() -> None:
    assert (GOOD.accuracy, SplitScore(3, 4, 0.25).accuracy) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (EvaluateResult(SplitScore(3, 2, 0.5), GOOD), "val: .* found SplitScore\\(correct=3, total=2, loss=0.5\\)"),
        (EvaluateResult(SplitScore(-1, 2, 0.5), GOOD), "val: .*\\(correct=-1"),
        (EvaluateResult(GOOD, SplitScore(0, 0, 0.25)), "test: .* total=0"),
        (EvaluateResult(GOOD, SplitScore(-2, -1, 0.25)), "test: .* total=-1"),
        (EvaluateResult(GOOD, SplitScore(1, 2, -0.5)), "test: expected a loss of 0 to 1e\\+30, found -0.5"),
        (EvaluateResult(GOOD, SplitScore(1, 2, float("nan"))), "test: expected a loss of 0 to 1e\\+30, found nan"),
    ],
)
def test_impossible_scores_are_refused(result: EvaluateResult, message: str) -> None:
    with pytest.raises(WireError, match=message):
        result.check()
    EvaluateResult(SplitScore(0, 1, 0.5), SplitScore(4, 4, 0.25)).check()


@pytest.mark.parametrize("loss", [-0.1, 2e30])
def test_impossible_losses_are_refused_and_none_is_no_loss(loss: float) -> None:
    with pytest.raises(WireError, match=r"^loss: expected 0 to 1e\+30, found "):
        TrainResult(0.5, loss=loss).check()
    TrainResult(0.5).check()
