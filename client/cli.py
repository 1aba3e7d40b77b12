"""`flower-client`: join a federation with this machine's data and device."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from hyperbloom import __version__
from hyperbloom.client.flags import (
    CONNECTION,
    SIZE,
    VERBOSE,
    check_security,
    data_flags,
    data_spec,
    log_to_stderr,
    make_link,
)
from hyperbloom.common.commands import FOLDER, Flag, Program, run_program, section

__all__ = ["flower_client", "main"]

_EPILOG = """\
\b
Examples:
  on the server's own machine, the third sixth of the digits (what
  flower-server --insecure prints)
    flower-client --server 127.0.0.1:9092 --insecure --client-id client-2 --data digits --partition 2/6
  over a network, with the server's ca.pem and a key that the server knows
  (flower-client keygen --out ward-7.pem), and data of your own: an .npz, a
  folder of images by class, or a function that returns train, val, test
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --data scans.npz
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --data ./scans
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --data our.data:load
  with a model of your own, where the run's strategy lets clients choose
  (ghn, ghn-server, local)
    flower-client --server gpu:9092 --root-certificates ca.pem --key ward-7.pem --client-id ward-7 --model our.nets:make
  look at the graph that is read from it
    flower-client --data ./scans --model our.nets:make --show-graph

What leaves this machine: the client's name and secret, the version of this program, sizes of its data sets, shape of
inputs, number of classes; weights or their change, losses, counts of right answers; and what some strategies ask for
beside them (descriptors, moments, representations: docs/privacy.md). Examples, labels and a personal classifier never
do. The personal classifier lies in the state folder and survives a restart. See also --disclose,
--disclose-class-shares, --min-noise, --min-masked.

exit codes: 0 the run is over or Ctrl-C, 1 a defect or a disk that is full at the start, 2 wrong settings or data,
3 refused by the server, or this client already runs here, 5 no connection possible
"""

_MODEL = section(
    "A model of your own",
    Flag("--model", metavar="WHAT", help="name, or package.module:factory, a function (input_shape, num_classes)"),
    Flag("--show-graph", is_flag=True, help="print the graph of --model as it is read, and exit"),
    Flag(
        "--disclose",
        type=click.Choice(["types", "all-types", "graph"]),
        default="types",
        help="what the server may be told of --model. types: its layer types. all-types: not even these; the client "
        "loads all parts of the hypernetwork, and another client, or the server's --init-from, must have disclosed the "
        "same types. graph: the whole graph, which strategy ghn-server asks for",
    ),
)
_MACHINE = section(
    "This machine",
    Flag("--client-id", metavar="NAME", help="this client's name, the same at each start"),
    Flag("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps"),
    Flag("--threads", type=click.IntRange(1), metavar="N", help="CPU threads for training", show_default="all cores"),
    SIZE,
    Flag("--state-dir", type=FOLDER, metavar="DIR", help="identity and personal classifier live here"),
    Flag("--stay", is_flag=True, help="wait for the next run when one is over"),
    VERBOSE,
    Flag("--parent-pid", type=int, hidden=True),
)
_PRIVACY = section(
    "What leaves this machine",
    Flag(
        "--disclose-class-shares",
        is_flag=True,
        help="tell the server the shares of the classes (only strategies with fixed descriptors ask for them)",
    ),
    Flag(
        "--min-noise",
        type=float,
        metavar="Z",
        help="train only in runs where changes leave this machine with Gaussian noise of at least Z times the norm "
        "that they are clipped to (flower-server --dp-clients)",
    ),
    Flag(
        "--min-masked",
        type=int,
        metavar="N",
        help="send changes only under masks, in sums of at least N clients (flower-server --secure-aggregation)",
    ),
)


@click.version_option(__version__, message="hyperbloom %(version)s")
@click.command(
    "flower-client",
    cls=Program,
    package="hyperbloom.client.commands",
    params=[*CONNECTION, *data_flags("digits"), *_MODEL, *_MACHINE, *_PRIVACY],
    epilog=_EPILOG,
)
@click.pass_context
def flower_client(ctx: click.Context, /, **flags: Any) -> None:
    """Join a personalised federation: train on this machine's own data, on its own device."""
    if ctx.invoked_subcommand:
        return
    if flags["show_graph"] and not flags["model"]:
        ctx.fail("--show-graph: expected with --model.")
    missing = [flag for flag, name in (("--server", "server"), ("--client-id", "client_id")) if not flags[name]]
    if missing and not flags["show_graph"]:
        ctx.fail(f"Missing {' and '.join(missing)}.")
    # Our own log says in one line what goes wrong with the connection.
    os.environ.setdefault("FLWR_LOG_LEVEL", "DEBUG" if flags["verbose"] else "CRITICAL")
    os.environ.setdefault("GRPC_VERBOSITY", "INFO" if flags["verbose"] else "NONE")
    log_to_stderr(flags["client_id"], flags["verbose"])
    try:
        _show_graph(flags) if flags["show_graph"] else _join(flags)
    except KeyboardInterrupt:
        print("flower-client: left the federation", file=sys.stderr)


def _join(flags: Mapping[str, Any]) -> None:
    """Join with the settings that the flags describe."""
    check_security(flags)
    # Late, because importing torch and Flower takes seconds that --help and a wrong flag should not cost.
    import torch

    from hyperbloom.client.app import app
    from hyperbloom.client.runtime import exit_with_parent, run_client
    from hyperbloom.client.settings import ClientSettings
    from hyperbloom.client.worker import worker_for

    if flags["threads"]:
        torch.set_num_threads(flags["threads"])
    alike = ClientSettings.__dataclass_fields__.keys() & flags.keys() - {"data"}
    settings = ClientSettings(data=data_spec(flags), **{name: flags[name] for name in alike})
    link = make_link(flags)
    config = settings.to_node_config()
    # The same route as the app takes, so that what is loaded here, before the server hears of us, is what it uses.
    worker = worker_for(ClientSettings.from_node_config(config))
    with worker.state.lock():
        if flags["parent_pid"]:
            exit_with_parent(flags["parent_pid"])
        run_client(link, app, config, stay=flags["stay"])


def _show_graph(flags: Mapping[str, Any]) -> None:
    """Print the graph of a model for these data; nothing of it leaves this machine."""
    from hyperbloom.client.graphs import own_graph
    from hyperbloom.common.data import load_client_data
    from hyperbloom.common.models import ModelSpec

    data = load_client_data(data_spec(flags))
    print(own_graph(ModelSpec(flags["model"], flags["size"], data.input_shape, data.num_classes)).render())


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_program(flower_client, arguments)
