"""What the SuperLink keeps of what clients push: Flower's own state and handlers, and our limits around them."""

import hashlib
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree

from hyperbloom.common.enclosed import WAIT, enclose
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.broker import hosted as superlink_hosted
from hyperbloom.server.broker import limits as superlink_limits
from hyperbloom.server.broker import servicer as superlink_servicer
from hyperbloom.server.broker.flower import NoObjectInStoreError
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.limits import MOST_OBJECTS, TOO_LARGE, Store, largest_message, reply_limit
from hyperbloom.server.broker.servicer import Fleet
from hyperbloom.server.broker.state import State, state_factory


class Link:
    """A SuperLink's state and servicer, with one node and an order to it for each reply."""

    def __init__(self) -> None:
        factory = state_factory()
        self.state = cast(State, factory.state())
        self.store = cast(Store, self.state.object_store)
        self.fleet = Fleet(factory, False)
        self.run = Hosted(self.state)
        self.node = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"key", 0)
        self.state.activate_node(self.node, 30)

    def announce(self, *contents: bytes) -> str:
        """Announce a reply of these objects; returns its session."""
        root = _id(b"root" + b"".join(map(_id_bytes, contents)))
        tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=_id(each)) for each in contents])
        return str(self.push_messages(tree).session_id)

    def order(self) -> str:
        """Send an order without objects; returns its id."""
        order = Message(RecordDict(), self.node, "train")
        order.metadata.__dict__["_message_id"] = order.object_id
        assert self.state.store_message_ins(order)
        return order.metadata.message_id

    def push_messages(self, tree: ObjectTree, order: str = "", reply: str = "") -> Any:
        """Announce a tree as a reply, by default its root, to a new order or the one that is given."""
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id=reply or tree.object_id,
            src_node_id=self.node,
            dst_node_id=1,
            reply_to_message_id=order or self.order(),
            created_at=time.time(),
            ttl=10,
            message_type="train",
        )
        message = ProtoMessage(metadata=metadata, content=ProtoRecordDict())
        node = Node(node_id=self.node)
        request = PushMessagesRequest(node=node, messages_list=[message], message_object_trees=[tree])
        return self.fleet.PushMessages(request, None)  # type: ignore[arg-type]

    def push(self, session: str, content: bytes, name: str = "") -> bool:
        """Push an object, under its own or another name."""
        request = PushObjectRequest(
            node=Node(node_id=self.node),
            run_id=self.run.run_id,
            session_id=session,
            object_id=name or _id(content),
            object_content=content,
        )
        return bool(self.fleet.PushObject(request, None).stored)  # type: ignore[arg-type]


def _id(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _id_bytes(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def record(size: int, fill: int = 0) -> bytes:
    """Return an object as Flower writes it, of some more than `size` bytes."""
    return ConfigRecord({"values": bytes([fill]) * size}).deflate()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    """Return a SuperLink whose replies may have 1,000 bytes more than twice the largest order."""
    monkeypatch.setattr(superlink_limits, "SMALLEST_LIMIT", 1000)
    return Link()


def test_a_sound_reply_is_kept_whole(link: Link) -> None:
    contents = [record(600), record(100, 1)]
    session = link.announce(*contents)
    assert all(link.push(session, content) for content in contents)
    assert [link.store.get(_id(content)) for content in contents] == contents


def test_of_an_object_that_is_too_large_a_note_is_kept(link: Link) -> None:
    content = record(1001)
    session = link.announce(content)
    assert link.push(session, content), "the server is to read the note"
    assert link.store.get(_id(content)) == TOO_LARGE


def test_the_limit_follows_the_orders_and_nothing_that_clients_push(link: Link) -> None:
    for size in (700, 900):
        content = record(size)
        assert link.push(link.announce(content), content)
    assert link.store.largest == 0
    order = record(5000)
    link.store.preregister(1, ObjectTree(object_id=_id(order)))
    link.store.put(_id(order), order)
    small = record(10)
    link.store.preregister(1, ObjectTree(object_id=_id(small)))
    link.store.put(_id(small), small)
    assert link.store.largest == len(order)
    content = record(10_000)
    assert link.push(link.announce(content), content)
    assert link.store.get(_id(content)) == content


def test_nobody_makes_an_object_unreadable_whose_content_it_has_not(link: Link) -> None:
    honest = record(100)
    session = link.announce(honest)
    assert not link.push(session, record(1001), _id(honest))
    assert not link.push(session, TOO_LARGE, _id(honest))
    assert link.push(session, honest)
    assert link.store.get(_id(honest)) == honest


def test_many_objects_have_no_more_than_twice_what_one_may_have(link: Link) -> None:
    contents = [*(record(800, number) for number in range(5)), record(1001)]
    session = link.announce(*contents)
    assert [link.push(session, content) for content in contents] == [True, True, False, False, False, True]
    assert link.store.get(_id(contents[-1])) == TOO_LARGE, "of one that is too large by itself a note is kept as ever"


def test_two_replies_with_an_object_in_common_both_arrive(link: Link) -> None:
    """The second is whole with the first one's object, and is taken while its client still uploads its own."""
    shared, *roots = record(100), record(10, 1), record(10, 2)
    trees = [ObjectTree(object_id=_id(root), children=[ObjectTree(object_id=_id(shared))]) for root in roots]
    sessions = [str(link.push_messages(tree).session_id) for tree in trees]
    assert link.push(sessions[0], shared) and link.push(sessions[0], roots[0]) and link.push(sessions[1], roots[1])
    for root in roots:
        assert link.store.get(_id(shared)) == shared
        link.run.confirm(_id(root))
    assert link.push(sessions[1], shared), "the client would take its connection for lost"
    assert not link.store.store.keys() & {_id(shared), *map(_id, roots)} and link.fleet._replies == {}


def test_an_object_without_an_announcement_is_refused(link: Link) -> None:
    content = record(10)
    link.announce(content)
    assert not link.push("", content)
    assert not link.push("another", content)


def test_a_session_is_forgotten_when_its_reply_is_whole(link: Link) -> None:
    tree = ObjectTree(object_id=_id(record(10)))
    session = str(link.push_messages(tree).session_id)
    assert link.push(session, record(10))
    assert link.fleet._replies == {}


def test_sessions_that_were_given_up_do_not_pile_up(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_servicer, "MOST_REPLIES", 3)
    sessions = [link.announce(record(10, number)) for number in range(5)]
    assert list(link.fleet._replies) == sessions[2:]


def test_of_too_many_objects_as_many_are_kept_as_show_it(link: Link) -> None:
    leaves = [ObjectTree(object_id=_id(bytes([number]))) for number in range(200)]
    for tree in (
        ObjectTree(object_id=_id(b"root"), children=leaves),
        ObjectTree(object_id=_id(b"other"), children=[ObjectTree(object_id=_id(b"inner"), children=leaves)]),
    ):
        link.push_messages(tree)
        kept = link.store.store[tree.object_id].child_object_ids
        assert len(kept) == 64
    assert len(link.store) == 66


def test_objects_that_are_parts_of_each_other_are_walked_once(link: Link) -> None:
    tree = ObjectTree(object_id=_id(b"0"))
    for level in range(1, 17):
        same = ObjectTree(object_id=tree.object_id)
        tree = ObjectTree(object_id=_id(b"%d" % level), children=[tree, same])
    link.push_messages(tree)
    names = [node.object_id for node in iterate_object_tree(link.store.get_object_tree(tree.object_id))]
    assert len(names) == len(set(names)) == 17  # there are 2 ** 16 ways to the innermost


def test_objects_of_several_announcements_are_walked_no_further_than_shows_that_they_are_too_many(link: Link) -> None:
    inner = ObjectTree(object_id=_id(b"inner"), children=[ObjectTree(object_id=_id(bytes([n]))) for n in range(60)])
    link.push_messages(inner)
    leaves = [ObjectTree(object_id=_id(bytes([n]))) for n in range(60, 70)]
    outer = ObjectTree(object_id=_id(b"outer"), children=[ObjectTree(object_id=inner.object_id), *leaves])
    link.push_messages(outer)
    assert len(list(iterate_object_tree(link.store.get_object_tree(outer.object_id)))) == MOST_OBJECTS + 1


def test_a_tree_with_an_object_that_is_gone_is_told_as_flower_tells_it(link: Link) -> None:
    """Flower's handlers take this error for a reply that is not there; any other would end the call."""
    with pytest.raises(NoObjectInStoreError, match=f"object {_id(b'gone')} was not announced"):
        link.store.get_object_tree(_id(b"gone"))


@pytest.mark.parametrize(("said", "waits"), [("3", 3.0), ("1e9", 60.0), ("inf", 60.0), ("-5", 0.0)])
def test_no_call_waits_longer_than_a_minute(
    link: Link, monkeypatch: pytest.MonkeyPatch, said: str, waits: float
) -> None:
    """Each call that waits takes a thread."""
    call: Any = SimpleNamespace(invocation_metadata=lambda: [(WAIT, said)])
    waited = list[float]()
    monkeypatch.setattr(link.state, "wait_for_order", lambda node, seconds, tell: waited.append(seconds))
    link.fleet.PullMessages(PullMessagesRequest(node=Node(node_id=link.node)), call)
    assert waited == [waits]


def test_a_reply_to_no_order_leaves_nothing(link: Link) -> None:
    before = len(link.store)
    assert link.push_messages(ObjectTree(object_id=_id(b"root")), order=_id(b"none")).session_id
    assert link.state._object_push_sessions == {}
    assert len(link.store) == before


@pytest.mark.parametrize("text", ["0", "2048", "-1", "1.5", "many"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERBLOOM_MESSAGE_MIB", text)
    with pytest.raises(ConfigError, match="HYPERBLOOM_MESSAGE_MIB: expected MiB from 1 to 2047, found"):
        largest_message()


def test_the_limits_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPERBLOOM_MESSAGE_MIB", raising=False)
    assert largest_message() == 512 * 2**20
    assert reply_limit(10) == 16 * 2**20 + 20
    monkeypatch.setenv("HYPERBLOOM_MESSAGE_MIB", "7")
    assert largest_message() == 7 * 2**20


def test_an_order_has_its_own_parts_whatever_a_client_has_announced(link: Link) -> None:
    """All greetings have equal objects, so a client knows their ids, and could announce them with other parts."""
    content = RecordDict({"hyperbloom": ConfigRecord({"values": b"a greeting"})})
    tree = get_object_tree(Message(content, link.node, "train"))
    (record_tree,) = tree.children
    bogus = ObjectTree(object_id=_id(b"never uploaded"))
    wrong = ObjectTree(object_id=record_tree.object_id, children=[bogus])
    link.push_messages(ObjectTree(object_id=_id(b"reply"), children=[wrong]))
    message = Message(content, link.node, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    (name,) = link.run.send([message])
    found = link.store.get_object_tree(name)
    parts = {node.object_id for node in iterate_object_tree(found)}
    assert parts == {name, record_tree.object_id, *(child.object_id for child in record_tree.children)}
    assert all(link.store.get(part) for part in parts)
    link.store.delete(_id(b"reply"))
    assert all(link.store.get(part) for part in parts), "the reply's end takes nothing from the order"
    assert bogus.object_id not in link.store
    link.store.delete(name)
    assert not parts & set(link.store.store)


@pytest.mark.parametrize("how", ["another root", "a leaf that has parts further on", "a circle"])
def test_nothing_of_a_reply_stays_whatever_its_tree_says(link: Link, how: str) -> None:
    one, two, reply = record(300), record(301), _id(b"the reply")
    leaf, node = ObjectTree(object_id=_id(one)), ObjectTree(object_id=_id(one))
    node.children.append(ObjectTree(object_id=_id(two)))
    tree = {
        "another root": node,
        "a leaf that has parts further on": ObjectTree(object_id=reply, children=[leaf, node]),
        "a circle": ObjectTree(object_id=reply, children=[node, ObjectTree(object_id=reply, children=[leaf])]),
    }[how]
    order = link.order()
    said = link.push_messages(tree, order, reply)
    for content in (one, two):
        link.push(said.session_id, content)
    assert link.store.get(_id(two)) == two
    link.run.replies({order})
    link.run.confirm(reply)
    link.store.delete(reply)
    assert not {_id(one), _id(two), reply} & set(link.store.store)


def test_an_enclosed_object_that_a_tree_names_twice_breaks_no_call(link: Link) -> None:
    part, root = record(600), _id(b"root")
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=_id(part)), ObjectTree(object_id=_id(part))])
    about = {"message_id": root, "reply_to_message_id": link.order(), "message_type": "train"}
    ends = {"run_id": link.run.run_id, "src_node_id": link.node, "dst_node_id": 1}
    metadata = Metadata(**about, **ends, created_at=time.time(), ttl=10)
    message = ProtoMessage(metadata=metadata, content=ProtoRecordDict())
    enclose(message, [(_id(part), part)])
    told = {"node": Node(node_id=link.node), "messages_list": [message], "message_object_trees": [tree]}
    answer = link.fleet.PushMessages(PushMessagesRequest(**told), None)
    assert root in answer.objects_to_push


def test_a_reply_in_the_name_of_its_order_brings_no_objects(link: Link) -> None:
    """The store knows the order, so nothing would hang on this reply, and nobody would delete it."""
    message = Message(RecordDict(), link.node, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    (order,), part = link.run.send([message]), record(300)
    said = link.push_messages(ObjectTree(object_id=order, children=[ObjectTree(object_id=_id(part))]), order)
    assert not link.push(said.session_id, part)
    assert link.run.replies({order}) == [] and len(link.store) == 0


def test_a_reply_to_an_order_that_is_forgotten_is_deleted(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a client that moved, announced before the next look at what is still asked."""
    order, part = link.order(), record(300)
    tree = ObjectTree(object_id=_id(b"reply"), children=[ObjectTree(object_id=_id(part))])
    assert link.push(link.push_messages(tree, order).session_id, part) and _id(part) in link.store
    monkeypatch.setattr(superlink_hosted, "LOOK_EVERY_S", 0)
    link.run.replies({link.order()})
    assert len(link.store) == 0
