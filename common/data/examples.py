"""Labelled examples as two tensors, and the three sets of them that one client owns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import DataError

__all__ = ["ClientData", "Examples"]


@dataclass(frozen=True)
class Examples:
    """Labelled examples held as two tensors.

    Args:
        inputs: float32 `(N, C, H, W)` images or `(N, F)` features.
        labels: int64 `(N,)`, classes counted from 0.

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
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise DataError(f"labels: expected int64 (N,), found {self.labels.dtype} {tuple(self.labels.shape)}")
        if len(self.inputs) != len(self.labels):
            raise DataError(f"expected one label for each of {len(self.inputs)} inputs, found {len(self.labels)}")

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    def subset(self, indices: torch.Tensor | NDArray[np.int64] | Sequence[int]) -> "Examples":
        """Return the examples at `indices`, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return Examples(self.inputs[rows], self.labels[rows])

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
        num_classes: Number of classes of the task. A client may lack examples of some.
        class_names: One name for each class, in the order of the labels.
        scaling: The scaling of the stored numbers, already applied.

    Raises:
        DataError: The parts differ in shape, a label is out of range, or there are not `num_classes` names.
    """

    train: Examples
    val: Examples
    test: Examples
    num_classes: int
    class_names: tuple[str, ...]
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        if len(self.class_names) != self.num_classes:
            raise DataError(f"expected {self.num_classes} class names, found {len(self.class_names)}")
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if tuple(part.inputs.shape[1:]) != self.input_shape:
                found = tuple(part.inputs.shape[1:])
                raise DataError(f"{name}: expected inputs of shape {self.input_shape} as in train, found {found}")
            if len(part) and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < self.num_classes:
                found_range = f"{int(part.labels.min())} to {int(part.labels.max())}"
                raise DataError(f"{name}: expected labels from 0 to {self.num_classes - 1}, found {found_range}")

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
        """Proportion of each class in the training set, float32 `(num_classes,)`; sums to 1."""
        counts = torch.bincount(self.train.labels, minlength=self.num_classes).to(torch.float32)
        return counts / counts.sum()
