"""Flower's simulation engine: virtual clients in Ray actors, on this machine's cores or on a cluster.

Flower runs the simulation and calls a `ServerApp`. Ours passes its grid to the caller's thread and waits, so that a
session uses it like any other grid. `run_simulation` is Flower's public function for this.
"""

import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.program.signals import terminate_as_interrupt


def check_ray() -> None:
    """Raise a ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "--engine ray: expected Ray, which is not installed; install the extra `simulation`: "
            "pip install 'hyperbloom[simulation]', or '.[simulation]' from the sources"
        )


@contextmanager
def simulation_grid(app: ClientApp, clients: int) -> Iterator[tuple[Grid, Callable[[], None]]]:
    """Simulate `clients` nodes; `app` knows each by the `partition-id` in its node config.

    Ray starts on this machine with a secret of this process, unless `RAY_ADDRESS` names a cluster.

    Yields:
        the grid, and a function that raises a `ConnectionFailed` if the simulation has ended by itself.

    Raises:
        ConfigError: Ray is not installed.
        ConnectionFailed: the simulation cannot be started.
    """
    check_ray()
    from flwr.simulation import run_simulation

    _start_ray()
    grids: SimpleQueue[Grid | None] = SimpleQueue()
    errors: list[BaseException] = []
    over = Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grids.put(grid)
        over.wait()

    def simulate() -> None:
        try:
            run_simulation(server, app, clients, backend_config={"client_resources": _resources()})
        except BaseException as error:
            errors.append(error)
        finally:
            grids.put(None)  # for a caller that still waits for a grid

    def watch() -> None:
        if errors or not thread.is_alive():
            reason = next((error.__cause__ or error for error in errors), "no reason given")
            raise ConnectionFailed(f"Flower's simulation has ended: {' '.join(str(reason).split())}")

    thread = Thread(target=simulate, name="simulation")
    thread.start()
    try:
        # Ray has replaced the SIGTERM handler with one that aborts.
        with terminate_as_interrupt():
            grid = grids.get()
            if grid is None:
                thread.join()
                watch()
            assert grid is not None
            yield grid, watch
    finally:
        over.set()
        thread.join()


def _start_ray() -> None:
    """Start Ray or join its cluster in this thread; Flower would do it in another one, but shuts it down."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a warning; this is Ray's coming default
    own = "RAY_ADDRESS" not in os.environ
    if own:
        # Ray opens its ports to the network, and everyone who reaches them can run code.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    try:
        ray.init(
            address="local" if own else None,  # never join a cluster that somebody left running here
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )
    except Exception as error:
        raise ConnectionFailed(f"--engine ray: Ray cannot be started: {' '.join(str(error).split())}") from error


def _resources() -> dict[str, Any]:
    """Return an actor's resources: a core, and an equal share of the GPUs."""
    share = min(1.0, torch.cuda.device_count() / (os.cpu_count() or 1))
    # Ray counts in steps of 1e-4. Rounded up, the last actor would wait for ever.
    return {"num_cpus": 1, "num_gpus": math.floor(share * 1e4) / 1e4}
