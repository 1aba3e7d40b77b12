"""Answers that cannot be true are refused."""

import math

import pytest

from hyperbloom.common.errors import WireError
from hyperbloom.common.wire.orders import EvaluateResult, SplitScore, TrainResult


def score(
    metric: str, value: float, *, total: int = 2, loss: float = 0.5, counts: tuple[float, ...] = ()
) -> SplitScore:
    """Return a score with one metric."""
    return SplitScore(total, loss, (metric,), (value,), counts)


GOOD = score("accuracy", 0.5)


def test_a_metric_that_is_not_told_is_undefined() -> None:
    assert (GOOD.value("accuracy"), GOOD.value("auroc")) == (0.5, None)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (EvaluateResult(score("accuracy", 1.5), GOOD), "val: expected accuracy from 0 to 1, found 1.5"),
        (EvaluateResult(score("auroc/3", -0.5), GOOD), "val: expected auroc/3 from 0 to 1, found -0.5"),
        (EvaluateResult(score("rmse", -1.0), GOOD), "val: expected rmse from 0 to 1e\\+30, found -1.0"),
        (EvaluateResult(score("r2", -2e30), GOOD), "val: expected r2 from -1e\\+30 to 1, found"),
        (EvaluateResult(score("r2", 1.1), GOOD), "val: expected r2 from -1e\\+30 to 1, found 1.1"),
        (EvaluateResult(SplitScore(2, 0.5, ("dice",), ()), GOOD), "val: expected one value for each metric"),
        (EvaluateResult(SplitScore(2, 0.5, ("mae", "mae"), (1.0, 2.0)), GOOD), "val: expected one value for each"),
        (EvaluateResult(score("dice", 0.5, counts=(1.0, math.nan)), GOOD), "val: expected counts up to 1e\\+30"),
        (EvaluateResult(score("dice", 0.5, counts=(1e308, 1.0)), GOOD), "val: expected counts up to 1e\\+30"),
        (EvaluateResult(score("dice", 0.5, counts=(-1e308, 1.0)), GOOD), "val: expected counts up to 1e\\+30"),
        (EvaluateResult(GOOD, score("accuracy", 0.5, loss=2e30)), "test: expected a loss of at most 1e\\+30, found 2"),
        (EvaluateResult(GOOD, score("accuracy", 0.5, total=0)), "test: expected examples, found 0"),
        (
            EvaluateResult(GOOD, score("accuracy", 0.5, loss=-2e30)),
            "test: expected a loss of at most 1e\\+30, found -2",
        ),
        (
            EvaluateResult(GOOD, score("accuracy", 0.5, loss=float("nan"))),
            "test: expected a loss of at most .* found nan",
        ),
    ],
)
def test_impossible_scores_are_refused(result: EvaluateResult, message: str) -> None:
    with pytest.raises(WireError, match=message):
        result.check()
    EvaluateResult(score("accuracy", 0.0), score("r2", -4.0)).check()
    EvaluateResult(score("kappa", -0.2, loss=-3.0), GOOD).check()  # of a user's own task: a density has such losses


@pytest.mark.parametrize("loss", [-2e30, 2e30, math.nan])
def test_impossible_losses_are_refused_and_none_is_no_loss(loss: float) -> None:
    with pytest.raises(WireError, match=r"^loss: expected at most 1e\+30, found "):
        TrainResult(0.5, loss=loss).check()
    TrainResult(0.5).check()
