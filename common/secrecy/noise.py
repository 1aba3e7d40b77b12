"""Differential privacy of training: changes are clipped to a norm, and Gaussian noise is added.

    client   delta_i' = clip(delta_i) + N(0, (z C)^2 I)             on the client, before anything leaves it
    server   w <- w + (sum_i clip(delta_i) + N(0, (z C)^2 I)) / m   m: the configured cohort, not the number of replies

with clip(x) = x min(1, C / |x|). Two clipped changes differ by at most 2 C, so one release is a Gaussian mechanism with
noise of z / 2 times its sensitivity if all data of a client may change. T releases are exactly as private as one with
noise z / (2 sqrt(T)) (Dong, Roth, Su: Gaussian Differential Privacy, 2022, corollary 3.3,
https://arxiv.org/abs/1905.02383). Epsilon and delta follow Balle, Wang, ICML 2018, theorem 8.

We claim no amplification by sampling: the server knows the cohorts, and everybody else can draw them from the run's
seed. Averaging with noise on the server is DP-FedAvg (McMahan, Ramage, Talwar, Zhang: Learning Differentially Private
Recurrent Language Models, ICLR 2018, https://arxiv.org/abs/1710.06963) with a fixed denominator.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperbloom.common.config import PrivacyConfig
from hyperbloom.common.errors import WireError

RandomBytes = Callable[[int], bytes]

_SUMMANDS = 4
_LIMITS = "no amplification by sampling is claimed; numbers of examples and evaluations' scores carry no noise"
_AT_ONCE = 2**18  # numbers drawn at a time; each takes 64 random bytes


def clip_norm(change: Tensor, norm: float) -> Tensor:
    """Return a `(P,)` change as float64, scaled to a norm of at most `norm`; WireError if it is not finite."""
    exact = change.detach().cpu().double()
    size = float(exact.norm())
    if not math.isfinite(size):
        raise WireError("the change is not finite, so it cannot be clipped")
    # Scale slightly below the bound, because rounding must not exceed it.
    return exact * (norm / size * (1 - 1e-12)) if size > norm else exact


def release(change: Tensor, clip: float, multiplier: float, random_bytes: RandomBytes = secrets.token_bytes) -> Tensor:
    """Clip a `(P,)` change and add noise of `multiplier * clip`; the float32 result may leave the client."""
    return add_noise(clip_norm(change, clip), multiplier * clip, random_bytes).to(torch.float32)


def noisy_mean(
    changes: Sequence[Tensor], clip: float, multiplier: float, of: int, random_bytes: RandomBytes = secrets.token_bytes
) -> Tensor:
    """Return the `(P,)` sum of clipped changes plus noise of `multiplier * clip`, divided by `of`, as float32."""
    total = sum((clip_norm(change, clip) for change in changes), torch.tensor(0.0))
    return (add_noise(total, multiplier * clip, random_bytes) / of).to(torch.float32)


def add_noise(values: Tensor, sigma: float, random_bytes: RandomBytes = secrets.token_bytes) -> Tensor:
    """Return `(P,)` float64 values with independent Gaussian noise of standard deviation `sigma`."""
    parts = [p + sigma * torch.from_numpy(noise(len(p), random_bytes)) for p in values.split(_AT_ONCE) if len(p)]
    return torch.cat(parts) if parts else values


def noise(count: int, random_bytes: RandomBytes = secrets.token_bytes) -> NDArray[np.float64]:
    """Return `(count,)` standard normal numbers from the operating system's cryptographic source.

    It applies Box and Muller's transform to 53 random bits. Each number is half the sum of four, so that its low bits
    do not reveal the noise (Holohan, Braghin: Secure Random Sampling in Differential Privacy, ESORICS 2021,
    https://arxiv.org/abs/2107.10138).
    """
    raw = np.frombuffer(random_bytes(16 * count * _SUMMANDS), dtype=np.uint64).reshape(2, _SUMMANDS, count)
    uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
    normal = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * np.pi * uniform[1])
    return normal.sum(0) / math.sqrt(_SUMMANDS)


def epsilon_of(multipliers: Sequence[float], delta: float) -> float:
    """Return the epsilon, rounded up, of releases with these noise multipliers at `delta`."""
    if not multipliers:
        return 0.0
    return _epsilon(0.5 / math.sqrt(math.fsum(multiplier**-2 for multiplier in multipliers)), delta)


@lru_cache(4096)
def _epsilon(sigma: float, delta: float) -> float:
    """Return epsilon for a Gaussian mechanism whose noise is `sigma` times its sensitivity."""
    if delta_of(0.0, sigma) <= delta:
        return 0.0
    return smallest(lambda epsilon: delta_of(epsilon, sigma) <= delta)


def delta_of(epsilon: float, sigma: float) -> float:
    """Return the smallest delta at which noise of `sigma` times the sensitivity is (epsilon, delta)-private."""
    a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
    first, second = torch.special.log_ndtr(torch.tensor([a, b], dtype=torch.float64)).tolist()
    # Use a product, because the difference of two nearly equal terms would lose a small delta.
    return -math.exp(first) * math.expm1(epsilon + second - first)


def smallest(suffices: Callable[[float], bool]) -> float:
    """Return the smallest number above 0 that suffices, as all larger ones do, rounded up at the twelfth digit."""
    low = high = 1.0
    while not suffices(high):
        high *= 2
    while suffices(low):
        low /= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def promise(privacy: PrivacyConfig, releases: int) -> tuple[str, ...]:
    """Return the guarantee for a client that has sent `releases` changes, as sentences."""
    epsilon = epsilon_of([privacy.noise] * releases, privacy.delta)
    where = {
        "client": "it is added on the client, so this holds against the server, too",
        "server": "it is added on the server, which sees each change; this holds against all who get models only",
    }[privacy.where]
    tell = "hardly" if epsilon <= 1 else "may"  # at 1 the odds of any guess are less than tripled
    told = f"the changes that it sent {tell} tell whether all of its training examples were replaced by others"
    return (
        f"a client that was asked {releases} times has ({epsilon:.4g}, {privacy.delta:g})-differential privacy: {told}",
        f"changes are clipped to a norm of {privacy.clip:g}; Gaussian noise of {privacy.noise:g} times that; {where}",
        f"composed over all times, baselines' and repeated rounds included, but not over earlier runs; {_LIMITS}",
    )
