"""What the SuperLink hands over: who is there, and replies that are whole, late, too large, garbage, or forged."""

from collections.abc import Callable, Sequence

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.common.errors import ConfigError
from hyperbloom.server.broker import limits as superlink_limits
from hyperbloom.server.broker.limits import TOO_LARGE
from hyperbloom.server.grids.live import SLOWEST_LINE, STALL_S, UPLOAD_DEADLINE_S, LiveGrid
from hyperbloom.server.loop.post import UNREADABLE

from ..conftest import Clock


class Desk:
    """Stands in for the SuperLink: holds one reply, in the objects that its client uploaded.

    Attributes:
        announced: whether the server has not been told of the reply yet; it is told once.
        coming: objects that were announced and are not there yet.
    """

    def __init__(self, content: RecordDict, to: str = "order-1") -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        order = Message(RecordDict(), 7, "train")
        order.metadata.__dict__["_message_id"] = to
        TaskIdentity.node_id = 7  # the client's process
        self.message = Message(content, reply_to=order)
        TaskIdentity.node_id = 1
        self.said = {"src_node_id": self.message.metadata.src_node_id, "reply_to_message_id": to}
        self.tree = get_object_tree(self.message)
        self.objects = {key: each.deflate() for key, each in get_all_nested_objects(self.message).items()}
        self.announced = True
        self.coming: set[str] = set()
        self.confirmed: list[str] = []
        self.pulled = 0

    run_id = 1

    def nodes(self) -> list[NodeInfo]:
        raise NotImplementedError

    def send(self, messages: Sequence[Message]) -> list[str]:
        raise NotImplementedError

    def replies(self, orders: set[str]) -> list[tuple[ProtoMetadata, ObjectTree]]:
        assert self.announced, "the SuperLink does not know the order any more"
        self.announced = False
        return [(ProtoMetadata(message_id=self.message.object_id, run_id=1, **self.said), self.tree)]

    def content(self, name: str) -> bytes | None:
        self.pulled += 1
        return b"" if name in self.coming and name in self.objects else self.objects.get(name)

    def confirm(self, message_id: str) -> None:
        self.confirmed.append(message_id)

    def wait(self, seconds: float) -> None:
        raise NotImplementedError


def grid_at(desk: Desk, order_bytes: int = 0) -> LiveGrid:
    """Return a grid that has sent an order of so many bytes, and gets the reply from `desk`."""
    grid = LiveGrid(desk)
    grid._largest, grid._sizes = order_bytes, {"order-1": order_bytes}
    return grid


def pulled(desk: Desk, order_bytes: int = 0) -> Message:
    (reply,) = grid_at(desk, order_bytes).pull_messages(["order-1", "order-2"])
    return reply


def content(size: int = 10, records: int = 1) -> RecordDict:
    return RecordDict({f"hyperbloom{n}": ConfigRecord({"values": bytes([n]) * size}) for n in range(records)})


def test_a_sound_reply_arrives_as_it_was_sent() -> None:
    desk = Desk(content())
    reply = pulled(desk)
    assert reply.content == content()
    assert reply.metadata.reply_to_message_id == "order-1"
    assert desk.confirmed == [desk.message.object_id]


def forge(desk: Desk) -> None:
    desk.said["reply_to_message_id"] = "order-2"  # its own order; inside, it answers another client's


def impersonate(desk: Desk) -> None:
    desk.said["src_node_id"] = 8


def garble(desk: Desk) -> None:
    desk.objects = dict.fromkeys(desk.objects, b"\xff" * 40)


def replace_content(desk: Desk) -> None:
    """Send a record where a reply has several by name."""
    desk.message.__dict__["_content"] = ConfigRecord({"values": b"0"})
    desk.tree = get_object_tree(desk.message)
    desk.objects = {key: each.deflate() for key, each in get_all_nested_objects(desk.message).items()}


def lose(desk: Desk) -> None:
    """Leave what the SuperLink notes of an object that was too large to keep."""
    desk.objects = dict.fromkeys(desk.objects, TOO_LARGE)


@pytest.mark.parametrize(
    ("make", "spoil", "told"),
    [
        (content, forge, "another message than was announced"),
        (content, impersonate, "another message than was announced"),
        (content, garble, "no message"),
        (content, replace_content, "the reply is"),
        (lambda: content(2000), lambda desk: None, "expected a reply of at most 1000 bytes, found 20"),
        (content, lose, "expected a reply of at most 1000 bytes, found 1001 and more"),
        (lambda: content(1, 70), lambda desk: None, "expected a reply of at most 64 objects, found 72"),
    ],
)
def test_what_is_no_reply_to_the_order_is_refused_and_forgotten(
    make: Callable[[], RecordDict], spoil: Callable[[Desk], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink_limits, "SMALLEST_LIMIT", 1000)
    desk = Desk(make())
    spoil(desk)
    reply = pulled(desk)
    assert reply.has_error()
    assert reply.error.code == UNREADABLE and told in reply.error.reason
    assert reply.metadata.reply_to_message_id == desk.said["reply_to_message_id"]
    assert desk.confirmed == [desk.message.object_id], "the SuperLink need not keep it"
    assert desk.pulled <= 3


def test_a_reply_may_be_as_large_as_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_limits, "SMALLEST_LIMIT", 1000)
    assert not pulled(Desk(content(2000)), order_bytes=1000).has_error()


class Slow(Desk):
    """A reply whose objects come when a test says so."""

    def __init__(self, clock: Clock) -> None:
        """Announce it; nothing is there."""
        super().__init__(content())
        self.clock = clock
        self.coming = set(self.objects)

    def upload(self) -> None:
        """Upload the next object, in the order of the tree."""
        names = [node.object_id for node in iterate_object_tree(self.tree)]
        self.coming.discard(next(name for name in names if name in self.coming))

    def seconds_until(self, grid: LiveGrid, done: Callable[[list[Message]], bool]) -> tuple[float, list[Message]]:
        """Poll as the federation does until `done`; returns how long that took and the last replies."""
        start = self.clock.now
        while not done(replies := grid.pull_messages(["order-1"])):
            self.clock.sleep(0.05)
        return self.clock.now - start, replies


@pytest.fixture
def slow(clock: Clock) -> Slow:
    """Return a reply that was announced."""
    return Slow(clock)


def test_a_reply_that_is_not_whole_is_put_aside_and_comes_when_it_is(slow: Slow, clock: Clock) -> None:
    grid, before = grid_at(slow), clock.now
    assert grid.pull_messages(["order-1"]) == [] and slow.pulled == 1, "one look"
    for _ in range(2):
        slow.upload()
        clock.sleep(2)
        assert grid.pull_messages(["order-1"]) == []
    assert clock.now == before + 4 and not slow.confirmed
    slow.upload()
    clock.sleep(2)
    (reply,) = grid.pull_messages(["order-1"])
    assert reply.content == content()
    assert slow.confirmed == [slow.message.object_id]


def test_other_replies_pass_one_that_is_not_whole(slow: Slow) -> None:
    grid = grid_at(slow)
    assert grid.pull_messages(["order-1"]) == []
    other = Desk(content(20), "order-2")
    other.objects |= slow.objects
    other.coming = slow.coming
    grid._superlink = other
    assert [reply.content for reply in grid.pull_messages(["order-1", "order-2"])] == [content(20)]


def test_what_is_never_uploaded_stalls_a_round_for_seconds_and_is_a_lie_after_its_deadline(slow: Slow) -> None:
    grid = grid_at(slow)
    waited, _ = slow.seconds_until(grid, lambda replies: grid.stalled() == {"order-1"})
    assert waited == pytest.approx(STALL_S, abs=0.1)
    waited, (reply,) = slow.seconds_until(grid, bool)
    assert waited == pytest.approx(UPLOAD_DEADLINE_S - STALL_S, abs=1.1)
    assert (reply.error.code, reply.metadata.reply_to_message_id) == (UNREADABLE, "order-1")
    assert reply.error.reason == "a reply was announced, but 0 of 3 objects came"
    assert slow.confirmed == [slow.message.object_id], "the SuperLink need not keep it"
    assert not grid.stalled()
    assert slow.pulled < 100, "the longer it takes, the rarer the looks"


def test_the_larger_the_order_the_longer_an_object_may_take(slow: Slow) -> None:
    grid = grid_at(slow, order_bytes=50 * SLOWEST_LINE)
    waited, _ = slow.seconds_until(grid, lambda replies: bool(grid.stalled()))
    assert waited == pytest.approx(50 + STALL_S, abs=0.1)
    waited, (reply,) = slow.seconds_until(grid, bool)
    assert waited == pytest.approx(UPLOAD_DEADLINE_S - STALL_S, abs=1.1) and reply.error.code == UNREADABLE


def test_each_object_gives_more_time_but_not_for_ever(slow: Slow, clock: Clock) -> None:
    grid = grid_at(slow)
    assert grid.pull_messages(["order-1"]) == []
    for _ in range(2):
        clock.sleep(UPLOAD_DEADLINE_S - 2)
        slow.upload()
        assert grid.pull_messages(["order-1"]) == []
    waited, (reply,) = slow.seconds_until(grid, bool)
    assert waited == pytest.approx(4, abs=1.1), "twice the deadline in all"
    assert reply.error.reason.endswith("2 of 3 objects came")


def test_what_the_superlink_has_given_up_is_a_lie_at_once(slow: Slow) -> None:
    slow.objects.clear()
    assert pulled(slow).error.code == UNREADABLE


def test_what_nobody_waits_for_is_forgotten(slow: Slow) -> None:
    grid = grid_at(slow)
    assert grid.pull_messages(["order-1"]) == []
    slow.announced = True
    assert grid.pull_messages(["order-2"]) == []  # the announced reply answers nothing that is asked for
    assert slow.confirmed == [slow.message.object_id] * 2
    assert not grid._aside and not grid._sizes


def test_an_order_that_the_network_does_not_take_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERBLOOM_MESSAGE_MIB", "3")
    order = Message(content(2 * 2**20 + 1), 7, "train")
    with pytest.raises(ConfigError, match=r"an order has 2 MiB, and a message may have 3 MiB.*HYPERBLOOM_MESSAGE"):
        LiveGrid(Desk(content())).push_messages([order])


def test_a_client_that_came_back_before_it_was_missed_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    activated, desk = {1: "10:00", 2: "10:00"}, Desk(content())

    def nodes() -> list[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at=time) for node, time in activated.items()]

    monkeypatch.setattr(desk, "nodes", nodes)
    grid = LiveGrid(desk)
    assert [node.node_id for node in grid.get_nodes()] == [1, 2]
    assert [node.node_id for node in grid.get_nodes()] == [1, 2]
    activated[2] = "10:05"
    activated[3] = "10:05"
    assert [node.node_id for node in grid.get_nodes()] == [1, 3]
    assert [node.node_id for node in grid.get_nodes()] == [1, 2, 3]
    del activated[1]
    assert [node.node_id for node in grid.get_nodes()] == [2, 3]
    activated[1] = "10:06"
    assert [node.node_id for node in grid.get_nodes()] == [2, 3, 1]
