"""The encoder for differential privacy: features on the unit sphere, their mean, a linear map (ODPFL-HN, section 7)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.encoders.base import BATCH, Encoder, per_sample
from hyperbloom.common.errors import ConfigError

__all__ = ["Private"]

WIDTH = 64
ROUNDING = 1e-5
"""By which share float32 may exceed the bounds on the norm of features and of the tail's output."""
LARGEST_TERMS = 1e30


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
        # The weights come from a server: what overflows must not tell by a NaN which examples there are.
        features = torch.nan_to_num(self.features(inputs))
        descriptor: Tensor = self.tail(F.normalize(features, dim=1).mean(0))
        return descriptor

    def sensitivity(self, examples: int) -> float:
        """Return `2 L B / examples` with `B = 1` and `L` the largest singular value of the tail, and room for rounding.

        Sums are rounded in steps of the size of their terms, the bias among them, however many examples there are: a
        server that chooses a huge bias would else read them off the steps.

        Raises:
            ConfigError: there is no example, or the tail's sums may overflow.
        """
        if examples < 1:
            raise ConfigError(f"sensitivity: expected at least one example, found {examples}")
        weight, bias = self.tail.weight.detach().double(), self.tail.bias.detach().double()
        largest = float(torch.linalg.matrix_norm(weight, 2))
        terms = float((weight.abs().sum(1) + bias.abs()).norm())
        if not terms < LARGEST_TERMS:
            raise ConfigError("sensitivity: the encoder's last layer is so large that its sums may overflow")
        additions = WIDTH + math.log2(BATCH) + examples / BATCH  # of the tail; of a batch's mean, in pairs; of batches
        rounding = 2 * 2.0**-24 * additions * terms
        return 2 * largest * (1 + ROUNDING) / examples + rounding
