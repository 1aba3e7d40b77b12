"""Flower's SuperLink in this process: its Fleet port with our authentication and limits, and one run on it.

The link state, the object store and the servicer are Flower's own. There is no HTTP API and no second process: nobody
but this process can start a run. `door.py` decides who may call, `limits.py` what is stored, `port.py` what gRPC
accepts, and `servicer.py` what a call does.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from hyperbloom.common.errors import attempt
from hyperbloom.common.secrecy.keys import server_of
from hyperbloom.server.access.certificates import Certificates
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker.door import Door, Keys
from hyperbloom.server.broker.handout import Handout
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.log import follow, say
from hyperbloom.server.broker.port import Connections, fleet_server
from hyperbloom.server.broker.servicer import Fleet
from hyperbloom.server.broker.state import State, state_factory
from hyperbloom.server.grids.live import LiveGrid

FREE_PORTS = (12_000, 30_000)
LOOK_EVERY_S = 0.1
STOPPING_S = 2.0


def free_port() -> int:
    """Return a free TCP port of the loopback interface.

    It lies below the range from which systems take ports for outgoing connections. Otherwise such a connection could
    take the port before its user binds it.
    """
    while True:
        port = FREE_PORTS[0] + secrets.randbelow(FREE_PORTS[1] - FREE_PORTS[0])
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def superlink(
    fleet_address: str,
    folder: Path,
    files: Certificates | None = None,
    tell: Callable[[str], None] = lambda text: None,
    keys: Path | None = None,
    backbone: Path | None = None,
) -> Iterator[LiveGrid]:
    """Open a SuperLink whose Fleet API listens at `fleet_address`; yield the grid of a fresh run on it.

    Without `files` it is in plain text, for clients without keys; `keys` is one more registry. `tell` receives a
    line for each refused caller, in another thread. `backbone` is a folder that clients may fetch.

    Raises:
        ConfigError: the backbone is no such folder.
        ConnectionFailed: the port is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    factory = state_factory()
    state = cast(State, factory.state())
    paths = [path for path in (files.clients, keys) if path] if files else []
    registries, tls = [ClientRegistry(path.absolute()) for path in paths], None
    if files:
        ca = files.ca.read_bytes()
        # The CA's certificate is shown as well: clients with a token know its fingerprint alone.
        tls = ca, files.server.read_bytes() + b"\n" + ca, files.server_key.read_bytes()
    connections, over = Connections(), threading.Event()
    who = Keys(state, registries) if registries else None
    invitations = Invitations(files) if files else None
    door = Door(factory, who, connections, server_of(files.ca if files else None), invitations)
    with follow(folder / "superlink.log", tell):
        fleet = Fleet(factory, bool(registries), Handout(backbone) if backbone else None)
        server = fleet_server(fleet, fleet_address, tls, [door], connections)
        server.start()
        looks = threading.Thread(target=_look, args=(who, door, connections, over), daemon=True)
        looks.start()
        try:
            yield LiveGrid(Hosted(state))
        finally:
            over.set()
            state.close()
            server.stop(grace=1).wait(STOPPING_S)


def _look(keys: Keys | None, door: Door, connections: Connections, over: threading.Event) -> None:
    """Follow the registries and the connections, even without calls: a revoked client may be busy training."""
    parts = (*([keys.follow] if keys else []), connections.sweep, door.cancel_overdue)
    while not over.is_set():
        for part in parts:
            if isinstance(error := attempt(part), Exception):  # such as no free file: the next look may have one
                say(f"cannot look at the connections now: {getattr(error, 'strerror', None) or repr(error)}")
        connections.wait(LOOK_EVERY_S)
