"""Network of four convolutions and two linear layers: pFedHN's target network for Omniglot (section 5.1)."""

import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.models.residual import check_image


class OmniglotCNN(nn.Module):
    """Four 3x3 convolutions with pooling by two, a linear layer of 84 and the head.

    The paper gives only the number of layers. Kernel sizes and widths are ours.

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
