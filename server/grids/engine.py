"""The clients that a run starts itself, and the grid that reaches all of its clients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from hyperbloom.client.app import app, train_all
from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import DataSource, DataSpec, data_source
from hyperbloom.common.program.attempt import attempt
from hyperbloom.server.grids.fleet import Machines, Say, Tell, open_superlink
from hyperbloom.server.grids.inline import InlineGrid, answer
from hyperbloom.server.grids.local_clients import client_settings, local_clients, make_keys, printed_line

__all__ = ["VirtualClients", "client_settings", "inline_grid", "open_grid", "virtual_clients"]

Opened = tuple[Grid, Callable[[], None]]
"""A grid, and what to call while waiting for clients; it raises if one that was started here has failed."""


def inline_grid(config: RunConfig, folder: Path, vectorise: bool | None = None) -> InlineGrid:
    """Return a grid of `config.clients` virtual clients whose state lies under `folder`.

    Args:
        config: the run.
        folder: the run's.
        vectorise: train the clients of a cohort at once; by default on a CUDA device, which one small network after
            the other leaves idle. On a CPU it helps an MLP and slows a LeNet down (`benchmarks/vectorised.py`).

    Raises:
        DataError: the data set is not there, or cannot be split like this.
    """
    settings = [client_settings(config, index, folder) for index in range(config.clients)]
    configs = [each.to_node_config() for each in settings]
    source = data_source(settings[0].data)
    # Data that are not there are told now, not by ten refusals.
    devices = {client_for(ClientSettings.from_node_config(each)).device.type for each in configs}
    if vectorise is None:
        vectorise = "cuda" in devices
    # The grid keeps the data set open: ten thousand clients must not read it ten thousand times.
    return InlineGrid(app, configs, train_all if vectorise else None, source)


class VirtualClients(ClientApp):
    """The `ClientApp` for nodes that know only their number, as in Flower's simulation. Travels to Ray's actors.

    Args:
        config: the run.
        folder: where the clients' state lies; all actors must see it.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Load nothing."""
        super().__init__()
        self.config, self.folder = config, folder

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer as the client that the node's `partition-id` stands for."""
        settings = client_settings(self.config, int(context.node_config["partition-id"]), self.folder)
        own = Context(context.run_id, context.node_id, settings.to_node_config(), context.state, context.run_config)
        # Flower would wrap an exception from an actor in two tracebacks, and lose the message's end in them.
        return answer(attempt(self._answer, message, own), message)

    def _answer(self, message: Message, context: Context) -> Message:
        settings = ClientSettings.from_node_config(context.node_config)
        _held(self.folder, replace(settings.data, partition=None))
        if message.metadata.message_type.partition(".")[0] == "query":
            return app(message, context)
        # An order that the server has given up may still be at work in another actor.
        with ClientState(settings.folder).lock():
            return app(message, context)


@lru_cache(1)
def _held(folder: Path, spec: DataSpec) -> DataSource:
    """Keep a run's data set open in this actor."""
    return data_source(spec)


def virtual_clients(config: RunConfig, folder: Path) -> VirtualClients:
    """Return the `ClientApp` of `config.clients` virtual clients whose state lies under `folder`.

    Raises:
        DataError: the data set is not there, or cannot be split like this.
    """
    folder = folder.resolve()  # an actor may run in another directory
    source = data_source(client_settings(config, 0, folder).data)
    for index in range(config.clients):
        source.client(index)  # as in `inline_grid`
    return VirtualClients(config, folder)


@contextmanager
def open_grid(machines: Machines, config: RunConfig, folder: Path, say: Say, tell: Tell) -> Iterator[Opened]:
    """Open the grid of a run by the engine of its machines, and start the clients that belong to it.

    Raises:
        HyperbloomError: the data are not there, or the engine cannot be started.
    """
    if machines.engine == "inline":
        yield inline_grid(config, folder, machines.vectorise), lambda: None
        return
    if machines.engine == "ray":
        from hyperbloom.server.grids.simulation import simulation_grid

        with simulation_grid(virtual_clients(config, folder), config.clients) as simulated:
            yield simulated
        return
    settings = [client_settings(config, index, folder) for index in range(machines.local_clients)]
    keys = None if machines.insecure or not settings else make_keys(settings, folder / "clients")
    with open_superlink(machines, folder, say, tell, keys) as grid:
        if len(settings) < config.clients:
            first, last = config.part(len(settings))[0], config.part(config.clients - 1)[0]
            say(f"run this on each machine, NAME its own and I {f'from {first} to' if first < last else '='} {last}:")
            say(f"  {printed_line(machines.client_flags(machines.address, 'NAME.pem'), config)}")
        with local_clients(settings, machines.client_flags(machines.local_address)) as watch:
            yield grid, watch
