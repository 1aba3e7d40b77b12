"""A whole data set as stored, from which a client reads its part before the conversion to float32.

CIFAR-10 has 180 MB as bytes and 740 MB as float32. A client with a hundredth of it should need a hundredth of the
memory. It reads the labels first, computes the partition from them, and then reads and converts only its own inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch

from hyperbloom.common.data.draws import IntArray
from hyperbloom.common.data.examples import Examples
from hyperbloom.common.data.labels import LabelKind, label_kind, strata_of
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.schema import Schema


class Block(Protocol):
    """A sequence of stored inputs with access by row, such as an array in memory, `(n, C, H, W)` or `(n, F)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: IntArray, /) -> AnyArray:
        """Return the inputs at `rows`, `(len(rows), *shape)`; `rows` may be empty."""
        ...


@dataclass(frozen=True)
class Portion:
    """Some examples of a data set: their labels, owners and groups, and the places of their stored inputs.

    Args:
        blocks: Stored inputs; rows are numbered through all blocks.
        rows: `(N,)`, the rows of this portion.
        labels: `(N, ...)`, as `label_kind` takes them.
        owners: `(N,)`, such as the hospital; None if the data name none.
        groups: `(N,)`, such as the patient; no split cuts a group. None if the data name none.
    """

    blocks: tuple[Block, ...]
    rows: IntArray
    labels: AnyArray
    owners: IntArray | None = None
    groups: IntArray | None = None

    @classmethod
    def of(cls, block: Block, labels: AnyArray, owners: IntArray | None = None) -> "Portion":
        """Return all examples of one block, in order."""
        return cls((block,), np.arange(len(labels), dtype=np.int64), labels, owners)

    def __len__(self) -> int:
        return len(self.rows)

    def choose(self, indices: IntArray) -> "Portion":
        """Return the examples at `indices`, without reading inputs."""
        owners, groups = (None if each is None else each[indices] for each in (self.owners, self.groups))
        return Portion(self.blocks, self.rows[indices], self.labels[indices], owners, groups)

    def split(self, cut: Callable[[IntArray], Sequence[IntArray]], by_owner: bool = False) -> list["Portion"]:
        """Split by `cut`, a function from strata to indices. If there are groups, it deals them instead of examples."""
        strata = strata_of(self.labels, label_kind(self.labels))
        if by_owner and self.owners is not None:
            strata = self.owners * (1 + strata.max()) + strata
        if self.groups is None:
            return [self.choose(part) for part in cut(strata)]
        _, first, of = np.unique(self.groups, return_index=True, return_inverse=True)
        return [self.choose(np.flatnonzero(np.isin(of, part))) for part in cut(strata[first])]

    def stored(self) -> AnyArray:
        """Read the inputs as they are stored, `(N, *shape)`."""
        starts = np.cumsum([0, *(len(block) for block in self.blocks)])
        order = np.argsort(self.rows, kind="stable")
        edges = np.searchsorted(self.rows[order], starts)
        places = zip(self.blocks, starts, edges, edges[1:], strict=False)
        taken = [block[self.rows[order[low:high]] - start] for block, start, low, high in places]
        return np.concatenate(taken)[np.argsort(order)]  # blocks were read in ascending order of rows

    def examples(self, scaling: Scaling) -> Examples:
        """Read and convert the inputs."""
        return Examples(scaling.apply(self.stored()), torch.tensor(self.labels), groups=self.groups)


@dataclass(frozen=True)
class Pool:
    """A whole data set.

    Args:
        name: Name in errors.
        class_names: One name for each class, label or number.
        owner_names: One name for each of the portions' `owners`, such as hospitals; empty if there are none.
    """

    name: str
    train: Portion
    val: Portion
    test: Portion
    class_names: tuple[str, ...]
    scaling: Scaling
    owner_names: tuple[str, ...] = ()
    schema: Schema | None = None

    @property
    def portions(self) -> dict[str, Portion]:
        """The three portions by name."""
        return {"train": self.train, "val": self.val, "test": self.test}

    @cached_property
    def kind(self) -> LabelKind:
        """What the labels are."""
        return label_kind(self._labels)

    @cached_property
    def strata(self) -> dict[str, IntArray]:
        """A number for each example of each portion, in proportion to which partitioners deal: see `strata_of`."""
        ends = np.cumsum([len(portion) for portion in self.portions.values()])
        return dict(zip(self.portions, np.split(strata_of(self._labels, self.kind), ends[:-1]), strict=True))

    @property
    def num_strata(self) -> int:
        """The number of strata: the classes, whether there are examples of all of them or not."""
        most = max(int(strata.max(initial=-1)) for strata in self.strata.values())
        return len(self.class_names) if self.kind == "classification" else 1 + most

    @property
    def meaning(self) -> str | None:
        """A digest of the names of the classes; None if they are only numbered."""
        plain = self.class_names == tuple(map(str, range(len(self.class_names))))
        return None if plain else sha256(repr(self.class_names).encode()).hexdigest()[:16]

    @property
    def least_outputs(self) -> int:
        """The least number of outputs of a network for these labels: classes, labels or numbers."""
        labels = self._labels
        if self.kind in ("classification", "segmentation"):
            return 1 + int(labels.max(initial=0))
        return labels.shape[1] if labels.ndim == 2 else 1

    @property
    def _labels(self) -> AnyArray:
        return np.concatenate([portion.labels for portion in self.portions.values()])
