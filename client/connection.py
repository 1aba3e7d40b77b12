"""The flags that say how a client reaches the server: for `flower-client` and those of its commands that connect."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.plain import check_insecure

if TYPE_CHECKING:
    from hyperbloom.client.runtime import Link

__all__ = ["add_security", "check_security", "make_link"]


def add_security(parser: argparse.ArgumentParser) -> None:
    """Add the flags for TLS and the client's key, or for plain text."""
    security = parser.add_mutually_exclusive_group()
    security.add_argument(
        "--insecure", action="count", default=0, help="plain text, without a key: on loopback; given twice, anywhere"
    )
    security.add_argument(
        "--root-certificates", type=Path, metavar="FILE", help="CA of the server's certificate (default: the system's)"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="this client's private key (flower-client keygen)")


def check_security(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together, before anything is loaded.

    Raises:
        ConfigError: says which.
    """
    if args.root_certificates and not args.root_certificates.is_file():
        raise ConfigError(f"--root-certificates: expected a file, found none at {args.root_certificates}")
    if args.insecure:
        check_insecure("--server", (args.server or "").rsplit(":", 1)[0], args.insecure)
    if args.insecure and args.key:
        raise ConfigError("--key: expected without --insecure, as plain text protects no signature")
    if not args.insecure and not args.key:
        raise ConfigError(
            "expected --key FILE, this client's private key (make it with `flower-client keygen --out FILE`), or "
            "--insecure for plain text on this machine"
        )


def make_link(args: argparse.Namespace) -> "Link":
    """Return the link that the flags describe.

    Raises:
        ConfigError: the key cannot be read.
    """
    from hyperbloom.client.runtime import Link
    from hyperbloom.common.keys import read_private_key

    key = read_private_key(args.key, "--key") if args.key else None
    return Link(args.server, bool(args.insecure), args.root_certificates, key)
