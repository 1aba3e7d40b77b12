"""The encoder for differential privacy: features on the unit sphere, their mean, a linear map (ODPFL-HN, section 7)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.encoders.base import Encoder, per_sample
from hyperbloom.common.errors import ConfigError

__all__ = ["Private"]

WIDTH = 64
ROUNDING = 1e-5
"""By which share float32 may exceed the bounds on the norm of features and of the tail's output."""


class Private(Encoder):
    """`g(D) = A mean_x phi(x) / |phi(x)| + b`: one example of many moves it a little, whatever the example.

    Shape:
        samples `(N, *input_shape)` to a descriptor `(dim,)`.
    """

    def __init__(self, input_shape: tuple[int, ...], dim: int) -> None:
        """Initialise from torch's global generator."""
        super().__init__()
        self.features = per_sample(input_shape, WIDTH)
        self.tail = nn.Linear(WIDTH, dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the descriptor of a set."""
        descriptor: Tensor = self.tail(F.normalize(self.features(inputs), dim=1).mean(0))
        return descriptor

    def sensitivity(self, examples: int) -> float:
        """Return `2 L B / examples` with `B = 1` and `L` the largest singular value of the tail."""
        if examples < 1:
            raise ConfigError(f"sensitivity: expected at least one example, found {examples}")
        largest = float(torch.linalg.matrix_norm(self.tail.weight.detach().double(), 2))
        return 2 * largest * (1 + ROUNDING) / examples
