"""Labelled examples as two tensors, and the three sets of them that one client owns."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.labels import LabelKind
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.data.schema import Schema
from hyperbloom.common.errors import DataError
from hyperbloom.common.tasks import CLASSIFICATION, Task, TaskSpec, make_task

WIDE = 10.0
"""Deviation of an input beyond which a network hardly learns from it at the default rates."""


def laid_out(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs in the fastest memory layout for training on their device: images channels-last on a CPU."""
    if inputs.ndim != 4 or inputs.device.type != "cpu":
        return inputs
    # A local step of LeNet then takes two thirds of the time (benchmarks/local_sgd.py), a step of FedHeNN half
    # (benchmarks/alignment.py). We have not measured GPUs. With one channel both layouts are the same bytes, and only
    # the strides tell torch which one to compute in.
    _, channels, height, width = inputs.shape
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs.as_strided(inputs.shape, (channels * height * width, 1, channels * width, channels))


@dataclass(frozen=True)
class Examples:
    """Labelled examples held as two tensors.

    Args:
        inputs: float32 `(N, C, H, W)` images or `(N, F)` features.
        labels: int64 `(N,)` classes counted from 0, or `(N, H, W)` masks of them; float32 `(N, L)` labels that are 0, 1
            or, where nobody knows, NaN; or float32 `(N,)` or `(N, T)` numbers.
        task: What the labels mean.
        weights: Weights of the labels in the loss; None: all alike.
        groups: `(N,)` integers, such as the patient of each image; None: all examples are independent.

    Raises:
        DataError: A tensor has the wrong type or number of axes, or the two differ in length.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    task: Task = CLASSIFICATION
    weights: torch.Tensor | None = None
    groups: IntArray | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype != torch.float32 or self.inputs.ndim not in (2, 4):
            found = f"{self.inputs.dtype} {tuple(self.inputs.shape)}"
            raise DataError(f"inputs: expected float32 (N, C, H, W) or (N, F), found {found}")
        if self.labels.ndim not in {torch.int64: (1, 3), torch.float32: (1, 2)}.get(self.labels.dtype, ()):
            found = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise DataError(f"labels: expected int64 (N,) or (N, H, W), or float32 (N,) or (N, L), found {found}")
        if len(self.inputs) != len(self.labels):
            raise DataError(f"expected one label for each of {len(self.inputs)} inputs, found {len(self.labels)}")

    def __len__(self) -> int:
        return len(self.labels)

    def loss(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a network's mean loss on the examples `rows`, whose outputs these are."""
        return self.task.loss(outputs, self.labels[rows], None if self.weights is None else self.weights[rows])

    def under(self, task: Task) -> "Examples":
        """Return the same examples for a task, with the weights that it gives to classes."""
        return replace(self, task=task, weights=task.weights(self.labels) if task.spec.balanced else None)

    def to(self, device: torch.device | str) -> "Examples":
        """Return the same examples on `device`, with images in the fastest memory layout for training there."""
        inputs = laid_out(self.inputs.to(device))
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, inputs=inputs, labels=self.labels.to(device), weights=weights)

    def on_disk(self, folder: Path) -> "Examples":
        """Return the same examples with inputs on the CPU in a nameless file, which the system pages in and out."""
        images = self.inputs.ndim == 4
        inputs = self.inputs.permute(0, 2, 3, 1) if images else self.inputs  # as `to` lays images out
        with TemporaryFile(dir=folder) as file:
            file.write(np.ascontiguousarray(inputs.numpy()).data)  # on a full disk, to write to a map ends the process
            file.flush()
            mapped = np.memmap(file, np.float32, "r+", shape=tuple(inputs.shape))
        paged = torch.from_numpy(mapped)
        return replace(self, inputs=paged.permute(0, 3, 1, 2) if images else paged)


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
        schema: What the columns of a table mean, if the data are one.
        meaning: Digest of the names in the data set, before a partition that relabels; None if they are numbers.

    Raises:
        DataError: The parts differ in shape, the labels are of another kind or out of range, or there are not
            `num_classes` names.
    """

    train: Examples
    val: Examples
    test: Examples
    num_classes: int
    class_names: tuple[str, ...]
    scaling: Scaling = field(default=Scaling(1.0))
    kind: LabelKind = "classification"
    schema: Schema | None = None
    meaning: str | None = None

    def __post_init__(self) -> None:
        if len(self.class_names) != self.num_classes:
            raise DataError(f"expected {self.num_classes} class names, found {len(self.class_names)}")
        task = make_task(TaskSpec(self.kind))
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if tuple(part.inputs.shape[1:]) != self.input_shape:
                found = tuple(part.inputs.shape[1:])
                raise DataError(f"{name}: expected inputs of shape {self.input_shape} as in train, found {found}")
            try:
                task.check(part.labels, self.num_classes)
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
            object.__setattr__(self, name, part.under(task))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, `(C, H, W)` or `(F,)`."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def summary(self) -> str:
        """One line for the user, with how many examples each class has, and with the columns that are read."""
        sizes = ", ".join(f"{len(getattr(self, part))} {part}" for part in ("train", "val", "test"))
        labels = torch.cat([part.labels.flatten() for part in (self.train, self.val, self.test)])
        more = f"outputs {self.num_classes}"
        if self.kind == "classification":
            counts = torch.bincount(labels, minlength=self.num_classes).tolist()
            few = [pair for pair in zip(self.class_names, counts, strict=False) if pair[1] or len(counts) <= 20][:20]
            more = ", ".join(f"{name}: {count}" for name, count in few)
            if max(counts) > 0.9 * len(labels):
                more += f". Accuracy says little where {max(counts) / len(labels):.0%} are alike: set select"
            elif len(counts) > 20 and len(labels) < 5 * sum(map(bool, counts)):
                more += ". Store floats if these are numbers"
        elif self.kind == "regression" and len(labels.unique()) <= 50 and bool((labels == labels.round()).all()):
            more += ". Store integers (in a table or list: words) if these few numbers are classes"
        columns = f" of {', '.join(column.name for column in self.schema.columns)}"[:200] if self.schema else ""
        if self.schema is None:
            spread, place = self.train.inputs[:1000].flatten(1).std(0, correction=0).max(0)
            if spread > WIDE:
                more += f". Input {int(place)} has a deviation of {spread:.3g}: standardise inputs alike at all clients"
        return f"{sizes}; inputs {self.input_shape}{columns}; {self.kind}, {more}"

    @property
    def whole(self) -> Examples:
        """All examples, in the order train, val, test."""
        parts = (self.train, self.val, self.test)
        labels = torch.cat([part.labels for part in parts])
        return Examples(torch.cat([part.inputs for part in parts]), labels, self.train.task)

    @property
    def class_shares(self) -> torch.Tensor:
        """Proportion of each class in the training set, float32 `(num_classes,)`; sums to 1. Empty without classes."""
        if self.kind != "classification":
            return torch.empty(0)
        counts = torch.bincount(self.train.labels, minlength=self.num_classes).to(torch.float32)
        return counts / counts.sum()
