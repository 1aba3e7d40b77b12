"""What clients learn: the object that knows the loss, the labels, the metrics and how answers are shown.

A task has a network's outputs and an example's labels; it knows no model, strategy or client. Everything else asks it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.tasks.measures import BINS, Metric, histogram_of


@dataclass(frozen=True)
class TaskSpec:
    """A task as the server describes it to clients.

    Attributes:
        name: of the task.
        mean: of each target, by which clients standardise targets; empty: they do not.
        std: deviation of each target.
        balanced: whether each client weighs classes by the inverse of their frequency among its examples.
    """

    name: str = "classification"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    balanced: bool = False


@dataclass(frozen=True)
class Measured:
    """Metrics of some answers.

    Attributes:
        values: by name; a metric that is undefined is missing. `auroc/3` is that of label 3.
        counts: numbers that add up over clients, from which `Task.pooled` computes the same metrics.
    """

    values: Mapping[str, float]
    counts: tuple[float, ...]


class Task(ABC):
    """Base class of tasks, of `spec`. One's own has `metrics`, `check`, `losses`, `counts`, `show` (docs/tasks.md)."""

    metrics: ClassVar[Mapping[str, Metric]]
    """The metrics that exist. The first one selects the round unless the run says otherwise."""
    usual: ClassVar[int] = 1
    """How many of the metrics, the first ones, are reported unless the run asks for others."""
    looks: ClassVar[str]
    """What labels look like, for error messages."""
    standardises: ClassVar[bool] = False
    """Whether targets are standardised, by moments that clients may disclose."""

    def __init__(self, spec: TaskSpec) -> None:
        if spec.balanced and type(self).weights is Task.weights:
            raise ConfigError(f"class_weights: expected none, because {spec.name} has no classes")
        self.spec = spec

    @abstractmethod
    def check(self, labels: Tensor, outputs: int) -> None:
        """Raise a DataError if labels `(N, ...)` are not those of a network with so many outputs."""

    def weights(self, labels: Tensor) -> Tensor:
        """Return balanced weights of labels, shaped as `losses`, with mean 1. Only for tasks with classes."""
        raise NotImplementedError

    @abstractmethod
    def losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each label, and which labels are present; None if all are.

        Shape:
            outputs `(B, K)` or `(B, K, H, W)`, labels `(B, ...)`; both results `(B, ...)`. Losses of missing labels are
            finite.
        """

    def loss(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss over the labels of a batch that are present.

        `weights` are of labels, in the shape of `losses`, and `share` `(B,)` of examples in the mean; None: all alike.
        """
        losses, present = self.losses(outputs, labels)
        counted = torch.ones_like(losses) if present is None else present.to(losses)
        if share is not None:
            counted = counted * share.view(-1, *[1] * (losses.ndim - 1))
        weighted = losses * counted if weights is None else losses * weights * counted
        return weighted.sum() / counted.sum().clamp(min=1e-12)

    def total(self, outputs: Tensor, labels: Tensor) -> tuple[float, int]:
        """Return the sum of the loss over a batch's labels, and the number of labels."""
        losses, present = self.losses(outputs, labels)
        if present is None:
            return float(losses.sum()), losses.numel()
        return float((losses * present).sum()), int(present.sum())

    def answers(self, outputs: Tensor) -> Tensor:
        """Return what `counts` and `scores` take of a network's outputs; by default the outputs."""
        return outputs

    @abstractmethod
    def counts(self, answers: Tensor, labels: Tensor, outputs: int) -> Tensor:
        """Return counts that add up over examples, float64, in a shape that depends on `outputs` alone."""

    def scores(self, answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores `(N, L)` from 0 to 1, and truths: 0, 1 or NaN. Only for tasks with metrics of scores."""
        raise NotImplementedError

    def asked(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return these metrics, each once, or the usual ones if there are none; ConfigError if one does not exist."""
        if wrong := [name for name in names if name not in self.metrics]:
            raise ConfigError(f"metrics: expected {', '.join(self.metrics)} for {self.spec.name}, found {wrong[0]!r}")
        return tuple(dict.fromkeys(names)) or tuple(self.metrics)[: self.usual]

    def measure(self, answers: Tensor, labels: Tensor, outputs: int, names: Sequence[str]) -> Measured:
        """Compute metrics of answers to examples `(N, ...)`."""
        counts, found = self.counts(answers, labels, outputs), {}
        pairs = self.scores(answers, labels) if any(self.metrics[name].scored for name in names) else ()
        for name in names:
            metric = self.metrics[name]
            found[name] = metric.counted(counts) if metric.counted else _by_label(metric, *pairs)
        flat = [counts.flatten(), *([histogram_of(*pairs).flatten()] if pairs else [])]
        return Measured(self._defined(found), tuple(torch.cat(flat).tolist()))

    def pooled(self, counts: Sequence[float], outputs: int, names: Sequence[str]) -> dict[str, float]:
        """Return the metrics of summed counts, without those that only the scores themselves can give."""
        (own, bins), found = self.unpacked(counts, outputs), {}
        for name in names:
            metric = self.metrics[name]
            if metric.counted:
                found[name] = metric.counted(own)
            elif metric.binned:
                found[name] = torch.stack([metric.binned(each) for each in bins])
        return self._defined(found)

    def _defined(self, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the means over labels that are defined, and the values of single labels if there are several."""
        values = {}
        for name, each in found.items():
            whole = each.nanmean()
            if bool(whole.isfinite()):
                values[name] = float(whole)
                if each.numel() > 1:
                    numbered = enumerate(each.tolist(), self.metrics[name].first)
                    values |= {f"{name}/{at}": value for at, value in numbered if value == value}
        return values

    def unpacked(self, counts: Sequence[float], outputs: int) -> tuple[Tensor, Tensor]:
        """Return counts as `self.counts` gives them, and histograms of scores `(L, 2, BINS)`, perhaps of no label."""
        like = self.counts(*self.nothing(outputs), outputs)
        flat = torch.tensor(counts, dtype=torch.float64)
        return flat[: like.numel()].view(like.shape), flat[like.numel() :].view(-1, 2, BINS)

    def are_counts(self, own: Tensor, bins: Tensor, total: int) -> bool:
        """Return whether what `unpacked` returned can be of `total` examples, or of so many pixels."""
        return bool((own >= 0).all() and (bins >= 0).all() and (bins.sum((1, 2)) <= total).all())

    def length(self, outputs: int, names: Sequence[str]) -> int:
        """Return the number of counts that `measure` returns for these metrics."""
        answers, labels = self.nothing(outputs)
        bins = self.scores(answers, labels)[0].shape[1] * 2 * BINS if any(self.metrics[n].scored for n in names) else 0
        return self.counts(answers, labels, outputs).numel() + bins

    def nothing(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Return answers and labels of no example, for the shapes; by default floats `(0, outputs)`."""
        return torch.zeros(0, outputs), torch.zeros(0, outputs)

    def output_shape(self, outputs: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a network's outputs for one input."""
        return (outputs,)

    def auto_model(self, input_shape: tuple[int, ...]) -> str:
        """Return the architecture that `auto` means: a LeNet for images of at least 28 x 28 pixels, else an MLP."""
        return "lenet" if len(input_shape) == 3 and min(input_shape[1:]) >= 28 else "mlp"

    @abstractmethod
    def show(self, outputs: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return what people are told of each example's outputs: a few named values, in order."""

    def describe(self, names: Sequence[str]) -> str:
        """Return what a network's outputs are, for a model card."""
        return f"logits of {len(names)} classes: {', '.join(names)}"


def _by_label(metric: Metric, scores: Tensor, truth: Tensor) -> Tensor:
    """Return the metric of each label; NaN for one that is only present or only absent."""
    assert metric.scored
    values = []
    for score, each in zip(scores.T, truth.T, strict=True):
        known = ~each.isnan()
        positives = int(each[known].sum())
        mixed = 0 < positives < int(known.sum())
        values.append(metric.scored(score[known], each[known].long()) if mixed else torch.tensor(torch.nan))
    return torch.stack([value.double().cpu() for value in values]).clamp(0, 1)  # in float32 an area may exceed 1
