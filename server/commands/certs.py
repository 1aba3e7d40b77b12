"""`flower-server certs`."""

from pathlib import Path

import click

from hyperbloom.common.commands import FOLDER, Command, Commands, Flag

_EPILOG = """\
\b
Example:
  flower-server certs init --host gpu-box.hospital.example --host 10.0.0.5
"""
_FOLDER = Flag(
    "--dir", "folder", type=FOLDER, metavar="DIR", help="folder", show_default="$HYPERBLOOM_CERTS, else certs"
)
_CERTIFICATE: list[click.Parameter] = [
    Flag(
        "--host",
        "hosts",
        multiple=True,
        metavar="NAME_OR_IP",
        help="a name or address of the server, beside localhost and this machine's name; may be repeated",
    ),
    Flag("--days", type=click.IntRange(1), default=365, help="days that the certificate holds"),
    _FOLDER,
]


@click.group("certs", cls=Commands, epilog=_EPILOG)
def command() -> None:
    """Make and show the server's certificates.

    With them the server proves to clients that it is the server. `flower-server` finds the folder by itself:
    $HYPERBLOOM_CERTS, else ./certs.
    """


@command.command("init", cls=Command, params=[*_CERTIFICATE])
@click.option("--force", is_flag=True, help="replace the CA that is there")
def _init(hosts: tuple[str, ...], days: int, folder: Path | None, force: bool) -> None:
    """Make a CA (certificate authority) and a certificate."""
    from hyperbloom.server.certificates import default_folder, init

    folder = folder or default_folder()
    init(folder, list(hosts), days, force)
    _show(folder)
    print(f"give {folder / 'ca.pem'} to every client; next: flower-server clients add NAME --public-key FILE")


@command.command("renew", cls=Command, params=[*_CERTIFICATE])
def _renew(hosts: tuple[str, ...], days: int, folder: Path | None) -> None:
    """Make a new certificate of the same CA."""
    from hyperbloom.server.certificates import default_folder, renew

    folder = folder or default_folder()
    renew(folder, list(hosts), days)
    _show(folder)
    print("the server shows it from its next start on; clients need nothing new")


@command.command("show", cls=Command, params=[_FOLDER])
def _say(folder: Path | None) -> None:
    """Say what is there."""
    from hyperbloom.server.certificates import default_folder

    _show(folder or default_folder())


def _show(folder: Path) -> None:
    from hyperbloom.server.certificates import describe

    print("\n".join(describe(folder)))
