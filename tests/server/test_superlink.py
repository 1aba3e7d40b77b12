"""The live grid: who is said to be there."""

from collections.abc import Iterable

import pytest
from flwr.proto.node_pb2 import NodeInfo
from flwr.superlink.grid import HttpGrid

from hyperbloom.server.superlink import LiveGrid


def test_a_client_that_came_back_before_it_was_missed_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = {1: "10:00", 2: "10:00"}

    def nodes(self: HttpGrid) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at=time) for node, time in activated.items()]

    monkeypatch.setattr(HttpGrid, "get_nodes", nodes)
    grid = LiveGrid("127.0.0.1:1", True, token="t")
    assert list(grid.get_node_ids()) == [1, 2]
    assert list(grid.get_node_ids()) == [1, 2]
    activated[2] = "10:05"
    activated[3] = "10:05"
    assert list(grid.get_node_ids()) == [1, 3]
    assert list(grid.get_node_ids()) == [1, 2, 3]
    del activated[1]
    assert list(grid.get_node_ids()) == [2, 3]
    activated[1] = "10:06"
    assert list(grid.get_node_ids()) == [2, 3, 1]
