"""Networks for images, built of convolutions with pooling: of pFedHN and of FedHeNN.

pFedHN: Shamsian, Navon, Fetaya, Chechik, https://arxiv.org/abs/2103.04628, section 5. FedHeNN: Makhija, Han, Ho, Ghosh,
https://arxiv.org/abs/2202.07757, section IV.A, whose text gives the smallest and the largest of five networks, and the
one for clients of one architecture; the other two, kernels and widths are ours.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.models.residual import check_image

LAYERS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))
"""Numbers of convolutions and linear layers with the head. The fourth is for clients of one architecture."""

HIDDEN = (120, 84)
"""Widths of the linear layers before the head, as in LeNet. Networks with fewer layers use the last ones."""


class LeNet(nn.Module):
    """Two 5x5 convolutions with pooling (`width` and `2 * width` filters), linear layers of 120 and 84, and the head.

    Shape:
        inputs `(B, C, H, W)` with H and W at least 16; logits `(B, num_classes)`.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        check_image(input_shape, "lenet", 16)
        channels, *sides = input_shape
        self.conv1 = nn.Conv2d(channels, width, 5)
        self.conv2 = nn.Conv2d(width, 2 * width, 5)
        pixels = math.prod(((side - 4) // 2 - 4) // 2 for side in sides)
        self.fc1 = nn.Linear(2 * width * pixels, 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        # ReLU and max-pooling commute, and after pooling ReLU has a quarter of the values.
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu().flatten(1)
        logits: Tensor = self.head(self.fc2(self.fc1(x).relu()).relu())
        return logits


class PooledCNN(nn.Module):
    """3x3 convolutions, each with pooling by two, then linear layers and the head.

    pFedHN's network for Omniglot is one of these; the paper gives only its number of layers.

    Args:
        name: in errors.
        filters: of each convolution, in units of `width`.
        hidden: widths of the linear layers before the head.
        input_shape: shape of an image.
        num_classes: number of logits.
        width: unit of `filters`.

    Shape:
        inputs `(B, C, H, W)` with H and W at least `2^convolutions`; logits `(B, num_classes)`.
    """

    def __init__(
        self,
        name: str,
        filters: Sequence[int],
        hidden: Sequence[int],
        input_shape: tuple[int, ...],
        num_classes: int,
        width: int = 16,
    ) -> None:
        super().__init__()
        least = 2 ** len(filters)
        check_image(input_shape, name, least)
        channels, *sides = input_shape
        made = [channels, *(width * each for each in filters)]
        self.convolutions = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(made))
        widths = [made[-1] * math.prod(side // least for side in sides), *hidden]
        self.linear = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        for convolution in self.convolutions:
            x = F.max_pool2d(convolution(x), 2).relu()  # ReLU on a quarter of the values
        x = x.flatten(1)
        for layer in self.linear:
            x = layer(x).relu()
        logits: Tensor = self.head(x)
        return logits
