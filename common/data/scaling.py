"""Scaling of stored numbers to a network's inputs."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

AnyArray = NDArray[Any]


@dataclass(frozen=True)
class Scaling:
    """The map from stored numbers to inputs: `(stored / divisor - mean) / std`, by channel or by feature.

    Where it is part of a file, pydantic checks that divisor and deviations are above 0.

    Args:
        divisor: The largest stored value.
        mean: One number for each channel or feature, or empty.
        std: One number for each channel or feature, or empty.
    """

    divisor: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    mean: tuple[float, ...] = ()
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()

    @property
    def of_bytes(self) -> "Scaling":
        """The scaling of bytes for a model trained with this one; the divisor is 255 if training used floats."""
        return replace(self, divisor=255.0) if self.divisor == 1.0 else self

    def apply(self, stored: AnyArray) -> torch.Tensor:
        """Return float32 inputs of the same shape; `stored` stays unchanged."""
        inputs = torch.tensor(np.ascontiguousarray(stored), dtype=torch.float32)
        if self.divisor != 1.0:
            inputs.div_(self.divisor)
        if self.mean:
            last = (-1,) + (1,) * (inputs.ndim - 2)
            inputs.sub_(torch.tensor(self.mean).view(last)).div_(torch.tensor(self.std).view(last))
        return inputs
