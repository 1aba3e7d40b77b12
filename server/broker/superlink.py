"""The SuperLink as a child process (`server/broker/child.py`), and a run's grid on it (`server/grids/live.py`).

`flower-superlink --isolation process` starts no ServerApp; the first process that asks gets the run's task. We ask, so
the strategy is an ordinary object of this process: there is no app bundle to ship and no second process to watch. The
public way (`flwr run --stream`) would put the strategy into another process, with 3 s between polls.

Internals used (flwr 1.39): `ControlHttpClient.StartRun`, `RuntimeHttpClient.AcquireTask` and `PullTaskInput`,
`HeartbeatSender`, `TaskIdentity`, `build_fab_from_files`. Control and Runtime share one HTTP port. It stays on
loopback, because everybody who reaches it can start a run. Only the Fleet port faces clients.
"""

import hashlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.server.broker.log import TRACE, relay
from hyperbloom.server.grids.live import LiveGrid

FREE_PORTS = (12_000, 30_000)
START_DEADLINE_S = 60.0
PATIENCE_S = 30.0  # with a SuperLink that does not answer

# The app for a stock `flower-supernode`: two files that point at the installed package.
_BUNDLE = {
    "pyproject.toml": """\
[project]
name = "hyperbloom"
version = "{version}"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "hyperbloom"

[tool.flwr.app.components]
serverapp = "hyperbloom_bundle:server"
clientapp = "hyperbloom_bundle:client"

[tool.flwr.app.config]
""",
    "hyperbloom_bundle.py": """\
from flwr.serverapp import ServerApp
from hyperbloom.client.app import app

client = app
server = ServerApp()
""",
}


@dataclass(frozen=True)
class Tls:
    """PEM files of the server's certificate, its key and its CA, and the registries of clients.

    Flower uses the certificate for its loopback port as well, so it must also name 127.0.0.1.
    """

    certificate: Path
    key: Path
    ca: Path
    registries: tuple[Path, ...] = ()  # re-read while the SuperLink runs


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
    version: str,
    tls: Tls | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[LiveGrid]:
    """Run a SuperLink whose Fleet API listens at `fleet_address`; yield the grid of a fresh run on it.

    Args:
        fleet_address: `HOST:PORT` for clients.
        folder: receives the SuperLink's log and Flower's own files.
        version: of the app, as the run announces it.
        tls: certificates and clients' keys; None for plain text and clients without keys.
        tell: receives a line for each refused caller, in another thread.

    Raises:
        ConnectionFailed: the SuperLink did not start; the message ends with the last line of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    http_address = f"127.0.0.1:{free_port()}"
    log_path = folder / "superlink.log"
    with log_path.open("ab") as log:
        child = _spawn(fleet_address, http_address, folder, tls)
        reader = threading.Thread(target=relay, args=(child.stdout, log, tell), daemon=True)
        reader.start()
        try:
            if not _wait_until_up(child, http_address, tls):
                _fail(child, reader, fleet_address, log_path)
            with task(http_address, version, tls.ca.read_bytes() if tls else None) as grid:
                _give_up_at_its_end(grid, child)
                yield grid
        except httpx.HTTPError as error:
            raise ConnectionFailed(f"the SuperLink {_fate(child, error)}; see {log_path}") from None
        finally:
            child.terminate()
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            reader.join(timeout=5)
            if child.stdout and not reader.is_alive():
                child.stdout.close()


def _spawn(fleet_address: str, http_address: str, folder: Path, tls: Tls | None) -> subprocess.Popen[bytes]:
    host, port = http_address.rsplit(":", 1)
    registries = "\n".join(str(path.absolute()) for path in tls.registries) if tls else ""
    command = [
        sys.executable,
        "-m",
        "hyperbloom.server.broker.child",
        str(os.getpid()),
        registries,
        "--isolation",
        "process",
    ]
    if tls:
        command += ["--enable-supernode-auth"] if tls.registries else []
        command += ["--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key)]
        command += ["--ssl-ca-certfile", str(tls.ca)]
    else:
        command += ["--insecure"]
    command += ["--host", host, "--port", port, "--fleet-api-address", fleet_address]
    command += ["--disable-runtime-dependency-installation"]
    quiet = {"FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    # A session of its own: Ctrl-C must not end the SuperLink before the last round.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"FLWR_LOG_LEVEL": "WARNING", **os.environ, **quiet, **(TRACE if tls else {})},
        start_new_session=True,
    )


def _give_up_at_its_end(grid: LiveGrid, child: subprocess.Popen[bytes]) -> None:
    """Retry calls to a SuperLink that does not answer, but not to one that has ended."""
    retries = grid._retry_invoker
    hopeless = retries.should_giveup
    retries.should_giveup = lambda error: child.poll() is not None or bool(hopeless and hopeless(error))


def _fate(child: subprocess.Popen[bytes], error: Exception) -> str:
    code = child.poll()
    if code is None:
        return f"does not answer any more ({error})"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _wait_until_up(child: subprocess.Popen[bytes], http_address: str, tls: Tls | None) -> bool:
    """Return whether the SuperLink answers within `START_DEADLINE_S`."""
    deadline = time.monotonic() + START_DEADLINE_S
    verify = ssl.create_default_context(cafile=tls.ca) if tls else True
    url = f"{'https' if tls else 'http'}://{http_address}/health"
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=2, verify=verify).is_success:
                return True
        except httpx.TransportError:
            time.sleep(0.05)
    return False


def _fail(child: subprocess.Popen[bytes], reader: threading.Thread, fleet_address: str, log_path: Path) -> NoReturn:
    code = child.poll()
    child.kill()
    reader.join(timeout=5)  # so that the last line is in the log
    last = (log_path.read_text(errors="replace").strip().splitlines() or ["(its log is empty)"])[-1]
    state = "is not up after 60 s" if code is None else f"ended with code {code}"
    raise ConnectionFailed(
        f"the SuperLink for {fleet_address} {state}; is the port taken? See {log_path}, which ends: {last.strip()}"
    )


@contextmanager
def task(http_address: str, version: str, ca: bytes | None) -> Iterator[LiveGrid]:
    """Start a run on the SuperLink and hold its ServerApp task, with heartbeats; `ca` is PEM, None for plain text."""
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flower-server")]
    content = bundle(version)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    control = ControlHttpClient.from_server_address(http_address, ca is None, ca, interceptors)
    with closing(control):
        run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
    runtime = RuntimeHttpClient.from_server_address(http_address, ca is None, ca, interceptors)
    with closing(runtime):
        token = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    if not token:
        raise ConnectionFailed(
            "the SuperLink did not hand out the run's task; another process took it first: start it with "
            "flower-superlink --isolation process"
        )

    grid = LiveGrid(http_address, ca is None, ca, token=token)
    grid._retry_invoker.max_time = PATIENCE_S
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    heartbeat.start()
    sub_status, details = SubStatus.FAILED, "flower-server ended early"
    try:
        start = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        if start.run.run_id != run_id:
            raise ConnectionFailed(f"the SuperLink handed out run {start.run.run_id}, which somebody else has started")
        TaskIdentity.task_id = start.task_id
        TaskIdentity.run_id = start.run.run_id
        TaskIdentity.node_id = start.context.node_id
        grid.set_run(run_from_proto(start.run))
        yield grid
        sub_status, details = SubStatus.COMPLETED, ""
    finally:
        heartbeat.stop()
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):  # the SuperLink may be gone, and the run with it
            grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=sub_status, details=details))
        grid.close()


def bundle(version: str) -> bytes:
    """Return the app bundle for stock SuperNodes in Flower's format: two files, always the same bytes."""
    files = {name: text.replace("{version}", version).encode() for name, text in _BUNDLE.items()}
    return build_fab_from_files(files)[0]
