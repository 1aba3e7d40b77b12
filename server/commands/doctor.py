"""`flower-server doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperbloom.common.commands import FOLDER, Command

if TYPE_CHECKING:
    from hyperbloom.common.doctor import Finding
    from hyperbloom.server.certificates import Certificates

_EPILOG = """\
\b
Example:
  flower-server doctor --host 0.0.0.0 --port 9092
"""


@click.command("doctor", cls=Command, epilog=_EPILOG)
@click.option("--host", default="127.0.0.1", help="address that clients connect to")
@click.option("--port", type=int, default=9092, help="Fleet port")
@click.option("--insecure", count=True, show_default=False, help="plain text: expect neither TLS nor keys")
@click.option("--certs", type=FOLDER, metavar="DIR", help="their folder", show_default="$HYPERBLOOM_CERTS, else certs")
@click.option("--run-dir", type=FOLDER, default=Path("runs"), metavar="DIR", help="where runs are written")
@click.option("--server", metavar="HOST:PORT", help="test the way to this server, TLS included")
def command(host: str, port: int, insecure: int, certs: Path | None, run_dir: Path, server: str | None) -> int:
    """Check this machine before a run.

    Looks at packages, GPU, threads, disk, port, certificates, keys, and with --server at a server that runs. Prints a
    table with what to do for each thing that is not ok. Exit code 1 if something would keep the server from starting,
    0 otherwise.
    """
    from hyperbloom.common.doctor import check_folder, check_machine, check_server, report
    from hyperbloom.server.certificates import Certificates, default_folder

    certificates = Certificates(certs or default_folder())
    findings = [*check_machine(), check_folder("run folder", run_dir)]
    if server:  # it has the port
        ca = certificates.ca if certificates.ca.exists() else None
        findings += check_server(server, ca, bool(insecure))
    else:
        findings.append(_port(host, port))
    if not insecure:
        findings += _certificates(certificates.folder)
    return report(findings)


def _port(host: str, port: int) -> "Finding":
    from hyperbloom.common.doctor import Finding
    from hyperbloom.common.errors import HyperbloomError
    from hyperbloom.server.fleet import check_port

    try:
        check_port(host, port)
    except HyperbloomError as error:
        return Finding("port", "failure", str(error), "end what listens there, or choose another --port")
    return Finding("port", "ok", f"{host}:{port} is free")


def _certificates(folder: Path) -> "list[Finding]":
    from hyperbloom.common.doctor import Finding, check_expiry, check_file
    from hyperbloom.server.certificates import Certificates, check_files
    from hyperbloom.server.registry import ClientRegistry

    files = Certificates(folder)
    if not files.server.is_file():
        do = "flower-server certs init --host NAME_OR_IP; or --insecure, for one machine"
        return [Finding("certificates", "failure", f"none in {folder}", do)]
    where = ["server.pem", "server.key", "ca.pem"]
    findings = [
        check_file(
            "certificates",
            lambda: "for " + ", ".join(check_files(files.server, files.server_key, files.ca, where)),
        ),
        check_expiry("server.pem", files.server, "flower-server certs renew"),
        check_expiry("ca.pem", files.ca, "flower-server certs init --force, and the new ca.pem to every client"),
        _issuer(files),
    ]
    if files.ca_key.exists():
        findings.append(Finding("ca.key", "warning", f"in {folder}", "keep it in a safe; only certs renew needs it"))
    try:
        clients = ClientRegistry(files.clients).keys()
    except ValueError as error:  # a ConfigError
        return [*findings, Finding("clients", "failure", str(error), "restore it, or add the clients anew")]
    do = "" if clients else "flower-server clients add NAME --public-key FILE"
    return [*findings, Finding("clients", "ok" if clients else "warning", f"{len(clients)} may join", do)]


def _issuer(files: "Certificates") -> "Finding":
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    from hyperbloom.common.doctor import Finding

    try:
        server, ca = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (files.server, files.ca))
        server.verify_directly_issued_by(ca)
    except (OSError, ValueError, TypeError, InvalidSignature):
        found = "server.pem is not signed by ca.pem: clients will not trust this server"
        return Finding("signed by", "failure", found, "flower-server certs renew, where ca.key is")
    return Finding("signed by", "ok", "ca.pem")
