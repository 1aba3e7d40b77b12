"""Flags that several commands of `flower-client` share, and the objects made from them."""

import logging
import os
import re
import ssl
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hyperbloom.common.errors import ConfigError, printable
from hyperbloom.common.program.commands import FILE, FOLDER, Flag, section
from hyperbloom.common.program.plain import check_insecure, place_of

if TYPE_CHECKING:
    from pathlib import Path

    from hyperbloom.client.link.server import Link
    from hyperbloom.common.data import DataSpec

_PLAIN = "plain text, without a key: on loopback; given twice, anywhere"
CONNECTION = section(
    "The server",
    Flag("--server", "the server's Fleet address", metavar="HOST:PORT"),
    Flag("--insecure", _PLAIN, count=True, show_default=False),
    Flag("--root-certificates", "CA of the server's certificate", type=FILE, show_default="the system's"),
    Flag("--key", "this client's private key (flower-client keygen)", type=FILE, show_default="the one enrolled"),
    Flag("--token", "the server's token, for the first start; or as $HYPERBLOOM_TOKEN", envvar="HYPERBLOOM_TOKEN"),
    Flag("--stock-superlink", "the server is Flower's own SuperLink; signatures do not name the server", is_flag=True),
    Flag("--http", "the server is Flower's own SuperLink of 1.40 or later, over HTTP", is_flag=True),
)
SIZE = Flag("--size", "size of model that this machine can run", type=click.Choice(["S", "M", "L"]), default="M")
VERBOSE = Flag("-v --verbose", "say more, Flower's own log included", is_flag=True)


def data_flags(default: str | None = None, required: bool = True) -> list[Flag]:
    """Return the flags that describe this machine's data; without a default --data is required, unless told."""
    what = "name, .npz, .csv, .tsv, .parquet, folder, hf:NAME or package.module:function"
    return section(
        "Data",
        Flag("--data", what, metavar="WHAT", **({"default": default} if default else {"required": required})),
        Flag("--root", "folder with the files of a named data set", type=FOLDER),
        Flag("--partition", "this client's share of a data set that N clients split", metavar="I/N"),
        Flag("--split", "how the N shares are made", default="auto"),
        Flag("--classes-per-client", "classes, shards or concepts", default=2),
        Flag("--alpha", "concentration of the Dirichlet split", default=0.5),
        Flag("--label", "column of a table to predict, or several: A,B", metavar="COLUMN"),
        Flag("--owner", "column of a table that says whose a row is, for --split owner", metavar="COLUMN"),
        Flag("--group", "column of a table that says which rows no split may part", metavar="COLUMN"),
        Flag("--schema", "what a table's columns mean (flower-client schema)", type=FILE, show_default="the server's"),
        Flag("--backbone", "pretrained network: folder or module:function (docs/backbones.md)", metavar="WHERE"),
        Flag("--max-train", "use at most so many training examples", type=int),
        Flag("--data-seed seed", "seed of the split", default=0),
    )


def data_spec(flags: Mapping[str, Any]) -> "DataSpec":
    """Return the data that the flags of `data_flags` describe; other flags are ignored.

    Raises:
        ConfigError: --partition is not I/N.
        DataError: a number is out of range.
    """
    from hyperbloom.common.data import DataSpec

    found = re.fullmatch(r"(\d+)/(\d+)", flags["partition"] or "0/1", re.ASCII)
    if not found or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--partition: expected I/N with 0 <= I < N, such as 2/6; found {flags['partition']!r}")
    values = {name: flags[name] for name in DataSpec.__dataclass_fields__ if name in flags}
    part = None if flags["partition"] is None else int(found[1])
    return DataSpec(**values | {"partition": part, "partitions": int(found[2])})


def check_security(flags: Mapping[str, Any]) -> None:
    """Check the flags of CONNECTION before anything is loaded; ConfigError if one is missing, or they contradict."""
    ca, key, times = flags["root_certificates"], flags["key"], flags["insecure"]
    if times and (ca or key or flags["stock_superlink"]):
        flag = "--root-certificates" if ca else "--key" if key else "--stock-superlink"
        raise ConfigError(f"{flag}: expected without --insecure: plain text uses neither keys nor certificates")
    if ca and not ca.is_file():
        raise ConfigError(f"--root-certificates: expected a file, found none at {ca}")
    try:
        ssl.create_default_context(cafile=ca)
    except OSError as error:
        found = "none" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"--root-certificates: expected certificates (PEM) in {ca}, found {found}") from None
    if times:
        check_insecure("--server", flags["server"].rsplit(":", 1)[0], times)
    elif not (key or flags["stock_superlink"] or flags["http"]):  # those may let in whoever comes
        raise ConfigError(
            "expected --token TOKEN, which the server prints (flower-server clients invite NAME), --key FILE, this "
            "client's private key (flower-client keygen --out FILE), or --insecure for plain text on this machine"
        )


def enrolled(flags: Mapping[str, Any], name: str, folder: "Path") -> dict[str, Any]:
    """Return flags with the CA and the key that the client `name` has for its server, in `folder`.

    With --token it makes a key, and fetches the CA from the server, which shows by the token's fingerprint that it is
    the right one before it is sent anything. Errors as in `enrol`, and a ConfigError for flags that contradict each
    other.
    """
    from hyperbloom.client.link.enrolment import enrol

    alone = [name for name in ("insecure", "key", "root_certificates", "stock_superlink", "http") if flags[name]]
    if alone and flags["token"]:
        raise ConfigError(f"--token or HYPERBLOOM_TOKEN: expected without --{alone[0].replace('_', '-')}")
    return {**flags, "secret": ""} if alone else {**flags, **enrol(flags["server"], flags["token"], name, folder)}


def make_link(flags: Mapping[str, Any]) -> "Link":
    """Return the link that the flags of CONNECTION describe; ConfigError if an address or the key is none."""
    from hyperbloom.client.link.server import Link
    from hyperbloom.common.secrecy.keys import read_private_key

    place_of(flags["server"])
    key = read_private_key(flags["key"], "--key") if flags["key"] else None
    plain, ca = bool(flags["insecure"]), flags["root_certificates"]
    stock = flags["stock_superlink"] or flags["http"]
    return Link(flags["server"], plain, ca, key, stock, flags["http"], flags["secret"])


def log_to(name: str, verbose: bool) -> None:
    """Write our log to stderr, with the client's name in each line; gRPC and Flower speak only if `verbose`."""
    os.environ.setdefault("GRPC_VERBOSITY", "INFO" if verbose else "NONE")  # it reads this when it is imported
    os.environ["FLWR_LOG_LEVEL"] = "DEBUG" if verbose else os.environ.get("FLWR_LOG_LEVEL", "CRITICAL")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(message)s", datefmt="%H:%M:%S"))
    handler.addFilter(_make_printable)
    logger = logging.getLogger("hyperbloom")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)


def _make_printable(record: logging.LogRecord) -> bool:
    """Replace control characters, as a text may come from a server; a defect's traceback stays as it is."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True
