"""The door of the SuperLink, over Flower's own state: who gets in, and that nobody else is read."""

import datetime as dt
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.superlink.federation import NoOpFederationManager

from hyperbloom.common.enclosed import PROCESS, TAKEN
from hyperbloom.common.secrecy import token
from hyperbloom.common.secrecy.keys import fingerprint, make_key, public_pem, sign
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker import door as superlink_door
from hyperbloom.server.broker.door import UPLOAD, Door, Keys
from hyperbloom.server.broker.limits import MOST_WORDS
from hyperbloom.server.broker.port import PATIENCE, Connections

IN_MEMORY = ":flwr-in-memory:"
ANY, UNKNOWN = "/flwr.proto.Fleet/Any", "/flwr.proto.Fleet/Unknown"
DENIED, UNAUTHENTICATED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
Key = ec.EllipticCurvePrivateKey


class Aborted(Exception):
    """What a call ends with: the status, and what the client hears."""


class Context:
    """A call as gRPC describes it to a servicer."""

    def __init__(self, port: int = 5) -> None:
        self.cancelled, self.port = False, port

    def peer(self) -> str:
        """Return where it came from."""
        return f"ipv4:10.0.0.9:{self.port}"

    def cancel(self) -> None:
        """Note that it was."""
        self.cancelled = True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Say that the caller has gone, so that nobody waits for it."""
        return False

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call."""
        raise Aborted(code, details)


class Messages:
    """What a caller sends, and whether somebody has read it."""

    def __init__(self, *contents: bytes) -> None:
        self.left = list(contents)
        self.were_read = False

    def __next__(self) -> bytes:
        self.were_read = True
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def metadata(key: Key, time: dt.datetime | None = None) -> list[tuple[str, str | bytes]]:
    """Return how a client shows its key."""
    stamp = (time or dt.datetime.now(dt.UTC)).isoformat()
    signature = sign_message(key, stamp.encode())
    return [
        (PUBLIC_KEY_HEADER, public_pem(key).encode()),
        (TIMESTAMP_HEADER, stamp),
        (SIGNATURE_HEADER, signature),
    ]


class House:
    """A SuperLink's state, its door, and a registry file in `folder`."""

    def __init__(self, folder: Path, is_open: bool = False) -> None:
        factory = LinkStateFactory(IN_MEMORY, NoOpFederationManager(), ObjectStoreFactory())
        self.registry = ClientRegistry(folder / "clients.json")
        self.state = factory.state()
        self.keys = Keys(self.state, [self.registry])
        self.connections = Connections()
        self.invitations = Invitations(Certificates(folder))
        keys = None if is_open else self.keys
        self.door = Door(factory, keys, self.connections, "SHA256:here", self.invitations)

    def add(self, name: str) -> Key:
        """Return the key of a client that is added to the file now."""
        key = make_key()
        self.registry.add(name, public_pem(key))
        self.keys.follow()
        return key

    def call(self, request: Any, key: Key, time: dt.datetime | None = None) -> Any:
        """Let the client with this key call; returns the answer."""
        messages = Messages(request.SerializeToString())
        try:
            return self.send(messages, metadata(key, time), type(request))
        except Aborted as aborted:
            known = self.state.get_node_id_by_public_key(public_pem(key).encode()) is not None
            in_time = "Invalid timestamp" not in aborted.args[1]
            assert messages.were_read == (known and in_time)
            raise

    def send(
        self, messages: Messages, shown: Any, kind: Any = PullMessagesRequest, method: str = ANY, context: Any = None
    ) -> Any:
        """Call with any messages and metadata."""
        served = grpc.unary_unary_rpc_method_handler(
            self._answer, request_deserializer=kind.FromString, response_serializer=lambda answer: answer
        )
        details = SimpleNamespace(method=method, invocation_metadata=shown)
        handler = self.door.intercept_service(lambda _: None if method == UNKNOWN else served, details)
        assert handler.request_streaming and not handler.response_streaming  # or gRPC would read by itself
        return handler.stream_unary(messages, context or Context())

    def _answer(self, request: Any, context: Any) -> Any:
        """Answer as Flower's handlers would."""
        if isinstance(request, ActivateNodeRequest):
            node = self.state.get_node_id_by_public_key(request.public_key)
            assert node is not None and self.state.activate_node(node, request.heartbeat_interval)
            return ActivateNodeResponse(node_id=node)
        return "answer"

    def activate(self, key: Key, whose: Key | None = None) -> int:
        """Let a client come in; returns its node."""
        public = public_pem(whose or key).encode()
        return int(self.call(ActivateNodeRequest(public_key=public, heartbeat_interval=30), key).node_id)

    def names(self) -> dict[str, str]:
        """Return the state of every node by the name that the server sees."""
        return {node.name: node.status for node in self.state.get_node_info()}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def pull(node: int) -> PullMessagesRequest:
    """Return a node's poll."""
    return PullMessagesRequest(node=Node(node_id=node))


def reply(node: int, *senders: int) -> PushMessagesRequest:
    """Return replies that a node pushes, in the names of senders."""
    messages = [Message(metadata=Metadata(src_node_id=sender, message_id="m")) for sender in senders]
    trees = [ObjectTree(object_id="m") for _ in senders]
    return PushMessagesRequest(node=Node(node_id=node), messages_list=messages, message_object_trees=trees)


def test_a_key_in_the_file_comes_in_under_its_name(house: House) -> None:
    key = house.add("ward-7")
    node = house.activate(key)
    assert house.call(pull(node), key) == "answer"
    assert house.call(reply(node, node), key) == "answer"
    assert house.names() == {"ward-7": "online"}


def test_a_key_that_is_not_in_the_file_is_refused_and_named_on_both_sides(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = make_key()
    shown = fingerprint(public_pem(stranger))
    with pytest.raises(Aborted) as caught:
        house.activate(stranger)
    assert caught.value.args == (DENIED, f"key {shown} is unknown or revoked")
    assert caplog.messages == [f"refused 10.0.0.9: its key {shown} is unknown or revoked"]


def test_the_file_is_followed_without_being_asked(house: House) -> None:
    key = make_key()
    house.registry.add("ward-7", public_pem(key))
    node = house.activate(key)  # nobody called `follow`
    house.registry.revoke("ward-7")
    with pytest.raises(Aborted) as caught:
        house.call(pull(node), key)
    assert caught.value.args[0] == DENIED


def test_a_revoked_client_is_gone_and_stays_away(house: House, caplog: pytest.LogCaptureFixture) -> None:
    key, other = house.add("ward-7"), house.add("ward-8")
    node, neighbour = house.activate(key), house.activate(other)
    house.registry.revoke("ward-7")
    house.keys.follow()
    assert house.names() == {"ward-7": "unregistered", "ward-8": "online"}
    shown = fingerprint(public_pem(key))
    assert f"ward-7 may not join any more: its key {shown} was revoked or replaced" in caplog.messages
    for act in (lambda: house.activate(key), lambda: house.call(pull(node), key)):
        with pytest.raises(Aborted) as caught:
            act()
        assert caught.value.args == (DENIED, f"key {shown} is unknown or revoked")
    assert house.call(pull(neighbour), other) == "answer"


@pytest.mark.parametrize("kind", [PullMessagesRequest, ActivateNodeRequest])
def test_a_client_that_is_revoked_while_its_message_comes_is_refused(house: House, kind: Any) -> None:
    key = house.add("ward-7")
    node, public = house.activate(key), public_pem(key)
    asked = pull(node) if kind is PullMessagesRequest else kind(public_key=public.encode(), heartbeat_interval=30)

    class Late(Messages):
        """A message that takes so long that its sender's key is revoked before it is there."""

        def __next__(self) -> bytes:
            house.registry.revoke("ward-7")
            house.keys.follow()
            return super().__next__()

    with pytest.raises(Aborted) as caught:
        house.send(Late(asked.SerializeToString()), metadata(key), kind)
    assert caught.value.args == (DENIED, f"key {fingerprint(public)} is unknown or revoked")
    assert house.names() == {"ward-7": "unregistered"}


def test_a_client_that_never_came_can_be_revoked(house: House) -> None:
    key = house.add("ward-7")
    house.registry.revoke("ward-7")
    house.keys.follow()
    with pytest.raises(Aborted):
        house.activate(key)


def test_a_replaced_key_is_out_and_the_new_one_is_in_under_the_same_name(house: House) -> None:
    old, new = house.add("ward-7"), make_key()
    house.activate(old)
    house.registry.add("ward-7", public_pem(new), replace=True)
    node = house.activate(new)
    assert house.call(pull(node), new) == "answer"
    with pytest.raises(Aborted):
        house.activate(old)


def test_a_damaged_file_changes_nothing_and_is_told_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    key = house.add("ward-7")
    node = house.activate(key)
    good = house.registry.path.read_bytes()
    house.registry.path.write_text("{")
    for _ in range(3):
        assert house.call(pull(node), key) == "answer"
    said = caplog.text
    assert said.count("found it damaged") == said.count("who may join stays as it was") == 1
    house.registry.path.write_bytes(good)
    assert house.activate(house.add("ward-8"))


def test_a_folder_that_cannot_be_read_for_a_moment_changes_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = house.add("ward-7")
    node = house.activate(key)

    def unreachable(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(superlink_door, "file_state", unreachable)
        assert house.call(pull(node), key) == "answer"
    assert "the list of clients cannot be read (Permission denied); who may join stays as it was" in caplog.text
    assert house.activate(house.add("ward-8"))


def test_a_revocation_that_could_not_be_read_at_first_is_applied(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as when no file is free."""
    key = house.add("ward-7")
    node = house.activate(key)
    house.registry.revoke("ward-7")

    def fail(path: Path) -> bytes:
        raise OSError(24, "Too many open files", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        for _ in range(2):
            assert house.call(pull(node), key) == "answer"
    assert caplog.text.count("who may join stays as it was") == 1
    with pytest.raises(Aborted):
        house.call(pull(node), key)


def test_a_file_that_vanishes_lets_nobody_in(house: House) -> None:
    key = house.add("ward-7")
    house.registry.path.unlink()
    with pytest.raises(Aborted):
        house.activate(key)


def test_a_key_that_comes_back_by_hand_is_told_and_not_taken(house: House, caplog: pytest.LogCaptureFixture) -> None:
    key = house.add("ward-7")
    house.activate(key)
    before = house.registry.path.read_bytes()
    house.registry.revoke("ward-7")
    house.keys.follow()
    house.registry.path.write_bytes(before)
    with pytest.raises(Aborted):
        house.activate(key)
    assert "ward-7 needs a new key, or a new start of the server" in caplog.text


def test_two_files_count_together(house: House, tmp_path: Path) -> None:
    local = ClientRegistry(tmp_path / "local.json")
    keys = Keys(house.state, [house.registry, local])
    local.add("client-0", public_pem(make_key()))
    house.registry.add("ward-7", public_pem(make_key()))
    keys.follow()
    assert set(house.names()) == {"ward-7", "client-0"}


def test_a_key_opens_its_own_node_only(house: House, caplog: pytest.LogCaptureFixture) -> None:
    key, victim = house.add("ward-7"), house.add("ward-8")
    with pytest.raises(Aborted) as caught:
        house.activate(key, whose=victim)
    assert caught.value.args == (DENIED, "this is another client's public key")
    assert "refused 10.0.0.9: it asked to be another client" in caplog.messages
    assert house.names()["ward-8"] == "registered"
    node = house.activate(victim)
    with pytest.raises(Aborted) as caught:
        house.call(pull(node), key)
    assert caught.value.args == (UNAUTHENTICATED, "Invalid node ID")


def test_a_reply_is_its_senders_own(house: House) -> None:
    key, victim = house.add("ward-7"), house.add("ward-8")
    node, other = house.activate(key), house.activate(victim)
    for senders in ((other,), (node, other)):
        with pytest.raises(Aborted) as caught:
            house.call(reply(node, *senders), key)
        assert caught.value.args == (DENIED, "a reply in another client's name")


def test_a_reply_brings_a_tree_of_its_objects(house: House) -> None:
    """Flower would open a session for the first, fail at the second, and keep the session."""
    key = house.add("ward-7")
    node = house.activate(key)
    for trees in (0, 2):
        request = reply(node, node)
        del request.message_object_trees[:]
        request.message_object_trees.extend([ObjectTree(object_id="m")] * trees)
        with pytest.raises(Aborted) as caught:
            house.call(request, key)
        assert caught.value.args == (grpc.StatusCode.INVALID_ARGUMENT, "expected a tree of objects for each reply")


def test_a_new_node_registers_the_key_that_signs(tmp_path: Path) -> None:
    """The server keeps the bytes that a node gives as its key, so any others would fill its memory."""
    house, key = House(tmp_path, is_open=True), make_key()
    own = public_pem(key).encode()
    shown = metadata(key)
    sent = RegisterNodeFleetRequest(public_key=own).SerializeToString()
    assert house.send(Messages(sent), shown, RegisterNodeFleetRequest) == "answer"
    for other in (public_pem(make_key()).encode(), own + b" " * 1_000_000):
        sent = RegisterNodeFleetRequest(public_key=other).SerializeToString()
        with pytest.raises(Aborted) as caught:
            house.send(Messages(sent), shown, RegisterNodeFleetRequest)
        assert caught.value.args == (DENIED, "this is another client's public key")


def test_who_comes_back_with_its_key_after_a_crash_comes_in_at_once(house: House) -> None:
    key = house.add("ward-7")
    first = house.activate(key)
    before = house.state.get_node_info()[0].last_activated_at
    assert house.activate(key) == first  # Flower alone would refuse it for a minute
    assert house.state.get_node_info()[0].last_activated_at > before


def test_a_key_is_one_processs_at_a_time(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    key, node, standing = house.add("ward-7"), house.activate(house.add("other")), {"ipv4:10.0.0.9:1"}
    node = house.activate(key)
    monkeypatch.setattr(house.connections, "is_open", standing.__contains__)

    def poll(process: str, port: int) -> Any:
        shown = [*metadata(key), (PROCESS, process)]
        return house.send(Messages(pull(node).SerializeToString()), shown, context=Context(port))

    assert poll("first", 1) == "answer"
    with pytest.raises(Aborted) as caught:
        poll("second", 2)
    assert caught.value.args == (grpc.StatusCode.ABORTED, TAKEN)
    assert poll("first", 3) == "answer"  # it has a new connection
    assert poll("second", 2) == "answer"  # that one is lost
    standing.add("ipv4:10.0.0.9:2")
    with pytest.raises(Aborted):
        poll("first", 3)
    monkeypatch.setattr(superlink_door, "GONE_S", 0.0)  # its machine has lost its power
    assert poll("first", 3) == "answer"
    assert house.call(pull(node), key) == "answer"  # a stock SuperNode does not say which process it is


def enrol(house: House, key: Key, shown: str, signer: Key | None = None) -> Any:
    """Let the owner of a key call with a token; `signer` signs in its place."""
    public, *signed = metadata(key)
    signed = metadata(signer)[1:] if signer else signed
    return house.send(Messages(), [public, *signed, (token.HEADER, shown)])


def refuse_to_write(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_token_lets_a_key_in_that_has_signed_and_no_other(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(house.registry.path.parent, [])
    secret, key, neighbour = house.invitations.invite("ward-7", 1, 60).secret, make_key(), house.add("ward-8")
    refusals = {
        f"{secret} ward-9": "its token is for a client of another name",
        f"{secret} ../a": "its name: expected 1 to 64 letters",
        secret: "its name: expected 1 to 64 letters",
        "guessed ward-7": "its token is unknown",
    }
    for shown, why in refusals.items():
        with pytest.raises(Aborted) as caught:
            enrol(house, key, shown)
        assert caught.value.args[0] == DENIED and caught.value.args[1].startswith(f"{token.REFUSED}{why}")
    with pytest.raises(Aborted, match="Invalid signature"):  # whoever overhears a token has not the key
        enrol(house, key, f"{secret} ward-7", signer=make_key())
    public, *signed = metadata(key)
    odd = [(public[0], public_pem(key).encode() + b"\xff"), *signed]  # the key all the same, but no text
    with pytest.raises(Aborted, match=token.REFUSED):
        house.send(Messages(), [*odd, (token.HEADER, f"{secret} ward-7")])
    assert set(house.names()) == {"ward-8"}
    with (
        monkeypatch.context() as patch,
        pytest.raises(Aborted, match="the server cannot write down who enrols") as full,
    ):
        patch.setattr(os, "fsync", refuse_to_write)
        enrol(house, key, f"{secret} ward-7")
    assert full.value.args[0] == grpc.StatusCode.UNAVAILABLE  # it may try again
    assert any(line.endswith("ward-7 cannot enrol: [Errno 28] No space left on device") for line in caplog.messages)
    with pytest.raises(Aborted, match="expected a message"):  # it is in, and has said nothing
        enrol(house, key, f"{secret} ward-7")
    assert f"ward-7 has enrolled with a token; its key is {fingerprint(public_pem(key))}" in caplog.messages
    assert set(house.names()) == {"ward-7", "ward-8"}
    node = house.activate(key)
    with pytest.raises(Aborted, match="its token was used before"):
        enrol(house, make_key(), f"{secret} ward-7")
    for known in (key, neighbour):  # who is known shows it in vain
        with pytest.raises(Aborted, match="expected a message"):
            enrol(house, known, f"{secret} ward-7")
    assert house.call(pull(node), key) == "answer"


def test_a_signature_counts_at_the_server_for_which_it_was_made(house: House) -> None:
    """A server that lies shows a call that it got, at another server that knows the same key."""
    key = house.add("a")
    pull_once = pull(house.activate(key)).SerializeToString()
    (name, public), (_, stamp), _ = metadata(key)
    for server, gets_in in (("SHA256:here", True), ("", True), ("SHA256:elsewhere", False)):  # none: a stock SuperNode
        signature = sign(key, f"{stamp}{server}".encode())
        shown = [(name, public), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature)]
        if gets_in:
            assert house.send(Messages(pull_once), shown) == "answer"
        else:
            with pytest.raises(Aborted, match="Invalid signature"):
                house.send(Messages(pull_once), shown)


def test_a_time_without_a_zone_is_none(house: House) -> None:
    key, stamp = house.add("ward-7"), dt.datetime.now().isoformat()
    shown = [metadata(key)[0], (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, sign_message(key, stamp.encode()))]
    with pytest.raises(Aborted, match="Invalid signature"):
        house.send(Messages(), shown)


def _two(shown: list[Any], header: str) -> list[Any]:
    return [*shown, *(pair for pair in shown if pair[0] == header)]


def _other(shown: list[Any], header: str, value: str | bytes) -> list[Any]:
    return [(name, value if name == header else old) for name, old in shown]


def _without(shown: list[Any], header: str) -> list[Any]:
    return [pair for pair in shown if pair[0] != header]


def _moved(key: Key, **ahead: float) -> list[Any]:
    return metadata(key, dt.datetime.now(dt.UTC) + dt.timedelta(**ahead))


STRANGERS: dict[str, tuple[Callable[[Key], list[Any]], grpc.StatusCode, str]] = {
    "no metadata": (lambda key: [], UNAUTHENTICATED, "Missing authentication metadata"),
    "no key": (lambda key: _without(metadata(key), PUBLIC_KEY_HEADER), UNAUTHENTICATED, "Missing authentication"),
    "two keys": (lambda key: _two(metadata(key), PUBLIC_KEY_HEADER), UNAUTHENTICATED, "Missing authentication"),
    "an unknown key": (lambda key: metadata(make_key()), DENIED, "is unknown or revoked"),
    "a damaged key": (lambda key: _other(metadata(key), PUBLIC_KEY_HEADER, b"a\nb\nc"), DENIED, "key is damaged"),
    "a key of no text": (lambda key: _other(metadata(key), PUBLIC_KEY_HEADER, b"\xff"), DENIED, "key is damaged"),
    "no signature": (lambda key: _without(metadata(key), SIGNATURE_HEADER), UNAUTHENTICATED, "Missing"),
    "two signatures": (lambda key: _two(metadata(key), SIGNATURE_HEADER), UNAUTHENTICATED, "Missing"),
    "a wrong signature": (
        lambda key: _other(metadata(key), SIGNATURE_HEADER, b"0" * 70),
        UNAUTHENTICATED,
        "Invalid si",
    ),
    "another's signature": (
        lambda key: [metadata(key)[0], *metadata(make_key())[1:]],
        UNAUTHENTICATED,
        "Invalid signature",
    ),
    "no time": (lambda key: _without(metadata(key), TIMESTAMP_HEADER), UNAUTHENTICATED, "Missing"),
    "two times": (lambda key: _two(metadata(key), TIMESTAMP_HEADER), UNAUTHENTICATED, "Missing"),
    "a time that is none": (lambda key: _other(metadata(key), TIMESTAMP_HEADER, "x"), UNAUTHENTICATED, "Invalid si"),
    "an old call": (
        lambda key: _moved(key, seconds=-310),
        UNAUTHENTICATED,
        "Invalid timestamp: the clock is 310 s behind",
    ),
    "a call of the next minute": (
        lambda key: _moved(key, seconds=75),
        UNAUTHENTICATED,
        "Invalid timestamp: the clock is 75 s ahead",
    ),
    "a call of tomorrow": (
        lambda key: _moved(key, days=1),
        UNAUTHENTICATED,
        "Invalid timestamp: the clock is 86400 s ahead",
    ),
}


@pytest.mark.parametrize("method", [ANY, UPLOAD, UNKNOWN])
@pytest.mark.parametrize(("shown", "code", "answer"), STRANGERS.values(), ids=STRANGERS)
def test_a_call_that_no_known_key_has_signed_is_refused_unread(
    house: House, shown: Callable[[Key], list[Any]], code: grpc.StatusCode, answer: str, method: str
) -> None:
    messages, key = Messages(b""), house.add("ward-7")
    with pytest.raises(Aborted) as caught:
        house.send(messages, shown(key), method=method)
    assert caught.value.args[0] == code and answer in caught.value.args[1]
    assert not messages.were_read


def test_clocks_may_differ_by_a_minute(house: House) -> None:
    key = house.add("ward-7")
    node = house.activate(key)
    for seconds in (-250, -55, 55):
        assert house.call(pull(node), key, dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)) == "answer"


def test_who_is_refused_all_the_time_is_told_a_few_times_only(house: House, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(PATIENCE + 20):
        with pytest.raises(Aborted):
            house.send(Messages(), metadata(make_key()))
    lines = caplog.messages
    assert len(lines) == PATIENCE + 1
    assert lines[-1].startswith("10.0.0.9 floods the port with calls that are refused")


def test_an_unknown_method_is_unread_for_members_too(house: House) -> None:
    messages = Messages(b"")
    with pytest.raises(Aborted) as caught:
        house.send(messages, metadata(house.add("ward-7")), method=UNKNOWN)
    assert caught.value.args[0] == grpc.StatusCode.UNIMPLEMENTED
    assert not messages.were_read


def test_only_an_object_may_be_large(house: House) -> None:
    key = house.add("ward-7")
    node = house.activate(key)
    large = PushObjectRequest(node=Node(node_id=node), object_content=bytes(MOST_WORDS)).SerializeToString()
    with pytest.raises(Aborted) as caught:
        house.send(Messages(large), metadata(key))
    assert caught.value.args[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.args[1].startswith(f"expected a message of at most {MOST_WORDS} bytes, found 1048")
    assert house.send(Messages(large), metadata(key), PushObjectRequest, UPLOAD) == "answer"


@pytest.mark.parametrize("messages", [Messages(), Messages(b"\xff")], ids=["none", "nonsense"])
def test_a_call_without_a_message_is_refused(house: House, messages: Messages) -> None:
    with pytest.raises(Aborted) as caught:
        house.send(messages, metadata(house.add("ward-7")))
    assert caught.value.args[0] == grpc.StatusCode.INVALID_ARGUMENT


class Slow(Messages):
    """A message that comes when it may."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.waits, self.comes = threading.Event(), threading.Event()

    def __next__(self) -> bytes:
        self.waits.set()
        assert self.comes.wait(30)
        return super().__next__()


def test_a_member_has_few_messages_under_way_and_they_end_in_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink_door, "MOST_CALLS", 2)
    monkeypatch.setattr(superlink_door, "MOST_UPLOADS", 2)
    key, other = house.add("ward-7"), house.add("ward-8")
    node, neighbour = house.activate(key), house.activate(other)
    slow, contexts = [Slow(pull(node).SerializeToString()) for _ in range(2)], [Context(), Context()]
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(house.send, messages, metadata(key), context=context)
            for messages, context in zip(slow, contexts, strict=True)
        ]
        assert all(messages.waits.wait(30) for messages in slow)
        with pytest.raises(Aborted) as caught:
            house.send(Messages(), metadata(key))
        assert caught.value.args[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert house.call(pull(neighbour), other) == "answer"
        upload = Messages(pull(node).SerializeToString())
        assert house.send(upload, metadata(key), method=UPLOAD) == "answer", "objects have places of their own"
        house.door.cancel_overdue()
        assert not any(context.cancelled for context in contexts)
        monkeypatch.setattr(superlink_door.time, "monotonic", lambda: float("inf"))
        house.door.cancel_overdue()
        assert all(context.cancelled for context in contexts)
        for messages in slow:
            messages.comes.set()
        assert [answer.result() for answer in answers] == ["answer"] * 2
    assert house.call(pull(node), key) == "answer", "its places are free again"
    for context in contexts:
        context.cancelled = False
    house.door.cancel_overdue()
    assert not any(context.cancelled for context in contexts), "what has come is not overdue"
    assert not house.door._reading, "nothing is kept of keys that do not call, of which strangers can make many"


def test_without_a_registry_every_key_is_a_client_of_its_own(tmp_path: Path) -> None:
    house = House(tmp_path, is_open=True)
    key, other = make_key(), make_key()
    nodes = [
        house.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_pem(each).encode(), 0) for each in (key, other)
    ]
    assert house.activate(key) == nodes[0]
    assert house.call(pull(nodes[0]), key) == "answer"
    with pytest.raises(Aborted) as caught:
        house.call(pull(nodes[1]), key)
    assert caught.value.args == (UNAUTHENTICATED, "Invalid node ID")
    with pytest.raises(Aborted) as caught:
        house.call(reply(nodes[0], nodes[1]), key)
    assert caught.value.args == (DENIED, "a reply in another client's name")
    for process in ("first", "second"):
        shown = [*metadata(key), (PROCESS, process)]
        assert house.send(Messages(pull(nodes[0]).SerializeToString()), shown) == "answer"
    assert not house.door._processes, "nothing is kept of keys, of which strangers can make many"
    messages = Messages(b"")
    with pytest.raises(Aborted):
        house.send(messages, _other(metadata(key), SIGNATURE_HEADER, b"0" * 70))
    assert not messages.were_read
