"""A small U-Net for masks.

O. Ronneberger, P. Fischer, T. Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015,
https://arxiv.org/abs/1505.04597. Ours pads, halves at most twice, and normalises by groups, which have no running
statistics to keep apart from the weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.errors import ModelError

HALVINGS = 2


class UNet(nn.Module):
    """Two halvings of the image, and the way back with skips.

    Shape:
        inputs `(B, C, H, W)` with H and W multiples of 4; logits `(B, num_classes, H, W)`.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        if len(input_shape) != 3 or any(side % 2**HALVINGS for side in input_shape[1:]):
            expected = f"images (C, H, W) with sides that are multiples of {2**HALVINGS}"
            raise ModelError(f"unet: expected {expected}, found {input_shape}")
        widths = [width * 2**level for level in range(HALVINGS + 1)]
        above = [input_shape[0], *widths[:-1]]
        self.down = nn.ModuleList(_block(before, after) for before, after in zip(above, widths, strict=True))
        self.up = nn.ModuleList(_block(3 * after, after) for after in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(B, K, H, W)` of each pixel."""
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for block, skip in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([skip, F.interpolate(x, scale_factor=2.0)], 1))
        return self.head(x)


def _block(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(min(4, after), after), nn.ReLU()]
    return nn.Sequential(*layers)
