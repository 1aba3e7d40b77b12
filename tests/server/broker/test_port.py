"""The Fleet port over real gRPC: what strangers can hold open, and for how long."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetServicer, FleetStub
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.superlink.federation import NoOpFederationManager

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.common.secrecy.keys import make_key, public_pem
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker import door as superlink_door
from hyperbloom.server.broker import port as superlink_port
from hyperbloom.server.broker.door import Door, Keys
from hyperbloom.server.broker.port import MOST_FILES, MOST_HELD, PATIENCE, SLOW_BYTES, Connections, _peer, fleet_server
from hyperbloom.server.broker.superlink import free_port

pytestmark = pytest.mark.timeout(60)

PULL = "/flwr.proto.Fleet/PullMessages"
SECONDS = 30.0  # that a call of a test may take: an answer that takes so long has not come


class Answers(FleetServicer):  # type: ignore[misc]
    """Answers polls and takes objects."""

    def PullMessages(self, request: Any, context: Any) -> PullMessagesResponse:
        """Have no message."""
        return PullMessagesResponse()

    def PushObject(self, request: Any, context: Any) -> PushObjectResponse:
        """Take it."""
        return PushObjectResponse(stored=True)


class Signed(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Signs the time of each call, as Flower's own clients do."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self.key, self.public = key, public_pem(key).encode()

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        stamp = now().isoformat()
        signature = sign_message(self.key, stamp.encode("ascii"))
        shown = ((PUBLIC_KEY_HEADER, self.public), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature))
        return continuation(details._replace(metadata=[*(details.metadata or ()), *shown]), request)


class Port:
    """A server with one member."""

    def __init__(self, folder: Path) -> None:
        factory = LinkStateFactory(":flwr-in-memory:", NoOpFederationManager(), ObjectStoreFactory())
        registry, self.key = ClientRegistry(folder / "clients.json"), make_key()
        registry.add("ward-7", public_pem(self.key))
        keys = Keys(factory.state(), [registry])
        keys.follow()
        self.connections = Connections()
        self.door = Door(factory, keys, self.connections)
        self.node = Node(node_id=factory.state().get_node_id_by_public_key(public_pem(self.key).encode()))
        self.address = f"127.0.0.1:{free_port()}"
        self.server = fleet_server(Answers(), self.address, None, [self.door], self.connections)
        self.server.start()
        self._channels: list[grpc.Channel] = []

    def channel(self, key: ec.EllipticCurvePrivateKey | None = None) -> grpc.Channel:
        """Return a connection of its own, which signs its calls if it has a key."""
        plain = grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])
        self._channels.append(plain)
        return grpc.intercept_channel(plain, Signed(key)) if key else plain

    def member(self) -> FleetStub:
        """Return a new connection of the member."""
        return FleetStub(self.channel(self.key))

    def knock(self, channel: grpc.Channel, headers: list[tuple[str, Any]] | None = None) -> grpc.StatusCode:
        """Send headers and never a message; returns the refusal."""
        never = threading.Event()
        call = channel.stream_unary(PULL)
        try:
            call(iter(never.wait, True), timeout=SECONDS, metadata=headers)
        except grpc.RpcError as error:
            return cast(grpc.Call, error).code()
        finally:
            never.set()
        raise AssertionError("it was answered")

    def close(self) -> None:
        """End all of it."""
        for channel in self._channels:
            channel.close()
        self.server.stop(None).wait(10)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    port = Port(tmp_path)
    yield port
    port.close()


def code(call: Callable[[], Any]) -> grpc.StatusCode:
    """Return what a call fails with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return cast(grpc.Call, caught.value).code()


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the test's time limit ends it."""
    while not condition():
        time.sleep(0.01)


def hangs_up(connection: socket.socket) -> bool:
    """Return whether the other side ends a connection within `SECONDS`."""
    connection.settimeout(SECONDS)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_headers_alone_are_refused_at_once(port: Port) -> None:
    assert port.knock(port.channel()) == grpc.StatusCode.UNAUTHENTICATED
    pem = public_pem(make_key()).encode()
    unknown = [("flwr-public-key-bin", pem), ("flwr-signature-bin", b"0" * 70), ("flwr-timestamp", "x")]
    assert port.knock(port.channel(), unknown) == grpc.StatusCode.PERMISSION_DENIED
    assert port.member().PullMessages(PullMessagesRequest(node=port.node)) == PullMessagesResponse()


def test_a_member_that_sends_headers_alone_does_not_wait_for_ever(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_door, "READING_S", 0.0)
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            port.door.cancel_overdue()

    thread = threading.Thread(target=look)
    thread.start()
    stamped: list[Any] = []

    class Note(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        """Keeps the metadata of a call that is never made."""

        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            stamped.extend(details.metadata)
            raise KeyError

    signed = grpc.intercept_channel(port.channel(), Signed(port.key), Note())
    with pytest.raises(KeyError):
        FleetStub(signed).PullMessages(PullMessagesRequest(node=port.node))
    assert port.knock(port.channel(), stamped) == grpc.StatusCode.CANCELLED
    over.set()
    thread.join()


def test_compressed_messages_are_refused(port: Port) -> None:
    request = PullMessagesRequest(node=port.node, message_ids=["0" * 1000] * 1000)
    assert port.member().PullMessages(request) == PullMessagesResponse()
    squeezed = code(lambda: port.member().PullMessages(request, compression=grpc.Compression.Gzip))
    assert squeezed == grpc.StatusCode.UNIMPLEMENTED


def test_only_an_object_may_have_more_than_a_megabyte(port: Port) -> None:
    large = PushMessagesRequest(node=port.node, clientapp_runtime_list=[0.5] * 2**18)
    assert code(lambda: port.member().PushMessages(large)) == grpc.StatusCode.INVALID_ARGUMENT
    upload = PushObjectRequest(node=port.node, object_content=bytes(8 * 2**20))
    assert port.member().PushObject(upload).stored


def test_metadata_of_many_bytes_are_refused(port: Port) -> None:
    assert port.knock(port.channel(), [("much", "0" * 20_000)]) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_who_floods_the_port_is_cut_off_and_a_member_at_the_same_address_is_not(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    port.connections._places = threading.BoundedSemaphore(1)
    port.connections._places.acquire()  # nobody else may wait
    member, stranger = port.member(), port.channel()
    member.PullMessages(PullMessagesRequest(node=port.node))
    states: list[grpc.ChannelConnectivity] = []
    stranger.subscribe(states.append)
    for _ in range(PATIENCE + 1):
        assert port.knock(stranger) == grpc.StatusCode.UNAUTHENTICATED
    assert grpc.ChannelConnectivity.IDLE not in states[1:]
    before = set(superlink_port._sockets(port.connections.port))
    port.connections.wait(SECONDS)
    port.connections.sweep()
    # Not until the channel is idle: it tells its state at the next look, and may have gone on by then.
    until(lambda: bool(before - set(superlink_port._sockets(port.connections.port))))
    left = set(superlink_port._sockets(port.connections.port))
    assert len(before - left) == 1 and port.connections._known <= left
    member.PullMessages(PullMessagesRequest(node=port.node))
    assert set(superlink_port._sockets(port.connections.port)) == left, "over the same connection"
    (line,) = [line for line in caplog.messages if "floods the port" in line]
    assert line.startswith("127.0.0.1 floods")


def test_who_is_refused_all_the_time_waits_for_the_answer(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_port, "HELD_S", 1000.0)
    stranger, never, places = port.channel(), threading.Event(), port.connections._places
    for _ in range(PATIENCE):
        assert port.knock(stranger) == grpc.StatusCode.UNAUTHENTICATED
    call = stranger.stream_unary(PULL).future(iter(never.wait, True), timeout=SECONDS)
    until(lambda: places._value == MOST_HELD - 1)
    port.member().PullMessages(PullMessagesRequest(node=port.node))
    assert not call.done() and not port.connections._doomed
    call.cancel()
    never.set()
    until(lambda: places._value == MOST_HELD)


def test_after_a_minute_an_address_may_be_refused_as_often_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a client whose clock is wrong once a day would flood the port in the end."""
    connections = Connections()
    call: Any = SimpleNamespace(peer=lambda: "ipv4:10.0.0.9:1", add_callback=lambda _: False)
    connections.sweep()
    assert [connections.refused(call) for _ in range(PATIENCE + 1)] == [True] * PATIENCE + [False]
    connections.sweep()
    assert not connections.refused(call)
    monkeypatch.setattr(superlink_port, "MINUTE_S", -1.0)
    connections.sweep()
    assert connections.refused(call)


def test_connections_that_flood_are_slowed_down_and_others_are_not(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_port, "HELD_S", 0.0)
    stranger = port.channel()
    port.member().PullMessages(PullMessagesRequest(node=port.node))
    for _ in range(PATIENCE + 1):
        assert port.knock(stranger) == grpc.StatusCode.UNAUTHENTICATED
    port.connections.sweep()
    rates = {}
    for peer, descriptor in superlink_port._sockets(port.connections.port).items():
        with superlink_port._borrowed(descriptor) as each:
            rates[peer] = each.getsockopt(socket.SOL_SOCKET, superlink_port.SO_MAX_PACING_RATE)
    (member,) = port.connections._known
    assert rates.pop(member) != SLOW_BYTES
    assert list(rates.values()) == [SLOW_BYTES]
    (slow,) = rates
    port.connections.served(slow)  # it has a valid key after all: its clock was wrong, say
    port.connections.sweep()
    with superlink_port._borrowed(superlink_port._sockets(port.connections.port)[slow]) as each:
        rate = each.getsockopt(socket.SOL_SOCKET, superlink_port.SO_MAX_PACING_RATE)
    assert rate == superlink_port.NO_LIMIT, "and from then on its orders come as fast as any"
    port.connections._slow.add(slow)
    port.connections.sweep()
    assert slow not in port.connections._slowed, "a known client is not slowed for a call that is refused"


def test_silent_connections_are_closed_after_a_while_and_the_oldest_at_once_where_files_run_short(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(superlink_port, "MOST_STRANGERS", 3)
    port.member().PullMessages(PullMessagesRequest(node=port.node))
    number = port.connections.port

    def peers() -> set[str]:
        return set(superlink_port._sockets(number))

    with ExitStack() as closing:
        silent = []
        for _ in range(5):
            silent.append(closing.enter_context(socket.create_connection(("127.0.0.1", number))))
            until(lambda: f"ipv4:127.0.0.1:{silent[-1].getsockname()[1]}" in peers())
            port.connections.sweep()
        assert len(peers()) == 6, "they would come back"
        port.connections.most = 8  # files run short
        port.connections.sweep()
        assert all(hangs_up(each) for each in silent[:2])
        until(lambda: len(peers()) == 4)
        assert "holds over 3 connections without a call; the oldest are closed" in caplog.text
        monkeypatch.setattr(superlink_port, "SILENT_S", -1.0)
        port.connections.sweep()
        assert all(hangs_up(each) for each in silent[2:])
    until(lambda: len(peers()) == 1)
    assert port.connections._known == peers(), "the member's"


def test_who_says_much_without_a_valid_call_is_cut_off(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HTTP/2 allows a header that does not end, which gRPC keeps."""
    port.member().PullMessages(PullMessagesRequest(node=port.node))
    monkeypatch.setattr(superlink_port, "STRANGER_BYTES", 1000)
    number = port.connections.port

    def arrived(peer: str, size: int) -> bool:
        found = superlink_port._sockets(number)
        return peer in found and superlink_port._received(found[peer]) >= size

    with ExitStack() as closing:
        short, long = (closing.enter_context(socket.create_connection(("127.0.0.1", number))) for _ in range(2))
        begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
        frame = (16_000).to_bytes(3, "big") + b"\xfa" + bytes(5)  # of an unknown kind: gRPC reads on until its end
        for one, size in ((short, 10), (long, 4000)):
            one.sendall(begin + frame + bytes(size))
            until(partial(arrived, f"ipv4:127.0.0.1:{one.getsockname()[1]}", size))
        port.connections.sweep()
        left = set(superlink_port._sockets(number))
        until(lambda: f"ipv4:127.0.0.1:{long.getsockname()[1]}" not in superlink_port._sockets(number))
        assert f"ipv4:127.0.0.1:{short.getsockname()[1]}" in left and port.connections._known <= left


def test_an_open_file_that_is_another_one_by_now_is_left_alone() -> None:
    def hang_up(each: socket.socket) -> None:
        each.shutdown(socket.SHUT_RDWR)

    one, other = socket.socketpair()
    with one, other:
        superlink_port._with(one.fileno(), "ipv4:10.0.0.9:5", hang_up)
        one.sendall(b"still here")
        assert other.recv(100) == b"still here"
    superlink_port._with(one.fileno(), "ipv4:10.0.0.9:5", hang_up)  # it is closed


def test_a_port_that_is_taken_is_told(port: Port) -> None:
    with pytest.raises(ConnectionFailed, match="the port is taken"):
        fleet_server(Answers(), port.address, None, [], Connections())


def test_a_server_may_open_more_files_than_the_usual_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        fleet_server(Answers(), "127.0.0.1:0", None, [], Connections())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], MOST_FILES), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_slow_connection_may_become_known_and_close_during_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    connections, peer = Connections(), "ipv4:10.0.0.9:7"
    connections._slowed.add(peer)

    def look(port: int) -> dict[str, int]:
        connections.served(peer)
        return {}

    monkeypatch.setattr(superlink_port, "_sockets", look)
    connections.sweep()
    assert not connections._slowed


def test_who_becomes_known_during_a_look_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    connections, closed = Connections(), list[str]()
    member, found = "ipv4:10.0.0.9:7", dict[str, int]()

    def look(port: int) -> dict[str, int]:
        listed = dict(found)
        connections.served(member)  # just after it was listed which connections there are
        return listed

    monkeypatch.setattr(superlink_port, "_sockets", look)
    monkeypatch.setattr(superlink_port, "_with", lambda descriptor, peer, act: closed.append(peer))
    connections.sweep()
    monkeypatch.setattr(superlink_port, "_sockets", lambda port: {member: 99})
    monkeypatch.setattr(superlink_port, "SILENT_S", -1.0)
    connections.sweep()
    assert not closed
    monkeypatch.setattr(superlink_port, "_sockets", lambda port: {})
    connections.sweep()
    assert not connections._known, "its connection is gone"


@pytest.mark.parametrize(
    ("family", "name", "peer"),
    [
        (socket.AF_INET, ("127.0.0.1", 50), "ipv4:127.0.0.1:50"),
        (socket.AF_INET6, ("::1", 50, 0, 0), "ipv6:%5B::1%5D:50"),
        (socket.AF_INET6, ("::ffff:10.0.0.1", 50, 0, 0), "ipv4:10.0.0.1:50"),
        (socket.AF_INET6, ("fe80::1", 50, 0, 3), "ipv6:%5Bfe80::1%253%5D:50"),
    ],
)
def test_a_connection_has_the_name_that_grpc_gives_its_peer(family: Any, name: tuple[Any, ...], peer: str) -> None:
    """No test may use a link-local address, whose name has a scope."""
    assert _peer(cast(socket.socket, SimpleNamespace(family=family, getpeername=lambda: name))) == peer
