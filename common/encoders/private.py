"""The encoder for differential privacy: unit-norm features, their mean, a linear map (ODPFL-HN, section 7)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.encoders.base import BATCH, Encoder, per_sample
from hyperbloom.common.errors import ConfigError

ROUNDING = 1e-5
"""Relative error by which float32 may exceed the bounds on the norms of the features and of the tail's output."""
LARGEST_TERMS = 1e30  # sums of such terms are far from overflow in float32


class Private(Encoder):
    """`g(D) = A mean_x phi(x) + b`: any single example among many changes the descriptor only a little.

    `phi(x) = u(u(f(x)) - c)` with `u(z) = z / |z|`. Without the centre `c`, all features of a fresh network point in
    one direction: their mean has norm 0.98 on CIFAR-10. Clients then differ by hundredths, and a tail that amplifies
    these differences amplifies the noise as well. Relative to the centre, features point in all directions, and the
    sensitivity is the same.

    A fresh tail is the identity, as in the paper, so descriptors start as the mean of `phi`.
    """

    def __init__(self, input_shape: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.features = per_sample(input_shape, dim)
        self.centre = nn.Parameter(torch.zeros(dim))
        self.tail = nn.Linear(dim, dim)
        nn.init.eye_(self.tail.weight)
        nn.init.zeros_(self.tail.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the descriptor of a set."""
        # The server chooses the weights. A NaN from an overflow must not reveal which examples a client has.
        direction = F.normalize(torch.nan_to_num(self.features(inputs)), dim=1)
        return self.tail(F.normalize(direction - self.centre, dim=1).mean(0))

    def sensitivity(self, examples: int) -> float:
        """Return `2 L B / examples` plus a bound on rounding, with `B = 1` and `L` the tail's largest singular value.

        The rounding error of a sum grows with its terms, including the bias, and does not shrink with `examples`.
        Without this bound, a server that chooses a huge bias could read examples from the rounding steps.

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
        # Additions in the tail, in a batch's pairwise mean, and over the batches.
        additions = len(self.centre) + math.log2(BATCH) + examples / BATCH
        rounding = 2 * 2.0**-24 * additions * terms
        return 2 * largest * (1 + ROUNDING) / examples + rounding
