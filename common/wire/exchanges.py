"""Orders and answers that only some strategies use, in addition to those in `orders.py`."""

from dataclasses import dataclass

from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import Order, Scope, Target, TrainOrder, TrainResult

FARTHEST = 100.0
"""Largest root mean square of an accepted descriptor. Sound ones have deviation 1, fresh ones less."""


@dataclass(frozen=True)
class ReferenceResult:
    """Confirms that the reference set is on the client's disk."""

    reference: str


@dataclass(frozen=True)
class ReferenceOrder(Order, message_type="query.reference", answer=ReferenceResult):
    """Store the reference set with digest `reference`; `weights` are its inputs `(n, *shape)`."""

    reference: str
    weights: Weights


@dataclass(frozen=True)
class RepresentResult:
    """A factor of the representations' kernel matrix (common/alignment.py)."""

    factor: Weights


@dataclass(frozen=True)
class RepresentOrder(Order, message_type="query.represent", answer=RepresentResult):
    """Represent this round's rows of the reference set with the network before training.

    Attributes:
        reference: digest of the set.
        rows: number of its inputs in this round.
        draw: seed that selects them.
    """

    scope: Scope
    target: Target
    reference: str
    rows: int
    draw: int


@dataclass(frozen=True)
class DescribeResult:
    """The descriptor of a client's examples, and the version of the encoder that made it."""

    version: str
    weights: Weights

    def check(self) -> None:
        """Raise a WireError for a descriptor that is far from all sound ones."""
        self.weights.check_norm(FARTHEST * self.weights.layout.numel**0.5)


@dataclass(frozen=True)
class DescribeOrder(Order, message_type="train.describe", answer=DescribeResult):
    """Encode the training examples, without their labels.

    Attributes:
        dim: length of a descriptor.
        version: hash of the encoder's parameters, which are in `weights`.
        keep: whether a `BackpropOrder` follows.
    """

    run_id: str
    encoder: str
    dim: int
    version: str
    keep: bool
    weights: Weights


@dataclass(frozen=True)
class BackpropResult:
    """The gradient with respect to the encoder of `version`."""

    version: str
    weights: Weights


@dataclass(frozen=True)
class BackpropOrder(Order, message_type="train.backprop", answer=BackpropResult):
    """Propagate the gradient with respect to the descriptor, `weights`, back through the encoder that was kept."""

    run_id: str
    encoder: str
    dim: int
    version: str
    weights: Weights


@dataclass(frozen=True)
class Fit:
    """How to fit an encoder: `gamma` are its parameters, and `descriptor` is its target output."""

    encoder: str
    version: str
    gamma: Weights
    descriptor: Weights
    steps: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class FitResult(TrainResult):
    """A `TrainResult` with the change `gamma` of the encoder of `version`."""

    version: str
    gamma: Weights


@dataclass(frozen=True, kw_only=True)
class FitOrder(TrainOrder, message_type="train.fit", answer=FitResult):
    """Train, and fit the encoder to the descriptor that the server has learned."""

    fit: Fit
