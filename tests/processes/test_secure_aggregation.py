"""Secure aggregation over real gRPC, with a client that is killed in the middle of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_client_does_not_spoil_the_sum(site: Site, until: Callable[[Callable[[], bool], str], None]) -> None:
    run = site.folder / "run"
    args = ["--strategy", "fedavg", "--clients", "4", "--cohort", "4", "--rounds", "100000", "--eval-every", "100000"]
    args += ["--secure-aggregation", "--round-timeout", "15", "--set", "local.steps=100", "--run-dir", str(run)]
    site.server(*args)
    clients = [site.client(f"c{index}", "--partition", f"{index}/4") for index in range(4)]
    until(lambda: len(lines(run / "metrics.jsonl")) >= 2, "two rounds")
    before = len(lines(run / "metrics.jsonl"))
    clients[1].kill()
    until(lambda: len(lines(run / "metrics.jsonl")) >= before + 4, "rounds after one was killed")
    rounds = lines(run / "metrics.jsonl")
    assert [line["clients"] for line in rounds[:before]] == [4] * before
    assert rounds[-1]["clients"] == 3 and "loss" in rounds[-1]
    # Whatever it was in the middle of: the others' sum is found with the shares that it has dealt, or without it.
    refused = [line for line in lines(run / "clients.jsonl") if "refused" in line]
    assert {line["client"] for line in refused} <= {"c1"}, refused
