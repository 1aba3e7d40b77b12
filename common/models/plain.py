"""Plain CNNs of 4, 7, 10 and 13 layers whose inner layers have one type: the ablation of HAFL-GHN's GNN.

Litany et al., 2022, https://arxiv.org/abs/2201.08459, section 5.6. The network with 4 layers is also its stress test.
"""

from torch import Tensor, nn

from hyperbloom.common.models.residual import check_image


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
