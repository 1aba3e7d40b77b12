"""Stock `flower-supernode` processes, started as Flower's documentation says, with our app's settings."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hyperbloom.common.config import RunConfig
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.engine import client_settings

__all__ = ["supernodes"]

_PROGRAM = "from flwr.supernode.cli import flower_supernode; flower_supernode()"
LEAVE_TIMEOUT_S = 30


@contextmanager
def supernodes(config: RunConfig, address: str, folder: Path) -> Iterator[None]:
    """Run `config.clients` stock SuperNodes, each with the data and the state folder of the client of that number.

    Args:
        config: the run.
        address: the SuperLink's Fleet API.
        folder: as given to `local_clients`: logs and state, a folder per client.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, children)
        for index in range(config.clients):
            settings = client_settings(config, index, folder.parent)
            log = stack.enter_context((folder / f"supernode-{index}.log").open("ab"))
            children.append(_start(settings.to_node_config(), address, folder / "flwr", log.fileno()))
        yield


def _start(
    node_config: dict[str, str | int | float | bool], address: str, home: Path, log: int
) -> subprocess.Popen[bytes]:
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in node_config.items())
    command = [sys.executable, "-c", _PROGRAM, "--insecure", "--superlink", address]
    command += ["--port", str(free_port()), "--node-config", text]
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",  # four clients on one machine: as many threads as our clients get
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # it starts commands of its own
    }
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Let each deregister by itself, or force it."""
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
