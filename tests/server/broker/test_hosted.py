"""A run in this process: orders are whole when they can be fetched, and nothing of them stays."""

import threading
from math import inf
from typing import cast

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from hyperbloom.server.broker import hosted as superlink_hosted
from hyperbloom.server.broker.flower import constant
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.state import State, state_factory
from hyperbloom.server.grids.live import LiveGrid


class Run:
    """A run with one node."""

    def __init__(self) -> None:
        self.state = cast(State, state_factory().state())
        self.hosted = Hosted(self.state)
        self.grid = LiveGrid(self.hosted)
        self.node = self.state.create_node(constant.NOOP_FLWR_AID, constant.NOOP_ACCOUNT_NAME, b"key", 0)
        self.state.activate_node(self.node, 30)

    def send(self, node: int) -> str:
        content = RecordDict({"hyperbloom": ConfigRecord({"values": b"order"})})
        (name,) = self.grid.push_messages([Message(content, node, "train")])
        return name

    @property
    def objects(self) -> int:
        return len(self.state.object_store)  # type: ignore[arg-type]


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_objects_of_an_order_are_there_before_its_node_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = []
    store = run.state.store_message_ins

    def look(message: Message) -> str | None:
        there.append(run.objects)
        return store(message)

    monkeypatch.setattr(run.state, "store_message_ins", look)
    assert run.send(run.node) and there == [3]


def test_an_order_to_a_node_that_is_gone_leaves_nothing(run: Run) -> None:
    run.state.delete_node(constant.NOOP_FLWR_AID, run.node)
    assert run.send(run.node) == ""
    assert run.objects == 0


def test_an_order_whose_node_went_away_is_answered_with_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    name = run.send(run.node)
    assert run.grid.pull_messages([name]) == []
    run.state.deactivate_node(run.node)
    monkeypatch.setattr(superlink_hosted, "LOOK_EVERY_S", inf)  # a second may pass here
    assert run.grid.pull_messages([name]) == [], "all orders are looked at now and then"
    monkeypatch.setattr(superlink_hosted, "LOOK_EVERY_S", 0.0)
    (reply,) = run.grid.pull_messages([name])
    assert reply.has_error() and reply.metadata.reply_to_message_id == name


def test_a_reply_ends_the_wait(run: Run) -> None:
    waiting = threading.Thread(target=run.grid.wait, args=(60.0,))
    waiting.start()
    run.state.came.set()
    waiting.join(30)
    assert not waiting.is_alive() and not run.state.came.is_set()
