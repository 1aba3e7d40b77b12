"""What a newcomer, whom no training has seen, and a server that hands out models say to each other.

With `flower-server serve` and `flower-client join` nothing travels but

      | -- Offer (query.offer) -------------->   |   the encoder
      | <------------------- Description ------- |   what it makes of the newcomer's examples
      | -- Delivery (query.deliver) --------->   |   weights
      | <------------------------ Notice ------- |   received
      | -- Notice (query.notice) ------------>   |
"""

from dataclasses import dataclass
from typing import ClassVar

from hyperbloom.common.wire.orders import Notice, Order
from hyperbloom.common.wire.weights import Weights

__all__ = ["Delivery", "Description", "Offer"]


@dataclass(frozen=True)
class Description:
    """All that a newcomer sends: which size of model, and the descriptor of its examples, with noise or without."""

    size: str
    encoder_version: str
    weights: Weights


@dataclass(frozen=True)
class Offer(Order):
    """A server meets a node that may want a model: the encoder, and what a model will be.

    Attributes:
        run: name of the run folder.
        round: the one that was selected.
        clients: how many took part.
        accuracy: percent, mean over the run's own novel clients, if it had any.
        divisor: what training divided stored numbers by; `mean` and `std` normalised the channels.
        weights: the encoder's parameters.
        scaling_known_by: how the server knows what training did to stored numbers, in a sentence.
    """

    message_type: ClassVar[str] = "query.offer"
    answer: ClassVar[type] = Description
    version: str
    run: str
    round: int
    clients: int
    accuracy: float | None
    model: str
    sizes: tuple[str, ...]
    input_shape: tuple[int, ...]
    num_classes: int
    divisor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    encoder: str
    dim: int
    encoder_version: str
    weights: Weights
    scaling_known_by: str = ""


@dataclass(frozen=True)
class Delivery(Order):
    """The newcomer's model, and whether its descriptor is unlike those of all clients that trained."""

    message_type: ClassVar[str] = "query.deliver"
    answer: ClassVar[type] = Notice
    weights: Weights
    unlike: bool = False
