"""`flower-server clients`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperbloom.common.commands import FILE, FOLDER, Command, Commands, Flag
from hyperbloom.common.errors import ConfigError

if TYPE_CHECKING:
    from hyperbloom.server.certificates import Certificates

_EPILOG = """\
\b
Example:
  flower-server clients add ward-7 --public-key ward-7.pub
"""
_CERTS = Flag(
    "--certs", type=FOLDER, metavar="DIR", help="folder of clients.json", show_default="$HYPERBLOOM_CERTS, else certs"
)
_NAME = click.Argument(["name"], help="the client's --client-id")


@click.group("clients", cls=Commands, epilog=_EPILOG)
def command() -> None:
    """Say which clients may join.

    A running server takes notice: a new client can join at once, and a revoked one is out within a round. Make the
    private key on the client (`flower-client keygen`), so that it never travels. `add` without --public-key makes the
    pair here.
    """


def _files(folder: Path | None) -> "Certificates":
    from hyperbloom.server.certificates import Certificates, default_folder

    return Certificates(folder or default_folder())


@command.command("add", cls=Command, params=[_NAME, _CERTS])
@click.option("--public-key", type=FILE, metavar="FILE", help="what flower-client keygen printed")
@click.option("--replace", is_flag=True, help="in place of the key that it has")
def _add(name: str, certs: Path | None, public_key: Path | None, replace: bool) -> None:
    """Let a client join."""
    from hyperbloom.common.keys import fingerprint, make_key, public_pem, read_public_key, write_private_key
    from hyperbloom.common.names import check_name
    from hyperbloom.server.registry import ClientRegistry

    files = _files(certs)
    registry = ClientRegistry(files.clients)
    if public_key:
        public = read_public_key(public_key, "--public-key")
        registry.add(name, public, replace)
    else:
        key, path = make_key(), files.folder / f"{check_name(name, 'NAME')}.pem"
        if path.exists():
            raise ConfigError(f"{path} is there already; move it to its client or delete it first")
        public = public_pem(key)
        registry.add(name, public, replace)
        write_private_key(path, key)
        print(f"its private key is {path}: move it to the client (flower-client --key) and delete it here")
    print(f"{name} may join with key {fingerprint(public)}")


@command.command("list", cls=Command, params=[_CERTS])
def _list(certs: Path | None) -> None:
    """Say who may join."""
    from hyperbloom.common.keys import fingerprint
    from hyperbloom.server.registry import ClientRegistry

    for name, client in ClientRegistry(_files(certs).clients).clients().items():
        state = f"revoked {client.revoked}" if client.revoked else f"added {client.added}"
        print(f"{name}  {fingerprint(client.public_key)}  {state}")


@command.command("revoke", cls=Command, params=[_NAME, _CERTS])
def _revoke(name: str, certs: Path | None) -> None:
    """Let a client join no more."""
    from hyperbloom.server.registry import ClientRegistry

    ClientRegistry(_files(certs).clients).revoke(name)
    print(f"{name} may not join any more; its key is retired for good")
