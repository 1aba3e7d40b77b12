"""A run on a stock SuperLink, which speaks HTTP with the server and gRPC with the clients."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from benchmarks.supernodes import stock_superlink
from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.runtime import retries_of
from hyperbloom.client.link.server import Link
from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.server.broker import flower
from hyperbloom.server.broker.flower import TaskIdentity
from hyperbloom.server.broker.hosted import bundle
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.attached import Attached, attached
from hyperbloom.server.grids.live import LiveGrid

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Return the addresses of a SuperLink for clients and for servers."""
    fleet = f"127.0.0.1:{free_port()}"
    with stock_superlink(fleet, tmp_path) as api:
        yield fleet, api


def play(grid: LiveGrid, client: Connection, answer: bytes) -> Message:
    """Send an order and answer it; return what the grid gets."""
    (name,) = grid.push_messages([Message(RecordDict({"a": ConfigRecord({"b": b"order"})}), client.node_id, "train")])
    while (order := client.receive()) is None:
        pass
    TaskIdentity.node_id = client.node_id
    client.send(Message(RecordDict({"a": ConfigRecord({"b": answer})}), reply_to=order))
    TaskIdentity.node_id = 1
    (reply,) = grid.pull_messages([name])
    return reply


def test_a_round_on_a_stock_superlink_even_if_the_answer_to_a_call_is_lost(
    addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, api = addresses
    link = Link(fleet, insecure=True)
    with attached(api) as grid:
        client = Connection(link, retries_of(link))
        client.open()
        assert [node.node_id for node in grid.get_nodes()] == [client.node_id]
        assert play(grid, client, b"first").content["a"]["b"] == b"first"

        superlink = grid._superlink
        assert isinstance(superlink, Attached)
        send, lost = superlink._client._send, ["/flwr.proto.Runtime/PushObject"]

        def lossy(call: Any) -> httpx.Response:
            response = send(call)
            if call.rpc_method in lost:
                lost.remove(call.rpc_method)
                raise httpx.ReadError("the connection was reset")
            return response

        monkeypatch.setattr(superlink._client, "_send", lossy)
        assert play(grid, client, b"second").content["a"]["b"] == b"second" and not lost
        client.close()
        assert [node.node_id for node in grid.get_nodes()] == []


def test_a_run_of_somebody_else_that_waits_stands_in_the_way_once(addresses: tuple[str, str]) -> None:
    _, api = addresses
    told = flower.RuntimeVersionHttpInterceptor(component_name="a test")
    with closing(flower.ControlHttpClient.from_server_address(api, True, None, [told])) as control:
        waiting = control.StartRun(flower.control.StartRunRequest(fab=flower.fab_to_proto(bundle()))).run_id
    with (
        pytest.raises(ConnectionFailed, match=f"run {waiting}, which somebody else has"),
        attached(api),
    ):
        raise AssertionError
    with attached(api) as grid:
        assert list(grid.get_nodes()) == []


def test_a_superlink_that_is_away_is_told_in_one_line() -> None:
    with (
        pytest.raises(ConfigError, match=r"^--certs: its ca\.pem holds no certificate$"),
        attached("127.0.0.1:1", b"nonsense"),
    ):
        raise AssertionError
    with (
        pytest.raises(ConnectionFailed, match=r"the SuperLink at 127\.0\.0\.1:1 does not answer"),
        attached("127.0.0.1:1"),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, r"has ended the run, as by flwr stop; --resume"),
        (503, r"does not answer \(Server error '503 [^\n]*'\); --resume [^\n]*$"),
    ],
)
def test_a_run_that_flower_has_stopped_is_told_so(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperbloom.server.grids.attached._task", lambda *_: nullcontext(None))
    request = httpx.Request("POST", "http://127.0.0.1:1/v1/runtime/push-messages")
    with pytest.raises(ConnectionFailed, match=said), attached("127.0.0.1:1"):
        httpx.Response(status, request=request).raise_for_status()
