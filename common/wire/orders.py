"""The orders and answers that all strategies share, as plain values without Flower.

    server                                   client
      | -- Greeting (query.greet) ------------> |
      | <------------------- Introduction ------ |   identity, size of its data, size of its model
      | -- TrainOrder (train) ---------------->  |
      | <------------------- TrainResult ------- |
      | -- EvaluateOrder (evaluate) ---------->  |
      | <------------------- EvaluateResult ---- |
      | -- Notice (query.notice) ------------->  |   refused, or the run is over

A client answers an order that it cannot carry out with `Failed`. `pack.py` converts all of them to Flower's records.
"""

from dataclasses import dataclass
from typing import ClassVar

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import WireError
from hyperbloom.common.gains import MODELS, Gain
from hyperbloom.common.layout import Weights
from hyperbloom.common.methods import Method
from hyperbloom.common.metrics import scale_of
from hyperbloom.common.reasons import Reason
from hyperbloom.common.tasks import CLASSIFICATION, TaskSpec

ASKS = ("own", "types", "graph")
"""What a strategy must know of clients' own models: only that they exist, their layer types, or their graphs."""
PRIVATE = ("none", "head", "body", "all", "copy")
"""The part of the target network that stays on the client: nothing, the head, all but the head, or everything. With
'copy' all weights travel, and the client also keeps a private model of the same shapes. Training orders then need a
method that trains it."""
REFINED = ("head", "all")
"""The part that a client trains on its own examples before an evaluation and forgets afterwards."""
REPLIES = ("delta", "weights", "nothing")
"""What a client sends back after training: trained - sent, trained, or only its metrics."""
LARGEST_LOSS = 1e30
"""Largest accepted loss, so that sums over clients do not overflow."""


@dataclass(frozen=True)
class Scope:
    """The run and the round of an order.

    Attributes:
        seed: seed of the run; the client mixes in its name and the round.
        resume_points: rounds to which the server may go back after a crash.
        rewound: rounds to which it has gone back, in order of time.
    """

    run_id: str
    round: int
    seed: int
    resume_points: tuple[int, ...] = ()
    rewound: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """The target network of an order.

    Attributes:
        private: the part that stays on the client, one of `PRIVATE`.
        hypernetwork: settings, as JSON, of the graph hypernetwork whose parameters travel in place of weights.
        task: what the network learns.
        adapt: which of its parameters are adapted (`Adapt.parse`); the others are frozen.
        backbones: digests of what is frozen, one for each size on offer; empty if nothing is.
    """

    model: str
    num_classes: int
    private: str
    hypernetwork: str | None = None
    task: TaskSpec = CLASSIFICATION.spec
    adapt: str = "all"
    backbones: tuple[str, ...] = ()


@dataclass(frozen=True)
class SGD:
    """Hyperparameters of local SGD; `clip` is the largest total norm of a gradient."""

    steps: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    clip: float


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on a change that is clipped to norm `clip`; its standard deviation is `scale * clip`."""

    clip: float
    scale: float


@dataclass(frozen=True)
class Refinement:
    """Local training that a client does before it scores the weights.

    Attributes:
        epochs: passes of plain SGD over the training examples.
        rate: learning rate.
        batch: batch size; a client with fewer examples takes all.
        part: the part to train, one of `REFINED`, or what a plug-in makes of the network.
    """

    epochs: int
    rate: float
    batch: int
    part: str = "head"


@dataclass(frozen=True)
class Order:
    """Base of all orders; `answer` is the type of a client's answer."""

    message_type: ClassVar[str]
    answer: ClassVar[type]

    def __init_subclass__(cls, message_type: str, answer: type | None = None) -> None:
        cls.message_type, cls.answer = message_type, answer or cls


@dataclass(frozen=True)
class Failed:
    """A client's answer to an order that it could not carry out."""

    reason: Reason
    text: str


@dataclass(frozen=True)
class Introduction:
    """A client's description of itself. It reveals no single example.

    Attributes:
        token: a secret that the client made, by which the server recognises it.
        size: size of the target network that it can run: S, M or L.
        class_shares: shares of the classes; empty unless the client's user chose to disclose them.
        types: layer types of its own model in sorted order; () means only that there is one.
        graph: graph of its own model, if the server asks and the user chose to disclose it.
        has_reference: whether the client has the reference set of the greeting; None if the greeting names none.
        divisor: divisor of stored numbers, before `mean` and `std` normalise the channels.
        task: for which its labels are.
        moments: for each target, and for each number to which its schema gives no scale: how many values it has, their
            mean, and their deviation; empty unless the client's user chose to disclose them.
        schema: what the columns of its table mean, as JSON, if its data are one.
        backbone: digest of its pretrained network, if it has one.
        meaning: digest of the names of its classes; None if they are only numbered.
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
    task: str = "classification"
    moments: tuple[float, ...] = ()
    schema: str | None = None
    backbone: str | None = None
    meaning: str | None = None


@dataclass(frozen=True)
class Greeting(Order, message_type="query.greet", answer=Introduction):
    """The server asks a new node to introduce itself.

    Attributes:
        asks: what the strategy must know of clients' own models, one of `ASKS`; None if the server chooses the model.
        reference: digest of the reference set that clients will need.
        task: the task of the run; None: that which the first client's labels suggest.
        schema: what the columns of all clients' tables mean, as JSON.
    """

    version: str
    asks: str | None = None
    reference: str | None = None
    task: str | None = None
    schema: str | None = None


@dataclass(frozen=True)
class Notice(Order, message_type="query.notice"):
    """The server's last message to a node: `kind` is 'refused' or 'finished'. The client answers with the same.

    Attributes:
        complete: id of a run that will not be resumed; the client may delete its earlier versions.
    """

    kind: str
    reason: str
    complete: str | None = None


@dataclass(frozen=True)
class TrainResult:
    """A client's answer to a `TrainOrder`.

    Attributes:
        seconds: wall time of the local training.
        weights: trained - sent, or trained, as the order says; None if nothing travels.
        loss: mean training loss over the local steps; None if the client does not disclose it.
        encoded: the change, trained - sent, in the codec of the order, in place of `weights`.
    """

    seconds: float
    weights: Weights | None = None
    loss: float | None = None
    encoded: bytes | None = None

    def check(self) -> None:
        """Raise a WireError if the loss is out of range."""
        if self.loss is not None and not abs(self.loss) <= LARGEST_LOSS:
            raise WireError(f"loss: expected at most {LARGEST_LOSS:.0e}, found {self.loss}")


@dataclass(frozen=True)
class TrainOrder(Order, message_type="train", answer=TrainResult):
    """Train: load the weights, take the steps of SGD, and send back what `reply` says.

    `weights` hold the part that is not private. With 'body' they may hold the whole network, from which a client
    initialises a private part that it does not have yet. The answer never contains the private part.

    Attributes:
        reply: one of `REPLIES`.
        method: the local method; None means plain SGD on the loss.
        resemble: FedHeNN: factor of the kernel matrix that the representations should resemble.
        codec: codec of the change in the answer; None sends `weights` as `reply` says.
        noise: noise that the client adds to the change before it sends it.
        quiet: whether the loss, which depends on training examples, stays on the client.
    """

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
    """Score of one model on one set of examples.

    Attributes:
        total: number of examples.
        loss: mean over the labels.
        metrics: names of the metrics that are defined on these examples.
        values: of these metrics.
        counts: numbers that add up over clients; empty unless the client's user chose to disclose them.
    """

    total: int
    loss: float
    metrics: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    def value(self, metric: str) -> float | None:
        """Return the value of a metric, or None if it is undefined here."""
        return self.values[self.metrics.index(metric)] if metric in self.metrics else None


@dataclass(frozen=True)
class EvaluateResult:
    """Scores on a client's validation and test examples."""

    val: SplitScore
    test: SplitScore

    def check(self) -> None:
        """Raise a WireError if a number is out of range."""
        for split, score in (("val", self.val), ("test", self.test)):
            if score.total < 1:
                raise WireError(f"{split}: expected examples, found {score.total}")
            if not abs(score.loss) <= LARGEST_LOSS:  # false for NaN
                raise WireError(f"{split}: expected a loss of at most {LARGEST_LOSS:.0e}, found {score.loss}")
            if len(score.metrics) != len(score.values) or len(set(score.metrics)) < len(score.metrics):
                raise WireError(f"{split}: expected one value for each metric, found {score.metrics}")
            for metric, value in zip(score.metrics, score.values, strict=True):
                scale = scale_of(metric)
                most = min(scale.most, LARGEST_LOSS)
                least = 0.0 if scale.percent or not scale.rises else -LARGEST_LOSS  # R2 and own metrics may be negative
                if not least <= value <= most:  # false for NaN
                    raise WireError(f"{split}: expected {metric} from {least:g} to {most:g}, found {value}")
            if not all(abs(count) <= LARGEST_LOSS for count in score.counts):  # false for NaN
                raise WireError(f"{split}: expected counts up to {LARGEST_LOSS:.0e}, found others")


@dataclass(frozen=True)
class EvaluateOrder(Order, message_type="evaluate", answer=EvaluateResult):
    """Evaluate the weights, together with the client's private part, on its validation and test examples.

    Attributes:
        metrics: names of the metrics to compute; empty: those that are usual for the task.
    """

    scope: Scope
    target: Target
    weights: Weights | None = None
    refinement: Refinement | None = None
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompareResult(EvaluateResult):
    """An `EvaluateResult`, and what the federation gains this client, if its user chose to disclose it."""

    gain: Gain | None = None

    def check(self) -> None:
        """Raise a WireError if a number is out of range."""
        super().check()
        told, names = self.gain, set(self.gain.models if self.gain else ())
        if told is not None and not (
            len(told.models) == len(told.test) == len(names)
            and {told.chosen, "alone"} <= names <= set(MODELS)
            and told.low <= told.high
        ):
            raise WireError(f"gain: expected a value for each model, and bounds in order, found {told}")


@dataclass(frozen=True, kw_only=True)
class CompareOrder(EvaluateOrder, message_type="evaluate.compare", answer=CompareResult):
    """Evaluate, compare with a model that the client trains alone, and keep what is best on validation examples.

    Attributes:
        sgd: one round of training alone.
        decays: whether its learning rate decays over the rounds.
        rounds: as often as a client trains in the run; alone it trains as often, and as long as models are fine-tuned.
        common: the model for all, if it is not what `weights` are.
    """

    sgd: SGD
    decays: bool
    rounds: int
    common: Weights | None = None
