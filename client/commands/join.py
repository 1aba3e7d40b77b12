"""Get a model for this machine's data from a server that never saw it: no labels, no training.

The server (`flower-server serve`) sends an encoder, this machine sends back what it makes of the data (with --eps: with
noise that makes it differentially private), and gets weights. They become a model folder for `predict`.

--data takes what flower-client takes, and also inputs without labels: .npy, .npz with x alone, a folder of images.

exit codes: 0 the model is there, 2 wrong settings or data, 3 refused, or beyond the privacy budget, 5 no connection
"""

import argparse
import math
from pathlib import Path

from hyperbloom.client.connection import add_security, check_security, make_link

EXAMPLE = "join --server gpu-box:9092 --root-certificates ca.pem --key me.pem --data scans.npz --out model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `join`."""
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the server's Fleet address")
    add_security(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the model")
    parser.add_argument("--data", required=True, metavar="WHAT", help="this machine's data, with labels or without")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder with the files of a named data set")
    parser.add_argument("--partition", metavar="I/N", help="a share of a data set that N clients split")
    parser.add_argument("--split", default="shares", help="how the N shares are made (default: %(default)s)")
    parser.add_argument("--data-seed", type=int, default=0, metavar="SEED", help="seed of the split (default: 0)")
    parser.add_argument("--size", default="M", choices=["S", "M", "L"], help="size of model it can run (default: M)")
    privacy = parser.add_argument_group("differential privacy of what is sent")
    privacy.add_argument("--eps", type=float, metavar="EPSILON", help="add noise for this epsilon (default: no noise)")
    privacy.add_argument("--delta", type=float, help="and this delta; less than one over the number of examples")
    privacy.add_argument("--budget", type=float, metavar="EPSILON", help="refuse if all joins together spend more")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="where privacy spent on these data is entered (default: per user)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say more, Flower's own log included")


def run(args: argparse.Namespace) -> None:
    """Join, and write the model.

    Raises:
        HyperbloomError: settings, data, budget or connection do not allow it.
    """
    from hyperbloom.client.cli import log_to_stderr, parse_partition
    from hyperbloom.common.errors import ConfigError
    from hyperbloom.common.export import check_writable

    log_to_stderr("join", args.verbose)
    if (args.eps is None) != (args.delta is None):
        raise ConfigError("--eps and --delta: expected both or neither")
    if args.budget is not None and args.eps is None:
        raise ConfigError("--budget: expected with --eps and --delta; without noise no budget holds")
    if args.budget is not None and not (math.isfinite(args.budget) and args.budget > 0):
        raise ConfigError(f"--budget: expected a number above 0, found {args.budget:g}")
    check_security(args)
    check_writable(args.out)  # before the budget is spent
    partition, partitions = parse_partition(args.partition)
    link = make_link(args)

    from hyperbloom.client.keep.state import default_state_dir
    from hyperbloom.client.newcomer.join import join
    from hyperbloom.client.newcomer.ledger import Ledger
    from hyperbloom.client.newcomer.newcomer import Newcomer, Promise
    from hyperbloom.client.newcomer.sources import Sources
    from hyperbloom.common.data import DataSpec

    promise = Promise(args.eps, args.delta) if args.eps is not None else None
    spec = DataSpec(
        data=args.data,
        root=args.root,
        split=args.split,
        partition=partition,
        partitions=partitions,
        seed=args.data_seed,
    )
    ledger = Ledger(args.state_dir or default_state_dir("on-demand"))
    ledger.read()  # a damaged one is told before anybody is asked, and so is an exhausted budget
    if promise and args.budget is not None:
        ledger.afford(promise.epsilon, promise.delta, args.budget)
    newcomer = Newcomer(Sources(spec), args.size, promise, args.budget, ledger, args.server)
    join(link, newcomer)
    files = newcomer.write(args.out)
    print(f"{args.out}: {', '.join(files)}")
