"""ODPFL-HN whose fresh encoder is scaled by one factor for all dimensions of the descriptor, not at all, or to zero.

`--strategy figures.one_factor:ODPFLOneFactor`, `...:ODPFLUncalibrated` and `...:ODPFLOneModel` run them. By default
each dimension is divided by its own deviation over clients. That also enlarges directions in which clients hardly
differ, but blurred images do. The paper names no scaling. Without it all clients begin with almost the same
descriptor. With zero they keep one descriptor, so the hypernetwork writes one model for all.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from hyperbloom.common.encoders import version_of
from hyperbloom.strategies.encoder import ServerEncoder, without_outliers
from hyperbloom.strategies.odpfl import ODPFL


class OneFactorEncoder(ServerEncoder):
    """An encoder whose calibration keeps the proportions of its dimensions."""

    def scale(self, descriptors: Tensor) -> None:
        """Scale and shift the last layer so that `(n, dim)` get mean 0 and a mean square of 1."""
        descriptors = without_outliers(descriptors)
        deviation = descriptors.std(0).square().mean().sqrt().clamp_min(1e-6)
        views = self.layout.views(self.gamma.detach())
        views["tail.weight"].div_(deviation)
        views["tail.bias"].sub_(descriptors.mean(0)).div_(deviation)
        self.version = version_of(self.gamma)


class UncalibratedEncoder(ServerEncoder):
    """An encoder that begins as torch made it."""

    def scale(self, descriptors: Tensor) -> None:
        """Leave the last layer as it is."""


class ZeroEncoder(ServerEncoder):
    """An encoder that describes every client by zeros, and does not learn."""

    def scale(self, descriptors: Tensor) -> None:
        """Set the last layer to zero."""
        views = self.layout.views(self.gamma.detach())
        for name in ("tail.weight", "tail.bias"):
            views[name].zero_()
        self.version = version_of(self.gamma)

    def step(self, gradients: Sequence[Tensor], clip: float) -> None:
        """Leave the encoder as it is."""


class ODPFLOneFactor(ODPFL):
    """ODPFL-HN with an encoder of one factor."""

    kind: ClassVar[type[ServerEncoder]] = OneFactorEncoder

    def make(self, dim: int) -> None:
        """Make hypernetwork and encoder from the run's seed."""
        super().make(dim)
        self.encoder = self.kind(self.encoder.spec, self.config.seed, self.options.encoder_learning_rate)


class ODPFLUncalibrated(ODPFLOneFactor):
    """ODPFL-HN with an encoder that is not scaled."""

    kind = UncalibratedEncoder


class ODPFLOneModel(ODPFLOneFactor):
    """ODPFL-HN that writes the same model for all clients."""

    kind = ZeroEncoder
