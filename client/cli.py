"""`flower-client`: join a federation with this machine's data and device."""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hyperbloom import __version__
from hyperbloom.client.connection import add_security, check_security, make_link
from hyperbloom.common.commands import list_commands, run_command
from hyperbloom.common.errors import ConfigError, HyperbloomError

if TYPE_CHECKING:
    from hyperbloom.common.data import DataSpec

__all__ = ["build_parser", "log_to_stderr", "main", "parse_partition"]

_COMMANDS = "hyperbloom.client.commands"

_EPILOG = """\
examples:
  on the server's own machine, the third sixth of the digits (what flower-server --insecure prints):
    flower-client --server 127.0.0.1:9092 --insecure --client-id client-2 --data digits --partition 2/6
  join over a network, with the server's ca.pem and a key of this client's own (flower-client keygen --out ward-7.pem),
  which the server knows; with data of your own: an .npz, a folder of images by class, or a function that returns
  train, val, test
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --data scans.npz
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --data ./scans
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --data our.data:load
  join with a model of your own, where the run's strategy lets clients choose (ghn, ghn-server, local)
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --model our.nets:make
  look at the graph that is read from it
    flower-client --data ./scans --model our.nets:make --show-graph

What leaves this machine: the client's name and secret, the version of this program, sizes of its data sets, shape of
inputs, number of classes; weights or their change, losses, counts of right answers; and what some strategies ask for
beside them (descriptors, moments, representations: docs/privacy.md). Examples, labels and a personal classifier never
do. The personal classifier lies in the state folder and survives a restart. See also --disclose,
--disclose-class-shares, --min-noise, --min-masked, --peers, --max-changes, --max-scores.

exit codes: 0 the run is over or Ctrl-C, 1 a defect or a disk that is full at the start, 2 wrong settings or data,
3 refused by the server, or this client already runs here, 5 no connection possible
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="flower-client",
        description="Join a personalised federation: train on this machine's own data, on its own device.",
        epilog=list_commands("flower-client", _COMMANDS) + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hyperbloom {__version__}")
    parser.add_argument("--server", metavar="HOST:PORT", help="the server's Fleet address")
    parser.add_argument("--client-id", metavar="NAME", help="this client's name, the same at each start")
    add_security(parser)
    data = parser.add_argument_group("data")
    data.add_argument("--data", default="digits", metavar="WHAT", help="name, .npz, folder or package.module:function")
    data.add_argument("--root", type=Path, metavar="DIR", help="folder with the files of a named data set")
    data.add_argument("--download", action="store_true", help="fetch a named data set that is missing")
    data.add_argument("--partition", metavar="I/N", help="this client's share of a data set that N clients split")
    data.add_argument("--split", default="shares", help="how the N shares are made (default: %(default)s)")
    data.add_argument(
        "--classes-per-client", type=int, default=2, metavar="K", help="classes, or concepts (default: 2)"
    )
    data.add_argument("--alpha", type=float, default=0.5, help="concentration of the Dirichlet split (default: 0.5)")
    data.add_argument("--max-train", type=int, metavar="N", help="use at most N training examples")
    data.add_argument("--data-seed", type=int, default=0, metavar="SEED", help="seed of the split (default: 0)")
    model = parser.add_argument_group("a model of your own")
    model.add_argument(
        "--model", metavar="WHAT", help="name, or package.module:factory, a function (input_shape, num_classes)"
    )
    model.add_argument("--show-graph", action="store_true", help="print the graph of --model as it is read, and exit")
    model.add_argument(
        "--disclose",
        choices=["types", "all-types", "graph"],
        default="types",
        help="what the server may be told of --model: its layer types; not even these, for all parts of the "
        "hypernetwork (another client, or the server's --init-from, must have disclosed the same types); or the graph, "
        "which strategy ghn-server asks for (default: %(default)s)",
    )
    machine = parser.add_argument_group("this machine")
    machine.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads for training (default: all cores)")
    machine.add_argument("--size", default="M", choices=["S", "M", "L"], help="size of model it can run (default: M)")
    machine.add_argument("--state-dir", type=Path, metavar="DIR", help="identity and personal classifier live here")
    machine.add_argument("--stay", action="store_true", help="wait for the next run when one is over")
    machine.add_argument(
        "--disclose-class-shares",
        action="store_true",
        help="tell the server the shares of the classes (only strategies with fixed descriptors ask for them)",
    )
    machine.add_argument(
        "--min-noise",
        type=float,
        metavar="Z",
        help="train only in runs where changes leave this machine with Gaussian noise of at least Z times the norm "
        "that they are clipped to (flower-server --dp-clients)",
    )
    machine.add_argument(
        "--min-masked",
        type=int,
        metavar="N",
        help="send changes under masks alone, in sums of at least N clients (flower-server --secure-aggregation)",
    )
    machine.add_argument(
        "--peers",
        type=Path,
        metavar="FILE",
        help="with secure aggregation: add changes to those of clients alone whose key's fingerprint is in this text "
        "(what flower-server clients list prints)",
    )
    machine.add_argument(
        "--max-changes",
        type=int,
        metavar="N",
        help="send at most N changes, over all runs (default: 1000 with --min-noise or --min-masked, else any number)",
    )
    machine.add_argument(
        "--max-scores",
        type=int,
        metavar="N",
        help="tell at most N scores of models that training on this machine has shaped, over all runs (default: none "
        "with --min-noise or --min-masked, else any number)",
    )
    machine.add_argument("-v", "--verbose", action="store_true", help="say more, Flower's own log included")
    machine.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if (code := run_command("flower-client", _COMMANDS, arguments)) is not None:
        return code
    args = _parse(arguments)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    # What goes wrong with the connection is said by our own log, in one line.
    os.environ.setdefault("FLWR_LOG_LEVEL", "DEBUG" if args.verbose else "CRITICAL")
    os.environ.setdefault("GRPC_VERBOSITY", "INFO" if args.verbose else "NONE")
    log_to_stderr(args.client_id, args.verbose)
    try:
        _run(args)
    except HyperbloomError as error:
        print(f"flower-client: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("flower-client: left the federation", file=sys.stderr)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.show_graph and not args.model:
        parser.error("--show-graph: expected with --model")
    missing = [flag for flag, value in (("--server", args.server), ("--client-id", args.client_id)) if not value]
    if missing and not args.show_graph:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return args


def log_to_stderr(client_id: str, verbose: bool) -> None:
    """Show our log, each line with the client's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {client_id} %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("hyperbloom")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)


def _run(args: argparse.Namespace) -> None:
    # Late, because importing torch and Flower takes seconds that --help and a wrong flag should not cost.
    import torch

    from hyperbloom.client.app import app
    from hyperbloom.client.runtime import exit_with_parent, run_client
    from hyperbloom.client.settings import ClientSettings
    from hyperbloom.client.worker import worker_for
    from hyperbloom.common.data import DataSpec

    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads: expected at least 1, found {args.threads}")
    if not args.show_graph:
        check_security(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    partition, partitions = parse_partition(args.partition)
    spec = DataSpec(
        data=args.data,
        root=args.root,
        download=args.download,
        split=args.split,
        classes_per_client=args.classes_per_client,
        alpha=args.alpha,
        partition=partition,
        partitions=partitions,
        max_train=args.max_train,
        seed=args.data_seed,
    )
    if args.show_graph:
        print(_graph(args.model, args.size, spec))
        return
    settings = ClientSettings(
        client_id=args.client_id,
        data=spec,
        device=args.device,
        size=args.size,
        state_dir=args.state_dir,
        disclose_class_shares=args.disclose_class_shares,
        model=args.model,
        disclose=args.disclose,
        min_noise=args.min_noise,
        min_masked=args.min_masked,
        key=args.key,
        peers=args.peers,
        max_changes=args.max_changes,
        max_scores=args.max_scores,
    )
    link = make_link(args)
    config = settings.to_node_config()
    # The same route as the app takes, so that what is loaded here, before the server hears of us, is what it uses.
    worker = worker_for(ClientSettings.from_node_config(config))
    with worker.state.lock():
        if args.parent_pid:
            exit_with_parent(args.parent_pid)
        run_client(link, app, config, stay=args.stay)


def _graph(model: str, size: str, spec: "DataSpec") -> str:
    """Return the graph of a model for these data as text; nothing of it leaves this machine."""
    from hyperbloom.client.graphs import own_graph
    from hyperbloom.common.data import load_client_data
    from hyperbloom.common.models import ModelSpec

    data = load_client_data(spec)
    return own_graph(ModelSpec(model, size, data.input_shape, data.num_classes)).render()


def parse_partition(text: str | None) -> tuple[int | None, int]:
    """Return I and N of `I/N`, None and 1 of nothing; ConfigError if it is neither."""
    if text is None:
        return None, 1
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
        raise ConfigError(f"--partition: expected I/N with 0 <= I < N, such as 2/6; found {text!r}")
    return int(index), int(count)
