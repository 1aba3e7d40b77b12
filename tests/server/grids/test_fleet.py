"""What a server takes from its machine: its logs, and the address that others dial."""

import logging
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from hyperbloom.common.secrecy.keys import make_key, public_pem
from hyperbloom.server.access.certificates import Certificates, init, own_addresses, renew
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.grids import fleet
from hyperbloom.server.grids.fleet import Machines


def test_the_log_of_a_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperbloom.server.broker.log.LARGEST_LOG", 1000)
    with fleet.log_to(tmp_path / "server.log"):
        for number in range(1000):
            logging.getLogger("hyperbloom").warning("line %d of a client that talks", number)
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert files.keys() == {"server.log", "server.log.1", "server.log.2", "server.log.3"}
    assert max(files.values()) <= 1000
    assert "line 999 of" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize(
    ("host", "place"),
    [("::1", "[::1]:9092"), ("[::1]", "[::1]:9092"), ("::", "[::]:9092"), ("127.0.0.1", "127.0.0.1:9092")],
)
def test_an_address_of_ipv6_is_in_brackets(host: str, place: str) -> None:
    assert Machines(host=host, port=9092).listening == place


def test_clients_dial_the_name_that_the_certificate_was_made_for(tmp_path: Path) -> None:
    init(tmp_path / "named", ["fed.hospital.example"])
    named = Machines(host="0.0.0.0", port=9092, certs=tmp_path / "named")
    assert named.address == "fed.hospital.example:9092"
    init(tmp_path / "own", own_addresses())
    machines = Machines(host="0.0.0.0", port=9092, certs=tmp_path / "own")
    (*_, first) = [*own_addresses(), socket.gethostname()][:1]
    assert machines.address == f"{first}:9092"
    renew(tmp_path / "own", ["10.255.255.1"], 9)  # such as an address of yesterday
    if own_addresses():
        assert machines.address == f"{first}:9092"
    renew(tmp_path / "own", ["*.example.org", "fed.example.org"], 9)
    assert machines.address == "fed.example.org:9092"


def test_the_line_for_newcomers_has_a_token_though_those_who_trained_have_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "open_superlink", lambda *_: nullcontext())
    certs, lines = tmp_path / "certs", list[str]()
    ClientRegistry(Certificates(init(certs, ["127.0.0.1"]).folder).clients).add("ward-7", public_pem(make_key()))
    machines = Machines(host="127.0.0.1", port=0, certs=certs)
    with fleet.open_for_newcomers(
        machines, tmp_path / "serve", "--data WHAT", lambda line, *_: lines.append(line), print
    ):
        assert " --token HB1." in lines[1]
        assert lines[2].startswith("the token lets 1 enrol within an hour; flower-server clients invite NAME")
