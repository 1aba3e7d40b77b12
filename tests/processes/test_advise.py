"""`flower-server advise` with clients in processes of their own, which join over gRPC as they do in any run."""

import json
from pathlib import Path

import pytest

from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ["--clients", "3", "--cohort", "3", "--rounds", "2", "--max-train", "40", "--set", "local.steps=5"]


def test_clients_of_all_kinds_join_and_the_advice_names_what_they_told(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    server = site.start("hyperbloom.server", "server", "advise", "--port", str(site.port), "--insecure",
                        "--local-clients", "1", "--set", "data.first=2", "--set", "data.parts=5", *FLAGS,
                        "--run-dir", str(run))  # fmt: skip
    own = ["--data", "digits", "--partition", "0/5", "--model", "hafl-1"]
    clients = [
        site.client("own", *own, "--disclose-class-shares"),
        site.client("plain", "--data", "digits", "--partition", "1/5"),
    ]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0]
    advice = json.loads((run / "advice.json").read_text())
    assert advice["scores"].keys() == {"local", "fedavg", "pfedhn"}
    assert advice["strategy"] == "local", "the others do not use its network"
    assert any(line.startswith("1 of 3 clients have their own networks") for line in advice["says"])
    assert any("2 of 3 tell" in line for line in advice["says"]), "the local client, and the one that wants to"
    assert f"advice: local\n- {advice['says'][0]}" in server.output
