"""Scores of classification as counts of right answers."""

from hyperbloom.common.wire.orders import SplitScore


def right(correct: int, total: int, loss: float = 1.0) -> SplitScore:
    """Return the score of so many right answers."""
    return SplitScore(total, loss, ("accuracy",), (correct / total if total else 0.0,))


def count_right(score: SplitScore) -> int:
    """Return how many answers were right."""
    accuracy = score.value("accuracy")
    assert accuracy is not None
    return round(accuracy * score.total)
