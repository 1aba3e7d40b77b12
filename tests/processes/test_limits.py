"""A client that sends too much, or never what it announced, against a real SuperLink and a real server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import exponential
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom import __version__
from hyperbloom.common.messages import UNREADABLE
from hyperbloom.server.broker.superlink import free_port, superlink
from hyperbloom.server.grids.live import LiveGrid
from tests.processes.conftest import Site, superlink_memory

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),  # Flower's builder of bundles
]

MIB = 2**20


class Client:
    """A registered node that answers what the test lets it answer."""

    def __init__(self, node: int, *primitives: Any) -> None:
        self.node = node
        self._receive, self._send, _, _, _, self._push, _ = primitives

    def answer(self, values: bytes) -> None:
        """Answer the next order."""
        server, (order, _) = TaskIdentity.node_id, self._receive()
        TaskIdentity.node_id = self.node
        reply = Message(RecordDict({"hyperbloom": ConfigRecord({"values": values})}), reply_to=order)
        TaskIdentity.node_id = server
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = self._send(reply, get_object_tree(reply), 0.0)
            for name, each in get_all_nested_objects(reply).items():
                if name in wanted:
                    self._push(order.metadata.run_id, session, name, each.deflate())


@contextmanager
def client(address: str) -> Iterator[Client]:
    """Let a node in."""
    never = RetryInvoker(exponential, grpc.RpcError, max_tries=1, max_time=None)
    failures: list[Exception] = []
    with grpc_request_response(address, True, never) as primitives:
        try:
            yield Client(*primitives)
        except Exception as error:  # Flower's session would log it and go on
            failures.append(error)
    for failure in failures:
        raise failure


def orders(grid: LiveGrid, node: int, count: int = 1) -> list[str]:
    """Send a node some orders; returns their names."""
    return [name for _ in range(count) for name in grid.push_messages([Message(RecordDict(), node, "train")])]


def test_a_client_that_sends_too_much_is_refused_and_the_superlink_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPERBLOOM_MESSAGE_MIB", "32")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    address = f"127.0.0.1:{free_port()}"
    with superlink(address, tmp_path, __version__) as grid, client(address) as liar:
        # More than a reply may have, less than a message: the server is told, and can count it.
        names, sizes = orders(grid, liar.node, 10), []
        for number in range(10):
            liar.answer(bytes([number]) * (20 * MIB))
            sizes.append(superlink_memory(address))
        assert sizes[-1] - sizes[3] < 60, f"MiB, of 120 that were sent: {sizes}"
        replies = grid.pull_messages(names)
        assert len(replies) == 10
        for reply in replies:
            assert reply.error.code == UNREADABLE and "expected a reply of at most" in reply.error.reason
        # More than a message may have: gRPC refuses it unread.
        orders(grid, liar.node)
        with pytest.raises(grpc.RpcError) as caught:
            liar.answer(bytes(33 * MIB))
        assert cast(grpc.Call, caught.value).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        # And an honest answer comes through.
        names = orders(grid, liar.node)
        liar.answer(b"honest")
        (reply,) = grid.pull_messages(names)
        assert reply.content["hyperbloom"]["values"] == b"honest"


def test_an_order_arrives_although_the_answer_to_a_call_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    address = f"127.0.0.1:{free_port()}"
    with superlink(address, tmp_path, __version__) as grid, client(address) as honest:
        send, lost = grid._runtime_client._send, ["/flwr.proto.Runtime/PushObject"]

        def lossy(call: ProtobufRequestContext) -> httpx.Response:
            response = send(call)
            if call.rpc_method in lost:
                lost.remove(call.rpc_method)
                raise httpx.ReadError("the connection was reset")
            return response

        monkeypatch.setattr(grid._runtime_client, "_send", lossy)
        names = orders(grid, honest.node)
        honest.answer(b"honest")
        (reply,) = grid.pull_messages(names)
        assert reply.content["hyperbloom"]["values"] == b"honest" and not lost


@pytest.mark.timeout(300)
def test_members_that_never_upload_what_they_announce_do_not_hold_up_the_others(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    metrics = site.folder / "run/metrics.jsonl"
    flags = ["--clients", "2", "--cohort", "2", "--rounds", "100000", "--eval-every", "5"]
    brief = ["--set", "local.steps=50", "--set", "hidden_dim=8", "--run-dir", str(metrics.parent)]
    server = site.server("--strategy", "pfedhn", *flags, *brief)
    for name in "ab":
        site.client(name, "--max-train", "60")
    until(metrics.exists, "the first round")
    hostile = "siege.hostile_member", f"127.0.0.1:{site.port}"
    site.start(hostile[0], "mute", hostile[1], "mute", "--speechless")
    site.start(hostile[0], "mallory", hostile[1], "mallory")
    server.wait_for("mallory joined")
    before = metrics.read_text().count("\n")
    # Each reply of theirs used to take 30 s; there is one in two of three rounds, and in each evaluation.
    until(lambda: metrics.read_text().count("\n") > before + 40, "40 rounds")
    server.wait_for("mallory left out")
    server.wait_for(": it cannot say who it is: the reply was announced but never uploaded: 0 of 3 objects came")
