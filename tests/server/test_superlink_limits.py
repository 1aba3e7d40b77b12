"""What the SuperLink keeps of what clients push: Flower's own state and handlers, and our limits around them."""

import hashlib
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from flwr.app import ConfigRecord
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from hyperbloom.common.errors import ConfigError
from hyperbloom.server.broker import limits as superlink_limits
from hyperbloom.server.broker.limits import MOST_OBJECTS, TOO_LARGE, Fleet, Store, largest_message, reply_limit


class Aborted(Exception):
    """What a call ends with."""


class Context:
    """A call."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End it."""
        raise Aborted(code)


class State:
    """Stands in for Flower's: one session, in which whatever was announced is pending."""

    def __init__(self, store: Store) -> None:
        self.store, self.trees = store, []  # type: ignore[var-annotated]

    def start_session(self, run_id: int) -> str:
        return f"session-{len(self.trees)}"

    def store_message_and_object_tree(self, message: Any, tree: ObjectTree, session_id: str) -> tuple[bool, list[str]]:
        self.trees.append(tree)
        return True, self.store.preregister(1, tree)

    def store_object(self, run_id: int, session_id: str, object_id: str, content: bytes) -> bool:
        try:
            self.store.put(object_id, content)
        except ValueError:
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Link:
    """Our servicer over that state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        self.state = State(self.store)
        monkeypatch.setattr(message_handler, "check_abort", lambda *args: None)
        monkeypatch.setattr(message_handler, "message_from_proto", lambda message_proto: _MESSAGE)
        self.fleet = Fleet(SimpleNamespace(state=lambda: self.state), SimpleNamespace(store=lambda: self.store), False)

    def announce(self, *contents: bytes) -> str:
        """Announce a reply of these objects; returns its session."""
        root = _id(b"root" + b"".join(map(_id_bytes, contents)))
        tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=_id(each)) for each in contents])
        return str(self.push_messages(tree).session_id)

    def push_messages(self, tree: ObjectTree) -> Any:
        """Announce a tree."""
        message = ProtoMessage()
        request = PushMessagesRequest(node=Node(node_id=7), messages_list=[message], message_object_trees=[tree])
        return self.fleet.PushMessages(request, Context())  # type: ignore[arg-type]

    def push(self, session: str, content: bytes, name: str = "") -> bool:
        """Push an object, under its own or another name."""
        request = PushObjectRequest(
            node=Node(node_id=7), session_id=session, object_id=name or _id(content), object_content=content
        )
        return bool(self.fleet.PushObject(request, Context()).stored)  # type: ignore[arg-type]


_MESSAGE = SimpleNamespace(metadata=SimpleNamespace(run_id=1, message_id="m"))


def _id(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _id_bytes(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def record(size: int, fill: int = 0) -> bytes:
    """Return an object as Flower writes it, of some more than `size` bytes."""
    return ConfigRecord({"values": bytes([fill]) * size}).deflate()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    """Return a SuperLink where a reply may have 1000 bytes, and twice those of the largest order beside."""
    monkeypatch.setattr(superlink_limits, "SMALLEST_LIMIT", 1000)
    return Link(monkeypatch)


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
    contents = [record(800, number) for number in range(5)]
    session = link.announce(*contents)
    assert [link.push(session, content) for content in contents] == [True, True, False, False, False]


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
    monkeypatch.setattr(superlink_limits, "MOST_REPLIES", 3)
    sessions = [link.announce(record(10, number)) for number in range(5)]
    assert list(link.fleet._replies) == sessions[2:]


def test_of_too_many_objects_as_many_are_kept_as_show_it(link: Link) -> None:
    leaves = [ObjectTree(object_id=_id(bytes([number]))) for number in range(200)]
    for tree in (
        ObjectTree(object_id=_id(b"root"), children=leaves),
        ObjectTree(object_id=_id(b"other"), children=[ObjectTree(object_id=_id(b"inner"), children=leaves)]),
    ):
        link.push_messages(tree)
        kept = link.state.trees[-1]
        assert (kept.object_id, len(kept.children)) == (tree.object_id, 64)
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


def test_a_reply_to_no_order_leaves_nothing(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    state = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()).state()
    monkeypatch.setattr(state, "store_message_and_object_tree", lambda *args: (False, []))
    monkeypatch.setattr(state, "store_traffic", lambda *args, **kwargs: None)
    monkeypatch.setattr(link, "state", state)
    assert link.push_messages(ObjectTree(object_id=_id(b"root"))).session_id
    assert state._object_push_sessions == {}  # type: ignore[attr-defined]


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
