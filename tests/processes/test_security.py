"""Who gets in, who does not, and what both sides are told: one server over TLS, and every kind of wrong client."""

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from hyperbloom.common.secrecy.keys import fingerprint, make_key, public_pem, read_private_key, write_private_key
from hyperbloom.server.access.certificates import Certificates, init, renew
from hyperbloom.server.access.registry import ClientRegistry
from tests.processes.conftest import Process, Site, cleared

Until = Callable[[Callable[[], bool], str], None]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@dataclass
class House:
    """A server that trains with its members, and what it takes to join."""

    site: Site
    files: Certificates
    registry: ClientRegistry
    server: Process
    members: dict[str, Process]

    def key(self, name: str, known: bool = True) -> Path:
        """Return the file of a key, in the registry under its name or not."""
        path = self.site.folder / f"{name}.pem"
        if not path.exists():
            key = make_key()
            write_private_key(path, key)
            if known:
                self.registry.add(name, public_pem(key))
        return path

    def client(self, name: str, key: Path, ca: Path | None = None, port: int | None = None, state: str = "") -> Process:
        """Start a client with a key."""
        address = ["--server", f"127.0.0.1:{port}"] if port else []
        flags = ["--root-certificates", str(ca or self.files.ca), "--key", str(key), "--max-train", "60", *address]
        return self.site.client(name, *flags, state=state, insecure=False)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Return a server in the middle of a long run with the members a and b."""
    with cleared(tmp_path_factory.mktemp("house")) as site:
        files = init(site.folder / "certs", [], days=30)
        registry = ClientRegistry(files.clients)
        run = ["--clients", "2", "--cohort", "2", "--rounds", "100000", "--eval-every", "2"]
        brief = ["--set", "local.steps=50", "--set", "hidden_dim=8", "--run-dir", str(site.folder / "run")]
        flags = ["--certs", str(files.folder), "--host", "127.0.0.1", *run, *brief]
        server = site.server("--strategy", "pfedhn", *flags, insecure=False)
        house = House(site, files, registry, server, {})
        server.wait_for("waiting for 2 clients")
        # Both are added while the server runs.
        house.members |= {name: house.client(name, house.key(name)) for name in "ab"}
        server.wait_for("b joined")
        server.wait_for("a joined")
        yield house
        # What all of this was about: nobody else has ever been in.
        assert set(re.findall(r"(\S+) joined", server.output)) == set(house.members)


def test_each_wrong_client_is_refused_and_both_sides_say_why(house: House) -> None:
    site, server = house.site, house.server
    other_ca = init(site.folder / "other", [], days=30).ca
    stranger = house.key("stranger", known=False)
    # c is a client of this federation, and has a's secret: all but a's key.
    shutil.copytree(site.folder / "state/a", site.folder / "state/a-stolen", ignore=shutil.ignore_patterns("lock"))
    thief = ["--root-certificates", str(house.files.ca), "--key", str(house.key("c"))]
    expected = {
        "unknown key": (house.client("x", stranger), 3, "the server refused this client: key SHA256:"),
        "stolen id": (
            site.client("a", *thief, state="a-stolen", insecure=False),
            3,
            "the server refused this client: its key is that of c, but it says that it is a",
        ),
        "wrong CA": (
            house.client("y", house.key("y"), ca=other_ca),
            5,
            f"cannot open a session with 127.0.0.1:{site.port}: its certificate is not signed by the CA",
        ),
        "plain text": (
            site.client("z"),
            5,
            f"cannot open a session with 127.0.0.1:{site.port}: it speaks TLS; use --token, or --root-certificates",
        ),
    }
    shutil.copytree(site.folder / "state/a", site.folder / "state/a-again", ignore=shutil.ignore_patterns("lock"))
    double = house.client("a", house.key("a"), state="a-again")  # a's key and secret: the member stays, it waits
    for what, (client, code, line) in expected.items():
        assert client.wait() == code, what
        assert client.output.splitlines()[-1].startswith(f"flower-client: {line}"), (what, client.output)
        assert "Traceback" not in client.output
    shown, mine = (fingerprint(public_pem(read_private_key(key, ""))) for key in (stranger, house.key("a")))
    for line in (
        f"refused 127.0.0.1: its key {shown} is unknown or revoked",
        ": its key is that of c, but it says that it is a",
        "127.0.0.1 broke off the TLS handshake: a client that does not trust this certificate",
        "refused 127.0.0.1: it spoke plain text to the TLS port (is it a client with --insecure?)",
        f"refused 127.0.0.1: another process has its key {mine}",
    ):
        server.wait_for(line)
    double.wait_for(
        "refuses this client for now (another process with this client's key is here); trying until it does not"
    )
    double.popen.terminate()
    assert double.wait() == 0
    assert all(member.popen.poll() is None for member in house.members.values()), "the members have noticed nothing"
    assert "a left" not in server.output


def test_from_an_empty_folder_the_printed_line_is_all_that_others_need(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site.folder)
    flags = ["--strategy", "pfedhn", "--clients", "2", "--cohort", "2", "--host", "127.0.0.1", "--rounds", "2"]
    server = site.server(*flags, "--set", "local.steps=5", "--run-dir", str(site.folder / "run"), insecure=False)
    server.wait_for("waiting for 2 clients")
    (token,) = re.findall(r"flower-client --server 127\.0\.0\.1:\d+ --token (HB1\.\S+) --client-id NAME", server.output)
    clients = [site.client(name, "--token", token, "--max-train", "60", insecure=False) for name in "ab"]
    assert [client.wait() for client in clients] == [0, 0], clients[0].output
    assert server.wait() == 0, server.output
    assert set(ClientRegistry(site.folder / "certs/clients.json").clients()) == {"a", "b"}

    # A day later the clients need no token, and a third one has to be invited.
    again = site.server(*flags, "--run-dir", str(site.folder / "again"), insecure=False)
    third = site.client("c", "--token", token, insecure=False)
    assert third.wait() == 3
    assert "the server refused this client: it cannot enrol: its token was used before" in third.output
    again.wait_for("refused 127.0.0.1: its token was used before")
    clients = [site.client(name, "--max-train", "60", insecure=False) for name in "ab"]
    assert [client.wait() for client in clients] == [0, 0], clients[0].output
    assert again.wait() == 0, again.output
    assert "--token" not in again.output


def test_a_revoked_client_is_out_in_the_middle_of_the_run_and_a_new_one_gets_in(house: House, until: Until) -> None:
    server, member = house.server, house.members["b"]
    metrics = house.site.folder / "run/metrics.jsonl"
    late = house.members["late"] = house.client("late", house.key("late"))
    server.wait_for("late joined")
    done = len(metrics.read_text().splitlines())
    until(lambda: len(metrics.read_text().splitlines()) > done + 2, "rounds of the three")
    house.registry.revoke("b")
    server.wait_for("b may not join any more: its key SHA256:")
    server.wait_for("b left")
    assert member.wait() == 3
    assert member.output.splitlines()[-1].startswith("flower-client: the server refused this client: key SHA256:")
    done = len(metrics.read_text().splitlines())
    until(lambda: len(metrics.read_text().splitlines()) > done + 2, "the others go on")

    # Killed without a word and started again at once: the key is the client, and the server notices. It lost its state.
    house.members["a"].kill()
    house.members["a"] = house.client("a", house.key("a"), state="a new disk")
    server.wait_for("a is back")
    server.interrupt()
    assert server.wait() == 130
    assert house.members["a"].wait() == late.wait() == 0


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[tuple[Path, int, int]]:
    """Return a CA, a port with its expired certificate, and a port that speaks plain text."""
    files = init(tmp_path / "expired", [], days=30)
    renew(files.folder, [], days=0)
    server = grpc.server(ThreadPoolExecutor(1))
    pair = (files.server_key.read_bytes(), files.server.read_bytes())
    expired = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    plain = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield files.ca, expired, plain
    server.stop(None)


def test_an_expired_certificate_and_a_port_without_tls(
    site: Site, ports: tuple[Path, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)  # other tests may have set it
    ca, expired, plain = ports
    write_private_key(site.folder / "a.pem", make_key())
    flags = ["--root-certificates", str(ca), "--key", str(site.folder / "a.pem")]
    clients = [
        site.client(name, "--server", f"127.0.0.1:{port}", *flags, insecure=False)
        for name, port in (("a", expired), ("b", plain))
    ]
    np.save(site.folder / "x.npy", np.zeros((2, 4), np.float32))
    to = ["--server", f"127.0.0.1:{expired}", "--data", str(site.folder / "x.npy"), "--out", str(site.folder / "model")]
    clients.append(site.start("hyperbloom.client", "newcomer", "join", *to, *flags, "--state-dir", str(site.folder)))
    assert [client.wait() for client in clients] == [5, 5, 5]
    assert len(clients[2].output.splitlines()) == 1, "and not a line of gRPC's"
    assert "its certificate has expired; whoever runs it can make a new one" in clients[0].output
    assert (
        "it does not speak TLS; is it the Fleet port, and was the server started with --insecure?" in clients[1].output
    )
