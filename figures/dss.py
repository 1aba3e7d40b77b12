"""Deep sets for symmetric elements: every layer reads a sample and the mean of all samples.

Importing this module registers it as an encoder of odpfl.

Maron, Litany, Chechik, Fetaya: On Learning Sets of Symmetric Elements, ICML 2020, https://arxiv.org/abs/2002.08599.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.encoders import ENCODERS
from hyperbloom.common.encoders.base import DENSE, Encoder, is_image


class _Layer(nn.Module):
    """`L(x)_i = A x_i + B mean_j x_j` (theorem 1), with a mean so that values do not grow with the set."""

    def __init__(self, own: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = own, shared

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(x) + self.shared(x.mean(0, keepdim=True))
        return out


def _dense(inputs: int, outputs: int) -> _Layer:
    return _Layer(nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False))


class DSS(Encoder):
    """The target network with such layers, then the mean over the samples and a linear layer."""

    def __init__(self, input_shape: tuple[int, ...], dim: int, width: int = 16) -> None:
        super().__init__()
        self.image = is_image(input_shape)
        if self.image:
            channels, height, breadth = input_shape
            self.conv1 = _Layer(nn.Conv2d(channels, width, 5), nn.Conv2d(channels, width, 5, bias=False))
            self.conv2 = _Layer(nn.Conv2d(width, 2 * width, 5), nn.Conv2d(width, 2 * width, 5, bias=False))
            pixels = math.prod(((side - 4) // 2 - 4) // 2 for side in (height, breadth))
            sizes = (2 * width * pixels, 120, 84)
        else:
            sizes = (math.prod(input_shape), DENSE, DENSE)
        self.fc1, self.fc2 = _dense(sizes[0], sizes[1]), _dense(sizes[1], sizes[2])
        self.tail = nn.Linear(sizes[2], dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the descriptor of a set."""
        x = inputs
        if self.image:
            x = F.max_pool2d(self.conv1(x), 2).relu()
            x = F.max_pool2d(self.conv2(x), 2).relu()
        x = self.fc2(self.fc1(x.flatten(1)).relu()).relu()
        descriptor: Tensor = self.tail(x.mean(0))
        return descriptor


ENCODERS["dss"] = DSS
