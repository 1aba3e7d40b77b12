"""Differential privacy for the descriptor of a newcomer: the client adds noise before it sends anything.

Amosy, Eyal, Chechik: On-Demand Unlabeled Personalized Federated Learning, section 7, https://arxiv.org/abs/2111.08356.

    e~ = g(D) + N(0, sigma^2 I)

is (epsilon, delta)-differentially private if P(e~(D) in S) <= exp(epsilon) P(e~(D') in S) + delta for every set S of
descriptors and all neighbours D, D', which have equally many examples and differ in one. With the sensitivity
s = max |g(D) - g(D')| of the encoder, this holds if and only if

    Phi(s / 2 sigma - epsilon sigma / s) - exp(epsilon) Phi(-s / 2 sigma - epsilon sigma / s) <= delta

(Balle, Wang: Improving the Gaussian Mechanism, ICML 2018, theorem 8, https://arxiv.org/abs/1805.06530). This module
uses the smallest such sigma.

Departure: the paper uses the classical formula sigma = s sqrt(2 log(1.25 / delta)) / epsilon (Dwork, Roth 2014, theorem
A.1). That formula is proven only for epsilon < 1 (at epsilon 8, delta 0.01 it gives delta 0.0178), and for smaller
epsilon it adds more noise than needed (2.27 times at epsilon 0.3, delta 0.01). The analytic formula is exact.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperbloom.common.encoders import Encoder
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.noise import add_noise, delta_of, smallest


@dataclass(frozen=True)
class Promise:
    """The privacy of each example that a user asks for; ConfigError if epsilon or delta is out of range."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        noise_scale(self.epsilon, self.delta)


@dataclass(frozen=True)
class Guarantee(Promise):
    """How a promise is kept; `sigma` is the standard deviation of the noise in each coordinate."""

    examples: int
    sensitivity: float
    sigma: float

    def sentences(self) -> tuple[str, ...]:
        """Return the guarantee as sentences."""
        promise = (
            f"The descriptor is ({self.epsilon:g}, {self.delta:g})-differentially private with respect to exchanging "
            f"one of the {self.examples} examples that it describes; their number counts as public."
        )
        means = (
            f"L2 sensitivity {self.sensitivity:.6g}; Gaussian noise of standard deviation {self.sigma:.6g} "
            "(analytic Gaussian mechanism), added on the client before anything left it."
        )
        limits = (
            "It covers this descriptor and the weights that are computed from it, not the clients that trained the "
            "hypernetwork."
        )
        weak = (
            f"delta is not below 1 / {self.examples}, one over the number of examples: that is weak, as publishing one "
            "example at random would pass as well."
        )
        return (promise, means, limits, weak) if self.delta * self.examples >= 1 else (promise, means, limits)


def guarantee(encoder: Encoder, examples: int, promise: Promise) -> Guarantee:
    """Return a promise with the noise that it needs for `examples` samples; ConfigError if the encoder has no bound."""
    sensitivity = encoder.sensitivity(examples)
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ConfigError(f"the encoder's sensitivity: expected a finite number, found {sensitivity}")
    sigma = sensitivity * noise_scale(promise.epsilon, promise.delta)
    return Guarantee(promise.epsilon, promise.delta, examples, sensitivity, sigma)


def privatise(
    descriptor: Tensor, promised: Guarantee, random_bytes: Callable[[int], bytes] = secrets.token_bytes
) -> Tensor:
    """Return the `(k,)` descriptor with noise, as float32. Noise cannot hide what is not finite."""
    return add_noise(descriptor.detach().cpu().double(), promised.sigma, random_bytes).to(torch.float32)


def noise_scale(epsilon: float, delta: float) -> float:
    """Return the smallest standard deviation of the noise for a sensitivity of 1, rounded up at the twelfth digit.

    Raises:
        ConfigError: epsilon or delta is out of range.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"--eps: expected a number above 0, found {epsilon}")
    if not 0 < delta < 1:
        raise ConfigError(f"--delta: expected a number between 0 and 1, found {delta}")
    return smallest(lambda sigma: delta_of(epsilon, sigma) <= delta)
