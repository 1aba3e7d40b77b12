"""Networks for images, built of convolutions with pooling: of pFedHN, of FedHeNN, and of HAFL-GHN's ablation.

pFedHN: Shamsian, Navon, Fetaya, Chechik, https://arxiv.org/abs/2103.04628, section 5. FedHeNN: Makhija, Han, Ho, Ghosh,
https://arxiv.org/abs/2202.07757, section IV.A, whose text gives the smallest and the largest of five networks, and the
one for clients of one architecture; the other two, kernels and widths are ours. HAFL-GHN: Litany et al.,
https://arxiv.org/abs/2201.08459, section 5.6.
"""

import math
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


class OmniglotCNN(nn.Module):
    """Four 3x3 convolutions with pooling by two, a linear layer of 84 and the head.

    pFedHN gives only the number of layers. Kernel sizes and widths are ours.

    Shape:
        inputs `(B, C, H, W)` with H and W at least 16; logits `(B, num_classes)`.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        check_image(input_shape, "omniglot", 16)
        channels, height, width_px = input_shape
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.conv4 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * (height // 16) * (width_px // 16), 84)
        self.head = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.max_pool2d(convolution(x), 2).relu()  # ReLU on a quarter of the values
        logits: Tensor = self.head(self.fc1(x.flatten(1)).relu())
        return logits


class PooledCNN(nn.Module):
    """3x3 convolutions of 1, 2 and 4 times `width` channels, each with pooling by two, then linear layers.

    Shape:
        inputs `(B, C, H, W)` with H and W at least `2^convolutions`; logits `(B, num_classes)`.
    """

    def __init__(self, number: int, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        convolutions, linear = LAYERS[number - 1]
        least = 2**convolutions
        check_image(input_shape, f"cnn-{number}", least)
        channels, height, width_px = input_shape
        made = [channels, *(width * 2**layer for layer in range(convolutions))]
        self.convolutions = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(made))
        flat = made[-1] * (height // least) * (width_px // least)
        widths = [flat, *HIDDEN[len(HIDDEN) - linear + 1 :]]
        self.linear = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        for convolution in self.convolutions:
            x = F.max_pool2d(convolution(x), 2).relu()
        x = x.flatten(1)
        for layer in self.linear:
            x = layer(x).relu()
        logits: Tensor = self.head(x)
        return logits


class PlainCNN(nn.Module):
    """`layers - 1` 3x3 convolutions of `width` channels with batch normalisation and ReLU, average pooling, head.

    Shape:
        inputs `(B, C, H, W)`; logits `(B, num_classes)`.
    """

    def __init__(self, layers: int, input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        check_image(input_shape, f"plain-{layers}")
        body: list[nn.Module] = []
        for channels in [input_shape[0], *[width] * (layers - 2)]:
            body += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(self.body(x))
        return logits
