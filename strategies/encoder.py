"""The server's side of ODPFL-HN's encoder: its parameters, their version, their optimiser and their calibration."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hyperbloom.common.encoders import EncoderSpec, build_encoder, encoder_layout, version_of
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.seeds import derive

OUTLIER = 7.5
"""Largest distance from the median, in median distances, in calibration: 5 deviations of a Gaussian."""

FEWEST = 8

PREFIX, ADAM = "encoder.", "adam.encoder."
"""Prefixes for the parameters, and for the state of their optimiser."""


class ServerEncoder:
    """All parameters of an encoder. Clients run it; the server never does.

    Args:
        seed: of the run; decides the initial parameters.
        learning_rate: of Adam, whose steps do not depend on the scale of the last layer.

    Attributes:
        gamma: the parameters, `(Q,)`.
        version: hash of `gamma`. Clients return it, so that no reply of an earlier encoder is used.
        calibrated: whether the last layer has been scaled.
    """

    def __init__(self, spec: EncoderSpec, seed: int, learning_rate: float) -> None:
        self.spec, self.layout, self.calibrated = spec, encoder_layout(spec), False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "encoder"))
            module = build_encoder(spec)
        self.gamma = nn.Parameter(self.layout.flatten(dict(module.named_parameters())))
        self._optimizer = torch.optim.Adam([self.gamma], lr=learning_rate)
        self.version = version_of(self.gamma)

    @property
    def weights(self) -> Weights:
        """Return the parameters as they travel."""
        return Weights(self.layout, self.gamma.detach())

    @property
    def lacks_centre(self) -> bool:
        """Return whether its features are bounded (`encoder: private`), and have no centre yet."""
        centre = self.layout.views(self.gamma.detach()).get("centre")
        return centre is not None and not centre.any()

    def step(self, gradients: Sequence[Tensor], clip: float) -> None:
        """Take one step of Adam along the sum of gradients `(Q,)`, clipped to a norm."""
        self.gamma.grad = torch.stack(list(gradients)).sum(0)
        nn.utils.clip_grad_norm_([self.gamma], clip)
        self._optimizer.step()
        self.version = version_of(self.gamma)

    @torch.no_grad()
    def add(self, changes: Sequence[Tensor]) -> None:
        """Add the mean of changes `(Q,)`."""
        self.gamma.add_(torch.stack(list(changes)).mean(0))
        self.version = version_of(self.gamma)

    def centre(self, features: Tensor) -> None:
        """Centre the features of a bounded encoder at the mean of those of some clients, `(n, dim)`."""
        self.layout.views(self.gamma.detach())["centre"].copy_(without_outliers(features).mean(0))
        self.version = version_of(self.gamma)

    def scale(self, descriptors: Tensor) -> None:
        """Scale and shift the last layer so that these descriptors `(n, dim)` get mean 0 and deviation 1.

        Each dimension is scaled on its own. For a bounded encoder, one factor scales all: otherwise a dimension in
        which clients hardly differ would decide how much noise all dimensions get.
        """
        descriptors = without_outliers(descriptors)
        deviation = descriptors.std(0)
        views = self.layout.views(self.gamma.detach())
        if "centre" in views:
            deviation = deviation.square().mean().sqrt().expand_as(deviation)
        # Without a floor, scaling would turn a dimension in which clients hardly differ into noise of rounding.
        deviation = deviation.clamp_min(max(1e-6, 0.1 * float(deviation.mean())))
        views["tail.weight"].div_(deviation[:, None])
        views["tail.bias"].sub_(descriptors.mean(0)).div_(deviation)
        self.version = version_of(self.gamma)

    def check_version(self, version: str) -> None:
        """Raise a WireError for a reply of another encoder."""
        if version != self.version:
            raise WireError(f"expected what the encoder {self.version} makes, found {version}; its reply is dropped")

    def check_change(self, version: str, weights: Weights) -> None:
        """Raise a WireError for anything but a gradient or change of the current encoder."""
        self.check_version(version)
        weights.check(self.layout, self.gamma.dtype)
        weights.check_norm()

    def state(self) -> dict[str, Tensor]:
        """Return the parameters and the optimiser's state, by name."""
        tensors = {f"{PREFIX}{name}": value for name, value in self.layout.views(self.gamma.detach()).items()}
        return tensors | {f"{ADAM}{name}": value for name, value in self._optimizer.state.get(self.gamma, {}).items()}

    def load(self, tensors: Mapping[str, Tensor], with_optimizer: bool) -> None:
        """Load what `state` returned; ConfigError if the tensors are those of another encoder."""
        found = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
        if {name: tuple(value.shape) for name, value in found.items()} != dict(self.layout.shapes):
            raise ConfigError(f"options.encoder: expected the encoder of init_from, found {self.spec.name}")
        with torch.no_grad():
            self.gamma.copy_(self.layout.flatten(found))
        self.version = version_of(self.gamma)
        moments = {name.removeprefix(ADAM): x.clone() for name, x in tensors.items() if name.startswith(ADAM)}
        if with_optimizer and moments:
            self._optimizer.state[self.gamma] = moments


def without_outliers(descriptors: Tensor) -> Tensor:
    """Return descriptors `(n, dim)` with the outliers of each dimension clamped.

    Calibration happens once and is permanent, so one client's lie must not decide the scale for all. Among fewer than
    `FEWEST` descriptors, outliers cannot be told.
    """
    if len(descriptors) < FEWEST:
        return descriptors
    middle = descriptors.quantile(0.5, dim=0)
    spread = (descriptors - middle).abs().quantile(0.5, dim=0)
    reach = OUTLIER * spread.clamp_min(0.1 * float(spread.mean()))
    return descriptors.clamp(middle - reach, middle + reach)
