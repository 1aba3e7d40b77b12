"""A short siege; `python -m benchmarks.faults --minutes N` is the long one."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults import Siege, besiege

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_a_federation_under_fire_loses_nothing(tmp_path: Path) -> None:
    """Set HYPERBLOOM_FAULT_SECONDS to 300 for the five-minute version."""
    left, seed = float(os.environ.get("HYPERBLOOM_FAULT_SECONDS", "10")), 1
    rounds = 20 if left < 60 else 400
    problems, actions = besiege(tmp_path, seed, left, rounds)
    assert not problems, (problems, (tmp_path / "actions.log").read_text())
    assert sum(actions.values()) >= 2, actions


def test_clients_whose_connections_hang_or_are_cut_are_back_in_a_later_round(
    tmp_path: Path, until: Callable[[Callable[[], bool], str], None]
) -> None:
    siege = Siege(tmp_path, seed=1, rounds=100_000)
    members = siege.run / "clients.jsonl"

    def rounds_of(index: int, answered: bool) -> list[int]:
        lines = [json.loads(line) for line in members.read_text().splitlines()]
        mine = [line for line in lines if line["client"] == f"c{index}"]
        return [line["round"] for line in mine if ("refused" not in line) == answered]

    try:
        until(lambda: siege.done >= 2, "two rounds")
        siege.proxies[0].hang()
        siege.proxies[1].cut()
        until(lambda: bool(rounds_of(0, False) and rounds_of(1, False)), "a round without their replies")
        done = siege.done
        until(lambda: siege.done >= done + 2, "rounds without them")
        for proxy in siege.proxies:
            proxy.heal()
        for index in (0, 1):
            until(lambda index=index: rounds_of(index, True)[-1] > done, f"c{index} answers again")
        assert siege.server.lives and all(client.lives for client in siege.clients)
    finally:
        siege.close()
