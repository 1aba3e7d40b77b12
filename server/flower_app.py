"""A Flower app: what `flwr run` starts on SuperLinks and SuperNodes that are not ours, and in Flower's simulation.

It uses Flower's public interface only. `flower-server app new` writes a project that names these two objects.
"""

import os
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hyperbloom.client.app import app
from hyperbloom.server.flower_project import RUN_DIR, run_of
from hyperbloom.server.flower_strategy import FlowerStrategy
from hyperbloom.server.grids.engine import VirtualClients

_NUMBERS = {"partition-id", "num-partitions"}
"""The node config of a node that is only a number, as in Flower's simulation."""


class _Client(ClientApp):
    """Takes a client's settings from its node config, or for a node that is only a number, from the run config."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer an order."""
        own = {key: value for key, value in context.node_config.items() if key not in _NUMBERS}
        if "partition-id" in context.node_config and not own:
            return VirtualClients(run_of(context.run_config), _folder(context))(message, context)
        named = Context(context.run_id, context.node_id, own, context.state, context.run_config)
        return app(message, named)


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
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    return home / "hyperbloom" / str(context.run_id)
