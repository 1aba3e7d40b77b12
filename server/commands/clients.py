"""Say which clients may join: add a client's public key, list them, revoke one.

A running server takes notice: a new client can join at once, and one that is revoked is out within a round. The private
key is best made on the client (`flower-client keygen`); `add` without --public-key makes the pair here.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyperbloom.server.registry import ClientRegistry

EXAMPLE = "clients add ward-7 --public-key ward-7.pub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `clients`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|revoke")
    kinds = {"add": "let a client join", "list": "say who may join", "revoke": "let a client join no more"}
    for name, text in kinds.items():
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "--certs", type=Path, metavar="DIR", help="folder of clients.json (default: $HYPERBLOOM_CERTS, else certs)"
        )
        if name != "list":
            action.add_argument("name", metavar="NAME", help="the client's --client-id")
        if name == "add":
            action.add_argument("--public-key", type=Path, metavar="FILE", help="what flower-client keygen printed")
            action.add_argument("--replace", action="store_true", help="in place of the key that it has")


def run(args: argparse.Namespace) -> None:
    """Change or show the registry."""
    from hyperbloom.common.keys import fingerprint
    from hyperbloom.server.certificates import Certificates, default_folder
    from hyperbloom.server.registry import ClientRegistry

    files = Certificates(args.certs or default_folder())
    registry = ClientRegistry(files.clients)
    if args.action == "add":
        _add(args, files.folder, registry)
    elif args.action == "revoke":
        registry.revoke(args.name)
        print(f"{args.name} may not join any more; its key is retired for good")
    else:
        for name, client in registry.clients().items():
            state = f"revoked {client.revoked}" if client.revoked else f"added {client.added}"
            print(f"{name}  {fingerprint(client.public_key)}  {state}")


def _add(args: argparse.Namespace, folder: Path, registry: "ClientRegistry") -> None:
    from hyperbloom.common.errors import ConfigError
    from hyperbloom.common.keys import fingerprint, make_key, public_pem, read_public_key, write_private_key
    from hyperbloom.common.names import check_name

    if args.public_key:
        public = read_public_key(args.public_key, "--public-key")
        registry.add(args.name, public, args.replace)
    else:
        key, path = make_key(), folder / f"{check_name(args.name, 'NAME')}.pem"
        if path.exists():
            raise ConfigError(f"{path} is there already; move it to its client or delete it first")
        public = public_pem(key)
        registry.add(args.name, public, args.replace)
        write_private_key(path, key)
        print(f"its private key is {path}: move it to the client (flower-client --key) and delete it here")
    print(f"{args.name} may join with key {fingerprint(public)}")
