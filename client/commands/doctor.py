"""Check this machine before it joins: packages, GPU, threads, disk, clock, key, and the way to the server.

Prints a table with what to do for each thing that is not ok. Exit code 1 if something would keep the client from
joining, 0 otherwise. Whether the server knows this client's key shows when it joins.
"""

import argparse
from pathlib import Path

EXAMPLE = "doctor --server gpu-box:9092 --root-certificates ca.pem --key ward-7.pem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`: those of the client that are to be checked."""
    from hyperbloom.common.doctor import add_common_flags

    add_common_flags(parser)
    parser.add_argument("--root-certificates", type=Path, metavar="FILE", help="CA of the server's certificate")
    parser.add_argument("--key", type=Path, metavar="FILE", help="this client's private key")
    parser.add_argument("--client-id", default="client", metavar="NAME", help="names the default state folder")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where the client keeps its state")


def run(args: argparse.Namespace) -> int:
    """Check, and print what was found."""
    from hyperbloom.client.keep.state import default_state_dir
    from hyperbloom.common.doctor import check_expiry, check_file, check_folder, check_machine, check_server, report

    findings = [*check_machine(), check_folder("state folder", args.state_dir or default_state_dir(args.client_id))]
    if args.root_certificates:
        findings.append(check_expiry("CA", args.root_certificates, "get a new ca.pem from whoever runs the server"))
    if args.key:
        findings.append(check_file("key", lambda: _key(args.key)))
    if args.server:
        findings += check_server(args.server, args.root_certificates, bool(args.insecure))
    return report(findings)


def _key(path: Path) -> str:
    from hyperbloom.common.keys import fingerprint, public_pem, read_private_key

    return f"{path}: {fingerprint(public_pem(read_private_key(path, '--key')))}"
