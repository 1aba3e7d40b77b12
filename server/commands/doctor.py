"""Check this machine before a run: packages, GPU, threads, disk, port, certificates, keys, and a server that runs.

Prints a table with what to do for each thing that is not ok. Exit code 1 if something would keep the server from
starting, 0 otherwise.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperbloom.common.doctor import Finding
    from hyperbloom.server.certificates import Certificates

EXAMPLE = "doctor --host 0.0.0.0 --port 9092"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`: those of the server that are to be checked."""
    from hyperbloom.common.doctor import add_common_flags

    add_common_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address that clients connect to (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9092, help="Fleet port (default: %(default)s)")
    parser.add_argument(
        "--certs", type=Path, metavar="DIR", help="folder of the certificates (default: $HYPERBLOOM_CERTS, else certs)"
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs are written")


def run(args: argparse.Namespace) -> int:
    """Check, and print what was found."""
    from hyperbloom.common.doctor import check_folder, check_machine, check_server, report
    from hyperbloom.server.certificates import Certificates, default_folder

    certificates = Certificates(args.certs or default_folder())
    findings = [*check_machine(), check_folder("run folder", args.run_dir)]
    if args.server:  # it has the port
        ca = certificates.ca if certificates.ca.exists() else None
        findings += check_server(args.server, ca, bool(args.insecure))
    else:
        findings.append(_port(args.host, args.port))
    if not args.insecure:
        findings += _certificates(certificates.folder)
    return report(findings)


def _port(host: str, port: int) -> "Finding":
    from hyperbloom.common.doctor import Finding
    from hyperbloom.common.errors import HyperbloomError
    from hyperbloom.server.cli import check_port

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
