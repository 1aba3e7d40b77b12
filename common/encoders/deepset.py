"""Deep sets: a network per sample, pooling over the samples, and a second network.

Zaheer et al., Deep Sets, NeurIPS 2017, https://arxiv.org/abs/1703.06114. The layers follow ODPFL-HN, section 6.3 and
appendix C (https://arxiv.org/abs/2111.08356).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.encoders.base import DENSE, Encoder, is_image

POOLED = 200
"""Width of the dense layer after each convolution. Half of it is pooled by mean, half by maximum."""


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
        """Return the descriptor of a set."""
        if self.image:
            x = F.max_pool2d(self.conv1(inputs), 2).relu()
            y = F.max_pool2d(self.conv2(x), 2).relu()
            pooled = torch.cat([self.pool1(x.flatten(1)), self.pool2(y.flatten(1))])
        else:
            pooled = self.pool1(inputs.flatten(1))
        return self.tail(self.fc3(self.fc2(pooled).relu()).relu())
