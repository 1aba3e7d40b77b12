"""Flower's own simulation engine: virtual clients in actors of Ray, on this machine's cores or on a cluster's.

Flower runs the simulation and calls a `ServerApp`; ours hands its grid over to the caller's thread and waits, so that a
session over it is the same as over any other grid. `run_simulation` is Flower's public way to do this from a program.
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

__all__ = ["check_ray", "simulation_grid"]


def check_ray() -> None:
    """Raise a ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            "--engine ray: expected Ray, which is not installed; install the extra `simulation`: "
            "pip install 'hyperbloom[simulation]', or '.[simulation]' from the sources"
        )


@contextmanager
def simulation_grid(app: ClientApp, clients: int) -> Iterator[tuple[Grid, Callable[[], None]]]:
    """Simulate `clients` nodes, each known to `app` by `partition-id` in its node config.

    Ray is started on this machine, and demands a secret of this process's, unless `RAY_ADDRESS` names a cluster.

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
            grids.put(None)  # for a caller who still waits for a grid

    def watch() -> None:
        if errors or not thread.is_alive():
            reason = next((error.__cause__ or error for error in errors), "no reason given")
            raise ConnectionFailed(f"Flower's simulation has ended: {' '.join(str(reason).split())}")

    thread = Thread(target=simulate, name="simulation")
    thread.start()
    try:
        # Ray has put a handler of its own, which aborts, in the place of whatever SIGTERM did before.
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
    """Start Ray, or join its cluster; Flower, which would do it in another thread, shuts it down."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; else it warns
    own = "RAY_ADDRESS" not in os.environ
    if own:
        # Whoever reaches Ray's ports can run code, and it opens them to the network.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    try:
        ray.init(
            address="local" if own else None,  # not whatever cluster somebody has left running here
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )
    except Exception as error:
        raise ConnectionFailed(f"--engine ray: Ray cannot be started: {' '.join(str(error).split())}") from error


def _resources() -> dict[str, Any]:
    """Return what an actor takes of its machine: a core, and an even share of the GPUs."""
    share = min(1.0, torch.cuda.device_count() / (os.cpu_count() or 1))
    # Ray counts in steps of 1e-4; rounded up, the last actor would wait for ever.
    return {"num_cpus": 1, "num_gpus": math.floor(share * 1e4) / 1e4}
