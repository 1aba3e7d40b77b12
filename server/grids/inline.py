"""A grid with all clients in this process, in place of Flower's: the same strategy and `ClientApp`, no sockets.

It serves research on one machine, and tests of the whole path without a network.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, groupby

from flwr.app import Context, Error, Message, RecordDict

from hyperbloom.common.errors import attempt
from hyperbloom.common.wire.orders import TrainOrder
from hyperbloom.server.broker.flower import TaskIdentity, constant, node

log = logging.getLogger(__name__)

TrainAll = Callable[[Sequence[tuple[Message, Context]]], Sequence[Message | Exception]]


class InlineGrid:
    """A grid whose nodes are contexts of one `ClientApp`. It answers a message when its reply is pulled.

    Node ids count from 2. `train_all` answers waiting orders to train in place of the app, and `keep` lives as long.
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        node_configs: Sequence[Mapping[str, str | int | float | bool]],
        train_all: TrainAll | None = None,
        keep: object = None,
    ) -> None:
        self.app = app
        self.train_all = train_all
        self._keep = keep
        self._contexts = {
            name: Context(1, name, dict(config), RecordDict(), {}) for name, config in enumerate(node_configs, start=2)
        }
        self._waiting: dict[str, Message] = {}
        self._ids = count(1)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, constant.SUPERLINK_NODE_ID

    closed = True
    """Nobody else can come."""

    def get_nodes(self) -> Iterable[node.NodeInfo]:
        """Return the virtual clients as Flower's node records."""
        return [node.NodeInfo(node_id=number) for number in self._contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages; they run when their replies are pulled."""
        new = {f"inline-{next(self._ids)}": message for message in messages}
        for message_id, message in new.items():
            message.metadata.__dict__["_message_id"] = message_id
        self._waiting |= new
        return list(new)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer the wanted messages in the order in which they were pushed."""
        wanted = set(message_ids)
        asked = [self._waiting.pop(message_id) for message_id in list(self._waiting) if message_id in wanted]
        replies: list[Message] = []
        for kind, group in groupby(asked, key=lambda message: message.metadata.message_type):
            tasks = [(message, self._contexts[message.metadata.dst_node_id]) for message in group]
            together = self.train_all if kind == TrainOrder.message_type else None
            outcomes = together(tasks) if together else [attempt(self.app, *task) for task in tasks]
            replies += [answer(outcome, message) for outcome, (message, _) in zip(outcomes, tasks, strict=True)]
        return replies


def answer(outcome: Message | Exception, message: Message) -> Message:
    """Return a client's answer; an exception becomes the error message that Flower would send."""
    if isinstance(outcome, Message):
        return outcome
    log.error("%s failed", message.metadata.message_type, exc_info=outcome)  # as a client's process logs it
    reason = f"{type(outcome).__name__}: {outcome}"
    return Message(Error(constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
