"""Scaling of stored numbers to a network's inputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

AnyArray = NDArray[Any]


@dataclass(frozen=True)
class Scaling:
    """The map from stored numbers to inputs: `(stored / divisor - mean) / std`, by channel or by feature.

    Args:
        divisor: The largest stored value.
        mean: One number for each channel or feature, or empty.
        std: One number for each channel or feature, or empty.
    """

    divisor: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def apply(self, stored: AnyArray) -> torch.Tensor:
        """Return float32 inputs of the same shape; `stored` stays unchanged."""
        inputs = torch.tensor(np.ascontiguousarray(stored), dtype=torch.float32)
        if self.divisor != 1.0:
            inputs.div_(self.divisor)
        if self.mean:
            last = (-1,) + (1,) * (inputs.ndim - 2)
            inputs.sub_(torch.tensor(self.mean).view(last)).div_(torch.tensor(self.std).view(last))
        return inputs
