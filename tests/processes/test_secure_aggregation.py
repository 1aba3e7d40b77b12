"""Secure aggregation over real gRPC, with a client that is killed in the middle of it, and with keys."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperbloom.common.secrecy.keys import fingerprint, make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import init
from hyperbloom.server.access.registry import ClientRegistry
from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_client_does_not_spoil_the_sum(site: Site, until: Callable[[Callable[[], bool], str], None]) -> None:
    run = site.folder / "run"
    args = ["--strategy", "fedavg", "--clients", "4", "--cohort", "4", "--rounds", "100000", "--eval-every", "100000"]
    args += ["--secure-aggregation", "--round-timeout", "15", "--set", "local.steps=100", "--run-dir", str(run)]
    server = site.server(*args)
    clients = [site.client(f"c{index}", "--partition", f"{index}/4") for index in range(4)]
    until(lambda: len(lines(run / "metrics.jsonl")) >= 2, "two rounds")
    before = len(lines(run / "metrics.jsonl"))
    clients[1].kill()
    until(lambda: len(lines(run / "metrics.jsonl")) >= before + 4, "rounds after one was killed")
    rounds = lines(run / "metrics.jsonl")
    assert [line["clients"] for line in rounds[:before]] == [4] * before
    assert rounds[-1]["clients"] == 3 and "loss" not in rounds[-1]
    # Whatever it was in the middle of: the others' sum is found with the shares that it has dealt, or without it.
    refused = [line for line in lines(run / "clients.jsonl") if "refused" in line]
    assert {line["client"] for line in refused} <= {"c1"}, refused
    server.kill()  # it would wait for the killed client to hear its goodbye


def test_a_client_whose_user_does_not_know_another_one_stays_out(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    """The others, who insist on a sum of three and know each other, go on without it, and both sides say why."""
    files = init(site.folder / "certs", [], days=30)
    registry, keys = ClientRegistry(files.clients), {name: make_key() for name in ("a", "b", "c", "d")}
    names = {name: fingerprint(public_pem(key)) for name, key in keys.items()}
    for name, key in keys.items():
        registry.add(name, public_pem(key))
        write_private_key(site.folder / f"{name}.pem", key)
    (site.folder / "all").write_text("\n".join(f"{name}  {print_}" for name, print_ in names.items()))
    (site.folder / "few").write_text("\n".join(names[name] for name in "bc"))
    run = site.folder / "run"
    args = ["--strategy", "fedavg", "--clients", "4", "--cohort", "4", "--rounds", "3", "--eval-every", "3"]
    args += ["--secure-aggregation", "--set", "local.steps=1", "--certs", str(files.folder), "--run-dir", str(run)]
    server = site.server(*args, insecure=False)
    clients = {}
    for index, name in enumerate(keys):
        flags = ["--root-certificates", str(files.ca), "--key", str(site.folder / f"{name}.pem"), "--min-masked", "3"]
        flags += ["--peers", str(site.folder / ("few" if name == "a" else "all")), "--partition", f"{index}/4"]
        clients[name] = site.client(name, *flags, insecure=False)
    assert server.wait() == 0, server.output
    assert [line["clients"] for line in lines(run / "metrics.jsonl")] == [3, 3, 3]
    refused = {line["client"]: line["refused"] for line in lines(run / "clients.jsonl") if "refused" in line}
    expected = f"alone (--peers), found {names['d']}"
    assert set(refused) == {"a"} and refused["a"].endswith(expected) and expected in clients["a"].output
    assert json.loads((site.folder / "state/b/releases.json").read_text()) == {"changes": 3, "scores": 0}
