"""A client that sends too much, or never what it announced, against a real SuperLink and a real server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import exponential
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.server import Link
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.limits import Store
from hyperbloom.server.broker.superlink import free_port, superlink
from hyperbloom.server.grids.live import LiveGrid
from hyperbloom.server.loop.post import UNREADABLE
from tests.processes.conftest import Site

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
]

MIB = 2**20


class Client:
    """A registered node that answers what the test lets it answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.node = connection, connection.node_id

    def answer(self, values: bytes) -> None:
        """Answer the next order."""
        server, order = TaskIdentity.node_id, self._connection.receive()
        assert order is not None
        TaskIdentity.node_id = self.node
        reply = Message(RecordDict({"hyperbloom": ConfigRecord({"values": values})}), reply_to=order)
        TaskIdentity.node_id = server
        self._connection.send(reply)


@contextmanager
def client(address: str) -> Iterator[Client]:
    """Let a node in."""
    never = RetryInvoker(exponential, grpc.RpcError, max_tries=1, max_time=None)
    connection = Connection(Link(address, insecure=True), never)
    try:
        connection.open()
        yield Client(connection)
    finally:
        connection.close()


def orders(grid: LiveGrid, node: int, count: int = 1) -> list[str]:
    """Send a node some orders; returns their names."""
    return [name for _ in range(count) for name in grid.push_messages([Message(RecordDict(), node, "train")])]


def held(grid: LiveGrid) -> int:
    """Return the bytes that the SuperLink of this process holds of orders and replies."""
    store = cast(Hosted, grid._superlink)._store
    return sum(len(entry.content) for entry in cast(Store, store).store.values())


def test_a_client_that_sends_too_much_is_refused_and_the_superlink_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPERBLOOM_MESSAGE_MIB", "32")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    address = f"127.0.0.1:{free_port()}"
    with superlink(address, tmp_path) as grid, client(address) as liar:
        # More than a reply may have, less than a message: the server is told, and can count it.
        names, sizes = orders(grid, liar.node, 10), []
        for number in range(10):
            liar.answer(bytes([number]) * (20 * MIB))
            sizes.append(held(grid))
        assert max(sizes) < MIB, f"bytes, of {10 * 20 * MIB} that were sent: {sizes}"
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


@pytest.mark.timeout(300)
def test_members_that_never_upload_what_they_announce_do_not_hold_up_the_others(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    metrics = site.folder / "run/metrics.jsonl"
    flags = ["--clients", "2", "--cohort", "2", "--rounds", "100000", "--eval-every", "5"]
    brief = ["--set", "local.steps=50", "--set", "hidden_dim=8", "--run-dir", str(metrics.parent)]
    server = site.server("--strategy", "pfedhn", *flags, *brief, hasty=True)
    for name in "ab":
        site.client(name, "--max-train", "60")
    until(metrics.exists, "the first round")
    hostile = "siege.hostile_member", f"127.0.0.1:{site.port}"
    site.start(hostile[0], "mute", hostile[1], "mute", "--how", "speechless")
    site.start(hostile[0], "mallory", hostile[1], "mallory")
    server.wait_for("mallory joined")
    before = metrics.read_text().count("\n")
    # Each reply of theirs used to take 30 s; there is one in two of three rounds, and in each evaluation.
    until(lambda: metrics.read_text().count("\n") > before + 15, "15 rounds")
    server.wait_for("mallory left out")
    server.wait_for(": it cannot say who it is: a reply was announced, but 0 of 3 objects came")
    server.popen.kill()  # it would wait for them to hear its goodbye
