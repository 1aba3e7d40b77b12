"""The child process that runs Flower's SuperLink with our authentication, limits and port.

`door.py` decides who may call, `limits.py` what is stored, and `port.py` what gRPC accepts.

Internals used: names of `flwr.superlink.cli.flower_superlink` that are replaced, and the store's factory.

    python -m hyperbloom.server.broker.child PARENT_PID REGISTRIES FLAGS_OF_FLOWER_SUPERLINK...
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.object_store import object_store_factory

from hyperbloom.common.program.signals import run_program
from hyperbloom.common.secrecy.keys import server_of
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.door import Door, Keys
from hyperbloom.server.broker.limits import Fleet, Store
from hyperbloom.server.broker.port import Connections, fleet_server

__all__ = ["main"]

LOOK_EVERY_S = 0.3
CA = "--ssl-ca-certfile"


def _door(
    registries: Sequence[ClientRegistry], connections: Connections, ca: str | None
) -> Callable[[LinkStateFactory], Door]:
    """Return the replacement for Flower's `NodeAuthServerInterceptor`. It also watches keys and connections."""

    def make(state_factory: LinkStateFactory) -> Door:
        keys = Keys(state_factory.state(), registries) if registries else None
        door = Door(state_factory, keys, connections, server_of(Path(ca) if ca else None))
        if keys:
            keys.follow()

        def look() -> None:
            # Do this even without calls, so that a client revoked during its training is disconnected at once.
            while True:
                connections.wait(LOOK_EVERY_S)
                connections.sweep()
                door.cancel_overdue()
                if keys:
                    keys.follow()

        threading.Thread(target=look, daemon=True).start()
        return door

    return make


def main(arguments: list[str]) -> None:
    """Run the SuperLink until the parent process ends."""
    parent, registries, *flags = arguments
    start_parent_process_monitor(int(parent))
    # Import by the full name: the package has a function of the same name.
    program = importlib.import_module("flwr.superlink.cli.flower_superlink")
    connections = Connections()
    paths = [ClientRegistry(Path(path)) for path in registries.split("\n")] if registries else []
    program.NodeAuthServerInterceptor = _door(paths, connections, flags[flags.index(CA) + 1] if CA in flags else None)  # type: ignore[attr-defined]
    program.generic_create_grpc_server = partial(fleet_server, connections=connections)  # type: ignore[attr-defined]
    program.FleetServicer = Fleet  # type: ignore[attr-defined]
    object_store_factory.InMemoryObjectStore = Store  # type: ignore[attr-defined]
    sys.argv = ["flower-superlink", *flags]
    program.flower_superlink()


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
