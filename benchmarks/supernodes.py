"""Stock `flower-superlink` and `flower-supernode` processes, as Flower's documentation starts them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import httpx
from packaging.version import Version

from hyperbloom.common.config import RunConfig
from hyperbloom.server.broker.superlink import free_port
from hyperbloom.server.grids.local_clients import client_settings

__all__ = ["HTTP", "stock_superlink", "supernodes"]

HTTP = Version(version("flwr")) >= Version("1.40")
"""Whether stock SuperNodes speak HTTP, and only that, at the one port that their SuperLink has."""

_SUPERLINK = "from flwr.superlink.cli import flower_superlink; flower_superlink()"
_PROGRAM = "from flwr.supernode.cli import flower_supernode; flower_supernode()"
LEAVE_TIMEOUT_S = 30


@contextmanager
def stock_superlink(fleet_address: str, folder: Path) -> Iterator[str]:
    """Run Flower's own SuperLink with its Fleet API at an address; yield the address of its HTTP API."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-c", _SUPERLINK, "--insecure", "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    command += ["--fleet-api-type", "grpc-rere", "--fleet-api-address", fleet_address]
    with (folder / "superlink.log").open("ab") as log:
        process = _start(command, folder / "flwr", log.fileno())
        try:
            while True:  # until it is up
                if process.poll() is not None:
                    raise RuntimeError(f"the SuperLink ended with code {process.returncode}; see {log.name}")
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).is_success:
                        break
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            _end([process])


@contextmanager
def supernodes(config: RunConfig, address: str, folder: Path) -> Iterator[None]:
    """Run `config.clients` stock SuperNodes, each with the data and the state folder of the client of that number.

    Args:
        config: the run.
        address: where the SuperLink serves SuperNodes: its HTTP API, or before flwr 1.40 its Fleet API.
        folder: as given to `local_clients`: logs and state, a folder per client.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, children)
        for index in range(config.clients):
            settings = client_settings(config, index, folder.parent)
            log = stack.enter_context((folder / f"supernode-{index}.log").open("ab"))
            text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.to_node_config().items())
            command = [sys.executable, "-c", _PROGRAM, "--insecure", "--superlink", address]
            command += ["--port", str(free_port()), "--node-config", text]
            children.append(_start(command, folder / "flwr", log.fileno()))
        yield


def _start(command: list[str], home: Path, log: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_INTERNAL_GRPC_FLEET_API": "1",  # from 1.40 to 1.42 a SuperLink speaks gRPC only so
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
