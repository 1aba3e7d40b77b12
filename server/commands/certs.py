"""Make and show the certificates with which the server proves to clients that it is the server.

`init` makes a certificate authority (CA) and the server's certificate, `renew` a new server certificate of the same CA,
`show` prints what is there. `flower-server` finds the folder by itself: $HYPERBLOOM_CERTS, else ./certs.
"""

import argparse
from pathlib import Path

from hyperbloom.common.errors import ConfigError

EXAMPLE = "certs init --host gpu-box.hospital.example --host 10.0.0.5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `certs`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="init|renew|show")
    kinds = {"init": "make a CA and a certificate", "renew": "make a new certificate", "show": "say what is there"}
    for name, text in kinds.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("--dir", type=Path, metavar="DIR", help="folder (default: $HYPERBLOOM_CERTS, else certs)")
        if name == "show":
            continue
        action.add_argument(
            "--host",
            action="append",
            default=[],
            metavar="NAME_OR_IP",
            help="a name or address of the server, beside localhost and this machine's name; may be repeated",
        )
        action.add_argument("--days", type=int, default=365, help="days that the certificate holds (default: 365)")
        if name == "init":
            action.add_argument("--force", action="store_true", help="replace the CA that is there")


def run(args: argparse.Namespace) -> None:
    """Make or show certificates."""
    from hyperbloom.server.certificates import default_folder, describe, init, renew

    folder = args.dir or default_folder()
    if args.action != "show" and args.days < 1:
        raise ConfigError(f"--days: expected at least 1, found {args.days}")
    if args.action == "init":
        init(folder, args.host, args.days, args.force)
    elif args.action == "renew":
        renew(folder, args.host, args.days)
    print("\n".join(describe(folder)))
    if args.action == "init":
        print(f"give {folder / 'ca.pem'} to every client; next: flower-server clients add NAME --public-key FILE")
    elif args.action == "renew":
        print("the server shows it from its next start on; clients need nothing new")
