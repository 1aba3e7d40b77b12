"""The layout of a target network's parameters in one flat vector.

A model is sent, generated and trained as one contiguous vector. A hypernetwork's output row therefore becomes the
payload of a message without a copy, and the optimiser sees one tensor. A `Layout` maps slices to parameters.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of parameters, in their order in a flat vector of `numel` elements."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Return the layout of a module's parameters."""
        return cls(tuple((name, tuple(each.shape)) for name, each in module.named_parameters()))

    @cached_property
    def numel(self) -> int:
        """Length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for _, shape in self.shapes)

    @cached_property
    def digest(self) -> str:
        """Short hash of names and shapes. A message is refused unless sender and receiver have the same one."""
        return hashlib.sha256(repr(self.shapes).encode()).hexdigest()[:16]

    def slices(self) -> Iterator[tuple[str, slice, tuple[int, ...]]]:
        """Yield the name of each parameter, its slice of the flat vector, and its shape."""
        start = 0
        for (name, shape), size in zip(self.shapes, self.sizes, strict=True):
            yield name, slice(start, start + size), shape
            start += size

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters as views of a `(numel,)` vector."""
        # The gradient of one split is one concatenation. Each slice would add a full-length vector of zeros.
        return {n: piece.view(shape) for (n, shape), piece in zip(self.shapes, flat.split(self.sizes), strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy named tensors into a new `(numel,)` vector."""
        return torch.cat([tensors[name].detach().reshape(-1) for name, _ in self.shapes])
