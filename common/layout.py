"""How the parameters of a target network lie in one flat vector.

A model travels, is generated and is trained as one contiguous vector: a hypernetwork's output row is the message's
payload without a copy, and the optimiser sees one tensor. A `Layout` says which slice is which parameter.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of parameters in the order in which they lie in a flat vector of `numel` elements."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, module: nn.Module, without: str | None = None) -> "Layout":
        """Return the layout of a module's parameters, leaving out those whose name starts with `without`."""
        named = module.named_parameters()
        return cls(tuple((n, tuple(p.shape)) for n, p in named if without is None or not n.startswith(without)))

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
        """Short hash of names and shapes: equal on both sides of the wire or the message is refused."""
        return hashlib.sha256(repr(self.shapes).encode()).hexdigest()[:16]

    def slices(self) -> Iterator[tuple[str, slice, tuple[int, ...]]]:
        """Yield name, place in the flat vector, and shape of each parameter."""
        start = 0
        for (name, shape), size in zip(self.shapes, self.sizes, strict=True):
            yield name, slice(start, start + size), shape
            start += size

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters as views of a `(numel,)` vector."""
        # One split: its derivative is one concatenation, that of slices a vector of zeros for each.
        return {n: piece.view(shape) for (n, shape), piece in zip(self.shapes, flat.split(self.sizes), strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy named tensors into a new `(numel,)` vector."""
        return torch.cat([tensors[name].detach().reshape(-1) for name, _ in self.shapes])

    def name_at(self, index: int) -> str:
        """Return the name of the parameter that element `index` of the flat vector belongs to."""
        return next(name for name, place, _ in self.slices() if place.start <= index < place.stop)
