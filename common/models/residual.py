"""The four architectures of HAFL-GHN: ResNet-18, and three with skips nowhere, first or last.

They are in section 5 and appendix A of https://arxiv.org/abs/2201.08459. The figure with the layers is lost. The text
gives the numbers of layers and the places of the skips. The rest is chosen so that the four share layer types:

* 0: ResNet-18 for small images: a 3x3 stem without pooling, four stages of two residual blocks.
* 1: 10 layers, no skip: the stem, two convolutions in each stage, the head.
* 2: 12 layers: the stem, four residual blocks (skips over 8 layers), two convolutions, the head.
* 3: 12 layers: the stem, two convolutions, four residual blocks (skips over 8 layers), the head.

Stages have 1, 2, 4 and 8 times `width` channels; the paper uses 64. Batch normalisation follows every convolution. A
skip that changes the shape is a 1x1 convolution, which does not count as a layer.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hyperbloom.common.errors import ModelError

# (channels in units of width, stride, skip): with skip a residual block of two convolutions, without one convolution.
Step = tuple[int, int, bool]
_STEPS = ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1))
ARCHITECTURES: Mapping[str, tuple[Step, ...]] = {
    "ResNet-18": tuple((*step, True) for step in _STEPS),
    "10 layers without skips": tuple((*step, False) for step in _STEPS),
    "12 layers, skips first": ((1, 1, True), (2, 2, True), (2, 1, True), (4, 2, True), (8, 2, False), (8, 1, False)),
    "12 layers, skips last": ((1, 1, False), (2, 2, False), (2, 1, True), (4, 2, True), (8, 2, True), (8, 1, True)),
}


def check_image(input_shape: tuple[int, ...], name: str, least: int = 1) -> None:
    """Raise a ModelError if inputs are no images with sides of at least `least`; `name` names the model."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        expected = "images (channels, height, width)" + (f" of at least {least} x {least}" if least > 1 else "")
        raise ModelError(f"{name}: expected {expected}, found {input_shape}; use model: mlp")


class ResidualCNN(nn.Module):
    """A stem, residual blocks and plain convolutions, global average pooling and the head.

    Shape:
        inputs `(B, C, H, W)`; logits `(B, num_classes)`.
    """

    def __init__(
        self, name: str, steps: Sequence[Step], input_shape: tuple[int, ...], num_classes: int, width: int = 64
    ) -> None:
        super().__init__()
        check_image(input_shape, name)
        layers: list[nn.Module] = [_convolution(input_shape[0], width, 1), nn.ReLU()]
        channels = width
        for wide, stride, skip in steps:
            if skip:
                layers.append(_Block(channels, wide * width, stride))
            else:
                layers += [_convolution(channels, wide * width, stride), nn.ReLU()]
            channels = wide * width
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(B, K)` of a batch."""
        return self.head(self.body(x))


def _convolution(given: int, made: int, stride: int, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(made))


class _Block(nn.Module):
    """ResNet's basic block: two convolutions, and the sum with the block's input."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(given, made, stride)
        self.second = _convolution(made, made, 1)
        self.skip = nn.Identity() if given == made and stride == 1 else _convolution(given, made, stride, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).relu()) + self.skip(x)).relu()
