"""The connection over real gRPC: two calls a round to a server of ours, and more to Flower's own servicer."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto import fleet_pb2, fleet_pb2_grpc
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

from hyperbloom.client.link import connection as client_connection
from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.runtime import retries_of
from hyperbloom.client.link.server import Link, explanation
from hyperbloom.common.enclosed import MOST_ENCLOSED
from hyperbloom.common.secrecy.keys import make_key, public_pem, server_of
from hyperbloom.server.access.certificates import init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker import hosted
from hyperbloom.server.broker.door import Door, Keys
from hyperbloom.server.broker.flower import FleetServicer, TaskIdentity
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.port import Connections, fleet_server
from hyperbloom.server.broker.servicer import Fleet
from hyperbloom.server.broker.state import State, state_factory
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.live import LiveGrid


class Server:
    """A SuperLink that counts calls, with our servicer or with Flower's.

    Attributes:
        lost: methods whose next answer is lost on its way, after the call was served.
    """

    def __init__(self, stock: bool, registry: ClientRegistry | None = None, tls: Any = None, name: str = "") -> None:
        factory = state_factory()
        self.state = cast(State, factory.state())
        self.grid = LiveGrid(Hosted(self.state))
        self.calls = Counter[str]()
        self.lost: list[str] = []
        connections = Connections()
        keys = Keys(self.state, [registry]) if registry else None
        door: grpc.ServerInterceptor = Door(factory, keys, connections, name)
        if stock and keys:
            keys.follow()
            door = NodeAuthServerInterceptor(factory)
        servicer = FleetServicer(factory, factory.objectstore_factory, False) if stock else Fleet(factory, bool(keys))
        self.address = f"127.0.0.1:{free_port()}"
        self.server = fleet_server(servicer, self.address, tls, [self, door], connections)  # type: ignore[list-item]
        self.server.start()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Count a call, and lose its answer."""
        method, handler = details.method.rpartition("/")[2], continuation(details)
        self.calls[method] += 1
        if handler.stream_unary is None:
            return handler

        def serve(requests: Any, context: grpc.ServicerContext) -> Any:
            answer = handler.stream_unary(requests, context)
            if method in self.lost:
                self.lost.remove(method)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
            return answer

        return grpc.stream_unary_rpc_method_handler(serve)

    def close(self) -> None:
        self.state.close()
        self.server.stop(None).wait(10)


@contextmanager
def serving(*args: Any) -> Iterator[Server]:
    server = Server(*args)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def session(link: Link) -> Iterator[Connection]:
    connection = Connection(link, retries_of(link))
    try:
        connection.open()
        yield connection
    finally:
        connection.close()


def content(size: int) -> RecordDict:
    return RecordDict({"hyperbloom": ConfigRecord({"values": bytes(range(256)) * (size // 256)})})


def exchange(server: Server, client: Connection, down: int, up: int) -> None:
    """Send an order, answer it, and check both."""
    (name,) = server.grid.push_messages([Message(content(down), client.node_id, "train")])
    order = None
    while order is None:
        order = client.receive()
    assert order.content == content(down) and order.metadata.message_id == name
    TaskIdentity.node_id = client.node_id
    client.send(Message(content(up), reply_to=order))
    TaskIdentity.node_id = 1
    (reply,) = server.grid.pull_messages([name])
    assert reply.content == content(up)


@pytest.mark.parametrize("size", [0, 1024, 500_000])
def test_a_round_with_a_server_of_ours_takes_two_calls(size: int) -> None:
    with serving(False) as server, session(Link(server.address, insecure=True)) as client:
        before = server.calls.copy()
        exchange(server, client, size, size)
        server.calls.pop("SendNodeHeartbeat", None)
        before.pop("SendNodeHeartbeat", None)
        assert server.calls - before == Counter({"PullMessages": 1, "PushMessages": 1})
        assert len(server.state.object_store) == 0, "nothing is left"  # type: ignore[arg-type]


@pytest.mark.parametrize(("down", "up"), [(MOST_ENCLOSED, 1024), (1024, 2 * MOST_ENCLOSED)])
def test_what_does_not_fit_takes_calls_of_its_own(down: int, up: int) -> None:
    with serving(False) as server, session(Link(server.address, insecure=True)) as client:
        exchange(server, client, down, up)
        assert server.calls["PullObject"] == server.calls["ConfirmMessageReceived"] == (down > up)
        assert server.calls["PushObject"] == (up > down)
        assert len(server.state.object_store) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["PullMessages", "PullObject", "ConfirmMessageReceived", "PushMessages"])
@pytest.mark.parametrize("size", [1024, MOST_ENCLOSED])
def test_an_order_is_played_once_whichever_answer_of_the_server_is_lost(method: str, size: int) -> None:
    with serving(False) as server, session(Link(server.address, insecure=True)) as client:
        server.lost.append(method)
        for _ in range(2):
            exchange(server, client, size, 1024)
        assert bool(server.lost) == (server.calls[method] == 0)
        assert server.calls["PullMessages"] == 2 + (method == "PullMessages")
        assert len(server.state.object_store) == 0  # type: ignore[arg-type]


def test_an_order_that_nobody_waits_for_is_handed_to_nobody_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "LOOK_EVERY_S", 0.0)
    with serving(False) as server, session(Link(server.address, insecure=True)) as client:
        received, forgotten, last = (
            server.grid.push_messages([Message(content(1024), client.node_id, kind)])[0]
            for kind in ("train", "train.again", "evaluate")
        )
        order = client.receive()
        assert order is not None and order.metadata.message_id == received
        server.grid.pull_messages([last])
        order = client.receive()
        assert order is not None and order.metadata.message_id == last and forgotten not in server.state.object_store


def test_flowers_own_servicer_gets_the_calls_that_it_knows() -> None:
    with serving(True) as server, session(Link(server.address, insecure=True)) as client:
        assert client.receive() is None, "at once"
        exchange(server, client, 1024, 2048)
        assert (server.calls["PullObject"], server.calls["PushObject"]) == (3, 3)
        assert server.calls["ConfirmMessageReceived"] == 1


def test_a_call_waits_for_an_order_and_the_servers_end_ends_it() -> None:
    with serving(False) as server, session(Link(server.address, insecure=True)) as client:
        found: list[Message | None] = []
        thread = threading.Thread(target=lambda: found.append(client.receive()))
        thread.start()
        while client.node_id not in server.state._bells:
            pass
        server.state.close()
        thread.join(30)
        assert found == [None]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="gRPC bounds silence on Linux only")
def test_a_connection_on_which_nothing_arrives_is_given_up_after_twenty_seconds() -> None:
    def to(port: int) -> Iterator[socket.socket]:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
                if found.getpeername()[1:2] == (port,):
                    yield found

    with serving(False) as server, session(Link(server.address, insecure=True)):
        found = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in to(int(server.address[10:]))]
    assert found == [20_000]


def test_over_tls_with_a_key_of_its_own_and_the_right_ca(tmp_path: Path) -> None:
    files, registry, key = init(tmp_path / "certs", [], 30), ClientRegistry(tmp_path / "clients.json"), make_key()
    registry.add("ward-7", public_pem(key))
    tls = (files.ca.read_bytes(), files.server.read_bytes(), files.server_key.read_bytes())
    with serving(False, registry, tls, server_of(files.ca)) as server:
        for _ in range(2):  # the same key opens every session
            with session(Link(server.address, root_certificates=files.ca, key=key)) as client:
                exchange(server, client, 1024, 1024)
                assert [node.name for node in server.grid.get_nodes()] == ["ward-7"]
            assert list(server.grid.get_nodes()) == []
        stranger = Link(server.address, root_certificates=files.ca, key=make_key())
        with pytest.raises(grpc.RpcError, match="is unknown or revoked"), session(stranger):
            pass
    # A signature covers the server's name: no other server can be shown it.
    known = Link("", root_certificates=files.ca, key=key)
    with (
        serving(False, registry, tls, "another server") as server,
        pytest.raises(grpc.RpcError, match="Invalid signature"),
        session(replace(known, address=server.address)),
    ):
        pass


def test_a_stock_superlink_takes_keys_if_the_client_is_told_that_it_is_one(tmp_path: Path) -> None:
    files, registry, key = init(tmp_path / "certs", [], 30), ClientRegistry(tmp_path / "clients.json"), make_key()
    registry.add("ward-7", public_pem(key))
    tls = (files.ca.read_bytes(), files.server.read_bytes(), files.server_key.read_bytes())
    with serving(True, registry, tls) as server:
        link = Link(server.address, root_certificates=files.ca, key=key)
        with pytest.raises(grpc.RpcError) as caught, session(link):
            pass
        assert "--stock-superlink" in str(explanation(link, caught.value))
        with session(replace(link, stock=True)) as client:
            exchange(server, client, 1024, 1024)


class Hanging(fleet_pb2_grpc.FleetServicer):  # type: ignore[misc]
    """A server that lets a client in, takes no reply, and never answers its goodbye."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def RegisterNode(self, request: Any, context: Any) -> Any:
        return fleet_pb2.RegisterNodeFleetResponse(node_id=1)

    def ActivateNode(self, request: Any, context: Any) -> Any:
        return fleet_pb2.ActivateNodeResponse(node_id=1)

    def SendNodeHeartbeat(self, request: Any, context: Any) -> Any:
        return SendNodeHeartbeatResponse(success=True)

    def PushMessages(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNAVAILABLE, "the server goes")

    def DeactivateNode(self, request: Any, context: Any) -> Any:
        self.over.wait(60)
        return fleet_pb2.DeactivateNodeResponse()


@pytest.mark.timeout(60)
def test_a_client_leaves_though_nobody_takes_its_last_reply_or_answers_its_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_connection, "LEAVING_S", 0.3)
    hanging, server = Hanging(), grpc.server(ThreadPoolExecutor(4))
    fleet_pb2_grpc.add_FleetServicer_to_server(hanging, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with session(Link(f"127.0.0.1:{port}", insecure=True)) as client:
            order = Message(content(0), client.node_id, "train")
            order.metadata.__dict__["_message_id"] = order.object_id
            client.leave(Message(content(0), reply_to=order))
    finally:
        hanging.over.set()
        server.stop(None)
