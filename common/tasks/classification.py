"""Classification: one class for each example."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperbloom.common.errors import DataError
from hyperbloom.common.tasks import measures
from hyperbloom.common.tasks.base import Task
from hyperbloom.common.tasks.measures import Metric, confusion_of


class OfClasses(Task):
    """Base of tasks whose labels are classes, counted from 0, and whose outputs have the classes in axis 1."""

    axes: ClassVar[int]
    """Axes of the labels."""

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are int64 with so many axes, from 0 to `outputs - 1`."""
        if labels.dtype != torch.int64 or labels.ndim != self.axes:
            raise DataError(f"labels: expected {self.looks}, found {labels.dtype} {tuple(labels.shape)}")
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < outputs:
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise DataError(f"expected labels from 0 to {outputs - 1}, found {found}")

    def weights(self, labels: Tensor) -> Tensor:
        """Return the weight `N / (C n_c)` of each label `(N,)`: class c has `n_c` of N labels, and C classes occur."""
        counts = torch.bincount(labels.flatten()).float()
        weights = labels.numel() / (int((counts > 0).sum()) * counts.clamp(min=1))
        return weights[labels]

    def are_counts(self, own: Tensor, bins: Tensor, total: int) -> bool:
        """Return whether it can be, with each example, or each of its pixels, once in the confusion matrix."""
        return super().are_counts(own, bins, total) and float(own.sum()) == total


class Classification(OfClasses):
    """One class for each example, by cross-entropy."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": measures.ACCURACY,
        "balanced-accuracy": measures.BALANCED_ACCURACY,
        "macro-f1": measures.MACRO_F1,
        "auroc": measures.AUROC,
        "average-precision": measures.AVERAGE_PRECISION,
        "calibration-error": measures.CALIBRATION_ERROR,
    }
    looks: ClassVar[str] = "integers (N,), classes counted from 0"
    axes: ClassVar[int] = 1

    def losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        """Return the cross-entropy of each example, `(N,)`."""
        return F.cross_entropy(outputs, labels, reduction="none"), None

    def loss(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """Return the mean as in `Task.loss`, with torch's own reduction where nothing is weighted."""
        if weights is None and share is None:
            return F.cross_entropy(outputs, labels)
        return super().loss(outputs, labels, weights, share)

    def counts(self, answers: Tensor, labels: Tensor, outputs: int) -> Tensor:
        """Return the confusion matrix `(K, K)`: true classes by answers."""
        return confusion_of(answers.argmax(1), labels, outputs)

    def scores(self, answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each class against the others; of two classes, that of the second."""
        probabilities, truth = answers.double().softmax(1), F.one_hot(labels, answers.shape[1]).double()
        return (probabilities[:, 1:], truth[:, 1:]) if answers.shape[1] == 2 else (probabilities, truth)

    def nothing(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Return answers `(0, outputs)` and labels `(0,)`."""
        return torch.zeros(0, outputs), torch.zeros(0, dtype=torch.int64)

    def show(self, outputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the class with the largest probability, and all probabilities."""
        rows = outputs.double().softmax(1)
        return [
            {"class": names[best], "probability": row[best], "probabilities": row}
            for row, best in zip(rows.tolist(), rows.argmax(1).tolist(), strict=True)
        ]
