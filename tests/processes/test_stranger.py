"""Strangers who attack the port of a running federation, which goes on."""

import json
from collections.abc import Callable

import pytest

from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import init
from hyperbloom.server.access.registry import ClientRegistry
from tests.processes.conftest import Process, Site, memory

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def opened(stranger: Process) -> int:
    """Return how many connections a stranger has opened."""
    lines = stranger.output.rpartition("\n")[0].splitlines()
    return int(json.loads(lines[-1])["connections"]) if lines else 0


def test_strangers_stop_no_round_and_fill_no_memory(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    files = init(site.folder / "certs", [], days=30)
    run = [
        "--clients",
        "2",
        "--cohort",
        "2",
        "--rounds",
        "100000",
        "--eval-every",
        "1000",
        "--certs",
        str(files.folder),
    ]
    brief = ["--set", "local.steps=5", "--set", "hidden_dim=8", "--run-dir", str(site.folder / "run")]
    server = site.server("--strategy", "pfedhn", *run, *brief, insecure=False)
    members = []
    for name in "ab":
        key, path = make_key(), site.folder / f"{name}.pem"
        write_private_key(path, key)
        ClientRegistry(files.clients).add(name, public_pem(key))
        flags = ["--root-certificates", str(files.ca), "--key", str(path), "--max-train", "60"]
        members.append(site.client(name, *flags, insecure=False))
    metrics, address = site.folder / "run/metrics.jsonl", f"127.0.0.1:{site.port}"

    def rounds() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    until(lambda: rounds() > 3, "rounds before the attack")
    before = memory(server.popen.pid)
    strangers = []
    for how, connections in {"calls": 2, "bodies": 3, "gzip": 1, "silent": 300}.items():
        # Each in a process of its own: one for all would be too busy with itself, above all on a slow machine.
        attack = [address, "--ca", str(files.ca), "--how", how, "--connections", str(connections), "--seconds", "1000"]
        strangers.append((site.start("siege.stranger", how, *attack), connections))
    server.wait_for("127.0.0.1 floods the port with calls that are refused; they are answered late, or it is cut off")
    # Calls of headers alone are answered late, so that their connections stand.
    until(lambda: all(opened(stranger) > most for stranger, most in strangers[1:]), "connections closed by each attack")
    begun = rounds()
    until(lambda: rounds() > begun + 10, "rounds during the attack")
    for stranger, _ in strangers:
        stranger.kill()
    ended = rounds()
    until(lambda: rounds() > ended + 10, "rounds after the attack")
    assert [member.popen.poll() for member in members] == [None, None]
    # Before there was a door, 1,100 MiB of bodies and 3,100 of what unpacked.
    assert memory(server.popen.pid, "VmHWM") < before + 200
    assert server.output.count("floods the port") < 5, "told once a minute"
