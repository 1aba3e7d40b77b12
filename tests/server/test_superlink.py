"""What the SuperLink hands over: who is there, and replies that are whole, too large, of garbage, in another's name."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.messages import UNREADABLE
from hyperbloom.server import superlink_limits
from hyperbloom.server.superlink import LiveGrid
from hyperbloom.server.superlink_limits import TOO_LARGE


class Desk:
    """Stands in for the SuperLink: holds one reply, in the objects that its client uploaded."""

    def __init__(self, content: RecordDict) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        order = Message(RecordDict(), 7, "train")
        order.metadata.__dict__["_message_id"] = "order-1"
        TaskIdentity.node_id = 7  # the client's process
        self.message = Message(content, reply_to=order)
        TaskIdentity.node_id = 1
        self.said = {"src_node_id": self.message.metadata.src_node_id, "reply_to_message_id": "order-1"}
        self.tree = get_object_tree(self.message)
        self.objects = {key: each.deflate() for key, each in get_all_nested_objects(self.message).items()}
        self.confirmed: list[str] = []
        self.pulled = 0

    def PullMessages(self, request: Any) -> Any:
        announced = ProtoMetadata(message_id=self.message.object_id, run_id=1, **self.said)
        proto = ProtoMessage(metadata=announced)
        return SimpleNamespace(messages_list=[proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:
        self.pulled += 1
        content = self.objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


def pulled(desk: Desk, monkeypatch: pytest.MonkeyPatch, largest_order: int = 0) -> Message:
    grid = LiveGrid(token="token")
    grid._largest = largest_order
    monkeypatch.setattr(LiveGrid, "_runtime_client", desk, raising=False)
    monkeypatch.setattr(LiveGrid, "run", SimpleNamespace(run_id=1))
    (reply,) = grid.pull_messages(["order-1"])
    return reply


def content(size: int = 10, records: int = 1) -> RecordDict:
    return RecordDict({f"hyperbloom{n}": ConfigRecord({"values": bytes([n]) * size}) for n in range(records)})


def test_a_sound_reply_arrives_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(content())
    reply = pulled(desk, monkeypatch)
    assert reply.content == content()
    assert reply.metadata.reply_to_message_id == "order-1"
    assert desk.confirmed == [desk.message.object_id]


def forge(desk: Desk) -> None:
    desk.said["reply_to_message_id"] = "order-2"  # its own order; inside, it answers another client's


def impersonate(desk: Desk) -> None:
    desk.said["src_node_id"] = 8


def garble(desk: Desk) -> None:
    desk.objects = dict.fromkeys(desk.objects, b"\xff" * 40)


def lose(desk: Desk) -> None:
    """Leave what the SuperLink notes of an object that was too large to keep."""
    desk.objects = dict.fromkeys(desk.objects, TOO_LARGE)


@pytest.mark.parametrize(
    ("make", "spoil", "told"),
    [
        (content, forge, "another message than was announced"),
        (content, impersonate, "another message than was announced"),
        (content, garble, "no message"),
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
    reply = pulled(desk, monkeypatch)
    assert reply.has_error()
    assert reply.error.code == UNREADABLE and told in reply.error.reason
    assert reply.metadata.reply_to_message_id == desk.said["reply_to_message_id"]
    assert desk.confirmed == [desk.message.object_id], "the SuperLink need not keep it"
    assert desk.pulled <= 3


def test_a_reply_may_be_as_large_as_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_limits, "SMALLEST_LIMIT", 1000)
    assert not pulled(Desk(content(2000)), monkeypatch, largest_order=1000).has_error()


def test_an_order_that_the_network_does_not_take_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERBLOOM_MESSAGE_MIB", "3")
    order = Message(content(2 * 2**20 + 1), 7, "train")
    with pytest.raises(ConfigError, match=r"an order has 2 MiB, of 3 MiB that a message may have.*HYPERBLOOM_MESSAGE"):
        LiveGrid(token="token").push_messages([order])


def test_a_client_that_came_back_before_it_was_missed_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = {1: "10:00", 2: "10:00"}

    def nodes(self: HttpGrid) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at=time) for node, time in activated.items()]

    monkeypatch.setattr(HttpGrid, "get_nodes", nodes)
    grid = LiveGrid("127.0.0.1:1", True, token="t")
    assert list(grid.get_node_ids()) == [1, 2]
    assert list(grid.get_node_ids()) == [1, 2]
    activated[2] = "10:05"
    activated[3] = "10:05"
    assert list(grid.get_node_ids()) == [1, 3]
    assert list(grid.get_node_ids()) == [1, 2, 3]
    del activated[1]
    assert list(grid.get_node_ids()) == [2, 3]
    activated[1] = "10:06"
    assert list(grid.get_node_ids()) == [2, 3, 1]
