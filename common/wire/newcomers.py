"""Messages between a newcomer, which took no part in training, and a server that hands out models."""

from dataclasses import dataclass

from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.layout import Weights
from hyperbloom.common.tasks import CLASSIFICATION, TaskSpec
from hyperbloom.common.wire.orders import Notice, Order


@dataclass(frozen=True)
class Description:
    """All that a newcomer sends: the size of its model, and the descriptor of its examples, with or without noise."""

    size: str
    encoder_version: str
    weights: Weights


@dataclass(frozen=True)
class Offer(Order, message_type="query.offer", answer=Description):
    """The server offers a node a model: the encoder, and a description of the models.

    Attributes:
        round: the selected round.
        clients: number of clients that trained.
        expected: a sentence on what a newcomer gets, what it may expect, and why.
        scaling: of stored numbers in training.
        weights: the encoder's parameters.
        scaling_known_by: a sentence on how the server knows the scaling.
        metric: by which the run was selected.
        backbones: digests of what is frozen in the models, one for each size.
        shares: for each size, the part of a model that is written from the descriptor; the rest is the model for all.
        meaning: digest of the names of the classes; None if they are only numbered.
    """

    run: str
    round: int
    clients: int
    expected: str
    model: str
    sizes: tuple[str, ...]
    input_shape: tuple[int, ...]
    num_classes: int
    scaling: Scaling
    encoder: str
    dim: int
    encoder_version: str
    weights: Weights
    scaling_known_by: str = ""
    task: TaskSpec = CLASSIFICATION.spec
    metric: str = "accuracy"
    adapt: str = "all"
    schema: str | None = None
    backbones: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    meaning: str | None = None


@dataclass(frozen=True)
class Delivery(Order, message_type="query.deliver", answer=Notice):
    """The newcomer's model, and whether its descriptor differs from those of all clients that trained."""

    weights: Weights
    unlike: bool = False
