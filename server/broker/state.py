"""Flower's link state, with orders by node and a bell for each side.

Flower's own looks through all messages whenever a node asks for one, so a round costs the square of its cohort. Here
each node has a queue. A node's call can wait for its next order (`wait_for_order`), and the server for a reply
(`came`), so neither has to ask again and again.

A call's answer may be lost with its connection. A client of ours answers each order before it asks for the next one, so
if it asks without having answered, it has not received its last order, and gets it again.

The run's task is this process, so its token never expires.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from flwr.app import Message

from hyperbloom.server.broker import flower
from hyperbloom.server.broker.limits import Store

MOST_WAITING = 2000
"""Most nodes whose calls wait for an order. Each takes a thread; the others ask again after a while."""


class State(flower.InMemoryLinkState):
    """The link state of one run in this process.

    Attributes:
        came: set when a reply is complete.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.came = threading.Event()
        self._queues: dict[int, deque[str]] = {}  # ids of the orders that were not handed over, by node
        self._handed: dict[int, str] = {}  # the order that was handed over last and is not answered, by node
        self._replied: set[str] = set()  # orders whose replies were announced and not pulled
        self._bells: dict[int, threading.Event] = {}  # of the nodes whose calls wait
        self._is_closed = False

    def close(self) -> None:
        """Let no call wait any longer."""
        with self.lock:
            self._is_closed = True
            for bell in self._bells.values():
                bell.set()

    def wait_for_order(self, node_id: int, seconds: float, tell: Callable[[threading.Event], object]) -> bool:
        """Wait until a node has an order, at most `seconds`; return whether this is still its latest call.

        It returns at once if too many calls wait. A second call of the same node, or a new session, ends the wait of
        the first. `tell` gets the event that ends it.
        """
        with self.lock:
            self._dismiss(node_id)
            if lost := self._handed.pop(node_id, None):
                self._queues.setdefault(node_id, deque()).appendleft(lost)
            if self._queues.get(node_id) or self._is_closed or len(self._bells) >= MOST_WAITING:
                return True
            bell = self._bells[node_id] = threading.Event()
        tell(bell)
        bell.wait(seconds)
        with self.lock:
            is_latest = self._bells.get(node_id) is bell
            if is_latest:
                del self._bells[node_id]
        return is_latest

    def _dismiss(self, node_id: int) -> None:
        """End the wait of a node's call, which gets no order."""
        if bell := self._bells.pop(node_id, None):
            bell.set()

    def note_answer(self, node_id: int, order: str) -> None:
        """Note that a node has answered an order, even if the answer is of no use."""
        with self.lock:
            if self._handed.get(node_id) == order:
                del self._handed[node_id]

    def store_message_ins(self, message: Message) -> str | None:
        """Store an order, whose objects must be there already; return its id, or None if the node is gone."""
        node_id = message.metadata.dst_node_id
        with self.lock:
            stored = super().store_message_ins(message)
            if stored:
                self._queues.setdefault(node_id, deque()).append(stored)
                if bell := self._bells.get(node_id):
                    bell.set()
        return stored

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Return the next orders of a node, at most `limit`, and mark them as handed over."""
        found: list[Message] = []
        with self.lock:
            queue = self._queues.get(node_id, deque())
            while queue and len(found) != limit:
                message = self.message_ins_store.get(queue.popleft())
                if message and message.metadata.created_at + message.metadata.ttl > time.time():
                    message.metadata.delivered_at = flower.now().isoformat()
                    found.append(message)
                    self._handed[node_id] = message.metadata.message_id
            if not queue:
                self._queues.pop(node_id, None)
        return found

    def store_message_res(self, message: Message) -> str | None:
        """Store the announcement of a reply; return its id, or None if it answers no open order of its node."""
        with self.lock:
            stored = super().store_message_res(message)
            if stored:
                self._replied.add(message.metadata.reply_to_message_id)
        return stored

    def take_replied(self, orders: set[str]) -> set[str]:
        """Return which of `orders` have replies that were announced since the last call."""
        with self.lock:
            found, self._replied = self._replied & orders, set()
        return found

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Let a node in. A call of its earlier session gets none of its orders, and it none of that session's."""
        with self.lock:
            self._dismiss(node_id)
            self._handed.pop(node_id, None)
            return super().activate_node(node_id, heartbeat_interval)

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """Remove a node, and its orders."""
        with self.lock:
            self._queues.pop(node_id, None)
            self._handed.pop(node_id, None)
            self._dismiss(node_id)
            super().delete_node(owner_aid, node_id)

    def _cleanup_expired_task_tokens_locked(self) -> None:
        """Expire nothing, however long this process was suspended."""


def state_factory() -> flower.LinkStateFactory:
    """Return Flower's factory of a fresh `State` over a fresh `Store`."""
    factory = flower.LinkStateFactory(
        flower.supercore.FLWR_IN_MEMORY_DB_NAME, flower.NoOpFederationManager(), flower.ObjectStoreFactory()
    )
    store = factory.objectstore_factory.store_instance = Store()
    factory.state_instance = State(factory.federation_manager, store)
    return factory
