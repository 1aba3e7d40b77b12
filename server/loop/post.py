"""The book of messages: which orders are open, and which replies have come.

Works over any grid with three of the public methods of Flower's `Grid`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from flwr.app import Message, RecordDict

from hyperbloom.common.program.signals import uninterrupted
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder, Greeting, Notice, Order
from hyperbloom.common.wire.pack import pack, shown, weigh

FASTEST_POLL_S, SLOWEST_POLL_S = 0.004, 0.05

NETWORK_ERRORS = (3, 4, 5)
"""Flower's error codes for an unavailable message, reply or node."""
UNREADABLE = 1001
"""Our error code for a reply that is too large to read, is no message, or is in another node's name."""


class Grid(Protocol):
    """What the server needs of a grid: the methods of these names of `flwr.serverapp.Grid`."""

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes that are here, each with its id and its name."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their ids, nothing for a node that has left."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages that have come."""


@dataclass
class Traffic:
    """Bytes that training has sent to clients and received from them, as `weigh` counts them."""

    down: int = 0
    up: int = 0


@dataclass(frozen=True, eq=False)
class Letter:
    """An order, and when it was sent (`time.monotonic`); `about` is what its sender wants to know again later."""

    id: str
    node: int
    kind: type[Order]
    sent: float
    about: Any


@dataclass(frozen=True)
class Failure:
    """Why there is no answer, or none that counts: a reason for programs, a text for people.

    `network` says whether the network is at fault.
    """

    reason: Reason
    text: str
    network: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Arrival:
    """A reply to an order; `late` says that the server had stopped waiting for it."""

    letter: Letter
    content: RecordDict | Failure
    late: bool

    @property
    def is_lie(self) -> bool:
        """Return whether the failure itself counts against the client, without a look at any content."""
        return isinstance(self.content, Failure) and self.content.reason.is_lie


class Pause:
    """Waits between looks for answers, or until one has come: longer each time while nothing comes."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        self._wait, self._seconds = wait, FASTEST_POLL_S

    def take(self, came: bool = False) -> None:
        """Wait; `came` tells that the last look found something."""
        if came:
            self._seconds = FASTEST_POLL_S
        self._wait(self._seconds)
        self._seconds = min(1.5 * self._seconds, SLOWEST_POLL_S)


class Post:
    """Sends orders, and matches replies to them; `wait` waits so many seconds, or until an answer has come."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._open: dict[str, Letter] = {}
        self._overdue: dict[str, Letter] = {}  # no longer waited for; their clients still work on them
        self._traffic = Traffic()
        # Ids of orders whose announced answers do not arrive. Only the grid over the network has this method.
        self._stalled: Callable[[], Set[str]] = getattr(grid, "stalled", frozenset)
        self.wait: Callable[[float], None] = getattr(grid, "wait", None) or (lambda seconds: time.sleep(seconds))

    def send(
        self, orders: Sequence[tuple[int, Order, Any]], round_number: int = 0, ttl: float | None = None
    ) -> list[Letter]:
        """Send each order to its node; return those that the grid accepted. `ttl` is in seconds."""
        distinct = {id(order): order for _, order, _ in orders}  # all may get one order, which may be large
        packed = {key: pack(order) for key, order in distinct.items()}
        messages = [
            Message(packed[id(order)], node, order.message_type, ttl=ttl, group_id=str(round_number))
            for node, order, _ in orders
        ]
        if not messages:
            return []
        # A client that is told of a message waits for all of it. If a signal cut it, the client would miss the goodbye.
        with uninterrupted():
            ids, now = list(self.grid.push_messages(messages)), time.monotonic()
        self._traffic.down += sum(weigh(m.content) for m in messages if _is_of_training(m))
        letters = [
            Letter(message_id, node, type(order), now, about)
            for message_id, (node, order, about) in zip(ids, orders, strict=True)
            if message_id  # the grid gives no id for a node that has just left
        ]
        self._open |= {letter.id: letter for letter in letters}
        return letters

    def poll(self) -> list[Arrival]:
        """Return the replies that have come, including late ones."""
        wanted = {*self._open, *self._overdue}
        replies = list(self.grid.pull_messages(wanted)) if wanted else []
        self._traffic.up += sum(weigh(r.content) for r in replies if r.has_content() and _is_of_training(r))
        arrived = []
        for reply in replies:
            reply_to = reply.metadata.reply_to_message_id
            late = reply_to in self._overdue
            book = self._overdue if late else self._open
            if reply_to in book:  # a grid may deliver a reply twice
                letter = book.pop(reply_to)
                arrived.append(Arrival(letter, _content(reply, letter), late))
        return arrived

    def waits_for(self, letters: Iterable[Letter]) -> bool:
        """Return whether any of these answers is still expected and has not stalled."""
        stalled = self._stalled()
        return any(letter.id in self._open and letter.id not in stalled for letter in letters)

    def give_up(self, letters: Collection[Letter], timeout_s: float = 0.0) -> list[Letter]:
        """Stop waiting for answers to orders that are older than `timeout_s` seconds or have stalled.

        Return those of `letters` whose answers are not waited for any more.
        """
        now, stalled = time.monotonic(), self._stalled()
        for letter in letters:
            overdue = now - letter.sent >= timeout_s or letter.id in stalled
            if overdue and letter.id in self._open:
                del self._open[letter.id]
                self._overdue[letter.id] = letter
        return [letter for letter in letters if letter.id not in self._open]

    def keep(self, wanted: Callable[[Letter], bool]) -> None:
        """Forget all orders but the `wanted` ones: the nodes of the others are gone."""
        self._open = {i: letter for i, letter in self._open.items() if wanted(letter)}
        self._overdue = {i: letter for i, letter in self._overdue.items() if wanted(letter)}

    @property
    def busy(self) -> set[int]:
        """Return the nodes that still work on an order."""
        letters = (*self._open.values(), *self._overdue.values())
        return {letter.node for letter in letters if letter.kind not in (Greeting, Notice)}

    def open(self, kind: type[Order]) -> list[Letter]:
        """Return the orders of a class that still wait for an answer."""
        return [letter for letter in self._open.values() if letter.kind is kind]

    def take_traffic(self) -> Traffic:
        """Return the training traffic since the last call, and start counting anew."""
        taken, self._traffic = self._traffic, Traffic()
        return taken


def _content(reply: Message, letter: Letter) -> RecordDict | Failure:
    """Return the content of a reply, or why it has none.

    Errors of the infrastructure come from the SuperLink's node, so the sender is checked for answers only.
    """
    if reply.has_error():
        code = reply.error.code
        text = shown(reply.error.reason or f"error {code}")
        reason = Reason.CONTENT if code == UNREADABLE else Reason.FAILED
        return Failure(reason, text, network=code in NETWORK_ERRORS)
    if reply.metadata.src_node_id != letter.node:
        # The true sender is unknown, so the order's client must not be blamed.
        return Failure(Reason.FAILED, "the reply came from another node than the order went to")
    return reply.content


def _is_of_training(message: Message) -> bool:
    """Return whether a message belongs to training: all but evaluations, greetings and notices."""
    kind, apart = message.metadata.message_type, (Greeting.message_type, Notice.message_type)
    return kind not in apart and kind.partition(".")[0] != EvaluateOrder.message_type
