"""Clients' keys: the EC key pairs with which Flower's nodes sign their calls.

Private keys are written in OpenSSH's format, which a stock `flower-supernode` expects, and read in that format or in
PKCS 8. Public keys are stored and compared as PEM in the form that Flower sends (SubjectPublicKeyInfo).
"""

import base64
import hashlib
import re
import socket
import ssl
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hyperbloom.common.errors import ConfigError, attempt
from hyperbloom.common.files.storage import write_bytes

_NIST = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_ECDSA = ec.ECDSA(hashes.SHA256())


def make_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key on P-256, the fastest of the curves that Flower accepts."""
    return ec.generate_private_key(ec.SECP256R1())


def write_private_key(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.OpenSSH
) -> None:
    """Write a private key without a password; only its owner can read the file."""
    write_bytes(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()), mode=0o600)


def read_private_key(path: Path, where: str) -> ec.EllipticCurvePrivateKey:
    """Read a private key; errors name the flag `where`.

    Raises:
        ConfigError: there is no file, everyone on the machine can use it, or it holds no EC private key.
    """
    content = attempt(path.read_bytes) if path.is_file() else b""
    if isinstance(content, Exception):
        raise ConfigError(f"{where}: cannot read {path}: {content}")
    if b"PUBLIC KEY" in content or content.startswith(b"ecdsa-"):
        raise ConfigError(f"{where}: expected a private key, found a public one in {path}")
    check_private(path, where)
    openssh = b"OPENSSH PRIVATE KEY" in content
    try:
        load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
        key = load(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{where}: expected a private key (PEM, OpenSSH), no password, in {path} ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, _NIST):
        raise ConfigError(f"{where}: expected an EC key on P-256, P-384 or P-521, found another kind in {path}")
    return key


def check_private(path: Path, where: str) -> None:
    """Check a private key's file; ConfigError if there is none, or everyone on the machine can use it."""
    if not path.is_file():
        raise ConfigError(f"{where}: expected a file, found none at {path}")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{where}: everyone on this machine can use {path} (mode {mode:04o}); chmod 600 {path}")


def public_pem(key: ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) -> str:
    """Return the public key as PEM."""
    public = key.public_key() if isinstance(key, ec.EllipticCurvePrivateKey) else key
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


def parse_public_key(content: bytes, where: str) -> str:
    """Read a public key in PEM or OpenSSH's format and return it as PEM, the form in which keys are compared.

    Raises:
        ConfigError: `content` is no EC public key.
    """
    if b"PRIVATE KEY" in content:
        raise ConfigError(f"{where}: expected a public key, found a private one; it should never leave its client")
    try:
        openssh = content.startswith(b"ecdsa-")
        key = serialization.load_ssh_public_key(content) if openssh else serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{where}: expected a public key in PEM or OpenSSH's form ({error})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _NIST):
        raise ConfigError(f"{where}: expected an EC key on P-256, P-384 or P-521, found another kind")
    return public_pem(key)


def read_public_key(path: Path, where: str) -> str:
    """Return the public key in a file as PEM; ConfigError if there is no file, or it holds no EC public key."""
    if not path.is_file():
        raise ConfigError(f"{where}: expected a file, found none at {path}")
    return parse_public_key(path.read_bytes(), f"{where} {path}")


def fingerprint(public: str) -> str:
    """Return the fingerprint that people compare: SHA-256 of a public key (PEM) in DER, written as OpenSSH does."""
    return fingerprint_of_der(base64.b64decode("".join(public.strip().splitlines()[1:-1])))


def fingerprint_of_der(der: bytes) -> str:
    """Return the fingerprint of a public key in DER."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")


def read_fingerprints(path: Path, where: str) -> frozenset[str]:
    """Return all fingerprints in a text file and ignore other text; errors name the flag `where`.

    Raises:
        ConfigError: the file cannot be read, or holds no fingerprint.
    """
    try:
        found = frozenset(re.findall(r"SHA256:[A-Za-z0-9+/]{43}", path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise ConfigError(f"{where}: expected fingerprints (SHA256:...) in {path}, found none")
    return found


def server_of(ca: Path | None) -> str:
    """Return what names a server to itself and to its clients: the fingerprint of its CA's certificate.

    It is empty if the file does not hold exactly one certificate, or if there is none.
    """
    try:
        (certificate,) = x509.load_pem_x509_certificates(ca.read_bytes()) if ca else []
    except (OSError, ValueError, x509.InvalidVersion):
        return ""
    return name_of(certificate)


def name_of(ca: x509.Certificate) -> str:
    """Return the fingerprint of a CA's certificate, which names its server."""
    return fingerprint_of_der(ca.public_bytes(serialization.Encoding.DER))


def shown_certificates(host: str, port: int, timeout_s: float) -> list[x509.Certificate]:
    """Return the certificates that a port shows, its own first, without verification or a request.

    There are none if it does not speak TLS, or nobody answers.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC refuses handshakes without it and logs them
    try:
        plain = socket.create_connection((host, port), timeout_s)
        with plain, context.wrap_socket(plain, server_hostname=host) as secured:
            # Public from Python 3.13 on; the object below has had it since 3.10.
            shown = secured._sslobj.get_unverified_chain() or []  # type: ignore[attr-defined]
            return [x509.load_pem_x509_certificate(each.public_bytes().encode()) for each in shown]
    except (OSError, ValueError, x509.InvalidVersion):
        return []


def public_der(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the public key as DER."""
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    """Return the ECDSA signature of `content`."""
    return key.sign(content, _ECDSA)


def verify(public: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether `signature` fits `content` and a public key in DER; False for an invalid key."""
    try:
        key = serialization.load_der_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _NIST):
            return False
        key.verify(signature, content, _ECDSA)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True
