"""Orders and answers of single strategies, beside those in `orders.py`.

FedHeNN

      | -- ReferenceOrder (query.reference) ->   |   inputs that everybody may see, once
      | <----------------- ReferenceResult ----- |
      | -- RepresentOrder (query.represent) -->  |   what does your network make of them?
      | <----------------- RepresentResult ----- |

With an encoder (ODPFL-HN)

      | -- DescribeOrder (train.describe) ---->  |   the encoder
      | <---------------- DescribeResult ------- |   what it makes of the client's examples
      | -- BackpropOrder (train.backprop) ---->  |   the gradient with respect to that
      | <---------------- BackpropResult ------- |   the gradient with respect to the encoder
      | -- FitOrder (train.fit) -------------->  |   train, and fit the encoder to a given descriptor
      | <--------------------- FitResult ------- |

For novel clients that get a model of somebody else's (PFL-sampled, -ensemble, -nearest)

      | -- TryOrder (evaluate.many) ---------->  |   many models
      | <---------------- EvaluateResult ------- |
      | -- MomentsOrder (evaluate.moments) --->  |   a network
      | <----------------- MomentsResult ------- |   mean and covariance of its features
      | -- ErrorsOrder (evaluate.errors) ----->  |   linear classifiers of the same features
      | <------------------ ErrorsResult ------- |   how often each is wrong
"""

from dataclasses import dataclass
from typing import ClassVar

from hyperbloom.common.wire.orders import EvaluateOrder, Order, Scope, Target, TrainOrder, TrainResult
from hyperbloom.common.wire.weights import Weights

__all__ = [
    "BackpropOrder",
    "BackpropResult",
    "DescribeOrder",
    "DescribeResult",
    "ErrorsOrder",
    "ErrorsResult",
    "Fit",
    "FitOrder",
    "FitResult",
    "MomentsOrder",
    "MomentsResult",
    "ReferenceOrder",
    "ReferenceResult",
    "RepresentOrder",
    "RepresentResult",
    "TryOrder",
]


@dataclass(frozen=True)
class ReferenceResult:
    """The reference set is on the client's disk."""

    reference: str


@dataclass(frozen=True)
class ReferenceOrder(Order):
    """Keep the reference set, whose digest is `reference`; `weights` are its inputs `(n, *shape)`."""

    message_type: ClassVar[str] = "query.reference"
    answer: ClassVar[type] = ReferenceResult
    reference: str
    weights: Weights


@dataclass(frozen=True)
class RepresentResult:
    """A factor of the representations' kernel matrix: see common/alignment.py."""

    factor: Weights


@dataclass(frozen=True)
class RepresentOrder(Order):
    """Send what the network makes of this round's rows of the reference set, as it is before the training.

    Attributes:
        reference: digest of the set.
        rows: how many of its inputs.
        draw: seed that says which.
    """

    message_type: ClassVar[str] = "query.represent"
    answer: ClassVar[type] = RepresentResult
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


@dataclass(frozen=True)
class DescribeOrder(Order):
    """Encode the training examples, without their labels.

    Attributes:
        encoder: its name.
        dim: of a descriptor.
        version: hash of the encoder's parameters, which are `weights`.
        keep: whether a `BackpropOrder` follows.
    """

    message_type: ClassVar[str] = "train.describe"
    answer: ClassVar[type] = DescribeResult
    run_id: str
    round: int
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
class BackpropOrder(Order):
    """Take a gradient back through the encoder that was kept: `weights` is the one with respect to the descriptor."""

    message_type: ClassVar[str] = "train.backprop"
    answer: ClassVar[type] = BackpropResult
    run_id: str
    encoder: str
    dim: int
    version: str
    weights: Weights


@dataclass(frozen=True)
class Fit:
    """How an encoder is fitted: `gamma` are its parameters, `descriptor` is what it shall give."""

    encoder: str
    version: str
    gamma: Weights
    descriptor: Weights
    steps: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class FitResult(TrainResult):
    """Also the change of the encoder of `version`, and how far its descriptor was from the given one before.

    Attributes:
        distance: mean of the squared differences.
    """

    version: str
    distance: float
    gamma: Weights


@dataclass(frozen=True, kw_only=True)
class FitOrder(TrainOrder):
    """Train as ordered, and beside it fit the encoder to the descriptor that the server has learned."""

    message_type: ClassVar[str] = "train.fit"
    answer: ClassVar[type] = FitResult
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class TryOrder(EvaluateOrder):
    """Evaluate many models, whose weights are the rows of one tensor `models`: each, or all together."""

    message_type: ClassVar[str] = "evaluate.many"
    together: bool


@dataclass(frozen=True)
class MomentsResult:
    """Mean of the features, above their covariance: one tensor `moments` `(1 + F, F)`."""

    weights: Weights


@dataclass(frozen=True)
class MomentsOrder(EvaluateOrder):
    """Describe the training examples, without their labels, by what the head of the network sees of them."""

    message_type: ClassVar[str] = "evaluate.moments"
    answer: ClassVar[type] = MomentsResult


@dataclass(frozen=True)
class ErrorsResult:
    """For each classifier the share of examples that it takes for somebody else's."""

    errors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ErrorsOrder(EvaluateOrder):
    """Say how often each of linear classifiers `(M, F + 1)` takes a validation example for somebody else's.

    Attributes:
        sign: of the values that classifiers should have here, 1 or -1.
    """

    message_type: ClassVar[str] = "evaluate.errors"
    answer: ClassVar[type] = ErrorsResult
    sign: int
    classifiers: Weights
