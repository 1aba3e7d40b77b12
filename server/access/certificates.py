"""A certificate authority (CA) for one federation: its certificate and the server's.

    CERTS/ca.pem, ca.key            signs the server's certificate; clients get ca.pem, ca.key can go into a safe
    CERTS/server.pem, server.key    the server's certificate; it names every address under which clients reach it
    CERTS/clients.json              the clients that may join (`server/access/registry.py`)

The folder has mode 0700, keys and the registry 0600.
"""

import datetime as dt
import ipaddress
import os
import shlex
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.common.secrecy.keys import check_private, make_key, read_private_key, write_private_key

CA_DAYS, SERVER_DAYS = 3650, 365
_Party = tuple[x509.Name, ec.EllipticCurvePrivateKey]
_CRITICAL = (x509.BasicConstraints, x509.KeyUsage)
ALWAYS = ("localhost", "127.0.0.1", "::1")  # for the clients of this machine


class Certificates:
    """The paths of the files in one folder of certificates, by default $HYPERBLOOM_CERTS, else `certs`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get("HYPERBLOOM_CERTS") or "certs")
        self.ca = self.folder / "ca.pem"  # the CA's certificate, which clients need
        self.ca_key = self.folder / "ca.key"
        self.server = self.folder / "server.pem"
        self.server_key = self.folder / "server.key"
        self.clients = self.folder / "clients.json"  # the registry of clients' keys
        self.invitations = self.folder / "invitations.json"

    @property
    def there(self) -> list[str]:
        """The names of the certificates and keys that exist."""
        return [path.name for path in (self.ca, self.ca_key, self.server, self.server_key) if path.exists()]


def own_addresses() -> list[str]:
    """Return the addresses from which this machine reaches others, if it does. Nothing is sent to find out."""
    found = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            found.append(str(probe.getsockname()[0]))
    return found


def init(folder: Path, hosts: Sequence[str], days: int = SERVER_DAYS, force: bool = False) -> Certificates:
    """Make a CA and a server certificate for `hosts`, localhost and this machine's name; `force` replaces files.

    Raises:
        ConfigError: such files exist already, or a host is neither a name nor an address.
    """
    files = Certificates(folder)
    _alternatives(hosts)  # may raise, so do it before writing
    if files.ca.is_file() and files.ca_key.is_file() and not files.server.exists() and not force:
        return renew(folder, hosts, days)  # it was stopped in the middle
    if files.there and not force:
        raise ConfigError(
            f"{folder} holds {', '.join(files.there)} already; `certs renew` makes a new server certificate of the "
            "same CA, --force a new CA, which every client then needs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    key, subject = make_key(), _subject(f"Hyperbloom CA of {socket.gethostname()}")
    constraints, usage = x509.BasicConstraints(ca=True, path_length=0), _usage(key_cert_sign=True, crl_sign=True)
    itself = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    ca = _signed((subject, key), (subject, key), CA_DAYS, constraints, usage, itself)
    _write(files.ca, ca, files.ca_key, key)
    files.server.unlink(missing_ok=True)  # its names are not those of the new one
    files.invitations.unlink(missing_ok=True)  # their tokens have the fingerprint of the old one
    return renew(folder, hosts, days)


def renew(folder: Path, hosts: Sequence[str], days: int) -> Certificates:
    """Make a server certificate and key of the same CA, for the old names and `hosts`; ConfigError without that CA."""
    files = Certificates(folder)
    if not files.ca.is_file() or not files.ca_key.is_file():
        raise ConfigError(
            f"{folder}: expected ca.pem and ca.key; put them back from where they are kept, or make a new CA with "
            "`flower-server certs init`"
        )
    ca, ca_key, key = read_certificate(files.ca, "ca.pem"), read_private_key(files.ca_key, "ca.key"), make_key()
    old = names(read_certificate(files.server, "server.pem")) if files.server.is_file() else []
    constraints, usage = x509.BasicConstraints(ca=False, path_length=None), _usage(digital_signature=True)
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    extensions = constraints, usage, _alternatives([*old, *hosts]), purpose, authority
    certificate = _signed((_subject(socket.gethostname()), key), (ca.subject, ca_key), days, *extensions)
    _write(files.server, certificate, files.server_key, key)
    return files


def names(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses for which a certificate is valid."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return [*found.get_values_for_type(x509.DNSName), *addresses]


def describe(folder: Path) -> list[str]:
    """Return a line for each certificate: subject, validity, names; ConfigError if one is missing, or is none."""
    files = Certificates(folder)
    lines = []
    for path in (files.ca, files.server):
        certificate = read_certificate(path, path.name)
        last = certificate.not_valid_after_utc
        state = f"{'EXPIRED' if last < now() else 'valid'} until {last:%Y-%m-%d}"
        line = f"{path}: {certificate.subject.rfc4514_string()}, {state}"
        lines.append(line + (f", for {', '.join(names(certificate))}" if path == files.server else ""))
    safe = "in this folder; keep it elsewhere" if files.ca_key.exists() else "not in this folder, as it should be"
    return [*lines, f"{files.ca_key.name}: {safe}"]


def check_files(files: Certificates) -> list[str]:
    """Check the server's certificate, its key and the CA's certificate; return the names in the server's certificate.

    Raises:
        ConfigError: a file is missing or no certificate, everyone can read the key, the key belongs to another
            certificate, or a certificate is not valid today.
    """
    certificate, key, ca = files.server, files.server_key, files.ca
    shown, issuer = read_certificate(certificate, "server.pem"), read_certificate(ca, "ca.pem")
    check_private(key, "server.key")
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"server.key: expected a private key in PEM without a password in {key} ({error})") from None
    if private.public_key() != shown.public_key():
        raise ConfigError(f"server.key: expected the key of {certificate}, found another one in {key}")
    for path, one, how in ((certificate, shown, "renew"), (ca, issuer, "init --force --host NAME_OR_IP")):
        if one.not_valid_after_utc < now():
            # --dir, because the environment or the command line may name the folder
            mend = f"flower-server certs {how} --dir {shlex.quote(str(certificate.parent))}"
            raise ConfigError(f"{path} has expired on {one.not_valid_after_utc:%Y-%m-%d}; make a new one ({mend})")
        if one.not_valid_before_utc > now():
            raise ConfigError(f"{path} is valid from {one.not_valid_before_utc:%Y-%m-%d} on; is the clock right?")
    return names(shown)


def _signed(subject: _Party, issuer: _Party, days: int, *extensions: x509.ExtensionType) -> x509.Certificate:
    begin = now() - dt.timedelta(hours=1)  # clocks differ a little
    builder = x509.CertificateBuilder().subject_name(subject[0]).issuer_name(issuer[0])
    builder = builder.public_key(subject[1].public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(now() + dt.timedelta(days=days))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, _CRITICAL))
    return builder.sign(issuer[1], hashes.SHA256())


def _alternatives(hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    wanted = dict.fromkeys([*ALWAYS, socket.gethostname(), *hosts])
    return x509.SubjectAlternativeName([_alternative(host) for host in wanted])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not host.isascii() or any(character in host for character in " :/,@"):
        raise ConfigError(f"--host: expected a name or an IP address, found {host!r}")
    return x509.DNSName(host)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _usage(**wanted: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: wanted.get(name, False) for name in _USAGES})


def read_certificate(path: Path, where: str) -> x509.Certificate:
    """Return the first certificate in a PEM file; ConfigError if there is none."""
    if not path.is_file():
        raise ConfigError(f"{where}: expected a file, found none at {path}")
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{where}: expected a certificate in PEM, found {path} ({error})") from None


def _write(path: Path, certificate: x509.Certificate, key_path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    write_private_key(key_path, key, serialization.PrivateFormat.PKCS8)
    write_bytes(path, certificate.public_bytes(serialization.Encoding.PEM))


def now() -> dt.datetime:
    """Return the time, with its zone."""
    return dt.datetime.now(dt.UTC)
