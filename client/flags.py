"""Flags that several commands of `flower-client` have, and what is made of them."""

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hyperbloom.common.commands import FILE, FOLDER, Flag, section
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.plain import check_insecure
from hyperbloom.common.proposals import DATASETS, SPLITS, proposed

if TYPE_CHECKING:
    from hyperbloom.client.runtime import Link
    from hyperbloom.common.data import DataSpec

__all__ = [
    "CONNECTION",
    "SIZE",
    "VERBOSE",
    "check_security",
    "data_flags",
    "data_spec",
    "log_to_stderr",
    "make_link",
]

CONNECTION = section(
    "The server",
    Flag("--server", metavar="HOST:PORT", help="the server's Fleet address"),
    Flag(
        "--insecure",
        count=True,
        show_default=False,
        help="plain text, without a key: on loopback; given twice, anywhere",
    ),
    Flag(
        "--root-certificates",
        type=FILE,
        metavar="FILE",
        help="CA of the server's certificate",
        show_default="the system's",
    ),
    Flag("--key", type=FILE, metavar="FILE", help="this client's private key (flower-client keygen)"),
)
SIZE = Flag("--size", type=click.Choice(["S", "M", "L"]), default="M", help="size of model that this machine can run")
VERBOSE = Flag("-v", "--verbose", is_flag=True, help="say more, Flower's own log included")


def data_flags(default: str | None = None) -> list[click.Parameter]:
    """Return the flags that say what this machine's data are; without a default --data is required."""
    return section(
        "Data",
        Flag(
            "--data",
            default=default,
            required=default is None,
            metavar="WHAT",
            help="name, .npz, folder or package.module:function",
            shell_complete=proposed(DATASETS, "datasets"),
        ),
        Flag("--root", type=FOLDER, metavar="DIR", help="folder with the files of a named data set"),
        Flag("--download", is_flag=True, help="fetch a named data set that is missing"),
        Flag("--partition", metavar="I/N", help="this client's share of a data set that N clients split"),
        Flag("--split", default="shares", help="how the N shares are made", shell_complete=proposed(SPLITS)),
        Flag("--classes-per-client", type=int, default=2, metavar="K", help="classes, or concepts"),
        Flag("--alpha", type=float, default=0.5, help="concentration of the Dirichlet split"),
        Flag("--max-train", type=int, metavar="N", help="use at most N training examples"),
        Flag("--data-seed", type=int, default=0, metavar="SEED", help="seed of the split"),
    )


def data_spec(flags: Mapping[str, Any]) -> "DataSpec":
    """Return what the flags of `data_flags` describe.

    Raises:
        ConfigError: --partition is not I/N.
        DataError: a number is out of range.
    """
    from hyperbloom.common.data import DataSpec

    index, slash, count = (flags["partition"] or "").partition("/")
    if flags["partition"] is not None and not (
        slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)
    ):
        found = flags["partition"]
        raise ConfigError(f"--partition: expected I/N with 0 <= I < N, such as 2/6; found {found!r}")
    alike = ("data", "root", "download", "split", "classes_per_client", "alpha", "max_train")
    return DataSpec(
        **{name: flags[name] for name in alike},
        partition=int(index) if slash else None,
        partitions=int(count) if slash else 1,
        seed=flags["data_seed"],
    )


def check_security(flags: Mapping[str, Any]) -> None:
    """Refuse flags of CONNECTION that do not go together, before anything is loaded.

    Raises:
        ConfigError: says which.
    """
    ca, key, times = flags["root_certificates"], flags["key"], flags["insecure"]
    if times and (ca or key):
        flag = "--root-certificates" if ca else "--key"
        raise ConfigError(f"{flag}: expected without --insecure: plain text uses neither keys nor certificates")
    if ca and not ca.is_file():
        raise ConfigError(f"--root-certificates: expected a file, found none at {ca}")
    if times:
        check_insecure("--server", flags["server"].rsplit(":", 1)[0], times)
    elif not key:
        raise ConfigError(
            "expected --key FILE, this client's private key (make it with `flower-client keygen --out FILE`), or "
            "--insecure for plain text on this machine"
        )


def make_link(flags: Mapping[str, Any]) -> "Link":
    """Return the link that the flags of CONNECTION describe.

    Raises:
        ConfigError: the key cannot be read.
    """
    from hyperbloom.client.runtime import Link
    from hyperbloom.common.keys import read_private_key

    key = read_private_key(flags["key"], "--key") if flags["key"] else None
    return Link(flags["server"], bool(flags["insecure"]), flags["root_certificates"], key)


def log_to_stderr(name: str, verbose: bool) -> None:
    """Show our log, each line with the client's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("hyperbloom")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
