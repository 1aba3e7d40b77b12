"""Three scripted clients whose answers lie open: a test says which of them arrive, when, and what is in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import Order, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.strategies.hypernetworks.learner import Reply
from tests.strategies.conftest import Answer, Inline, RecordingGrid, introduction, joined, scripted_grid

NAMES = ("a", "b", "c")
SHAPES = {"fc1.weight": (50, 4), "fc1.bias": (50,), "head.weight": (3, 50), "head.bias": (3,)}
LENGTH = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def config(**changes: Any) -> RunConfig:
    """Return a run in which the mean of the answers is learned from."""
    values: dict[str, Any] = {
        "clients": 3,
        "cohort": 3,
        "rounds": 5,
        "sizes": ("S",),
        "options": {"hidden_dim": 8, "learning_rate": 0.1, "update": "mean", "start": "hypernetwork"},
    }
    return RunConfig(**(values | changes))


def delta_of(name: str) -> Tensor:
    """Return what a client's training changes."""
    return 0.1 * torch.randn(LENGTH, generator=torch.Generator().manual_seed(NAMES.index(name)))


def result_of(name: str, order: TrainOrder) -> TrainResult:
    """Return a sound answer; the loss tells whose it is."""
    assert order.weights is not None
    return TrainResult(0.0, Weights(order.weights.layout, delta_of(name)), 1.0 + NAMES.index(name))


class Desk(RecordingGrid):
    """Brings what `deliver` returns of the answers to a round's orders to train; the others never come.

    Attributes:
        orders: of this round, by name.
        replies: what clients have answered, by name.
        asked: name and round of every order to train.
    """

    def __init__(self, app: ClientApp, node_configs: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(app, node_configs)
        self.deliver: Callable[[], Sequence[Message]] = lambda: list(self.replies.values())
        self.orders: dict[str, Message] = {}
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[str, int]] = []
        self._pulled: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        found = {NAMES[m.metadata.dst_node_id - 2]: m for m in outgoing if _is_training(m)}
        self.orders |= found
        self.asked += [(name, unpack(TrainOrder, message.content).scope.round) for name, message in found.items()]
        return super().push_messages(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        replies = list(super().pull_messages(wanted))
        found = {NAMES[m.metadata.src_node_id - 2]: m for m in replies if _is_training(m)}
        if not found:
            return replies
        self.replies, self._pulled = found, self._pulled | wanted
        return self.deliver()

    def stalled(self) -> set[str]:
        """Return the orders that are not waited for: an answer that has not come with the others never will."""
        return self._pulled

    def answer(self, name: str, content: RecordDict | Error | TrainResult) -> Message:
        """Return another answer to a client's order."""
        return Message(pack(content) if isinstance(content, TrainResult) else content, reply_to=self.orders[name])

    def weights(self, name: str, values: Tensor, loss: float = 1.0) -> Message:
        """Return a well-formed answer to a client's order that brings these values."""
        sent = self.sent(TrainOrder)[0].weights
        assert sent is not None
        return self.answer(name, TrainResult(0.0, Weights(sent.layout, values), loss))


def _is_training(message: Message) -> bool:
    return message.metadata.message_type == TrainOrder.message_type


def federation(
    answers: Mapping[type[Order], Answer] | None = None, train: Answer = result_of, **changes: Any
) -> tuple[Inline, Desk]:
    """Return three scripted clients that have joined, and the desk on which their answers lie."""
    desk = scripted_grid([introduction(name) for name in NAMES], {TrainOrder: train} | dict(answers or {}), Desk)
    return Inline(config(**changes), desk).join(), desk


def state_after(deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a server whose learner was given these changes directly, in order of rows."""
    made = joined(config(), *map(introduction, NAMES))
    replies = [Reply(NAMES.index(name), "S", delta) for name, delta in deltas.items()]
    made.learner.update(replies, "mean")
    state: dict[str, Tensor] = made.state()
    return state
