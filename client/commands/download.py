"""Fetch a named data set, for clients, for --engine inline, compare and reproduce; what is there is left alone.

torchvision's downloader fetches CIFAR-10 and -100, MNIST and Fashion-MNIST from their publishers. For others the
command says what to put where.
"""

import argparse
from pathlib import Path

EXAMPLE = "download cifar10 --root /data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `download`."""
    parser.add_argument("data", metavar="NAME", help="name of a data set; see flower-server --list")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where to ($HYPERBLOOM_DATA or ~/.cache/hyperbloom)")


def run(args: argparse.Namespace) -> None:
    """Fetch what is missing, and read all of it once.

    Raises:
        HyperbloomError: there is no such data set, its publisher does not answer, or nobody may pass it on.
    """
    from hyperbloom.common.data import DATASETS, DataSpec, load_client_data
    from hyperbloom.common.errors import ConfigError

    if args.data not in DATASETS:
        raise ConfigError(f"expected one of {', '.join(sorted(DATASETS))}; found {args.data!r}")
    spec = DataSpec(data=args.data, root=args.root, download=True)
    data = load_client_data(spec)
    sizes = ", ".join(f"{len(getattr(data, part))} {part}" for part in ("train", "val", "test"))
    print(f"{args.data} can be read: {sizes}")
