"""The connection over HTTP: with Flower's own Fleet API in this process, and with servers that are no such thing."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import uvicorn
from packaging.version import Version

from hyperbloom.client.link.connection import ANSWER_S
from hyperbloom.client.link.http import HttpChannel
from hyperbloom.client.link.internals import FleetStub, fleet
from hyperbloom.client.link.server import Link, explanation
from hyperbloom.common.secrecy.keys import make_key, public_pem
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.door import Keys
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.state import State, state_factory
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.live import LiveGrid

from .test_connection import Server, exchange, session

flower_serves_http = pytest.mark.skipif(Version(version("flwr")) < Version("1.40"), reason="flwr serves HTTP from 1.40")


class Superlink:
    """Flower's own Fleet API over HTTP."""

    def __init__(self, registry: ClientRegistry | None, files: Certificates | None) -> None:
        from fastapi import FastAPI
        from flwr.superlink.main import _get_middleware, fleet_router

        factory = state_factory()
        self.state = cast(State, factory.state())
        self.grid = LiveGrid(Hosted(self.state))
        if registry:
            Keys(self.state, [registry]).follow()
        app = FastAPI(middleware=_get_middleware())
        app.include_router(fleet_router)
        app.state.linkstate_factory, app.state.enable_supernode_auth = factory, bool(registry)
        app.state.fleet_event_log_plugin = None
        self.port = free_port()
        tls: dict[str, Any] = {"ssl_certfile": files.server, "ssl_keyfile": files.server_key} if files else {}
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error", ws="none", **tls))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            assert self._thread.is_alive()

    def close(self) -> None:
        self.state.close()
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def superlink(registry: ClientRegistry | None = None, files: Certificates | None = None) -> Iterator[Superlink]:
    server = Superlink(registry, files)
    try:
        yield server
    finally:
        server.close()


@flower_serves_http
@pytest.mark.parametrize("size", [0, 1024, 2**20])
def test_a_round_with_flowers_own_superlink(size: int) -> None:
    with (
        superlink() as server,
        session(Link(f"127.0.0.1:{server.port}", insecure=True, stock=True, http=True)) as client,
    ):
        for _ in range(2):
            exchange(cast(Server, server), client, size, size)
        assert client.receive() is None
        assert len(server.state.object_store) == 0  # type: ignore[arg-type]
        assert [node.node_id for node in server.grid.get_nodes()] == [client.node_id]
    assert list(server.grid.get_nodes()) == [], "the client has said goodbye"


@flower_serves_http
def test_over_tls_with_a_key_that_the_superlink_knows(tmp_path: Path) -> None:
    files, registry, key = init(tmp_path / "certs", [], 30), ClientRegistry(tmp_path / "clients.json"), make_key()
    registry.add("ward-7", public_pem(key))
    with superlink(registry, files) as server:
        link = Link(f"localhost:{server.port}", False, files.ca, key, stock=True, http=True)
        with session(link) as client:
            exchange(cast(Server, server), client, 1024, 1024)
            assert [node.name for node in server.grid.get_nodes()] == ["ward-7"]
        for wrong, reason in (
            (replace(link, key=make_key()), "it does not know this client's key"),
            (replace(link, root_certificates=init(tmp_path / "other", [], 30).ca), "its certificate is not signed by"),
            (replace(link, insecure=True), "it speaks TLS; use --token, or --root-certificates"),
        ):
            with pytest.raises(grpc.RpcError) as caught, session(wrong):
                pass
            assert reason in str(explanation(wrong, caught.value)), caught.value


def failure(link: Link, timeout: float | None = None) -> grpc.RpcError:
    """Return the error of a call."""
    channel = HttpChannel(link, ANSWER_S)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            FleetStub(channel).PullMessages(fleet.PullMessagesRequest(), timeout=timeout, metadata=())
    finally:
        channel.close()
    return caught.value


@contextmanager
def answering(content: bytes | None) -> Iterator[Link]:
    """Yield the link to a server that answers each request so, and not at all without a content."""
    with socket.create_server(("127.0.0.1", 0)) as port:

        def serve() -> None:
            while True:
                try:
                    client, _ = port.accept()
                except OSError:
                    return
                with client:
                    client.recv(65536)
                    if content is None:
                        client.recv(65536)
                    else:
                        client.sendall(content)

        threading.Thread(target=serve, daemon=True).start()
        yield Link(f"127.0.0.1:{port.getsockname()[1]}", insecure=True, stock=True, http=True)
        port.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "UNAVAILABLE"),
        (b"HTTP/1.1 503 Busy\r\n\r\n", "UNAVAILABLE"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "UNAVAILABLE"),
        (b"HTTP/1.1 401 No\r\n\r\n", "UNAUTHENTICATED"),
        (b"HTTP/1.1 403 No\r\n\r\n", "PERMISSION_DENIED"),
        (b"HTTP/1.1 404 What\r\n\r\n", "UNIMPLEMENTED"),
        (b"HTTP/1.1 500 Oh\r\n\r\n", "UNKNOWN"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>Please log in to the network</html>", "UNAVAILABLE"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\nno gzip", "UNAVAILABLE"),
        (b"\0\0\x12\4\0\0\0\0\0\0\3\x7f\xff\xff\xff", "UNIMPLEMENTED"),  # the first frame of a gRPC server
    ],
)
def test_a_failure_is_told_as_grpc_tells_it(content: bytes, code: str) -> None:
    with answering(content) as link:
        assert failure(link).code().name == code


def test_a_server_that_is_silent_or_away_is_away(tmp_path: Path) -> None:
    with answering(None) as link:
        assert failure(link, timeout=0.2).code() is grpc.StatusCode.UNAVAILABLE
    assert failure(link).code() is grpc.StatusCode.UNAVAILABLE, "nobody listens any more"


def test_plain_text_where_tls_is_expected_says_so(tmp_path: Path) -> None:
    files = init(tmp_path / "certs", [], 30)
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as link:
        secure = replace(link, insecure=False, root_certificates=files.ca)
        assert "it does not speak TLS" in str(explanation(secure, failure(secure)))


def test_a_channel_that_is_closed_is_told_as_grpc_tells_it() -> None:
    channel = HttpChannel(Link("127.0.0.1:1", insecure=True, http=True), ANSWER_S)
    channel.close()
    with pytest.raises(grpc.RpcError) as caught:
        FleetStub(channel).PullMessages(fleet.PullMessagesRequest(), timeout=None, metadata=())
    assert caught.value.code() is grpc.StatusCode.CANCELLED
