"""Labelled examples as two tensors, and the three sets of them that one client owns."""

from dataclasses import dataclass, field

import torch

from hyperbloom.common.data.labels import LabelKind
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import DataError

__all__ = ["ClientData", "Examples"]

_FORMS: dict[LabelKind, tuple[torch.dtype, tuple[int, ...]]] = {
    "classification": (torch.int64, (1,)),
    "segmentation": (torch.int64, (3,)),
    "multilabel": (torch.float32, (2,)),
    "regression": (torch.float32, (1, 2)),
}
"""Type and possible numbers of axes of each kind's labels."""


@dataclass(frozen=True)
class Examples:
    """Labelled examples held as two tensors.

    Args:
        inputs: float32 `(N, C, H, W)` images or `(N, F)` features.
        labels: int64 `(N,)` classes counted from 0, or `(N, H, W)` masks of them; float32 `(N, L)` labels that are 0, 1
            or, where nobody knows, NaN; or float32 `(N,)` or `(N, T)` numbers.

    Raises:
        DataError: A tensor has the wrong type or number of axes, or the two differ in length.
    """

    inputs: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        """Check types and shapes."""
        if self.inputs.dtype != torch.float32 or self.inputs.ndim not in (2, 4):
            found = f"{self.inputs.dtype} {tuple(self.inputs.shape)}"
            raise DataError(f"inputs: expected float32 (N, C, H, W) or (N, F), found {found}")
        if self.labels.ndim not in {torch.int64: (1, 3), torch.float32: (1, 2)}.get(self.labels.dtype, ()):
            found = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise DataError(f"labels: expected int64 (N,) or (N, H, W), or float32 (N,) or (N, L), found {found}")
        if len(self.inputs) != len(self.labels):
            raise DataError(f"expected one label for each of {len(self.inputs)} inputs, found {len(self.labels)}")

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Examples":
        """Return the same examples on `device`, with images in the fastest memory layout for training there."""
        inputs = self.inputs.to(device)
        if inputs.ndim == 4 and inputs.device.type == "cpu":
            # A local step of LeNet then takes three quarters of the time (benchmarks/local_sgd.py). We have not
            # measured GPUs.
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return Examples(inputs, self.labels.to(device))


@dataclass(frozen=True)
class ClientData:
    """The data of one client.

    Args:
        train: Examples for training.
        val: Examples for model selection.
        test: Examples for reports.
        num_classes: Number of outputs of a network for the task: classes, labels or numbers. A client may lack examples
            of some classes.
        class_names: One name for each of them, in the order of the labels.
        scaling: The scaling of the stored numbers, already applied.
        kind: What the labels are.

    Raises:
        DataError: The parts differ in shape, the labels are of another kind or out of range, or there are not
            `num_classes` names.
    """

    train: Examples
    val: Examples
    test: Examples
    num_classes: int
    class_names: tuple[str, ...]
    scaling: Scaling = field(default_factory=Scaling)
    kind: LabelKind = "classification"

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        if len(self.class_names) != self.num_classes:
            raise DataError(f"expected {self.num_classes} class names, found {len(self.class_names)}")
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if tuple(part.inputs.shape[1:]) != self.input_shape:
                found = tuple(part.inputs.shape[1:])
                raise DataError(f"{name}: expected inputs of shape {self.input_shape} as in train, found {found}")
            self._check_labels(name, part.labels)

    def _check_labels(self, name: str, labels: torch.Tensor) -> None:
        dtype, axes = _FORMS[self.kind]
        outputs = labels.shape[1] if labels.ndim == 2 else 1
        if (
            labels.dtype != dtype
            or labels.ndim not in axes
            or (dtype.is_floating_point and outputs != self.num_classes)
        ):
            found = f"{labels.dtype} {tuple(labels.shape)}"
            raise DataError(f"{name}: expected labels for {self.kind} with {self.num_classes} outputs, found {found}")
        if not dtype.is_floating_point and len(labels):
            low, high = int(labels.min()), int(labels.max())
            if not 0 <= low <= high < self.num_classes:
                raise DataError(f"{name}: expected labels from 0 to {self.num_classes - 1}, found {low} to {high}")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, `(C, H, W)` or `(F,)`."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def whole(self) -> Examples:
        """All examples, in the order train, val, test."""
        parts = (self.train, self.val, self.test)
        return Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))

    @property
    def class_shares(self) -> torch.Tensor:
        """Proportion of each class in the training set, float32 `(num_classes,)`; sums to 1. Empty without classes."""
        if self.kind != "classification":
            return torch.empty(0)
        counts = torch.bincount(self.train.labels, minlength=self.num_classes).to(torch.float32)
        return counts / counts.sum()
