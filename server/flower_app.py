"""A Flower app: what `flwr run` starts on SuperLinks and SuperNodes that are not ours, and in Flower's simulation.

It uses Flower's public interface only. `flower-server app new` writes a project that names these two objects.
"""

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hyperbloom.client.app import app
from hyperbloom.client.keep.state import ClientState
from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import DataSource, DataSpec, data_source
from hyperbloom.common.errors import ConfigError, attempt
from hyperbloom.server.flower_project import RUN_DIR, run_of
from hyperbloom.server.flower_strategy import FlowerStrategy
from hyperbloom.server.grids.inline import answer
from hyperbloom.server.grids.local_clients import client_settings

_NUMBERS = {"partition-id": "partition", "num-partitions": "partitions"}
"""The node config of a node that is only a number, as in Flower's simulation, and our names for its keys."""


class _Client(ClientApp):
    """Takes a client's settings from its node config, or for a node that is only a number, from the run config."""

    def __call__(self, message: Message, context: Context) -> Message:
        if "partition-id" in context.node_config and context.node_config.keys() <= _NUMBERS.keys():
            return answer_as_numbered(run_of(context.run_config), _folder(context), message, context)
        own = {_NUMBERS.get(key, key): value for key, value in context.node_config.items()}
        return app(message, Context(context.run_id, context.node_id, own, context.state, context.run_config))


def answer_as_numbered(config: RunConfig, folder: Path, message: Message, context: Context) -> Message:
    """Answer as the client of a run whose number is the node's `partition-id`; its state is under `folder`."""
    # Flower would wrap an exception from an actor in two tracebacks, and cut the end of the message off.
    return answer(attempt(_answer, config, folder.resolve(), message, context), message)


def _answer(config: RunConfig, folder: Path, message: Message, given: Context) -> Message:
    if config.secure_aggregation:
        raise ConfigError("secure_aggregation: a node that is only a number keeps no secrets between two messages")
    settings = client_settings(config, int(given.node_config["partition-id"]), folder)
    context = Context(given.run_id, given.node_id, settings.to_node_config(), given.state, given.run_config)
    attempt(_held, settings.folder.parent, replace(settings.data, partition=None))  # an error comes again in the app
    if message.metadata.message_type.partition(".")[0] == "query":
        return app(message, context)
    # Another actor may still work on an order that the server has given up.
    with ClientState(settings.folder).lock():
        return app(message, context)


@lru_cache(1)
def _held(clients: Path, spec: DataSpec) -> DataSource:
    """Return the data set of the run whose clients' state is there; the cache keeps it open in this process."""
    return data_source(spec)


server = ServerApp()
client = _Client()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    """Train over Flower's grid, as the run config says."""
    FlowerStrategy(run_of(context.run_config), _folder(context)).start(grid)


def _folder(context: Context) -> Path:
    """Return the run folder that the run config names, or one for this run of Flower's."""
    if named := context.run_config.get(RUN_DIR):
        return Path(str(named)).expanduser()
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "hyperbloom" / str(context.run_id)
