"""`flower-client`: join a federation with this machine's data and device."""

import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from hyperbloom.client import flags as shared
from hyperbloom.client.commands import COMMANDS, WEB
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.commands import FILE, FOLDER, Flag, Program, execute, section
from hyperbloom.common.program.names import check_name, default_state_dir
from hyperbloom.common.program.signals import end_with

_FLAGS = [
    *shared.CONNECTION,
    *shared.data_flags("digits"),
    *section(
        "A model of your own",
        Flag("--model", "name, or package.module:factory, a function (input_shape, num_classes)"),
        Flag("--show-graph", "print the graph of --model as it is read, and exit", is_flag=True),
        Flag(
            "--disclose",
            "what the server may be told of --model. types: its layer types. graph: the whole graph, which strategy "
            "ghn-server asks for",
            type=click.Choice(["types", "graph"]),
            default="types",
        ),
    ),
    *section(
        "This machine",
        Flag("--client-id", "its name, the same at each start", show_default="with --token this machine's name"),
        Flag("--device", "auto, cpu, cuda, cuda:1, mps", default="auto"),
        Flag("--threads", "CPU threads for training", type=click.IntRange(1), show_default="all it may use"),
        Flag("--low-memory", "page examples in from the disk", is_flag=True),
        Flag("--fetch-backbone", "first fetch --backbone FOLDER from the server, if it hands it out", is_flag=True),
        shared.SIZE,
        Flag("--state-dir", "folder of what the client keeps: identity, key, personal parts", type=FOLDER),
        Flag("--stay", "wait for the next run when one is over", is_flag=True),
        shared.VERBOSE,
        WEB,
        Flag("--parent-pid", "", type=int, hidden=True),
    ),
    *section(
        "What leaves this machine",
        Flag("--disclose-class-shares", "tell the shares of the classes, if a strategy asks for them", is_flag=True),
        Flag("--disclose-moments", "tell mean and deviation of regression targets and unscaled columns", is_flag=True),
        Flag("--moments-noise", "tell these with noise of so many standard errors", type=float, show_default="none"),
        Flag("--disclose-counts", "send the counts behind each score, for figures over all clients", is_flag=True),
        Flag("--disclose-gain", "tell the server what the run gains this client over training alone", is_flag=True),
        Flag(
            "--min-noise",
            "train only in runs where changes leave this machine with Gaussian noise of at least so many times the "
            "norm that they are clipped to (flower-server --dp-clients)",
            type=float,
        ),
        Flag("--min-masked", "send changes only in secure sums of at least so many clients", type=int),
        Flag("--peers", "join secure sums only with clients whose key's fingerprint is in this file", type=FILE),
        Flag(
            "--max-changes",
            "send at most so many changes, over all runs",
            type=int,
            show_default="1000 with --min-noise or --min-masked, else any number",
        ),
        Flag(
            "--max-scores",
            "tell at most so many scores of models that training on this machine has shaped, over all runs",
            type=int,
            show_default="none with --min-noise or --min-masked, else any number",
        ),
    ),
]


def _run(ctx: click.Context, flags: Mapping[str, Any]) -> None:
    """Join a personalised federation: train on this machine's own data, on its own device."""
    if flags["show_graph"] and not flags["model"]:
        ctx.fail("--show-graph: expected with --model.")
    if flags["token"] and not flags["client_id"]:
        flags = {**flags, "client_id": socket.gethostname()}
    missing = [flag for flag, name in (("--server", "server"), ("--client-id", "client_id")) if not flags[name]]
    if missing and not flags["show_graph"]:
        ctx.fail(f"Missing {' and '.join(missing)}.")
    shared.log_to(flags["client_id"], flags["verbose"])
    try:
        _show_graph(flags) if flags["show_graph"] else _join(flags)
    except KeyboardInterrupt:
        print("flower-client: left the federation", file=sys.stderr)


def _join(flags: Mapping[str, Any]) -> None:
    name = check_name(flags["client_id"], "--client-id")
    flags = shared.enrolled(flags, name, flags["state_dir"] or default_state_dir(name))
    shared.check_security(flags)
    # Import late, because torch and Flower take seconds that --help and a wrong flag should not cost.
    from hyperbloom.client.app import counting
    from hyperbloom.client.keep.sent import Sent
    from hyperbloom.client.link.runtime import run_client
    from hyperbloom.client.settings import ClientSettings
    from hyperbloom.client.work.client import client_for
    from hyperbloom.common.program.device import limit_threads

    limit_threads(flags["threads"])
    own = {name: flags[name] for name in ClientSettings.__dataclass_fields__ if name in flags}
    settings = ClientSettings(**own | {"data": shared.data_spec(flags)})
    link = shared.make_link(flags)
    config = settings.to_node_config()
    if flags["fetch_backbone"]:
        from hyperbloom.client.link.handout import fetch_backbone

        if not settings.data.backbone or link.stock:
            raise ConfigError("--fetch-backbone: expected with --backbone FOLDER, at a server of ours")
        fetch_backbone(link, Path(settings.data.backbone))
    # Load the client before connecting. The app finds it in the cache, because it takes the same way to the settings.
    worker = client_for(ClientSettings.from_node_config(config))
    with ExitStack() as stack:
        stack.enter_context(worker.state.lock())
        sent = Sent(worker.settings, worker.releases)
        sent.write()
        stack.callback(sent.write)
        if flags["parent_pid"]:
            end_with(flags["parent_pid"])
        if flags["web"]:
            from hyperbloom.common.pages.serving import serve_in_child

            command = ["hyperbloom.client", "watch", "--state-dir", str(worker.settings.folder)]
            print(stack.enter_context(serve_in_child(command, flags["web"])), flush=True)
        run_client(link, counting(sent), config, stay=flags["stay"])


def _show_graph(flags: Mapping[str, Any]) -> None:
    """Print the graph of a model for these data, without any connection."""
    from hyperbloom.client.work.own_network import own_graph
    from hyperbloom.common.data import load_client_data
    from hyperbloom.common.models import ModelSpec

    data = load_client_data(shared.data_spec(flags))
    print(own_graph(ModelSpec(flags["model"], flags["size"], data.input_shape, data.num_classes)).render())


flower_client = Program("flower-client", COMMANDS, _run, _FLAGS, Path(__file__).with_name("help.txt"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return execute(flower_client, arguments)
