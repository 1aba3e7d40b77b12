"""What the server asks of clients in every strategy, and what they answer: plain values, without Flower.

    server                                   client
      | -- Greeting (query.greet) ------------> |
      | <------------------- Introduction ------ |   who it is, how much data it has, what it can run
      | -- TrainOrder (train) ---------------->  |
      | <------------------- TrainResult ------- |
      | -- EvaluateOrder (evaluate) ---------->  |
      | <------------------- EvaluateResult ---- |
      | -- Notice (query.notice) ------------->  |   refused, or the run is over

An order that a client cannot carry out is answered with `Failed`. `pack.py` turns all of them into Flower's records.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import WireError
from hyperbloom.common.methods import Method
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.weights import Weights

__all__ = [
    "ASKS",
    "PRIVATE",
    "REFINED",
    "REPLIES",
    "SGD",
    "EvaluateOrder",
    "EvaluateResult",
    "Failed",
    "Greeting",
    "Introduction",
    "Noise",
    "Notice",
    "Order",
    "Refinement",
    "Scope",
    "SplitScore",
    "Target",
    "TrainOrder",
    "TrainResult",
]

ASKS = ("own", "types", "graph")
"""What a strategy asks clients about their own models: nothing but to use them, their layer types, their graphs."""

PRIVATE = ("none", "head", "body", "all", "copy")
"""What of the target network stays on the client: nothing, the personal classifier, all else, or everything. With
'copy' all weights travel, and the client has a model of the same shapes beside them that never does; orders to train
then need a method that says how."""

REFINED = ("head", "all")
"""What is trained on the client's own examples before an evaluation, and forgotten after it."""

REPLIES = ("delta", "weights", "nothing")
"""What a client sends back from training: trained - sent, trained, or only its metrics."""

LARGEST_LOSS = 1e30
"""Loss beyond which sums over clients might overflow."""


@dataclass(frozen=True)
class Scope:
    """The run and the round that an order belongs to.

    Attributes:
        seed: of the run; client and round are mixed in on the client.
        resume_points: rounds to which a server that crashes may go back.
        rewound: rounds to which it has gone back, in order of time.
    """

    run_id: str
    round: int
    seed: int
    resume_points: tuple[int, ...] = ()
    rewound: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """The target network that an order is about.

    Attributes:
        private: what of it stays on the client, one of `PRIVATE`.
        norms: with the client's own model: as in the greeting.
        hypernetwork: settings of the graph hypernetwork whose parameters travel in place of weights, as JSON.
    """

    model: str
    num_classes: int
    private: str
    norms: str | None = None
    hypernetwork: str | None = None


@dataclass(frozen=True)
class SGD:
    """Hyperparameters of local SGD; `clip` is the total norm to which a gradient is clipped."""

    steps: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    clip: float


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on a change: it is clipped to the norm `clip`; the deviation is `scale` times that."""

    clip: float
    scale: float


@dataclass(frozen=True)
class Refinement:
    """What a client does with the weights before it scores them.

    Attributes:
        epochs: passes of plain SGD over the training examples.
        rate: learning rate of these.
        batch: their batch size; a client with fewer examples takes all.
        part: what they train, one of `REFINED`.
        distil_temperature: they train the client's own model instead, with the ordered one as its teacher.
    """

    epochs: int
    rate: float
    batch: int
    part: str = "head"
    distil_temperature: float | None = None


@dataclass(frozen=True)
class Order:
    """Base of all that a client answers; `answer` is the type of the answer."""

    message_type: ClassVar[str]
    answer: ClassVar[type]


@dataclass(frozen=True)
class Failed:
    """A client's answer to an order that it could not carry out."""

    reason: Reason
    text: str


@dataclass(frozen=True)
class Introduction:
    """What a client says of itself. Nothing in it comes from single examples.

    Attributes:
        token: a secret of the client's own making: who shows it again is the same client.
        size: of the target network that it can run: S, M or L.
        class_shares: empty unless the client chose to disclose them.
        types: layer types of its own model, in no telling order, or ("all",); () tells that there is one.
        graph: the whole graph of its own model; if asked, and if the client chose to disclose it.
        has_reference: whether the reference set of the greeting is here; None if none was named.
        divisor: what it divides stored numbers by, before it normalises channels by `mean` and `std`.
    """

    client_id: str
    token: str
    version: str
    size: str
    input_shape: tuple[int, ...]
    num_classes: int
    train_examples: int
    val_examples: int
    test_examples: int
    class_shares: tuple[float, ...]
    types: tuple[str, ...] | None = None
    graph: str | None = None
    has_reference: bool | None = None
    divisor: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class Greeting(Order):
    """The server meets a node: who are you?

    Attributes:
        asks: what the strategy must know of clients' own models, one of `ASKS`; None: it chooses the model itself.
        norms: how the graph of an own model treats the affine parameters of its norms.
        reference: digest of the reference set that clients will need: is it here already?
    """

    message_type: ClassVar[str] = "query.greet"
    answer: ClassVar[type] = Introduction
    version: str
    asks: str | None = None
    norms: str | None = None
    reference: str | None = None


@dataclass(frozen=True)
class Notice(Order):
    """The server's last word to a node: `kind` is 'refused' or 'finished'. The client answers with the same.

    Attributes:
        complete: id of a run that will not be resumed: nothing needs to be kept for it any more.
    """

    message_type: ClassVar[str] = "query.notice"
    kind: str
    reason: str
    complete: str | None = None


Notice.answer = Notice


@dataclass(frozen=True)
class TrainResult:
    """What a client sends back from training.

    Attributes:
        seconds: wall time of the local training.
        weights: trained - sent, or trained, as the order says; None if nothing travels.
        loss: mean training loss over the local steps; None where the client keeps it to itself.
        encoded: instead of weights: the change, trained - sent, in the codec of the order.
    """

    seconds: float
    weights: Weights | None = None
    loss: float | None = None
    encoded: bytes | None = None

    def check(self) -> None:
        """Refuse an impossible loss with a WireError."""
        if self.loss is not None and not 0 <= self.loss <= LARGEST_LOSS:
            raise WireError(f"loss: expected 0 to {LARGEST_LOSS:.0e}, found {self.loss}")


@dataclass(frozen=True)
class TrainOrder(Order):
    """Train: load the weights, take the steps of SGD, send back what `reply` says.

    `weights` are what is not private. With 'body' they may be the whole network: then what is private starts from that,
    if the client has none yet. What it sends back is without the private part in either case.

    Attributes:
        reply: one of `REPLIES`.
        method: what the client minimises; None: the loss, by plain SGD.
        resemble: FedHeNN: factor of the kernel matrix that the representations are to resemble.
        codec: encodes the change that is sent back; None: it travels as `reply` says.
        noise: what is added to the change before it leaves.
        quiet: whether the loss, which is of training examples, stays on the client.
    """

    message_type: ClassVar[str] = "train"
    answer: ClassVar[type] = TrainResult
    scope: Scope
    target: Target
    sgd: SGD
    reply: str
    weights: Weights | None = None
    method: Method | None = None
    resemble: Weights | None = None
    codec: Codec | None = None
    noise: Noise | None = None
    quiet: bool = False


@dataclass(frozen=True)
class SplitScore:
    """Score of one model on one set of examples."""

    correct: int
    total: int
    loss: float

    @property
    def accuracy(self) -> float:
        """Share of correct answers, between 0 and 1."""
        return self.correct / self.total


@dataclass(frozen=True)
class EvaluateResult:
    """Counts and mean losses on a client's validation and test examples."""

    val: SplitScore
    test: SplitScore

    def check(self) -> None:
        """Refuse impossible counts and losses with a WireError."""
        for split, score in (("val", self.val), ("test", self.test)):
            if not 0 <= score.correct <= score.total or score.total == 0:
                raise WireError(f"{split}: expected 0 <= correct <= total and examples, found {score}")
            if not (0 <= score.loss <= LARGEST_LOSS and math.isfinite(score.loss)):
                raise WireError(f"{split}: expected a loss of 0 to {LARGEST_LOSS:.0e}, found {score.loss}")


@dataclass(frozen=True)
class EvaluateOrder(Order):
    """Evaluate the weights, with the private part that the client holds, on its validation and test examples."""

    message_type: ClassVar[str] = "evaluate"
    answer: ClassVar[type] = EvaluateResult
    scope: Scope
    target: Target
    weights: Weights | None = None
    refinement: Refinement | None = None
