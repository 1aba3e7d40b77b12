"""Enrolment against a real SuperLink over TLS, in this process."""

import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import exponential

from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.enrolment import enrol
from hyperbloom.client.link.server import Link, refusal
from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.secrecy.keys import public_pem, read_private_key, server_of
from hyperbloom.common.secrecy.token import Token
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.superlink import free_port, superlink


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def server(tmp_path: Path, said: list[str]) -> Iterator[tuple[str, Certificates]]:
    """Return a server's address and its certificates."""
    files, address = init(tmp_path / "certs", []), f"127.0.0.1:{free_port()}"
    with superlink(address, tmp_path / "run", files, said.append):
        yield address, files


def call(address: str, found: dict[str, Any]) -> None:
    """Open a session with what `enrol` has found, and end it."""
    key = read_private_key(found["key"], "--key")
    link = Link(address, root_certificates=found["root_certificates"], key=key, token=found["secret"])
    connection = Connection(link, RetryInvoker(exponential, grpc.RpcError, max_tries=1, max_time=None))
    try:
        connection.open()
    finally:
        connection.close()


def test_a_token_is_needed_once_and_the_key_is_made_here(
    server: tuple[str, Certificates], tmp_path: Path, said: list[str]
) -> None:
    address, files = server
    token = Invitations(files).invite(None, 1, 60)
    found = enrol(address, str(token), "ward-7", tmp_path / "state")
    assert found["root_certificates"].read_bytes() == files.ca.read_bytes()
    assert stat.S_IMODE(found["key"].stat().st_mode) == 0o600
    call(address, found)
    assert ClientRegistry(files.clients).keys() == {public_pem(read_private_key(found["key"], "")): "ward-7"}
    assert any("ward-7 has enrolled with a token; its key is SHA256:" in line for line in said)

    # The same command, and one without the token: the key is known, and the token is not looked at.
    again, without = (enrol(address, text, "ward-7", tmp_path / "state") for text in (str(token), None))
    assert again == found and without == found | {"secret": ""}
    call(address, again)
    call(address, without)


def test_a_token_of_another_ca_takes_the_place_of_what_is_there(
    server: tuple[str, Certificates], tmp_path: Path
) -> None:
    """As where a server was set up anew at the same address."""
    address, files = server
    token = str(Invitations(files).invite(None, 1, 60))
    found = enrol(address, token, "ward-7", tmp_path / "state")
    before = found["key"].read_bytes()
    found["root_certificates"].write_bytes(init(tmp_path / "earlier", []).ca.read_bytes())
    again = enrol(address, token, "ward-7", tmp_path / "state")
    assert again["root_certificates"].read_bytes() == files.ca.read_bytes()
    assert again["key"].read_bytes() != before, "each server gets a key of its own"
    call(address, again)


@pytest.mark.parametrize("shown", [True, False], ids=["with its token", "without a token"])
def test_a_server_that_has_moved_knows_its_clients(
    server: tuple[str, Certificates], tmp_path: Path, shown: bool
) -> None:
    address, files = server
    token = str(Invitations(files).invite(None, 2, 60))
    before = enrol(address, token, "ward-7", tmp_path / "state")
    call(address, before)
    moved = enrol(address.replace("127.0.0.1", "localhost"), token if shown else None, "ward-7", tmp_path / "state")
    assert moved["key"] == before["key"] and moved["root_certificates"] == before["root_certificates"]
    call(address, moved)
    assert list(ClientRegistry(files.clients).keys().values()) == ["ward-7"]


def test_a_name_that_cannot_be_looked_up_yet_is_waited_for(
    server: tuple[str, Certificates],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where a machine starts before its network."""
    monkeypatch.setattr("hyperbloom.client.link.enrolment.RETRY_S", 0.01)
    (address, files), calls, connected = server, [], socket.create_connection

    def connect(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) < 4:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return connected(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", connect)
    found = enrol(address, str(Invitations(files).invite(None, 1, 60)), "a", tmp_path / "state")
    assert found["root_certificates"].read_bytes() == files.ca.read_bytes()
    assert "does not answer (Temporary failure in name resolution); trying until it does" in caplog.text


def test_a_bad_token_is_one_line_on_both_sides(
    server: tuple[str, Certificates], tmp_path: Path, said: list[str]
) -> None:
    address, files = server
    bad = replace(Token.of(server_of(files.ca)), secret="A" * 22)
    with pytest.raises(grpc.RpcError) as caught:
        call(address, enrol(address, str(bad), "ward-7", tmp_path / "state"))
    assert str(refusal(caught.value)) == (
        "the server refused this client: it cannot enrol: its token is unknown. Ask for a token "
        "(flower-server clients invite NAME)"
    )
    assert [line for line in said if "token" in line] == ["refused 127.0.0.1: its token is unknown"]
    assert not ClientRegistry(files.clients).clients()


def test_nothing_is_sent_to_another_server(server: tuple[str, Certificates], tmp_path: Path) -> None:
    address, _ = server
    foreign = Token.of(server_of(init(tmp_path / "other", []).ca))
    with pytest.raises(ConnectionFailed, match="is another server than the token's; nothing was sent to it"):
        enrol(address, str(foreign), "ward-7", tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_server_that_is_not_there_yet_or_breaks_off_is_waited_for_and_gets_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy accepts before its server is up. One that serves several sites shows the certificate of the name."""
    monkeypatch.setattr("hyperbloom.client.link.enrolment.RETRY_S", 0.05)
    files, port, names = init(tmp_path / "certs", []), free_port(), list[str | None]()
    token = Invitations(files).invite(None, 1, 60)
    with pytest.raises(ConfigError, match=r"--server: expected HOST:PORT, such as gpu-box:9092 .*; found 'gpu-box'"):
        enrol("gpu-box", str(token), "a", tmp_path)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files.server.read_bytes() + files.ca.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, files.server_key)
    context.sni_callback = lambda _, name, __: names.append(name)

    def proxy() -> None:
        while not caplog.records:  # it says first that nobody is there
            time.sleep(0.01)
        with socket.create_server(("127.0.0.1", port)) as listening:
            for _ in range(3):
                listening.accept()[0].close()
            with suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True):
                pass

    later = threading.Thread(target=proxy)
    later.start()
    found = enrol(f"localhost:{port}", str(token), "a", tmp_path / "state")
    later.join()
    assert found["root_certificates"].read_bytes() == files.ca.read_bytes() and names == ["localhost"]
    (said,) = [each.message for each in caplog.records]
    assert said == f"localhost:{port} does not answer (Connection refused); trying until it does (Ctrl-C leaves)"


def test_a_port_without_tls_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tries = init(tmp_path / "certs", []), list[float]()

    def leave(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("hyperbloom.client.link.enrolment.time.sleep", leave)
    token = Invitations(files).invite(None, 1, 60)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=lambda: [listening.accept()[0].close() for _ in range(4)])
        accepting.start()
        with pytest.raises(KeyboardInterrupt):
            enrol(f"127.0.0.1:{listening.getsockname()[1]}", str(token), "a", tmp_path / "state")
        accepting.join()
    (said,) = [each.message for each in caplog.records]
    assert "(it shows no certificate; is it the Fleet port, and started with --insecure?); trying" in said
