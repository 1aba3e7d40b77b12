"""Named tensors as one flat vector, the form of weights on the wire."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout

LARGEST_NORM = 1e6
"""Largest accepted norm of a client's result. Normal ones are of order 1 to 1,000. Squares of much larger ones would
overflow in the product with the Jacobian and reach all clients as NaN."""


@dataclass(frozen=True)
class Weights:
    """Named tensors as one flat vector: `values` is `(layout.numel,)`."""

    layout: Layout
    values: Tensor

    def part(self, wanted: Layout) -> Tensor:
        """Return the values `(wanted.numel,)` of the parameters of `wanted`, a subset of these."""
        return self.values if wanted == self.layout else wanted.flatten(self.layout.views(self.values))

    def check(self, expected: Layout, dtype: torch.dtype) -> None:
        """Check names, order, shapes, dtype and finiteness.

        Raises:
            WireError: a tensor differs. The message names the first one.
        """
        here, there = dict(self.layout.shapes), dict(expected.shapes)
        for name in there:
            if name not in here:
                raise WireError(f"tensor {name}: expected with shape {there[name]}, but it is missing")
            if here[name] != there[name]:
                raise WireError(f"tensor {name}: expected shape {there[name]}, found {here[name]}")
        extra = [name for name in here if name not in there]
        if extra:
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
        if norm > most:
            raise WireError(f"expected a norm of at most {most:.3g}, found {norm:.3g}")
