"""Deep sets: a network per sample, pooling over the samples, and a second network.

Zaheer et al., Deep Sets, NeurIPS 2017, https://arxiv.org/abs/1703.06114. The layers follow ODPFL-HN
(https://arxiv.org/abs/2111.08356): `DeepSet` section 6.3 and appendix C, `Private` section 7.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.encoders.base import BATCH, DENSE, Encoder, is_image, per_sample
from hyperbloom.common.errors import ConfigError

POOLED = 200
"""Width of the dense layer after each convolution. Half of it is pooled by mean, half by maximum."""
ROUNDING = 1e-5
"""Relative error by which float32 may exceed the bounds on the norms of the features and of the tail's output."""
LARGEST_TERMS = 1e30  # sums of such terms are far from overflow in float32


class _Pool(nn.Module):
    """A dense layer with ReLU, then pooling over the samples: the mean of its first half, the maximum of its second.

    Shape:
        `(N, F)` to `(width,)`.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.split = width // 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).relu()
        return torch.cat([x[:, : self.split].mean(0), x[:, self.split :].amax(0)])


class DeepSet(Encoder):
    """The target network with pooling over the samples after each convolution.

    The paper leaves open how a pooled layer feeds the next convolution. Here the samples' own maps go on to the next
    convolution, and the pooled vectors of both are concatenated and enter dense layers of 120, 84 and k units. Feature
    vectors pass three dense layers of 500 units, the first one pooled, and a layer of k.
    """

    def __init__(self, input_shape: tuple[int, ...], dim: int, width: int = 16) -> None:
        super().__init__()
        self.image = is_image(input_shape)
        if self.image:
            channels, height, breadth = input_shape
            self.conv1, self.conv2 = nn.Conv2d(channels, width, 5), nn.Conv2d(width, 2 * width, 5)
            one = [(side - 4) // 2 for side in (height, breadth)]
            two = [(side - 4) // 2 for side in one]
            self.pool1 = _Pool(width * one[0] * one[1], POOLED)
            self.pool2 = _Pool(2 * width * two[0] * two[1], POOLED)
            sizes = (2 * POOLED, 120, 84)
        else:
            self.pool1 = _Pool(torch.Size(input_shape).numel(), DENSE)
            sizes = (DENSE, DENSE, DENSE)
        self.fc2, self.fc3 = nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2])
        self.tail = nn.Linear(sizes[2], dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the descriptor `(k,)` of a set `(N, ...)`."""
        if self.image:
            x = F.max_pool2d(self.conv1(inputs), 2).relu()
            y = F.max_pool2d(self.conv2(x), 2).relu()
            pooled = torch.cat([self.pool1(x.flatten(1)), self.pool2(y.flatten(1))])
        else:
            pooled = self.pool1(inputs.flatten(1))
        return self.tail(self.fc3(self.fc2(pooled).relu()).relu())


class Private(Encoder):
    """For privacy: `g(D) = A mean_x phi(x) + b`, a descriptor that any single example among many changes only a little.

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
        """Return the descriptor `(k,)` of a set `(N, ...)`."""
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
        return 2 * largest * (1 + ROUNDING) / examples + 2 * 2.0**-24 * additions * terms
