"""Flags that several commands of `flower-server` share."""

import click

from hyperbloom.common.program.commands import FOLDER, Flag, section

ENGINES = click.Choice(["grpc", "inline"])
HOST = Flag("--host", "address to listen on", show_default="with --insecure 127.0.0.1, else all: 0.0.0.0")
PORT = Flag("--port", "Fleet port; 0 takes a free one", type=click.IntRange(0, 65_535), default=9092)
CERTS = Flag("--certs", "folder of certificates and keys", type=FOLDER, show_default="$HYPERBLOOM_CERTS, else certs")
_PLAIN = "plain text, and clients without keys: on loopback; given twice, on any address"
INSECURE = Flag("--insecure", _PLAIN, count=True, show_default=False)
LISTENING = section("Where to listen", HOST, PORT, CERTS, INSECURE)
OWN_CODE = Flag("--own-code", "import what the run folder names as package.module:name", is_flag=True)

WEB = "serve the live page at this address, without HOST on loopback; port 0 takes a free one"
_TRACK = "tell a tracker: mlflow[:URI], wandb[:PROJECT], tensorboard[:DIR], a plug-in; may be repeated"
TRACK = Flag("--track", _TRACK, multiple=True, metavar="NAME[:WHERE]")

_SUPERLINK = (
    "use the SuperLink whose HTTP API is there (flower-superlink --isolation process), and its nodes; its CA is "
    "ca.pem in --certs"
)
SUPERLINK = Flag("--superlink", _SUPERLINK, metavar="HOST:PORT")

_WHERE = "clients in this process, here over gRPC, or elsewhere: they join every run (flower-client --stay)"
OUT = Flag("--out", "folder for all of it, a new one or one to go on with", type=FOLDER)
SERIES = [
    OUT,
    Flag("--engine", _WHERE, type=click.Choice(["inline", "grpc", "elsewhere"]), default="inline"),
    SUPERLINK,
    *LISTENING,
]
"""Flags that `compare` and `tune` share. Those after `--engine` belong to clients elsewhere."""


def set_flag(text: str) -> Flag:
    """Return the flag `--set`; `text` describes what it sets."""
    return Flag("--set assignments", f"{text}; may be repeated", multiple=True, metavar="KEY=VALUE")
