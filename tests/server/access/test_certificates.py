"""Certificates: what they say, who trusts them (Python's own TLS is the judge), and what is refused before a start."""

import datetime as dt
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import PrivateFormat

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.keys import make_key, write_private_key
from hyperbloom.server.access import certificates
from hyperbloom.server.access.certificates import (
    Certificates,
    check_files,
    describe,
    init,
    names,
    renew,
)
from hyperbloom.server.access.invitations import Invitations


def check(files: Certificates) -> list[str]:
    """Check a folder as the server does."""
    return check_files(files)


def shake_hands(files: Certificates, ca: Path, host: str) -> None:
    """Do a TLS handshake with what is in a folder; raises what the client would."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.server, files.server_key)
    client = ssl.create_default_context(cafile=str(ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def answer() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        client.wrap_socket(ours, server_hostname=host).close()
    finally:
        ours.close()
        thread.join()


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return init(tmp_path / "certs", ["gpu-box.example", "10.0.0.5", "2001:db8::1"], days=30)


@pytest.mark.parametrize("there", [("ca.pem", "ca.key"), ("ca.pem", "ca.key", "server.key")])
def test_init_goes_on_where_it_was_stopped(tmp_path: Path, there: tuple[str, ...]) -> None:
    files = init(tmp_path / "certs", ["a.example"])
    ca = files.ca.read_bytes()
    for name in {"server.pem", "server.key"} - set(there):
        (tmp_path / "certs" / name).unlink()
    files.server.unlink(missing_ok=True)
    again = init(tmp_path / "certs", ["a.example"])
    assert again.ca.read_bytes() == ca
    assert "a.example" in names(certificates.read_certificate(again.server, "server.pem"))
    with pytest.raises(ConfigError, match=r"holds .* already"):
        init(tmp_path / "certs", ["a.example"])


def test_a_client_with_the_ca_trusts_the_server_under_each_of_its_names(files: Certificates) -> None:
    for host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), "gpu-box.example", "10.0.0.5", "2001:db8::1"):
        shake_hands(files, files.ca, host)
    for host in ("gpu-box", "10.0.0.6"):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
            shake_hands(files, files.ca, host)


def test_a_client_of_another_ca_does_not(files: Certificates, tmp_path: Path) -> None:
    other = init(tmp_path / "other", [], days=30)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get local issuer|signature failure"):
        shake_hands(files, other.ca, "localhost")


def test_keys_are_their_owners_alone_and_belong_to_the_certificates(files: Certificates) -> None:
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {
        "ca.pem": 0o644,
        "ca.key": 0o600,
        "server.pem": 0o644,
        "server.key": 0o600,
    }
    assert set(check(files)) == {"localhost", "127.0.0.1", "::1", socket.gethostname(), "gpu-box.example"} | {
        "10.0.0.5",
        "2001:db8::1",
    }


def test_the_server_cannot_sign_and_the_ca_cannot_delegate(files: Certificates) -> None:
    ca, server = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (files.ca, files.server))
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert server.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(False, None)
    left = server.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=29) < left <= dt.timedelta(days=30)


def test_nothing_is_overwritten_without_force(files: Certificates) -> None:
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    with pytest.raises(ConfigError, match=r"holds ca\.pem, ca\.key, server\.pem, server\.key already; `certs renew`"):
        init(files.folder, [], days=30)
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == before
    files.ca_key.unlink()  # put into a safe
    with pytest.raises(ConfigError, match="already"):
        init(files.folder, [], days=30)
    Invitations(files).invite("a", 1, 60)
    init(files.folder, [], days=30, force=True)
    assert not Invitations(files).all(), "its token has the fingerprint of the CA that is gone"
    assert not [name for name, content in before.items() if (files.folder / name).read_bytes() == content]


@pytest.mark.parametrize("host", ["", "https://box", "box:9092", "a b", "bücher.example", "10.0.0.0/8"])
def test_what_is_no_host_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host: expected a name or an IP address, found"):
        init(tmp_path / "certs", [host], days=30)
    assert not (tmp_path / "certs").exists()


def test_a_renewed_certificate_has_the_old_names_a_new_key_and_the_same_ca(files: Certificates) -> None:
    old, ca, key = files.server.read_bytes(), files.ca.read_bytes(), files.server_key.read_bytes()
    renew(files.folder, ["10.0.0.6"], days=60)
    assert files.ca.read_bytes() == ca
    assert files.server_key.read_bytes() != key
    expected = [*names(x509.load_pem_x509_certificate(old)), "10.0.0.6"]
    assert sorted(check(files)) == sorted(expected)
    shake_hands(files, files.ca, "10.0.0.6")


def test_without_the_cas_key_nothing_is_renewed(files: Certificates) -> None:
    files.ca_key.unlink()
    with pytest.raises(ConfigError, match=r"expected ca\.pem and ca\.key; put them back from where they are kept"):
        renew(files.folder, [], days=60)
    check(files)


def test_an_expired_certificate_is_refused_before_a_start(files: Certificates) -> None:
    renew(files.folder, [], days=0)
    with pytest.raises(
        ConfigError, match=r"server\.pem has expired on \d{4}-\d\d-\d\d; make a new one \(flower-server"
    ):
        check(files)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(files, files.ca, "localhost")
    assert "EXPIRED until" in describe(files.folder)[1]


@pytest.mark.parametrize(
    ("days", "wrong"),
    [(4000, r"has expired on .*certs init --force"), (-2, "is valid from .* on; is the clock right")],
)
def test_clocks_and_the_cas_certificate_count_too(
    files: Certificates, monkeypatch: pytest.MonkeyPatch, days: int, wrong: str
) -> None:
    """Clients check both certificates; a clock that is half an hour late is no reason to refuse them."""
    made = dt.datetime.now(dt.UTC)
    renew(files.folder, [], days=5000)
    monkeypatch.setattr(certificates, "now", lambda: made - dt.timedelta(minutes=30))
    check(files)
    monkeypatch.setattr(certificates, "now", lambda: made + dt.timedelta(days=days))
    with pytest.raises(ConfigError, match=rf"{'ca' if days > 0 else 'server'}\.pem {wrong}"):
        check(files)


def test_files_that_do_not_belong_together_are_refused(files: Certificates) -> None:
    files.server_key.unlink()
    write_private_key(files.server_key, make_key(), PrivateFormat.PKCS8)
    with pytest.raises(ConfigError, match=r"server\.key: expected the key of .*server\.pem, found another one"):
        check(files)
    files.server_key.write_text("PEM")
    with pytest.raises(ConfigError, match=r"server\.key: expected a private key in PEM without a password"):
        check(files)
    files.server_key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.key: everyone on this machine can use"):
        check(files)
    files.ca.write_text("PEM")
    with pytest.raises(ConfigError, match=r"ca\.pem: expected a certificate in PEM"):
        check(files)


def test_a_certificate_of_ones_own_ca_needs_no_loopback_name(
    files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperbloom.server.access.certificates.ALWAYS", ())
    init(files.folder, ["gpu-box.example"], days=30, force=True)
    assert "127.0.0.1" not in check(files)


def test_the_description_names_the_ca_the_server_and_where_the_cas_key_is(files: Certificates) -> None:
    ca, server, key = describe(files.folder)
    assert ca.startswith(f"{files.ca}: CN=Hyperbloom CA of ")
    assert "valid until" in server
    assert server.endswith("for localhost, " + ", ".join(check(files)[1:]))
    assert key == "ca.key: in this folder; keep it elsewhere"
    files.ca_key.unlink()
    assert describe(files.folder)[2] == "ca.key: not in this folder, as it should be"


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPERBLOOM_CERTS", raising=False)
    assert Certificates().folder == Path("certs")
    monkeypatch.setenv("HYPERBLOOM_CERTS", "/etc/hyperbloom")
    assert Certificates().folder == Path("/etc/hyperbloom")
