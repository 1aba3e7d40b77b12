"""Metrics from counts that add up over clients, and from scores.

A metric has one value for each class, label or target, and NaN where it is undefined. Counts are float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

_TAIL = 2.0 ** -torch.arange(1, 17, dtype=torch.float64) / 150
EDGES = torch.cat([_TAIL.flip(0), torch.arange(1, 150) / torch.tensor(150.0, dtype=torch.float64), 1 - _TAIL])
"""Edges of the bins in which clients count scores, finer near 0 and 1, where confident networks have most of theirs."""

MIDDLES = (torch.nn.functional.pad(EDGES, (1, 0)) + torch.nn.functional.pad(EDGES, (0, 1), value=1.0)) / 2
BINS, CALIBRATION_BINS = len(MIDDLES), 15


@dataclass(frozen=True)
class Metric:
    """A metric of a task.

    Attributes:
        counted: computes it from the task's counts: a scalar, or `(L,)`.
        scored: computes it from scores `(N,)` and truths `(N,)` of one label, in place of `counted`.
        binned: computes it from one label's histogram `(2, BINS)`, if `scored` has such a form.
        mean: whether it is a mean over examples, so that values and numbers of examples are enough to pool it.
        first: the class, label or target of its first value.
    """

    counted: Callable[[Tensor], Tensor] | None = None
    scored: Callable[[Tensor, Tensor], Tensor] | None = None
    binned: Callable[[Tensor], Tensor] | None = None
    mean: bool = False
    first: int = 0


def confusion_of(answers: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return how often each class (row) got each answer (column), float64 `(classes, classes)`."""
    pairs = classes * labels.flatten().long() + answers.flatten().long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes).double()


GRID, REACH = 20, 3.0
"""Cells of targets and answers in each direction, and the deviations from the mean that they reach to."""


def sums_of(answers: Tensor, labels: Tensor) -> Tensor:
    """Return for each target `(N, T)`: count, sums of |error|, error^2, target and target^2; float64 `(T, 5)`."""
    truth = labels.double()
    error = answers.double() - truth
    parts = (torch.ones_like(truth), error.abs(), error**2, truth, truth**2)
    return torch.stack([part.sum(0) for part in parts], 1)


def grid_of(answers: Tensor, targets: Tensor) -> Tensor:
    """Return how often a target (row) got an answer (column), float64 `(T, GRID^2)`; both are `(N, T)`, in deviations.

    There are `GRID` cells from `-REACH` to `REACH`. What is beyond counts in the last ones.
    """
    rows, columns = (((each + REACH) * (GRID / (2 * REACH))).long().clamp(0, GRID - 1) for each in (targets, answers))
    return torch.stack([confusion_of(b, a, GRID).flatten() for a, b in zip(rows.T, columns.T, strict=True)])


def histogram_of(scores: Tensor, truth: Tensor) -> Tensor:
    """Return the number of negatives and positives in each bin of scores; float64 `(L, 2, BINS)`.

    `scores` `(N, L)` are from 0 to 1, and `truth` `(N, L)` is 0, 1, or NaN where it is not known.
    """
    labels = scores.shape[1]
    place = torch.bucketize(scores.double().contiguous(), EDGES.to(scores.device), right=True)
    place += BINS * (truth.nan_to_num().long() + 2 * torch.arange(labels, device=scores.device))
    return torch.bincount(place[~truth.isnan()], minlength=labels * 2 * BINS).view(labels, 2, BINS).double()


def regrouped(bins: Tensor, groups: int) -> Tensor:
    """Return the sums `(groups,)` of the values of bins `(BINS,)` in groups of one width, which divides 150."""
    return torch.bincount((MIDDLES * groups).long(), bins, groups)


def _accuracy(confusion: Tensor) -> Tensor:
    """Share of right answers; for several labels (L, 2, 2), of each label."""
    return confusion.diagonal(dim1=-2, dim2=-1).sum(-1) / confusion.sum((-2, -1))


def _f1(confusion: Tensor) -> Tensor:
    """F1 of each class, which for pixels is Dice; undefined for a class that neither occurs nor is predicted."""
    return 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1))


def _r2(sums: Tensor) -> Tensor:
    count, _, squares, total, total_squares = sums[:, :5].T
    spread = total_squares - total**2 / count
    return torch.where(spread > 1e-12 * total_squares, 1 - squares / spread, torch.nan)


ACCURACY, LABEL_ACCURACY = Metric(_accuracy, mean=True), Metric(_accuracy)
# the mean recall of the classes that occur
BALANCED_ACCURACY = Metric(lambda counts: (counts.diagonal(dim1=-2, dim2=-1) / counts.sum(-1)).nanmean(-1))
MACRO_F1 = Metric(_f1)
LABEL_F1 = Metric(lambda counts: 2 * counts[:, 1, 1] / (counts[:, 1].sum(1) + counts[:, :, 1].sum(1)))
DICE = Metric(lambda counts: _f1(counts)[1:], first=1)
IOU = Metric(lambda counts: (counts.diagonal() / (counts.sum(0) + counts.sum(1) - counts.diagonal()))[1:], first=1)
MAE = Metric(lambda sums: sums[:, 1] / sums[:, 0], mean=True)
RMSE = Metric(lambda sums: (sums[:, 2] / sums[:, 0]).sqrt())
R2 = Metric(_r2)


def _scored(name: str, scores: Tensor, truth: Tensor, **settings: int) -> Tensor:
    from torchmetrics.functional import classification  # some hundred MB, if a run asks for it

    return getattr(classification, f"binary_{name}")(scores, truth, **settings)


def _binned_auroc(bins: Tensor) -> Tensor:
    negative, positive = bins[0], bins[1]
    below = negative.cumsum(0) - negative / 2
    return (positive * below).sum() / (positive.sum() * negative.sum())


def _binned_average_precision(bins: Tensor) -> Tensor:
    above = bins.flip(1).cumsum(1)
    negative, positive = above[0], above[1]
    steps = torch.diff(positive, prepend=positive.new_zeros(1))
    return (steps * (positive / (positive + negative)).nan_to_num()).sum() / positive[-1]


def _binned_calibration_error(bins: Tensor) -> Tensor:
    """Return the error for scores in the middles of their bins."""
    above = bins[1] - bins.sum(0) * MIDDLES  # positives beyond those that the scores promise
    return regrouped(above, CALIBRATION_BINS).abs().sum() / bins.sum()


AUROC = Metric(scored=partial(_scored, "auroc"), binned=_binned_auroc)
AVERAGE_PRECISION = Metric(scored=partial(_scored, "average_precision"), binned=_binned_average_precision)
CALIBRATION_ERROR = Metric(
    scored=partial(_scored, "calibration_error", n_bins=CALIBRATION_BINS), binned=_binned_calibration_error
)
