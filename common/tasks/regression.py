"""Regression: one or several numbers for each example."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyperbloom.common.errors import DataError
from hyperbloom.common.tasks import measures
from hyperbloom.common.tasks.base import Task
from hyperbloom.common.tasks.measures import Metric, grid_of, sums_of


class Regression(Task):
    """Targets (N,) or (N, T), by squared error.

    With moments in its description, a network answers in units of each target's deviation from its mean.
    """

    metrics: ClassVar[Mapping[str, Metric]] = {"rmse": measures.RMSE, "mae": measures.MAE, "r2": measures.R2}
    usual: ClassVar[int] = 3
    looks: ClassVar[str] = "finite floats (N,) or (N, T)"
    standardises: ClassVar[bool] = True

    def check(self, labels: Tensor, outputs: int) -> None:
        """Check that labels are finite float32 `(N,)` or `(N, outputs)`."""
        sound = labels.dtype == torch.float32 and labels.ndim in (1, 2) and _columns(labels).shape[1] == outputs
        if not sound or not bool(labels.isfinite().all()):
            raise DataError(f"labels: expected {self.looks}, found {labels.dtype} {tuple(labels.shape)}")

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = self.spec.mean or (0.0,), self.spec.std or (1.0,)
        return _on(mean, like.dtype, like.device), _on(std, like.dtype, like.device)

    def losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, None]:
        """Return half the squared error of each target, in units of its deviation; `(B, T)`."""
        mean, std = self._moments(outputs)
        return (outputs - (_columns(labels) - mean) / std).square() / 2, None

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the predictions `(N, T)` in the targets' units."""
        mean, std = self._moments(outputs)
        return outputs * std + mean

    def counts(self, answers: Tensor, labels: Tensor, outputs: int) -> Tensor:
        """Return `(T, ...)`: for each target the sums of `sums_of`, and with moments the cells of `grid_of`."""
        mean, std = self._moments(answers)
        grid = [grid_of((answers - mean) / std, (_columns(labels) - mean) / std)] if self.spec.std else []
        return torch.cat([sums_of(answers, _columns(labels)), *grid], 1)

    def are_counts(self, own: Tensor, bins: Tensor, total: int) -> bool:
        """Return whether it can be; sums of targets may be negative, and no other."""
        counts, rest = own[:, 0], torch.cat([own[:, :3], own[:, 4:]], 1)
        return super().are_counts(rest, bins, total) and bool((counts == total).all())

    def show(self, outputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return each target by its name."""
        return [dict(zip(names, row, strict=True)) for row in self.answers(outputs.double()).tolist()]

    def describe(self, names: Sequence[str]) -> str:
        """Return what the outputs are."""
        mean, std = (list(part) for part in (self.spec.mean, self.spec.std))
        units = f"; a number is output * {std} + {mean}" if std else ""
        return f"{len(names)} numbers: {', '.join(names)}{units}"


def _columns(labels: Tensor) -> Tensor:
    return labels if labels.ndim == 2 else labels.unsqueeze(1)


@lru_cache(64)
def _on(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, made once: a step that copies to its device cannot be recorded."""
    return torch.tensor(values, dtype=dtype, device=device)
