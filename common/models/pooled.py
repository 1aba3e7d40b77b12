"""The CNNs of FedHeNN: one to three convolutions, each with pooling, and one to three linear layers.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757, section IV.A. The text gives the smallest and the largest of the five networks, and
the one for clients of one architecture: two convolutions and three linear layers. The other two, kernels and widths are
ours.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.models.residual import check_image

LAYERS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))
"""Numbers of convolutions and linear layers with the head. The fourth is for clients of one architecture."""

HIDDEN = (120, 84)
"""Widths of the linear layers before the head, as in LeNet. Networks with fewer layers use the last ones."""


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
