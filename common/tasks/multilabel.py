"""Multilabel: several labels for each example, each present, absent or not known."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperbloom.common.errors import DataError
from hyperbloom.common.tasks import measures
from hyperbloom.common.tasks.base import Task
from hyperbloom.common.tasks.measures import Metric

THRESHOLD = 0.5
"""Probability from which on a label counts as present."""


class Multilabel(Task):
    """Labels (N, L) of 0, 1 and NaN where nobody knows, by binary cross-entropy over the known ones."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        "auroc": measures.AUROC,
        "average-precision": measures.AVERAGE_PRECISION,
        "accuracy": measures.LABEL_ACCURACY,
        "balanced-accuracy": measures.BALANCED_ACCURACY,
        "macro-f1": measures.LABEL_F1,
        "calibration-error": measures.CALIBRATION_ERROR,
    }
    looks: ClassVar[str] = "floats (N, L) of 0, 1, and NaN for labels that are not known"

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are float32 `(N, outputs)` of 0, 1 and NaN."""
        sound = labels.dtype == torch.float32 and labels.shape[1:] == (outputs,)
        if not sound or not bool(((labels == 0) | (labels == 1) | labels.isnan()).all()):
            raise DataError(f"labels: expected {self.looks}, found {labels.dtype} {tuple(labels.shape)}")

    def weights(self, labels: Tensor) -> Tensor:
        """Return weights `(N, L)` that make the known examples with and without each label weigh the same."""
        weights = torch.ones_like(labels)
        for place, each in enumerate(labels.T):
            known = ~each.isnan()
            positives, total = each[known].sum(), known.sum()
            if 0 < positives < total:
                weights[:, place] = torch.where(each == 1, total / (2 * positives), total / (2 * (total - positives)))
        return weights

    def losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the binary cross-entropy of each label `(N, L)`, and which labels are known."""
        return F.binary_cross_entropy_with_logits(outputs, labels.nan_to_num(), reduction="none"), ~labels.isnan()

    def counts(self, answers: Tensor, labels: Tensor, outputs: int) -> Tensor:
        """Return each label's confusion matrix over the examples where it is known, `(L, 2, 2)`."""
        present, known = (answers.sigmoid() >= THRESHOLD).long(), ~labels.isnan()
        place = present + 2 * labels.nan_to_num().long() + 4 * torch.arange(outputs, device=labels.device)
        return torch.bincount(place[known], minlength=4 * outputs).view(outputs, 2, 2).double()

    def are_counts(self, own: Tensor, bins: Tensor, total: int) -> bool:
        """Return whether it can be, with no example twice in a label's confusion matrix."""
        return super().are_counts(own, bins, total) and float(own.sum((1, 2)).max()) <= total

    def scores(self, answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each label's probability `(N, L)`, and the labels."""
        return answers.double().sigmoid(), labels.double()

    def show(self, outputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the labels from `THRESHOLD` on, and the probability of each label."""
        return [
            {
                "labels": [name for name, value in zip(names, row, strict=True) if value >= THRESHOLD],
                "probabilities": dict(zip(names, row, strict=True)),
            }
            for row in outputs.double().sigmoid().tolist()
        ]

    def describe(self, names: Sequence[str]) -> str:
        """Return what the outputs are."""
        return f"logits of {len(names)} labels, each present from a probability of {THRESHOLD} on: {', '.join(names)}"
