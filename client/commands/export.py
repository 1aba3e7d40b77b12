"""Write this client's own model from its state folder: for runs in which no one else has the whole of it.

It is the one with which the client was last scored, as in runs of pfedhn-pc, fedrep, ghn or local. In runs of pfedhn
and fedavg the server writes the models: flower-server export.
"""

import argparse
from pathlib import Path

EXAMPLE = "export --client-id ward-7 --data scans.npz --out model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `export`."""
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the model")
    parser.add_argument("--client-id", required=True, metavar="NAME", help="this client's name, as it joined")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="its state folder, if it joined with one")
    parser.add_argument("--run", metavar="RUN", help="which run, if the state folder holds several")
    parser.add_argument("--data", required=True, metavar="WHAT", help="its data: name, .npz, folder or function")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder with the files of a named data set")
    parser.add_argument("--partition", metavar="I/N", help="its share of a data set that N clients split")
    parser.add_argument("--split", default="shares", help="how the N shares are made (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Write the model folder.

    Raises:
        HyperbloomError: there is no such model, or the data or the architecture are others than those it was made for.
    """
    from hyperbloom.client.cli import parse_partition
    from hyperbloom.client.keep.own_model import write_own_model
    from hyperbloom.client.settings import ClientSettings
    from hyperbloom.common.data import DataSpec

    partition, partitions = parse_partition(args.partition)
    spec = DataSpec(data=args.data, root=args.root, split=args.split, partition=partition, partitions=partitions)
    settings = ClientSettings(args.client_id, spec, state_dir=args.state_dir)
    print(f"{args.out}: {', '.join(write_own_model(settings, args.run, args.out))}")
