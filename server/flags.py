"""Flags that several commands of `flower-server` have."""

import click

from hyperbloom.common.commands import FILE, FOLDER, Flag, section

__all__ = ["ENGINES", "LISTENING", "OUT", "set_flag"]

ENGINES = ("grpc", "inline", "ray")

LISTENING = [
    *section(
        "Machines",
        Flag("--host", default="127.0.0.1", help="address that clients connect to"),
        Flag("--port", type=int, default=9092, help="Fleet port; 0 takes a free one"),
        Flag(
            "--insecure",
            count=True,
            show_default=False,
            help="plain text, and clients without keys: on loopback; given twice, on any address",
        ),
    ),
    *section(
        "TLS and clients' keys (instead of --insecure)",
        Flag(
            "--certs",
            type=FOLDER,
            metavar="DIR",
            help="folder of `certs init` and `clients add`",
            show_default="$HYPERBLOOM_CERTS, else certs",
        ),
        Flag("--tls-certificate", type=FILE, metavar="FILE", help="another certificate of the server, PEM"),
        Flag("--tls-key", type=FILE, metavar="FILE", help="its private key, PEM"),
        Flag("--tls-ca", type=FILE, metavar="FILE", help="the CA that signed it, PEM; clients need it too"),
    ),
]
"""The flags from which a `fleet.Listening` is made."""


def set_flag(text: str) -> Flag:
    """Return the flag `--set`; `text` says what it sets."""
    return Flag("--set", "assignments", multiple=True, metavar="KEY=VALUE", help=f"{text}; may be repeated")


OUT: list[click.Parameter] = [
    Flag("--out", type=FOLDER, metavar="DIR", help="folder for all of it, a new one or one to go on with"),
    Flag(
        "--engine",
        type=click.Choice(ENGINES),
        default="inline",
        help="clients as processes over gRPC, in this process, or in Flower's simulation",
    ),
]
"""What `compare` and `reproduce` have in common."""
