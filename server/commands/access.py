"""The subcommands that prepare a server: certificates, clients' keys, and a check of the machine."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.commands import FILE, FOLDER, JSON, Flag, command, group
from hyperbloom.server.flags import CERTS, HOST, PORT

if TYPE_CHECKING:
    from hyperbloom.common.program.doctor import Finding
    from hyperbloom.server.access.certificates import Certificates

_DIR = Flag("--dir folder", "folder of the certificates", type=FOLDER, show_default="$HYPERBLOOM_CERTS, else certs")
_NAMES = "a name or address of the server, beside localhost and this machine's name; may be repeated"
_HOSTS = Flag("--host hosts", _NAMES, multiple=True, metavar="NAME_OR_IP")
_DAYS = Flag("--days", "days that the certificate is valid", type=click.IntRange(1, 36_500), default=365)
_FORCE = Flag("--force", "replace the CA that is there", is_flag=True)
_NAME = click.Argument(["name"], help="the client's --client-id")


@command("init", _HOSTS, _DAYS, _DIR, _FORCE)
def _init(hosts: tuple[str, ...], days: int, folder: Path | None, force: bool) -> None:
    """Make a CA (certificate authority) and a certificate."""
    from hyperbloom.server.access.certificates import describe, init

    folder = init(_files(folder).folder, list(hosts), days, force).folder
    print("\n".join(describe(folder)))
    print("next: flower-server clients invite NAME, whose line is all that a client needs")


@command("renew", _HOSTS, _DAYS, _DIR)
def _renew(hosts: tuple[str, ...], days: int, folder: Path | None) -> None:
    """Make a new certificate of the same CA."""
    from hyperbloom.server.access.certificates import describe, renew

    print("\n".join(describe(renew(_files(folder).folder, list(hosts), days).folder)))
    print("the server shows it from its next start on; clients need nothing new")


@command("show", _DIR)
def _show(folder: Path | None) -> None:
    """Say what is there."""
    from hyperbloom.server.access.certificates import describe

    print("\n".join(describe(_files(folder).folder)))


certs = group(
    "certs",
    """Make and show the server's certificates.

    With them the server proves to clients that it is the server. `flower-server` finds the folder by itself:
    $HYPERBLOOM_CERTS, else ./certs.""",
    *(_init, _renew, _show),
    example="flower-server certs init --host gpu-box.hospital.example --host 10.0.0.5",
)


def _files(folder: Path | None) -> "Certificates":
    from hyperbloom.server.access.certificates import Certificates

    return Certificates(folder)


@command(
    "add",
    _NAME,
    CERTS,
    Flag("--public-key", "the .pub file that flower-client keygen wrote", type=FILE, required=True),
    Flag("--replace", "in place of the key that it has", is_flag=True),
)
def _add(name: str, certs: Path | None, public_key: Path, replace: bool) -> None:
    """Let a client join."""
    from hyperbloom.common.secrecy.keys import fingerprint, read_public_key
    from hyperbloom.server.access.registry import ClientRegistry

    public = read_public_key(public_key, "--public-key")
    ClientRegistry(_files(certs).clients).add(name, public, replace)
    print(f"{name} may join with key {fingerprint(public)}")


@command(
    "invite",
    click.Argument(["name"], required=False, help="the client's --client-id; any without it"),
    CERTS,
    Flag("--port", "the server's Fleet port", type=click.IntRange(1, 65_535), default=9092),
    Flag("--expires", "how long the token is valid: 30m, 2h, 7d", default="1h", metavar="TIME"),
    Flag("--uses", "without NAME: how many clients may use it", type=click.IntRange(1), default=1),
)
def _invite(name: str | None, certs: Path | None, port: int, expires: str, uses: int) -> None:
    """Print the line with which a client enrols."""
    from hyperbloom.common.secrecy.token import HAS_A_KEY
    from hyperbloom.server.access.invitations import Invitations
    from hyperbloom.server.access.registry import ClientRegistry
    from hyperbloom.server.grids.fleet import Machines

    found = re.fullmatch(r"([1-9]\d{0,3})([mhd])", expires)
    if not found:
        raise ConfigError(f"--expires: expected minutes, hours or days, such as 30m, 2h or 7d; found {expires!r}")
    if name and uses > 1:
        raise ConfigError("--uses: expected without NAME; a name is one client's")
    seconds = int(found[1]) * {"m": 60, "h": 3600, "d": 86400}[found[2]]
    if name in ClientRegistry(_files(certs).clients).keys().values():
        raise ConfigError(f"{name} {HAS_A_KEY}: a token is of no use to it; clients revoke takes the key back")
    token = Invitations(_files(certs)).invite(name, uses, seconds)
    address = Machines(certs=certs, port=port).address
    print(f"flower-client --server {address} --token {token} --client-id {name or 'NAME'} --data WHAT")


@command("list", CERTS)
def _list(certs: Path | None) -> None:
    """Say who may join, and who is invited."""
    from hyperbloom.common.secrecy.keys import fingerprint
    from hyperbloom.server.access.invitations import Invitations
    from hyperbloom.server.access.registry import ClientRegistry

    for name, client in ClientRegistry(_files(certs).clients).clients().items():
        state = f"revoked {client.revoked}" if client.revoked else f"added {client.added}"
        print(f"{name}  {fingerprint(client.public_key)}  {state}")
    for each in Invitations(_files(certs)).all():
        if each.uses and not each.is_over:
            print(f"{each.name or 'any name'}  invited until {each.until}, uses left: {each.uses}")


@command("revoke", _NAME, CERTS)
def _revoke(name: str, certs: Path | None) -> None:
    """Let a client join no more. Its invitations are cancelled, and those for any name, which it may know."""
    from hyperbloom.server.access.invitations import Invitations
    from hyperbloom.server.access.registry import ClientRegistry

    files = _files(certs)
    has_key = name in ClientRegistry(files.clients).clients()
    if has_key or not (files.there and any(each.name == name for each in Invitations(files).all())):
        ClientRegistry(files.clients).revoke(name)  # first: a name that nobody has takes back no tokens
    gone = Invitations(files).cancel(name) if files.there else []
    print(f"{name} may not join any more" + ("; its key is retired for good" if has_key else ""))
    if left := sum(each.uses for each in gone if each.name is None and not each.is_over):
        print(f"invitations for any name are taken back, too, with {left} uses left; invite the others anew")


clients = group(
    "clients",
    """Say which clients may join.

    A running server takes notice: a new client can join at once, and a revoked one is out within a round. `invite`
    prints a line with a token. The client that runs it makes its key, checks the server, and is in. `add` takes a key
    that was made with `flower-client keygen`.""",
    *(_invite, _add, _list, _revoke),
    example="flower-server clients invite ward-7 --expires 2h",
)


@command(
    "doctor",
    HOST,
    PORT,
    Flag("--insecure", "plain text: expect neither TLS nor keys", count=True, show_default=False),
    CERTS,
    Flag("--run-dir", "where runs are written", type=FOLDER, default=Path("runs")),
    Flag("--server", "test the way to this server, TLS included", metavar="HOST:PORT"),
    JSON,
    example="flower-server doctor --host 0.0.0.0 --port 9092",
)
def doctor(
    host: str | None, port: int, insecure: int, certs: Path | None, run_dir: Path, server: str | None, as_json: bool
) -> int:
    """Check this machine before a run.

    Looks at packages, GPU, threads, disk, port, certificates, keys, and with --server at a server that runs. Prints a
    table with what to do for each thing that is not ok. Exit code 1 if something would keep the server from starting,
    0 otherwise.
    """
    from hyperbloom.common.program.doctor import Finding, check_file, check_folder, check_machine, check_server, report

    files = _files(certs)
    findings = [*check_machine(), check_folder("run folder", run_dir)]
    if server:  # the running server has the port
        findings += check_server(server, files.ca if files.ca.exists() else None, bool(insecure))
    else:
        host = host or ("127.0.0.1" if insecure else "0.0.0.0")
        do = "end what listens there, or choose another --port"
        findings.append(check_file("port", lambda: _port(host, port), do))
    if not insecure and not certs and not files.there:
        made = "the first start makes them, or flower-server certs init --host NAME_OR_IP"
        findings.append(Finding("certificates", "warning", f"none in {files.folder}", made))
    elif not insecure:
        findings += _certificates(files)
    return report(findings, as_json)


def _port(host: str, port: int) -> str:
    from hyperbloom.server.grids.fleet import check_port

    check_port(host, port)
    return f"{host}:{port or 'any port'} is free"


def _certificates(files: "Certificates") -> "list[Finding]":
    from hyperbloom.common.program.doctor import Finding, check_expiry, check_file
    from hyperbloom.server.access.certificates import check_files
    from hyperbloom.server.access.registry import ClientRegistry

    if not files.server.is_file():
        do = f"flower-server certs init --dir {files.folder} --host NAME_OR_IP; or --insecure, for one machine"
        return [Finding("certificates", "failure", f"none in {files.folder}", do)]
    new_ca = "flower-server certs init --force --host NAME_OR_IP"
    findings = [
        check_file("certificates", lambda: "for " + ", ".join(check_files(files))),
        check_expiry("server.pem", files.server, "flower-server certs renew"),
        check_expiry("ca.pem", files.ca, f"{new_ca}, and the new ca.pem to every client"),
        check_file("signed by", lambda: _issuer(files)),
    ]
    if files.ca_key.exists():
        findings.append(Finding("ca.key", "warning", f"in {files.folder}", "keep it safe; only certs renew needs it"))
    try:
        clients = ClientRegistry(files.clients).keys()
    except ValueError as error:  # a ConfigError
        return [*findings, Finding("clients", "failure", str(error), "restore it, or add the clients anew")]
    do = "" if clients else "flower-server clients invite NAME"
    return [*findings, Finding("clients", "ok" if clients else "warning", f"{len(clients)} may join", do)]


def _issuer(files: "Certificates") -> str:
    from cryptography.exceptions import InvalidSignature

    from hyperbloom.server.access.certificates import read_certificate

    try:
        read_certificate(files.server, "server.pem").verify_directly_issued_by(read_certificate(files.ca, "ca.pem"))
    except (OSError, ValueError, TypeError, InvalidSignature):
        found = "server.pem is not signed by ca.pem: clients will not trust this server"
        raise ConfigError(f"{found}; flower-server certs renew, where ca.key is") from None
    return "ca.pem"
