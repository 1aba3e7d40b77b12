"""Networks of the real world: clients behind an HTTP CONNECT proxy, and a server behind nginx. docs/networks.md."""

import re
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

from hyperbloom.client.link.server import Link
from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.superlink import free_port
from tests.client.link.test_connection import Server, exchange, session
from tests.client.link.test_http import flower_serves_http, superlink
from tests.processes.conftest import Process, Site

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(200)]

PLACES = {"listen": "443", "grpc": "gpu-box:9092", "http": "127.0.0.1:8000", "certificates": "/etc/hyperbloom/certs/"}
"""What the page's lines name. nginx compares a server's certificate with its name, not with its address."""

PAGE = Path(__file__).parents[2] / "docs/networks.md"
RUN = ["--strategy", "pfedhn-pc", "--rounds", "2", "--clients", "1", "--cohort", "1", "--set", "local.steps=2"]


class Tunnel(socketserver.StreamRequestHandler):
    """Answers `CONNECT HOST:PORT`, and then passes bytes both ways."""

    asked: list[str]

    def handle(self) -> None:
        method, target, _ = self.rfile.readline().decode().split()
        while self.rfile.readline().strip():
            pass
        self.asked.append(f"{method} {target}")
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port))) as far:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            threading.Thread(target=_pump, args=(far, self.connection), daemon=True).start()
            _pump(self.connection, far)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a proxy, and what it has been asked for."""
    handler = type("Handler", (Tunnel,), {"asked": []})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
        server.shutdown()


@pytest.fixture
def house(site: Site) -> tuple[Process, Certificates, Path]:
    """Return a server with TLS that waits for one client, its certificates, and the key of that client."""
    files, key = init(site.folder / "certs", [], days=30), make_key()
    path = site.folder / "ward-7.pem"
    write_private_key(path, key)
    ClientRegistry(files.clients).add("ward-7", public_pem(key))
    server = site.server(*RUN, "--certs", str(files.folder), "--run-dir", str(site.folder / "run"), insecure=False)
    server.wait_for("waiting for 1 client")
    return server, files, path


def join(site: Site, ca: Path, key: Path) -> Process:
    flags = ["--root-certificates", str(ca), "--key", str(key), "--data", "digits", "--max-train", "60"]
    return site.client("ward-7", *flags, insecure=False)


@pytest.mark.parametrize("around", ["", "127.0.0.1"])
def test_a_client_takes_the_proxy_of_its_environment(
    site: Site, house: tuple[Process, Certificates, Path], around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, files, key = house
    with proxy() as (address, asked):
        monkeypatch.setenv("https_proxy", address)
        monkeypatch.setenv("no_proxy", around)
        client = join(site, files.ca, key)
        assert (server.wait(), client.wait()) == (0, 0), server.output + client.output
    assert set(asked) == (set() if around else {f"CONNECT 127.0.0.1:{site.port}"})


@contextmanager
def nginx(folder: Path, location: str, **here: str) -> Iterator[Path]:
    """Run nginx with the page's own lines for a location, but with what is `here`; yield the log of the calls."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/opt/homebrew/bin")
    if program is None:
        pytest.skip("there is no nginx here (Debian: apt-get install nginx-light)")
    folder.mkdir()
    (block,) = (each for each in re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL) if location in each)
    for written, value in here.items():
        assert PLACES[written] in block
        block = block.replace(PLACES[written], value)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    log = folder / "access.log"
    head = f"user root;\npid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log {log};\n{places}"
    (folder / "nginx.conf").write_text(f"{head}{block}}}\n")
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    with subprocess.Popen([*command, "-g", "daemon off;"]) as running:
        try:
            yield log
        finally:
            running.terminate()


def test_a_server_stands_behind_nginx(site: Site, house: tuple[Process, Certificates, Path]) -> None:
    server, files, key = house
    behind, port = site.port, free_port()
    here = {"listen": f"127.0.0.1:{port}", "grpc": f"localhost:{behind}", "certificates": f"{files.folder}/"}
    with nginx(site.folder / "nginx", "/flwr.proto.Fleet/", **here) as log:
        try:
            site.port = port
            client = join(site, files.ca, key)
            assert (server.wait(), client.wait()) == (0, 0), server.output + client.output
        finally:
            site.port = behind
    calls = log.read_text().splitlines()
    assert len([line for line in calls if "POST /flwr.proto.Fleet/" in line]) > 10
    # A client signs off when the run is over, and the server may be gone by then.
    assert not [line for line in calls if re.search(r'" [45]\d\d ', line) and "/DeactivateNode" not in line]


@flower_serves_http
def test_flowers_superlink_stands_behind_nginx(tmp_path: Path) -> None:
    files, port = init(tmp_path / "certs", [], days=30), free_port()
    with superlink() as server:
        here = {"listen": f"127.0.0.1:{port}", "http": f"127.0.0.1:{server.port}", "certificates": f"{files.folder}/"}
        link = Link(f"localhost:{port}", False, files.ca, stock=True, http=True)
        with nginx(tmp_path / "nginx", "/v1/fleet/", **here) as log, session(link) as client:
            for _ in range(2):
                exchange(cast(Server, server), client, 2**20, 2**20)
            assert [node.node_id for node in server.grid.get_nodes()] == [client.node_id]
    calls = log.read_text().splitlines()
    assert len([line for line in calls if "POST /v1/fleet/" in line]) > 10
    assert not [line for line in calls if re.search(r'" [45]\d\d ', line)]
