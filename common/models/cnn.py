"""The networks of pFedHN: Shamsian, Navon, Fetaya, Chechik, https://arxiv.org/abs/2103.04628, section 5, appendix C."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.models.residual import check_image


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
        self.fc1 = nn.Linear(2 * width * math.prod(((side - 4) // 2 - 4) // 2 for side in sides), 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(B, K)` of a batch."""
        # ReLU and max-pooling commute, and after pooling ReLU has a quarter of the values.
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu().flatten(1)
        return self.head(self.fc2(self.fc1(x).relu()).relu())


class MLP(nn.Module):
    """Flatten, one hidden layer of `width` units with ReLU, linear head; the paper has it for MNIST.

    Shape:
        inputs `(B, *input_shape)`; logits `(B, num_classes)`.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 100) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(input_shape), width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(B, K)` of a batch."""
        return self.head(self.fc1(x.flatten(1)).relu())
