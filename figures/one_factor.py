"""ODPFL-HN whose fresh encoder is scaled by one factor for all dimensions of the descriptor.

`--strategy figures.one_factor:ODPFLOneFactor` runs it. By default each dimension is divided by its own deviation over
clients. That also enlarges directions in which clients hardly differ, but blurred images do.
"""

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


class ODPFLOneFactor(ODPFL):
    """ODPFL-HN with that encoder."""

    def make(self, dim: int) -> None:
        """Make hypernetwork and encoder from the run's seed."""
        super().make(dim)
        self.encoder = OneFactorEncoder(self.encoder.spec, self.config.seed, self.options.encoder_learning_rate)
