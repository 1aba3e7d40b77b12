"""The parameters of a target network in one flat vector: their layout, and the form of weights on the wire.

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

from hyperbloom.common.errors import WireError

LARGEST_NORM = 1e6
"""Largest accepted norm of a client's result. Normal ones are of order 1 to 1,000. Squares of much larger ones would
overflow in the product with the Jacobian and reach all clients as NaN."""


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


@dataclass(frozen=True)
class Weights:
    """Named tensors as one flat vector: `values` is `(layout.numel,)`."""

    layout: Layout
    values: Tensor

    def part(self, wanted: Layout) -> Tensor:
        """Return the values `(wanted.numel,)` of the parameters of `wanted`, a subset of these."""
        return self.values if wanted == self.layout else wanted.flatten(self.layout.views(self.values))

    def check(self, expected: Layout, dtype: torch.dtype) -> None:
        """Check names, order, shapes, dtype and finiteness; WireError that names the first tensor that differs."""
        here, there = dict(self.layout.shapes), dict(expected.shapes)
        for name in there:
            if name not in here:
                raise WireError(f"tensor {name}: expected with shape {there[name]}, but it is missing")
            if here[name] != there[name]:
                raise WireError(f"tensor {name}: expected shape {there[name]}, found {here[name]}")
        if extra := [name for name in here if name not in there]:
            raise WireError(f"tensor {extra[0]}: not expected; expected {', '.join(there)}")
        if self.layout != expected:
            raise WireError(f"tensors: expected in the order {', '.join(there)}, found {', '.join(here)}")
        if self.values.dtype != dtype:
            raise WireError(f"tensor {next(iter(there), '')}: expected {dtype}, found {self.values.dtype}")
        # A sum is finite only if all terms are. This test is cheap; the exact one below excludes overflow of the sum.
        if not math.isfinite(self.values.sum().item()):
            bad = ~self.values.isfinite()
            for name, part in expected.views(bad).items():
                if part.any():
                    raise WireError(f"tensor {name}: {int(bad.sum())} values are not finite")

    def check_norm(self, most: float = LARGEST_NORM) -> None:
        """Raise a WireError if the norm is larger than `most`."""
        norm = float(self.values.double().norm())
        if not norm <= most:
            raise WireError(f"expected a norm of at most {most:.3g}, found {norm:.3g}")
