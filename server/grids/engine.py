"""The grid of a run, and the clients that the run starts itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hyperbloom.client.app import app
from hyperbloom.client.app import train_all as train_at_once
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.client.work.networks import forget
from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import data_source
from hyperbloom.server.grids.fleet import Machines, Say, Tell, open_superlink
from hyperbloom.server.grids.inline import InlineGrid, TrainAll
from hyperbloom.server.grids.local_clients import client_settings, local_clients, make_keys, printed_line
from hyperbloom.server.grids.workers import workers
from hyperbloom.server.loop.post import Grid
from hyperbloom.strategies import find_strategy

Opened = tuple[Grid, Callable[[], None]]
"""A grid, and a function to call while waiting for clients; it raises if a client started here has failed."""


def inline_grid(
    config: RunConfig, folder: Path, vectorise: bool | None = None, train_all: TrainAll | None = None
) -> InlineGrid:
    """Return a grid of `config.clients` virtual clients whose state is under `folder`.

    With `vectorise`, it trains the clients of a cohort at once; by default on a CUDA device, where one small network at
    a time leaves it idle. On a CPU it speeds an MLP up and slows a LeNet down (`benchmarks/vectorised.py`). `train_all`
    trains the clients of a cohort in place of this process.

    Raises:
        DataError: the data set is missing, or cannot be split like this.
        ModelError: a graph hypernetwork cannot write a client's own model.
    """
    settings = [client_settings(config, index, folder) for index in range(config.clients)]
    configs = [each.to_node_config() for each in settings]
    source = data_source(settings[0].data)
    # Read data and trace models now: an error here is clearer than a refusal from every client.
    devices, traced = set(), find_strategy(config.strategy).asks in ("types", "graph")
    for each in configs:
        client = client_for(ClientSettings.from_node_config(each))
        devices.add(client.device.type)
        if client.own and traced:
            own_graph(client.own)
    if vectorise or (vectorise is None and not train_all and "cuda" in devices):
        train_all = train_at_once
    # The grid keeps the data set open, or ten thousand clients would read it ten thousand times.
    return InlineGrid(app, configs, train_all, source)


@contextmanager
def open_grid(machines: Machines, config: RunConfig, folder: Path, say: Say, tell: Tell) -> Iterator[Opened]:
    """Open a run's grid on its engine and start its clients; HyperbloomError if data are missing or it cannot start."""
    if machines.engine == "inline":
        forget()  # of an earlier run: a notebook may have defined names, or written files, anew
        try:
            with workers(machines.workers) if machines.workers > 1 else nullcontext() as train_all:
                yield inline_grid(config, folder, machines.vectorise, train_all), lambda: None
        finally:
            forget()
        return
    settings = [client_settings(config, index, folder) for index in range(machines.local_clients)]
    keys = None if machines.insecure or not settings else make_keys(settings, folder / "clients")
    with open_superlink(machines, folder, say, tell, keys, config.backbone) as grid:
        if len(settings) < config.clients and not machines.superlink:
            first, last = config.part(len(settings))[0], config.part(config.clients - 1)[0]
            number = f"I {f'from {first} to' if first < last else '='} {last}"
            say(f"run this on each machine, NAME its own and {'its own TABLE' if config.data.schema_file else number}:")
            flags, told = machines.invite(config.clients - len(settings))
            say(f"  {printed_line([*flags, *['--stay'] * machines.stay], config)}")
            if told:
                say(told)
        with local_clients(settings, machines.client_flags(machines.local_address)) as watch:
            yield grid, watch
