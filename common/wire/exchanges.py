"""Orders and answers that only some strategies use, in addition to those in `orders.py`.

FedHeNN

      | -- ReferenceOrder (query.reference) ->   |   public inputs, once
      | <----------------- ReferenceResult ----- |
      | -- RepresentOrder (query.represent) -->  |   represent them with your network
      | <----------------- RepresentResult ----- |

With an encoder (ODPFL-HN)

      | -- DescribeOrder (train.describe) ---->  |   the encoder
      | <---------------- DescribeResult ------- |   the descriptor of the client's examples
      | -- BackpropOrder (train.backprop) ---->  |   the gradient with respect to the descriptor
      | <---------------- BackpropResult ------- |   the gradient with respect to the encoder
      | -- FitOrder (train.fit) -------------->  |   train, and fit the encoder to a given descriptor
      | <--------------------- FitResult ------- |

For novel clients that use other clients' models (PFL-sampled, -ensemble, -nearest)

      | -- TryOrder (evaluate.many) ---------->  |   many models
      | <---------------- EvaluateResult ------- |
      | -- MomentsOrder (evaluate.moments) --->  |   a network
      | <----------------- MomentsResult ------- |   mean and covariance of its features
      | -- ErrorsOrder (evaluate.errors) ----->  |   linear classifiers of the same features
      | <------------------ ErrorsResult ------- |   the error rate of each
"""

from dataclasses import dataclass
from typing import ClassVar

from hyperbloom.common.wire.orders import EvaluateOrder, Order, Scope, Target, TrainOrder, TrainResult
from hyperbloom.common.wire.weights import Weights


@dataclass(frozen=True)
class ReferenceResult:
    """Confirms that the reference set is on the client's disk."""

    reference: str


@dataclass(frozen=True)
class ReferenceOrder(Order):
    """Store the reference set with digest `reference`; `weights` are its inputs `(n, *shape)`."""

    message_type: ClassVar[str] = "query.reference"
    answer: ClassVar[type] = ReferenceResult
    reference: str
    weights: Weights


@dataclass(frozen=True)
class RepresentResult:
    """A factor of the representations' kernel matrix (common/alignment.py)."""

    factor: Weights


@dataclass(frozen=True)
class RepresentOrder(Order):
    """Represent this round's rows of the reference set with the network before training.

    Attributes:
        reference: digest of the set.
        rows: number of its inputs in this round.
        draw: seed that selects them.
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
        encoder: name of the encoder.
        dim: length of a descriptor.
        version: hash of the encoder's parameters, which are in `weights`.
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
    """Propagate the gradient with respect to the descriptor, `weights`, back through the encoder that was kept."""

    message_type: ClassVar[str] = "train.backprop"
    answer: ClassVar[type] = BackpropResult
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
    """A `TrainResult` with the change `gamma` of the encoder of `version`.

    Attributes:
        distance: mean squared difference of the client's descriptor to the target before the fit.
    """

    version: str
    distance: float
    gamma: Weights


@dataclass(frozen=True, kw_only=True)
class FitOrder(TrainOrder):
    """Train, and fit the encoder to the descriptor that the server has learned."""

    message_type: ClassVar[str] = "train.fit"
    answer: ClassVar[type] = FitResult
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class TryOrder(EvaluateOrder):
    """Evaluate many models, the rows of one tensor `models`: each by itself, or together by their mean logits."""

    message_type: ClassVar[str] = "evaluate.many"
    together: bool


@dataclass(frozen=True)
class MomentsResult:
    """One tensor `moments` `(1 + F, F)`: the mean of the features in the first row, then their covariance."""

    weights: Weights


@dataclass(frozen=True)
class MomentsOrder(EvaluateOrder):
    """Describe the training examples, without labels, by the moments of the features that enter the head."""

    message_type: ClassVar[str] = "evaluate.moments"
    answer: ClassVar[type] = MomentsResult


@dataclass(frozen=True)
class ErrorsResult:
    """The error rate of each classifier on the client's examples."""

    errors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ErrorsOrder(EvaluateOrder):
    """Return the error rates of linear classifiers `(M, F + 1)` that tell two clients' features apart.

    Attributes:
        sign: correct sign of the classifiers' values on this client's validation examples, 1 or -1.
    """

    message_type: ClassVar[str] = "evaluate.errors"
    answer: ClassVar[type] = ErrorsResult
    sign: int
    classifiers: Weights
