"""Clients that are killed, doubled, cut off, interrupted; a server that dies under its clients."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hyperbloom.server.cli import main
from siege.faults import Proxy
from tests.processes.conftest import Process, Site

SHAPE = ["--set", "input_shape=[1,8,8]", "--set", "num_classes=10"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Until = Callable[[Callable[[], bool], str], None]


def rounds(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def replied(run: Path, index: int) -> list[bool]:
    """Return, of each order to a client that is over, whether it replied."""
    lines = [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
    return ["refused" not in line for line in lines if line["client"] == f"c{index}"]


def join(site: Site, index: int, proxy: Proxy) -> Process:
    return site.client(f"c{index}", "--partition", f"{index}/3", "--server", f"127.0.0.1:{proxy.port}")


def test_killed_doubled_cut_off_and_interrupted_clients(site: Site, until: Until) -> None:
    run = site.folder / "run"
    args = ["--clients", "3", "--cohort", "3", "--rounds", "100000", "--eval-every", "5", "--set", "local.steps=200"]
    server = site.server("--strategy", "pfedhn-pc", *args, "--set", "round_timeout_s=5", "--run-dir", str(run))
    proxies = [Proxy(site.port) for _ in range(3)]
    clients = [join(site, index, proxy) for index, proxy in enumerate(proxies)]
    until(lambda: rounds(run) >= 2, "two rounds")

    double = site.client("c0", "--partition", "0/3", state="elsewhere")
    assert double.wait() == 3
    assert "a client named 'c0' with another identity is connected" in double.output
    again = site.client("c0", "--partition", "0/3")
    assert again.wait() == 3
    assert f"process {clients[0].popen.pid} already runs as this client" in again.output
    assert clients[0].popen.poll() is None

    # Killed in the middle of a round, restarted at once: a new process and a new node, the same client.
    head = next((site.folder / "state/c1/personal").glob("*.safetensors"))
    before = head.read_bytes()
    clients[1].kill()
    clients[1] = join(site, 1, proxies[1])
    server.wait_for("c1 is back")
    until(lambda: head.read_bytes() != before, "the personal classifier goes on in the same file")

    # Connections that stand, and connections that end: a round goes on without them, and later ones with them again.
    proxies[0].hang()
    proxies[1].cut()
    until(lambda: not (replied(run, 0)[-1] or replied(run, 1)[-1]), "a round without two of them")
    for proxy in proxies:
        proxy.heal()
    until(lambda: replied(run, 0)[-1] and replied(run, 1)[-1], "rounds with them again")
    assert all(client.popen.poll() is None for client in clients), "they never left"

    clients[2].interrupt()
    assert clients[2].wait() == 0
    assert "left the federation" in clients[2].output
    server.wait_for("c2 left")
    done = rounds(run)
    until(lambda: rounds(run) >= done + 2, "rounds without the client that left")

    roster = json.loads((run / "roster.json").read_text())["clients"]
    assert [(client["client_id"], client["row"]) for client in roster] == [("c0", 0), ("c1", 1), ("c2", 2)]
    server.popen.terminate()
    assert server.wait() == 130
    assert clients[0].wait() == 0
    assert "the server says: the run was stopped" in clients[0].output
    for proxy in proxies:
        proxy.close()


@pytest.mark.slow
def test_clients_outlive_a_server_and_join_the_next_one(site: Site, until: Until) -> None:
    args = ["--clients", "2", "--cohort", "2", "--eval-every", "5"]
    first = site.server(*args, "--rounds", "100000", "--run-dir", str(site.folder / "first"))
    clients = [site.client(f"c{index}", "--partition", f"{index}/2") for index in range(2)]
    until(lambda: rounds(site.folder / "first") >= 2, "two rounds")
    first.kill()
    clients[0].wait_for("trying until it does", timeout_s=60)
    second = site.server(*args, "--rounds", "10", "--run-dir", str(site.folder / "second"))
    assert second.wait(150) == 0, second.output
    assert [client.wait() for client in clients] == [0, 0], clients[0].output
    assert rounds(site.folder / "second") == 10


def test_only_the_fleet_port_faces_clients(site: Site) -> None:
    server = site.server(
        "--insecure", "--host", "0.0.0.0", *SHAPE, "--clients", "1", "--run-dir", str(site.folder / "run")
    )
    server.wait_for("run this on each machine")
    assert "everyone on the network can read and forge" in server.output
    pid = server.popen.pid
    inodes = {match for fd in Path(f"/proc/{pid}/fd").iterdir() for match in re.findall(r"socket:\[(\d+)\]", _link(fd))}
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.add(int(fields[1].rsplit(":", 1)[1], 16))
    assert listening == {site.port}


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


@pytest.mark.slow
def test_a_killed_server_goes_on_with_the_clients_that_waited(site: Site, until: Until, tmp_path: Path) -> None:
    run = site.folder / "run"
    args = ["--strategy", "pfedhn-pc", "--clients", "2", "--cohort", "1", "--rounds", "12", "--eval-every", "4"]
    args += ["--set", "checkpoint_every=3", "--set", "local.steps=40"]
    first = site.server(*args, "--run-dir", str(run))
    share = "--disclose-counts"  # as virtual clients do
    clients = [site.client(f"client-{index}", "--partition", f"{index}/2", share) for index in range(2)]
    until(lambda: rounds(run) >= 7, "seven rounds")
    first.kill()
    done = rounds(run)
    second = site.start("hyperbloom.server", "server", "--resume", str(run), "--insecure")
    assert second.wait(150) == 0, second.output
    assert f"going on after round {min(done, 11) // 3 * 3}" in second.output, "a checkpoint every three rounds"
    assert [client.wait() for client in clients] == [0, 0], clients[0].output

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["--engine", "inline", *args, "--run-dir", str(tmp_path / "whole")]) == 0
    torch.set_num_threads(threads)
    for name in ("summary.json", "hypernetwork-last.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert rounds(run) == rounds(tmp_path / "whole") == 12
