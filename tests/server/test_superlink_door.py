"""The door of the SuperLink: Flower's own state and its own check of signatures, and what we add to them."""

import datetime as dt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.superlink.federation import NoOpFederationManager

from hyperbloom.common.keys import fingerprint, make_key, public_pem
from hyperbloom.server import superlink_child
from hyperbloom.server.registry import ClientRegistry
from hyperbloom.server.superlink_child import Door, Keys
from hyperbloom.server.superlink_limits import Fleet, Store

IN_MEMORY = ":flwr-in-memory:"
DENIED, UNAUTHENTICATED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
Key = ec.EllipticCurvePrivateKey


class Aborted(Exception):
    """What a call ends with: the status, and what the client hears."""


class Context:
    """A call as gRPC describes it to a servicer."""

    def peer(self) -> str:
        """Return where it came from."""
        return "ipv4:10.0.0.9:5"

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call."""
        raise Aborted(code, details)


class Unread:
    """What a stranger sends, which nobody reads."""

    def __next__(self) -> NoReturn:
        raise AssertionError("it was read")


UNREAD = Unread()


class House:
    """A SuperLink's state, its door, and a registry file in `folder`."""

    def __init__(self, folder: Path) -> None:
        factory = LinkStateFactory(IN_MEMORY, NoOpFederationManager(), ObjectStoreFactory())
        self.registry = ClientRegistry(folder / "clients.json")
        self.state = factory.state()
        self.keys = Keys(self.state, [self.registry])
        self.door = Door(factory, self.keys)

    def add(self, name: str) -> Key:
        """Return the key of a client that is added to the file now."""
        key = make_key()
        self.registry.add(name, public_pem(key))
        self.keys.follow()
        return key

    def call(self, request: Any, key: Key, time: dt.datetime | None = None) -> Any:
        """Let the client with this key call; returns the answer."""
        stamp = (time or dt.datetime.now(dt.UTC)).isoformat()
        signature = sign_message(key, stamp.encode())
        headers = [(PUBLIC_KEY_HEADER, public_pem(key).encode()), (TIMESTAMP_HEADER, stamp)]
        details = SimpleNamespace(
            method="/flwr.proto.Fleet/Any", invocation_metadata=[*headers, (SIGNATURE_HEADER, signature)]
        )
        handler = self.door.intercept_service(lambda _: grpc.unary_unary_rpc_method_handler(self._answer), details)
        if handler.stream_unary:
            return handler.stream_unary(UNREAD, Context())
        return handler.unary_unary(request, Context())

    def _answer(self, request: Any, context: Any) -> Any:
        if isinstance(request, ActivateNodeRequest):
            return message_handler.activate_node(request, self.state)
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


def reply(node: int, sender: int) -> PushMessagesRequest:
    """Return a reply that a node pushes."""
    return PushMessagesRequest(
        node=Node(node_id=node), messages_list=[Message(metadata=Metadata(src_node_id=sender, message_id="m"))]
    )


def test_a_key_in_the_file_comes_in_under_its_name(house: House) -> None:
    key = house.add("ward-7")
    node = house.activate(key)
    assert house.call(pull(node), key) == "answer"
    assert house.call(reply(node, node), key) == "answer"
    assert house.names() == {"ward-7": "online"}


def test_a_key_that_is_not_in_the_file_is_refused_and_named_on_both_sides(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = make_key()
    shown = fingerprint(public_pem(stranger))
    with pytest.raises(Aborted) as caught:
        house.activate(stranger)
    assert caught.value.args == (DENIED, f"key {shown} is unknown or revoked")
    assert capsys.readouterr().err == f"door: refused ipv4:10.0.0.9:5: its key {shown} is unknown or revoked\n"


def test_a_key_that_is_none_is_refused(house: House) -> None:
    details = SimpleNamespace(method="/flwr.proto.Fleet/Any", invocation_metadata=[(PUBLIC_KEY_HEADER, b"a\nb\nc")])
    handler = house.door.intercept_service(lambda _: None, details)  # type: ignore[arg-type, return-value]
    with pytest.raises(Aborted) as caught:
        handler.stream_unary(UNREAD, Context())
    assert caught.value.args == (DENIED, "key is damaged")


def test_the_file_is_followed_without_being_asked(house: House) -> None:
    key = make_key()
    house.registry.add("ward-7", public_pem(key))
    node = house.activate(key)  # nobody called `follow`
    house.registry.revoke("ward-7")
    with pytest.raises(Aborted) as caught:
        house.call(pull(node), key)
    assert caught.value.args[0] == DENIED


def test_a_revoked_client_is_gone_and_stays_away(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    key, other = house.add("ward-7"), house.add("ward-8")
    node, neighbour = house.activate(key), house.activate(other)
    house.registry.revoke("ward-7")
    house.keys.follow()
    assert house.names() == {"ward-7": "unregistered", "ward-8": "online"}
    shown = fingerprint(public_pem(key))
    assert f"door: ward-7 may not join any more: its key {shown} was revoked or replaced\n" in capsys.readouterr().err
    for act in (lambda: house.activate(key), lambda: house.call(pull(node), key)):
        with pytest.raises(Aborted) as caught:
            act()
        assert caught.value.args == (DENIED, f"key {shown} is unknown or revoked")
    assert house.call(pull(neighbour), other) == "answer"


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


def test_a_damaged_file_changes_nothing_and_is_told_once(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    key = house.add("ward-7")
    node = house.activate(key)
    good = house.registry.path.read_bytes()
    house.registry.path.write_text("{")
    for _ in range(3):
        assert house.call(pull(node), key) == "answer"
    said = capsys.readouterr().err
    assert said.count("found it damaged") == said.count("who may join stays as it was") == 1
    house.registry.path.write_bytes(good)
    assert house.activate(house.add("ward-8"))


def test_a_file_that_vanishes_lets_nobody_in(house: House) -> None:
    key = house.add("ward-7")
    house.registry.path.unlink()
    with pytest.raises(Aborted):
        house.activate(key)


def test_a_key_that_comes_back_by_hand_is_told_and_not_taken(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    key = house.add("ward-7")
    house.activate(key)
    before = house.registry.path.read_bytes()
    house.registry.revoke("ward-7")
    house.keys.follow()
    house.registry.path.write_bytes(before)
    with pytest.raises(Aborted):
        house.activate(key)
    assert "ward-7 needs a new key, or a new start of the server" in capsys.readouterr().err


def test_two_files_count_together(house: House, tmp_path: Path) -> None:
    local = ClientRegistry(tmp_path / "local.json")
    keys = Keys(house.state, [house.registry, local])
    local.add("client-0", public_pem(make_key()))
    house.registry.add("ward-7", public_pem(make_key()))
    keys.follow()
    assert set(house.names()) == {"ward-7", "client-0"}


def test_a_key_opens_its_own_node_only(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    key, victim = house.add("ward-7"), house.add("ward-8")
    with pytest.raises(Aborted) as caught:
        house.activate(key, whose=victim)
    assert caught.value.args == (DENIED, "this is another client's public key")
    assert "refused ipv4:10.0.0.9:5: it asked to be another client" in capsys.readouterr().err
    assert house.names()["ward-8"] == "registered"
    node = house.activate(victim)
    with pytest.raises(Aborted) as caught:
        house.call(pull(node), key)
    assert caught.value.args == (UNAUTHENTICATED, "Invalid node ID")


def test_a_reply_is_its_senders_own(house: House) -> None:
    key, victim = house.add("ward-7"), house.add("ward-8")
    node, other = house.activate(key), house.activate(victim)
    with pytest.raises(Aborted) as caught:
        house.call(reply(node, other), key)
    assert caught.value.args == (DENIED, "a reply in another client's name")


def test_who_comes_back_with_its_key_after_a_crash_comes_in_at_once(house: House) -> None:
    key = house.add("ward-7")
    first = house.activate(key)
    before = house.state.get_node_info()[0].last_activated_at
    assert house.activate(key) == first  # Flower alone would refuse it for a minute
    assert house.state.get_node_info()[0].last_activated_at > before


def test_flowers_own_checks_stand(house: House) -> None:
    key = house.add("ward-7")
    with pytest.raises(Aborted, match="Invalid timestamp"):
        house.call(pull(1), key, dt.datetime.now(dt.UTC) - dt.timedelta(hours=1))


def test_the_child_puts_the_door_where_flower_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = SimpleNamespace(NodeAuthServerInterceptor=None, flower_superlink=lambda: None)
    monkeypatch.setattr(superlink_child.object_store_factory, "InMemoryObjectStore", None)
    real = superlink_child.importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert {"FleetServicer", "GRPC_MAX_MESSAGE_LENGTH"} <= vars(real).keys()
    assert real.NodeAuthServerInterceptor is superlink_child.NodeAuthServerInterceptor
    monkeypatch.setattr(superlink_child.importlib, "import_module", lambda name: program)
    monkeypatch.setattr(superlink_child, "start_parent_process_monitor", lambda pid: None)
    monkeypatch.setattr(superlink_child.sys, "argv", [])
    superlink_child.main(["1", "", "--insecure"])
    assert (program.NodeAuthServerInterceptor, superlink_child.sys.argv) == (None, ["flower-superlink", "--insecure"])
    assert (program.FleetServicer, program.GRPC_MAX_MESSAGE_LENGTH) == (Fleet, 512 * 2**20)
    assert isinstance(ObjectStoreFactory().store(), Store)
    registry = ClientRegistry(tmp_path / "clients.json")
    registry.add("ward-7", public_pem(make_key()))
    superlink_child.main(["1", f"{registry.path}\n{tmp_path / 'other.json'}", "--enable-supernode-auth"])
    factory = LinkStateFactory(IN_MEMORY, NoOpFederationManager(), ObjectStoreFactory())
    assert isinstance(program.NodeAuthServerInterceptor(factory), Door)  # type: ignore[misc]
    assert [node.name for node in factory.state().get_node_info()] == ["ward-7"]  # before the port opens
