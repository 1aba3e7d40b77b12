"""Differential privacy for the descriptor of a newcomer: noise that is added here, before anything leaves.

Amosy, Eyal, Chechik: On-Demand Unlabeled Personalized Federated Learning, section 7, https://arxiv.org/abs/2111.08356.

    e~ = g(D) + N(0, sigma^2 I)

is (epsilon, delta)-differentially private: for neighbours D, D' (as many examples, one of them exchanged) and every set
S of descriptors, P(e~(D) in S) <= exp(epsilon) P(e~(D') in S) + delta, if sigma is large enough for the sensitivity
s = max |g(D) - g(D')|, which the encoder knows.

    sigma is the smallest with Phi(s/2sigma - epsilon sigma/s) - exp(epsilon) Phi(-s/2sigma - epsilon sigma/s) <= delta
    (Balle, Wang: Improving the Gaussian Mechanism, ICML 2018, theorem 8, https://arxiv.org/abs/1805.06530)

Departure: the paper uses the classical formula, s sqrt(2 log(1.25 / delta)) / epsilon. It is proven for epsilon < 1
only (at epsilon 8, delta 0.01 it gives delta 0.0178), and below that it adds more noise than needed (2.27 times at
epsilon 0.3, delta 0.01). The analytic one is exact at every epsilon.
"""

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hyperbloom.common.errors import ConfigError, DataError, HyperbloomError, RefusedError
from hyperbloom.common.privacy import noise
from hyperbloom.common.storage import locked, write_json

__all__ = ["Guarantee", "Ledger", "delta_of", "guarantee", "noise_scale", "privatise"]


class Bounded(Protocol):
    """An encoder that knows how much one example can move its descriptor; raises ConfigError where it does not."""

    def sensitivity(self, examples: int) -> float:
        """Return the bound (L2)."""
        ...


@dataclass(frozen=True)
class Guarantee:
    """What is promised to whoever owns one of the examples."""

    epsilon: float
    delta: float
    examples: int
    sensitivity: float
    sigma: float  # standard deviation of the noise in each coordinate

    def sentences(self) -> tuple[str, ...]:
        """Return the guarantee in words."""
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


def guarantee(encoder: Bounded, examples: int, epsilon: float, delta: float) -> Guarantee:
    """Return what noise it takes.

    Raises:
        ConfigError: epsilon or delta is out of range, or no bound holds for the encoder.
    """
    sensitivity = encoder.sensitivity(examples)
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ConfigError(f"the encoder's sensitivity: expected a finite number, found {sensitivity}")
    return Guarantee(epsilon, delta, examples, sensitivity, noise_scale(epsilon, delta, sensitivity))


def privatise(
    descriptor: Tensor, promised: Guarantee, random_bytes: Callable[[int], bytes] = secrets.token_bytes
) -> Tensor:
    """Return the `(k,)` descriptor with the noise that the guarantee names.

    Raises:
        DataError: the descriptor is not finite, which no noise would hide.
    """
    if not bool(descriptor.isfinite().all()):
        raise DataError("the descriptor is not finite; are the inputs? Nothing was sent")
    noisy = descriptor.detach().cpu().double() + promised.sigma * torch.from_numpy(
        noise(descriptor.numel(), random_bytes)
    )
    return noisy.to(torch.float32)


def noise_scale(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the standard deviation of the noise.

    Raises:
        ConfigError: epsilon or delta is out of range.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"--eps: expected a number above 0, found {epsilon}")
    if not 0 < delta < 1:
        raise ConfigError(f"--delta: expected a number between 0 and 1, found {delta}")
    return sensitivity * _analytic(epsilon, delta)


def delta_of(epsilon: float, sigma: float) -> float:
    """Return the smallest delta at which noise of `sigma` times the sensitivity is (epsilon, delta)-private."""
    a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
    first, second = torch.special.log_ndtr(torch.tensor([a, b], dtype=torch.float64)).tolist()
    # As a product: the difference of two nearly equal terms would leave nothing of a small delta.
    return -math.exp(first) * math.expm1(epsilon + second - first)


def _analytic(epsilon: float, delta: float) -> float:
    """Return the smallest sigma for sensitivity 1, from above, to twelve digits."""
    low = high = 1.0
    while delta_of(epsilon, high) > delta:
        high *= 2
    while delta_of(epsilon, low) <= delta:
        low /= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if delta_of(epsilon, middle) > delta:
            low = middle
        else:
            high = middle
    return high


class Ledger:
    """What the examples of a client have been asked for so far: `STATE/privacy.json`.

    Guarantees add up (basic composition): after descriptors with epsilon 0.3 and 0.5 the promise is epsilon 0.8, and
    likewise for delta. What is spent is on the disk before anything is sent, so after a crash there is one entry
    too many at most.
    """

    def __init__(self, state: Path) -> None:
        """Use the state folder `state`, which is made when something is first spent."""
        self.path = state / "privacy.json"

    def spend(self, promised: Guarantee | None, budget: float | None, to: str) -> tuple[float, float] | None:
        """Enter a descriptor that is about to leave; returns epsilon and delta in all, None if one had no noise.

        Args:
            promised: the guarantee, None for a descriptor without noise.
            budget: epsilon that may be spent in all, this time included; None for any, as without noise.
            to: the server's address.

        Raises:
            RefusedError: the budget would be exceeded; nothing is entered.
            HyperbloomError: the ledger is damaged.
            ConfigError: it cannot be written.
        """
        try:
            with locked(self.path):
                spent = self.read()
                entry: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "server": to}
                entry |= asdict(promised) if promised else {"epsilon": None}
                if promised and budget is not None:
                    self._check(spent, promised.epsilon, promised.delta, budget)
                write_json(self.path, {"spent": [*spent, entry]}, mode=0o600)
                return _total([*spent, entry])
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {self.path.parent}: {error.strerror or error}") from None

    def read(self) -> list[dict[str, Any]]:
        """Return the entries so far.

        Raises:
            HyperbloomError: the file is damaged.
        """
        if not self.path.exists():
            return []
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))["spent"]
            _total(entries)
            return list(entries)
        except (ValueError, KeyError, TypeError) as error:
            raise HyperbloomError(
                f"{self.path} is damaged ({error!r}), so it is not known what has been spent on privacy. Restore it "
                "from a backup; starting anew would forget what the server has seen"
            ) from None

    def afford(self, epsilon: float, delta: float, budget: float) -> None:
        """Raise what `spend` would raise now, and enter nothing."""
        self._check(self.read(), epsilon, delta, budget)

    def _check(self, spent: list[dict[str, Any]], epsilon: float, delta: float, budget: float) -> None:
        before = _total(spent)
        if before is None:
            raise RefusedError(
                f"--budget: a descriptor without noise has left before (see {self.path}); no budget holds after that"
            )
        if before[0] + epsilon > budget * (1 + 1e-9):  # sums of decimal fractions
            raise RefusedError(
                f"--budget: epsilon {before[0]:g} of {budget:g} has been spent (see {self.path}); another {epsilon:g} "
                "would be beyond it. Nothing was sent"
            )
        if before[1] + delta >= 1:
            raise RefusedError(
                f"--budget: delta {before[1]:g} has been spent (see {self.path}); with another {delta:g} nothing would "
                "be promised at all. Nothing was sent"
            )


def _total(entries: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Return the sums of epsilon and delta; None if there was a descriptor without noise."""
    if any(entry["epsilon"] is None for entry in entries):
        return None
    return math.fsum(float(e["epsilon"]) for e in entries), math.fsum(float(e["delta"]) for e in entries)
