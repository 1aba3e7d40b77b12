"""Asynchronous mode with real processes: one client stands still for a while, and nobody waits for it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

STALE = 12


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow  # tests/server/loop/test_asynchronous.py has the rules
def test_a_client_that_stands_still_for_a_while_holds_nobody_up(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    run = site.folder / "run"
    args = ["--clients", "3", "--cohort", "3", "--rounds", "30", "--eval-every", "30", "--set", "asynchronous=true"]
    args += ["--set", "local.steps=50", "--set", "hidden_dim=8"]
    server = site.server("--strategy", "pfedhn", *args, "--run-dir", str(run))
    clients = [site.client(f"c{index}", "--partition", f"{index}/3") for index in range(3)]

    def answered() -> list[str]:
        return [line["client"] for line in lines(run / "clients.jsonl") if "seconds" in line]

    until(lambda: set(answered()) == {"c0", "c1", "c2"}, "a reply of each")
    os.kill(clients[2].popen.pid, signal.SIGSTOP)
    try:
        standing = len(lines(run / "metrics.jsonl"))
        # Rounds of three replies: the two others make them without the third.
        until(lambda: len(lines(run / "metrics.jsonl")) >= standing + 2 + STALE // 3, "rounds without it")
    finally:
        os.kill(clients[2].popen.pid, signal.SIGCONT)
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0, 0]

    rounds = [line for line in lines(run / "metrics.jsonl") if line["clients"]]
    assert [line["round"] for line in rounds] == list(range(1, 31))
    assert all(line["staleness_max"] >= line["staleness_mean"] >= 0 for line in rounds)
    assert max(line["staleness_max"] for line in rounds) >= STALE, "what c2 answered when it went on"
    (evaluation,) = [line for line in lines(run / "metrics.jsonl") if "test_mean" in line]
    assert evaluation["round"] == 30
    assert set(json.loads((run / "summary.json").read_text())["pfedhn"]["test_accuracy"]) == {"c0", "c1", "c2"}
    selected, last = (load_file(run / f"hypernetwork{name}.safetensors") for name in ("", "-last"))
    assert all(bool((selected[name] == last[name]).all()) for name in last), "no reply is applied after the last round"
