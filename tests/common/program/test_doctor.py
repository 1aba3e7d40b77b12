"""The doctor: every row says how it is and what to do, and the exit code says whether a run can work."""

import datetime as dt
import importlib.metadata
import json
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperbloom.client.cli import main as client_main
from hyperbloom.common.program import doctor
from hyperbloom.common.program.doctor import Finding, check_folder, check_machine, check_server, report
from hyperbloom.common.secrecy.keys import make_key, write_private_key
from hyperbloom.server.access import certificates
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.cli import main as server_main


@contextmanager
def listening(files: Certificates | None = None) -> Iterator[int]:
    """Take connections on a free port, with TLS if there are certificates, until the test is over."""
    context = None
    if files:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.server, files.server_key)
        context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        if context:
                            context.wrap_socket(connection, server_side=True).close()
                        else:
                            connection.sendall(b"this is no TLS\n" * 10)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in which nothing is folded."""
    monkeypatch.setenv("COLUMNS", "400")


def by_what(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return init(tmp_path / "certs", [], days=90)


# ---------------------------------------------------------------------- this machine


def test_this_machine_runs_the_tests_so_it_is_well() -> None:
    findings = by_what(check_machine())
    assert {"Python", "packages", "accelerator", "threads"} == set(findings)
    assert {finding.state for finding in findings.values()} <= {"ok", "warning"}


def test_versions_out_of_the_tested_ranges_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99,<100", "numpy>=1", "surely-not-there>=1", "matplotlib>=99; extra == 'plots'"]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    finding = by_what(check_machine())["packages"]
    assert finding.state == "failure"
    assert finding.found.startswith(f"torch {importlib.metadata.version('torch')}, tested with ")
    assert finding.found.endswith("surely-not-there none, tested with >=1")
    assert finding.do.startswith("pip install 'torch")
    monkeypatch.setattr(doctor, "requires", lambda name: wanted[:2])
    assert by_what(check_machine())["packages"].state == "warning"


def test_a_folder_that_will_be_made_is_tried_where_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_folder("state", tmp_path / "a" / "b").state == "ok"
    assert list(tmp_path.iterdir()) == []
    usage = SimpleNamespace(free=200 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert check_folder("state", tmp_path).state == "warning"
    usage.free = 2**20
    assert check_folder("state", tmp_path).state == "failure"
    (tmp_path / "file").touch()
    blocked = check_folder("state", tmp_path / "file" / "folder")
    assert blocked.state == "failure"
    assert "or choose another" in blocked.do


def test_a_path_that_cannot_be_asked_for_is_told_too() -> None:
    assert check_folder("state", Path("a" * 300)).what == "state"  # Python 3.11 and 3.12 raise an OSError here


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_of_somebody_else_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert check_folder("state", tmp_path).state == "failure"


def test_the_exit_code_counts_failures_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Finding("a", "ok", "[red]x"), Finding("b", "warning", "y", "mend it")]) == 0
    assert "[red]x" in capsys.readouterr().out
    assert report([Finding("a", "failure", "x", "do this")]) == 1
    assert "1 failure\n" in capsys.readouterr().out


# ---------------------------------------------------------------------- the way to the server


def test_a_server_of_this_ca(files: Certificates) -> None:
    with listening(files) as port:
        found = by_what(check_server(f"127.0.0.1:{port}", files.ca, insecure=False))
    assert [finding.state for finding in found.values()] == ["ok", "ok", "ok"]
    until = dt.datetime.now(dt.UTC) + dt.timedelta(days=90)
    assert found["its certificate"].found == f"valid until {until:%Y-%m-%d}"


def test_a_server_of_another_ca_and_without_this_name(files: Certificates, tmp_path: Path) -> None:
    other = init(tmp_path / "other", [], days=90)
    with listening(files) as port:
        found = by_what(check_server(f"127.0.0.1:{port}", other.ca, insecure=False))
        assert found["TLS"].state == "failure"
        assert found["TLS"].do.startswith("get the ca.pem of this server")
        unnamed = by_what(check_server(f"127.0.0.2:{port}", files.ca, insecure=False))
    assert unnamed["server"].state == "failure"  # the listener is on 127.0.0.1 alone


def test_an_address_that_the_certificate_does_not_name(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "ALWAYS", ("elsewhere.example",))
    strange = init(tmp_path / "strange", [], days=90)
    with listening(strange) as port:
        found = by_what(check_server(f"127.0.0.1:{port}", strange.ca, insecure=False))
    assert found["TLS"].state == "failure"
    assert "certs renew --host" in found["TLS"].do


@pytest.mark.parametrize(
    ("shift", "what", "do"),
    [(dt.timedelta(days=-1000), "expired on", "certs renew"), (dt.timedelta(days=100), "valid from", "clock")],
)
def test_clock_and_days_of_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: dt.timedelta, what: str, do: str
) -> None:
    then = dt.datetime.now(dt.UTC) + shift
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "now", lambda: then)
        files = init(tmp_path / "certs", [], days=90)
    with listening(files) as port:
        found = by_what(check_server(f"127.0.0.1:{port}", files.ca, insecure=False))
    assert found["its certificate"].state == found["TLS"].state == "failure"
    assert what in found["its certificate"].found
    assert do in found["its certificate"].do
    assert "clock" in found["its certificate"].do
    assert do in found["TLS"].do


def test_a_certificate_that_ends_soon_is_a_warning(tmp_path: Path) -> None:
    files = init(tmp_path / "certs", [], days=7)
    with listening(files) as port:
        found = by_what(check_server(f"127.0.0.1:{port}", files.ca, insecure=False))
    assert found["TLS"].state == "ok"
    assert found["its certificate"].state == "warning"


def test_plain_text_where_tls_is_meant_and_the_reverse(files: Certificates) -> None:
    with listening() as port:
        assert by_what(check_server(f"127.0.0.1:{port}", files.ca, False))["TLS"].found == "it does not speak TLS"
        assert [f.state for f in check_server(f"127.0.0.1:{port}", None, True)] == ["ok"]
    with listening(files) as port:
        assert by_what(check_server(f"127.0.0.1:{port}", None, True))["TLS"].found == "it speaks TLS"


@pytest.mark.parametrize(
    ("address", "found"),
    [("gpu-box", "gpu-box"), ("127.0.0.1:0", "127.0.0.1:0"), ("name.invalid:9092", "name.invalid: ")],
)
def test_addresses_that_are_none(address: str, found: str) -> None:
    (finding,) = check_server(address, None, False)
    assert finding.state == "failure"
    assert finding.found.startswith(found)


# ---------------------------------------------------------------------- the commands


def test_a_client_that_can_join(files: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "ward.pem"
    write_private_key(key, make_key())
    flags = ["--root-certificates", str(files.ca), "--key", str(key), "--state-dir", str(tmp_path / "state")]
    with listening(files) as port:
        assert client_main(["doctor", "--server", f"127.0.0.1:{port}", *flags]) == 0
        assert "nothing here keeps a run from working" in capsys.readouterr().out
        key.chmod(0o644)
        assert client_main(["doctor", "--server", f"127.0.0.1:{port}", *flags]) == 1
    shown = capsys.readouterr().out
    assert "chmod 600" in shown
    assert "1 failure\n" in shown


def test_a_server_that_can_start(files: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["doctor", "--certs", str(files.folder), "--run-dir", str(tmp_path / "runs")]
    with listening(files) as port:
        assert server_main([*flags, "--port", str(port)]) == 1
        assert "choose another" in " ".join(capsys.readouterr().out.split())
        assert server_main([*flags, "--server", f"127.0.0.1:{port}"]) == 0
    shown = capsys.readouterr().out
    assert "signed by" in shown
    assert "0 may join" in shown
    files.server_key.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    assert server_main([*flags, "--port", str(free)]) == 1
    assert "chmod 600" in " ".join(capsys.readouterr().out.split())
    assert server_main([*flags, "--port", str(free), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [each["what"] for each in findings if "chmod 600" in each["do"]] == ["certificates"]


def test_a_server_certificate_of_another_ca(
    files: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(init(tmp_path / "other", [], days=90).ca, files.ca)
    flags = ["--certs", str(files.folder), "--run-dir", str(tmp_path), "--port", "0"]
    assert server_main(["doctor", *flags]) == 1
    assert "not signed by ca.pem" in " ".join(capsys.readouterr().out.split())


def test_a_server_without_certificates_and_in_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    flags = ["doctor", "--certs", str(tmp_path / "none"), "--run-dir", str(tmp_path), "--port", str(free)]
    assert server_main(flags) == 1
    assert "certs init" in " ".join(capsys.readouterr().out.split())
    assert server_main([*flags, "--insecure"]) == 0


def test_before_the_first_start_certificates_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERBLOOM_CERTS", raising=False)
    assert server_main(["doctor", "--run-dir", str(tmp_path), "--port", "0", "--json"]) == 0
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["port"]["state"] == "ok" and found["certificates"]["state"] == "warning"
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs/ca.pem").touch()  # then the start makes none
    assert server_main(["doctor", "--run-dir", str(tmp_path), "--port", "0"]) == 1


def test_a_client_that_has_enrolled_knows_the_ca(
    files: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(files) as port:
        here = tmp_path / "state" / "servers" / f"127.0.0.1_{port}"
        here.mkdir(parents=True)
        flags = ["doctor", "--server", f"127.0.0.1:{port}", "--state-dir", str(tmp_path / "state")]
        assert client_main(flags) == 0 and "join with --token" in " ".join(capsys.readouterr().out.split())
        shutil.copy(files.ca, here / "ca.pem")
        write_private_key(here / "key.pem", make_key())
        assert client_main(flags) == 0 and "join with" not in capsys.readouterr().out
