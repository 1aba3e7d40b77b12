"""A clock that a test turns, a grid whose nodes a test scripts, and a process that is as it was afterwards."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.client.work.client import client_for
from hyperbloom.common.wire.orders import Greeting, Introduction, Notice, TrainResult
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.grids import live as live_grid
from hyperbloom.server.loop import asynchronous, exchange, federation, post, rounds
from hyperbloom.server.loop.post import UNREADABLE

Answer = Callable[[Message], RecordDict | Error | None]

ABOUT = Introduction(
    client_id="a",
    token="secret of a",
    version="0.1.0",
    size="M",
    input_shape=(1, 8, 8),
    num_classes=10,
    train_examples=60,
    val_examples=20,
    test_examples=20,
    class_shares=(),
)

TRAINED = pack(TrainResult(0.0))
"""A sound answer to an order to train that nothing travels with."""


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Let no test of small tensors wait for threads that share few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command does to its process: environment, loaded clients."""
    monkeypatch.setenv("FLWR_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("COLUMNS", "300")
    yield
    client_for.cache_clear()


class Clock:
    """Stands in for the module `time`: sleeping is what makes its time pass, and things happen on the way."""

    strftime, localtime = staticmethod(time.strftime), staticmethod(time.localtime)

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        """Return the seconds that have passed."""
        return self.now

    time = perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        assert self.now < 10_000, "waits for ever"
        for moment, act in [item for item in self._due if item[0] <= self.now]:
            self._due.remove((moment, act))
            act()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something when so many seconds have passed."""
        self._due.append((self.now + seconds, act))

    @property
    def passed(self) -> float:
        """Seconds since the start of the test."""
        return self.now - 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the federation, its grid and the loops over rounds look at."""
    turned = Clock()
    for module in (asynchronous, exchange, federation, live_grid, post, rounds):
        monkeypatch.setattr(module, "time", turned)
    return turned


class ScriptedGrid:
    """Nodes that answer what a test says, when it says so.

    Attributes:
        owners: whose key a node has, where nodes have keys.
        nodes: for each node that is present, what it answers to a message; None is silence, for now.
        sent: every message that was pushed, with the time at which it was.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nodes: dict[int, Answer] = {}
        self.sent: list[tuple[float, Message]] = []
        self._waiting: dict[str, Message] = {}
        self.unreachable: set[int] = set()
        self.owners: dict[int, str] = {}
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return who is present, each under the name that its key is registered for."""
        return [NodeInfo(node_id=node, name=self.owners.get(node, "")) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        """Take messages; an unreachable node's get no number, as Flower's grid has it."""
        ids: list[Any] = []
        for message in messages:
            self.sent.append((self.clock.passed, message))
            if message.metadata.dst_node_id in self.unreachable:
                ids.append(None)
                continue
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            self._waiting[f"m{len(self.sent)}"] = message
            ids.append(f"m{len(self.sent)}")
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answers that there are by now."""
        replies = []
        for message_id in [known for known in self._waiting if known in set(message_ids)]:
            message = self._waiting[message_id]
            node = self.nodes.get(message.metadata.dst_node_id)
            found = node(message) if node else None
            if found is not None:
                del self._waiting[message_id]
                replies.append(Message(found, reply_to=message))
        return replies

    def greeted(self) -> list[int]:
        """Return the nodes that were greeted, in order."""
        return [m.metadata.dst_node_id for _, m in self.sent if m.metadata.message_type == Greeting.message_type]

    def notices(self) -> list[tuple[int, Notice]]:
        """Return the notices that were sent, in order."""
        return [
            (m.metadata.dst_node_id, unpack(Notice, m.content))
            for _, m in self.sent
            if m.metadata.message_type == Notice.message_type
        ]

    def join(
        self, node: int, name: str = "a", token: str | None = None, orders: Answer | None = None, **about: object
    ) -> None:
        """Let a well-behaved client appear on a node; `orders` is what it answers to anything but greetings."""
        said = replace(ABOUT, client_id=name, token=token or f"secret of {name}", **about)  # type: ignore[arg-type]

        def answer(message: Message) -> RecordDict | Error | None:
            if message.metadata.message_type == Greeting.message_type:
                return pack(said)
            if message.metadata.message_type == Notice.message_type:
                return message.content
            return orders(message) if orders else TRAINED

        self.nodes[node] = answer

    def leave(self, node: int) -> None:
        """Let a node disappear."""
        del self.nodes[node]


class StallingGrid(ScriptedGrid):
    """A grid over which the replies to one node's orders are announced at once and never arrive.

    They count as stalled after five seconds, and are given up after thirty.
    """

    def __init__(self, clock: Clock, node: int) -> None:
        super().__init__(clock)
        self.begun: dict[str, float] = {}

        def answer(message: Message) -> Error | None:
            begun = self.begun.setdefault(message.metadata.message_id, clock.now)
            return Error(UNREADABLE, "it was never uploaded") if clock.now > begun + 30 else None

        self.join(node, "stalls", orders=answer)

    def stalled(self) -> set[str]:
        """Return the orders whose replies do not arrive."""
        return {order for order, begun in self.begun.items() if order in self._waiting and self.clock.now > begun + 5}


@pytest.fixture
def grid(clock: Clock) -> ScriptedGrid:
    """Return a grid without nodes."""
    return ScriptedGrid(clock)


def app_error(reason: str) -> Error:
    """Return what a client's exception becomes."""
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
