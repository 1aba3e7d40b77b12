"""Clients' keys: what a file may hold, who may read it, and the one form in which keys are compared."""

import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.doctor import check_expiry
from hyperbloom.common.secrecy.keys import (
    fingerprint,
    make_key,
    parse_public_key,
    public_der,
    public_pem,
    read_fingerprints,
    read_private_key,
    read_public_key,
    server_of,
    sign,
    verify,
    write_private_key,
)
from hyperbloom.server.access.certificates import init


def test_a_key_survives_its_file_which_is_its_owners_alone(tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "key.pem"
    write_private_key(path, key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_private_key(path, "--key").private_numbers() == key.private_numbers()


def test_the_public_half_is_in_the_form_that_flower_sends() -> None:
    key = make_key()
    assert public_pem(key).encode() == public_key_to_bytes(key.public_key()) == public_pem(key.public_key()).encode()
    assert uses_nist_ec_curve(key.public_key())


def test_the_fingerprint_is_that_of_openssl(tmp_path: Path) -> None:
    key = make_key()
    der = key.public_key().public_bytes(Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "der").write_bytes(der)
    pipe = f"openssl dgst -sha256 -binary {tmp_path / 'der'} | openssl base64"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=True)
    assert fingerprint(public_pem(key)) == "SHA256:" + done.stdout.strip().rstrip("=")


def test_a_public_key_is_read_in_any_dress_and_compared_in_one(tmp_path: Path) -> None:
    pem = public_pem(make_key())
    (tmp_path / "key.pub").write_text(f"from ward 7\r\n{pem.replace(chr(10), chr(13) + chr(10))}")
    assert read_public_key(tmp_path / "key.pub", "--public-key") == pem


def test_keys_of_ssh_keygen_are_taken_and_ours_are_flowers(tmp_path: Path) -> None:
    path = tmp_path / "key"
    theirs = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(theirs.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    assert public_pem(read_private_key(path, "--key")) == public_pem(theirs)
    path.write_bytes(theirs.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert public_pem(read_private_key(path, "--key")) == public_pem(theirs)
    line = theirs.public_key().public_bytes(Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b" ward-7\n"
    assert parse_public_key(line, "--public-key") == public_pem(theirs)
    ours = make_key()
    write_private_key(path, ours)
    # A stock flower-supernode reads no other form.
    assert public_pem(serialization.load_ssh_private_key(path.read_bytes(), None)) == public_pem(ours)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o777])
def test_a_private_key_that_everyone_can_use_is_not_used(tmp_path: Path, mode: int) -> None:
    write_private_key(tmp_path / "key.pem", make_key())
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"--key: everyone on this machine can use \S+ \(mode {mode:04o}\); chmod 600"
    ):
        read_private_key(tmp_path / "key.pem", "--key")


def test_a_public_key_is_told_apart_from_a_private_one(tmp_path: Path) -> None:
    public, path = make_key().public_key(), tmp_path / "key.pub"
    for content in (public_pem(public).encode(), public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^--key: expected a private key, found a public one in {path}$"):
            read_private_key(path, "--key")


def test_a_group_may_share_a_private_key(tmp_path: Path) -> None:
    write_private_key(tmp_path / "key.pem", make_key())
    (tmp_path / "key.pem").chmod(0o640)
    read_private_key(tmp_path / "key.pem", "--key")


HERE = Path(__file__)
OTHERS = {
    "rsa": rsa.generate_private_key(65537, 2048),
    "ed25519": ed25519.Ed25519PrivateKey.generate(),
    "another curve": ec.generate_private_key(ec.SECP256K1()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_keys_that_flower_cannot_use_are_refused(tmp_path: Path, name: str) -> None:
    key, path = OTHERS[name], tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="--key: expected an EC key on P-256, P-384 or P-521, found another kind"):
        read_private_key(path, "--key")
    public = key.public_key().public_bytes(Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ConfigError, match="expected an EC key on P-256, P-384 or P-521, found another kind"):
        parse_public_key(public, "--public-key")


def test_what_is_no_key_is_told(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(ConfigError, match=f"--key: expected a file, found none at {path}"):
        read_private_key(path, "--key")
    with pytest.raises(ConfigError, match=f"--public-key: expected a file, found none at {path}"):
        read_public_key(path, "--public-key")
    path.write_text("no key")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"--key: expected a private key \(PEM, OpenSSH\), no password"):
        read_private_key(path, "--key")
    with pytest.raises(ConfigError, match=r"--public-key .*: expected a public key in PEM"):
        read_public_key(path, "--public-key")
    with pytest.raises(ConfigError, match=r"--key: cannot read /proc/self/mem: .*Input/output error"):
        read_private_key(Path("/proc/self/mem"), "--key")  # a file that cannot be read, for root either
    path.write_bytes(make_key().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    with pytest.raises(ConfigError, match=r"--key: expected a private key \(PEM, OpenSSH\), no password"):
        read_private_key(path, "--key")


def test_a_private_key_in_place_of_a_public_one_is_not_taken(tmp_path: Path) -> None:
    write_private_key(tmp_path / "key.pem", make_key())
    with pytest.raises(ConfigError, match="expected a public key, found a private one; it should never leave its cl"):
        read_public_key(tmp_path / "key.pem", "--public-key")


def test_a_signature_is_of_one_content_by_one_key_on_a_known_curve() -> None:
    key, other = make_key(), make_key()
    signature = sign(key, b"content")
    assert verify(public_der(key), signature, b"content")
    assert not verify(public_der(key), signature, b"contents")
    assert not verify(public_der(key), signature[:-1], b"content") and not verify(public_der(key), b"", b"content")
    assert not verify(public_der(other), signature, b"content")
    assert not verify(b"", signature, b"content") and not verify(b"no key", signature, b"content")
    for each in OTHERS.values():
        der = each.public_key().public_bytes(Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        made = sign(each, b"content") if isinstance(each, ec.EllipticCurvePrivateKey) else signature
        assert not verify(der, made, b"content")


def test_a_bound_keys_signature_counts_at_its_server_alone() -> None:
    key = make_key()
    signature = sign(key, b"contentSHA256:one")
    assert verify(public_der(key), signature, b"contentSHA256:one")
    assert not verify(public_der(key), signature, b"contentSHA256:two")
    assert not verify(public_der(key), signature, b"content")


def test_fingerprints_are_found_among_other_text(tmp_path: Path) -> None:
    path, known = tmp_path / "peers", [fingerprint(public_pem(make_key())) for _ in range(2)]
    path.write_text(f"ward-7 {known[0]} 2026-01-01\n# {known[1]}\nSHA256:{'x' * 42}\n")
    assert read_fingerprints(path, "--peers") == set(known)
    path.write_bytes(b"\xff\xfe")
    for wrong, message in ((path, "cannot read"), (tmp_path / "none", "No such file"), (HERE, "expected fingerprints")):
        with pytest.raises(ConfigError, match=f"--peers: .*{message}"):
            read_fingerprints(wrong, "--peers")


def test_a_server_has_the_name_of_one_certificate_or_none(tmp_path: Path) -> None:
    ca, both = init(tmp_path / "certs", []).ca, tmp_path / "both.pem"
    both.write_bytes(2 * ca.read_bytes())
    (tmp_path / "text").write_text("no certificate")
    assert server_of(ca).startswith("SHA256:")
    assert [server_of(path) for path in (None, tmp_path / "none", tmp_path / "text", both)] == [""] * 4


def test_a_certificate_of_an_odd_version_is_none(tmp_path: Path) -> None:
    """OpenSSL shows it, and cryptography raises an error of its own kind."""
    ca = init(tmp_path / "certs", [], 30).ca
    der = x509.load_pem_x509_certificate(ca.read_bytes()).public_bytes(serialization.Encoding.DER)
    version = der.index(b"\xa0\x03\x02\x01\x02")
    odd = ssl.DER_cert_to_PEM_cert(der[: version + 4] + b"\x01" + der[version + 5 :])
    ca.write_text(odd)
    with pytest.raises(x509.InvalidVersion):
        x509.load_pem_x509_certificate(odd.encode()).version  # noqa: B018
    assert server_of(ca) == ""
    assert check_expiry("ca.pem", ca, "").state == "failure"


def test_commands_for_keys_do_not_wait_for_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hyperbloom.client.cli import main as client\n"
        "from hyperbloom.server.cli import main as server\n"
        f"client(['keygen', '--out', {str(tmp_path / 'k.pem')!r}])\n"
        f"server(['certs', 'init', '--dir', {str(tmp_path / 'certs')!r}])\n"
        f"server(['clients', 'list', '--certs', {str(tmp_path / 'certs')!r}])\n"
        "print([name for name in ('torch', 'flwr', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("[]\n")
