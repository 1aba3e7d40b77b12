"""The SuperLink as a child process (`server/superlink_child.py`), and Flower's grid in ours.

`flower-superlink --isolation process` starts nothing by itself: whoever asks for the run's task gets it. We ask, so
the strategy is an ordinary object of this process: no app bundle to ship, no second process to watch, a live view at
no cost. The public way (`flwr run --stream`) would put the strategy into a process of its own, 3 s between polls
away from us.

Internals used (flwr 1.39): `ControlHttpClient.StartRun`, `RuntimeHttpClient.AcquireTask` and `PullTaskInput`,
`HttpGrid`, `HeartbeatSender`, `TaskIdentity`, `pull_objects`, `build_fab_from_files`. Ports: Control and Runtime share
one HTTP port which always stays on loopback, because whoever reaches it can start a run; only the Fleet port faces
clients.
"""

import hashlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import httpx
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Metadata as ProtoMetadata
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE, TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.common.messages import UNREADABLE
from hyperbloom.server.superlink_limits import (
    LARGEST_VARIABLE,
    MOST_OBJECTS,
    MOST_WORDS,
    TOO_LARGE,
    largest_message,
    reply_limit,
)
from hyperbloom.server.superlink_log import TRACE, relay

START_DEADLINE_S = 60.0
PATIENCE_S = 30.0  # with a SuperLink that does not answer
# A reply is announced before its objects are uploaded. Stock Flower then backs off for a second and waits two hours;
# we look again at once, and give a client half a minute to finish what it announced.
UPLOAD_DEADLINE_S = 30.0

# What a stock `flower-supernode` receives: two lines that point at the installed package.
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
    """PEM files: the server's certificate, its key, and the CA that signed it; and who may join.

    Flower uses them for its loopback port as well, so the certificate must also name 127.0.0.1.
    """

    certificate: Path
    key: Path
    ca: Path
    registries: tuple[Path, ...] = ()  # files of `server/registry.py`, followed while the SuperLink runs


class LiveGrid(HttpGrid):
    """Flower's grid, pulling replies as soon as they are whole."""

    _largest = 0  # bytes of an order
    _activated: Mapping[int, str] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages; the largest decides how large a reply may be.

        Raises:
            ConfigError: one is larger than what the network takes.
        """
        outgoing, most = list(messages), largest_message()
        self._largest = max([self._largest, *map(_size, outgoing)])
        if self._largest + MOST_WORDS > most:
            found, allowed = (round(size / 2**20) for size in (self._largest, most))
            raise ConfigError(
                f"an order has {found} MiB, of {allowed} MiB that a message may have; let it have more by "
                f"{LARGEST_VARIABLE}, up to 2047"
            )
        return super().push_messages(outgoing)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that are here.

        A node whose client came back, with its key, before Flower missed it, is left out once: it is another process
        now, which knows nothing of what the first was asked.
        """
        before, nodes = self._activated, list(super().get_nodes())
        self._activated = {node.node_id: node.last_activated_at for node in nodes}
        return [node for node in nodes if before.get(node.node_id, node.last_activated_at) == node.last_activated_at]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to `message_ids` that have arrived.

        A reply whose content does not come within `UPLOAD_DEADLINE_S` becomes an error message that names it, as in
        Flower's own grid; so does one that is too large, no message, or not what was announced (`UNREADABLE`).
        """
        request = PullAppMessagesRequest(message_ids=message_ids)
        response = self._runtime_client.PullMessages(request)
        trees = zip(response.messages_list, response.message_object_trees, strict=True)
        return [self._pull(proto.metadata, tree) for proto, tree in trees]

    def _pull(self, announced: ProtoMetadata, tree: ObjectTree) -> Message:
        run_id, message_id, reply_to = self.run.run_id, announced.message_id, announced.reply_to_message_id
        objects = [node.object_id for node in iterate_object_tree(tree)]
        limit, sizes = reply_limit(self._largest), [0]
        fetch = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, run_id)

        def pull(object_id: str) -> bytes:
            content = fetch(object_id) if sum(sizes) <= limit else b""
            sizes.append(limit + 1 if content == TOO_LARGE else len(content))
            if sum(sizes) > limit:
                raise ObjectPullError(object_id, "the reply is too large")
            return content

        def refused(reason: str) -> Message:
            self._confirm(message_id)
            return _unavailable(run_id, reply_to, reason, UNREADABLE)

        if len(objects) > MOST_OBJECTS:
            return refused(f"expected a reply of at most {MOST_OBJECTS} objects, found {len(objects)}")
        try:
            contents = pull_objects(
                objects,
                pull,
                initial_backoff=0.004,
                backoff_cap=0.25,
                max_time=UPLOAD_DEADLINE_S,
                max_tries_per_object=None,
            )
        except ObjectPullError as error:
            if sum(sizes) > limit:
                return refused(f"expected a reply of at most {limit} bytes, found {sum(sizes)} and more")
            return _unavailable(run_id, reply_to, f"the reply was announced but never uploaded: {error}")
        try:
            message = cast(Message, inflate_object_from_contents(message_id, contents))
            said = message.metadata
            same = (said.src_node_id, said.reply_to_message_id) == (announced.src_node_id, reply_to)
            same &= message.has_error() or isinstance(message.content, RecordDict)
        except Exception as error:  # whatever Flower's parsers make of bytes that anybody may have written
            return refused(f"the reply is no message ({type(error).__name__})")
        if not same:
            # The SuperLink has looked at what was announced only, and by this a reply is matched to its order.
            return refused("the reply is another message than was announced")
        self._confirm(message_id)
        message.metadata.__dict__["_message_id"] = message_id
        return message

    def _confirm(self, message_id: str) -> None:
        """Let the SuperLink forget a reply."""
        run_id = self.run.run_id
        confirm = ConfirmMessageReceivedRequest(node=self.node, run_id=run_id, message_object_id=message_id)
        self._runtime_client.ConfirmMessageReceived(confirm)


def _size(message: Message) -> int:
    """Return the bytes that a message's records hold."""
    if not message.has_content():
        return 0
    values = (value for record in message.content.values() for value in record.values())
    return sum(len(value) for value in values if isinstance(value, bytes))


def _unavailable(run_id: int, reply_to: str, reason: str, code: int = ErrorCode.MESSAGE_UNAVAILABLE) -> Message:
    metadata = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=SUPERLINK_NODE_ID,
        reply_to_message_id=reply_to,
        group_id="",
        created_at=now().timestamp(),
        ttl=0,
        message_type=SYSTEM_MESSAGE_TYPE,
    )
    return make_message(metadata=metadata, error=Error(code, reason))


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def superlink(
    fleet_address: str,
    folder: Path,
    version: str,
    tls: Tls | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[LiveGrid]:
    """Run a SuperLink whose Fleet API listens at `fleet_address`, and yield the grid of a fresh run on it.

    Args:
        fleet_address: `HOST:PORT` that clients connect to.
        folder: where the SuperLink's log and Flower's own files go.
        version: version of the app that the run announces.
        tls: certificates and clients' keys, or None for plain text and clients without keys.
        tell: gets a line, in another thread, when somebody is refused at the door.

    Raises:
        ConnectionFailed: the SuperLink did not come up; the message ends with the last line of its log.
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
            with _task(http_address, version, tls) as grid:
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
        "hyperbloom.server.superlink_child",
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
    # A session of its own: Ctrl-C in the terminal is for us, and we end the SuperLink after the last round.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"FLWR_LOG_LEVEL": "WARNING", **os.environ, **quiet, **(TRACE if tls else {})},
        start_new_session=True,
    )


def _give_up_at_its_end(grid: LiveGrid, child: subprocess.Popen[bytes]) -> None:
    """Wait for a SuperLink that does not answer, but for none that is dead."""
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
    reader.join(timeout=5)  # or the last line is not in the log yet
    last = (log_path.read_text(errors="replace").strip().splitlines() or ["(its log is empty)"])[-1]
    state = "is not up after 60 s" if code is None else f"ended with code {code}"
    raise ConnectionFailed(
        f"the SuperLink for {fleet_address} {state}; is the port taken? See {log_path}, which ends: {last.strip()}"
    )


@contextmanager
def _task(http_address: str, version: str, tls: Tls | None) -> Iterator[LiveGrid]:
    """Start a run on the SuperLink and hold its ServerApp task, heartbeats included."""
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flower-server")]
    content = bundle(version)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    ca = tls.ca.read_bytes() if tls else None
    control = ControlHttpClient.from_server_address(http_address, tls is None, ca, interceptors)
    with closing(control):
        control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    runtime = RuntimeHttpClient.from_server_address(http_address, tls is None, ca, interceptors)
    with closing(runtime):
        token = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    if not token:
        raise ConnectionFailed("the SuperLink did not hand out the run's task; another process took it first")

    grid = LiveGrid(http_address, tls is None, ca, token=token)
    grid._retry_invoker.max_time = PATIENCE_S
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    heartbeat.start()
    sub_status, details = SubStatus.FAILED, "flower-server ended early"
    try:
        start = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = start.task_id
        TaskIdentity.run_id = start.run.run_id
        TaskIdentity.node_id = start.context.node_id
        grid.set_run(run_from_proto(start.run))
        yield grid
        sub_status, details = SubStatus.COMPLETED, ""
    finally:
        heartbeat.stop()
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):  # the SuperLink may be gone, and with it the run that we want to close
            grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=sub_status, details=details))
        grid.close()


def bundle(version: str) -> bytes:
    """Return the app bundle for stock SuperNodes: two files in Flower's own format, the same bytes every time."""
    files = {name: text.replace("{version}", version).encode() for name, text in _BUNDLE.items()}
    return build_fab_from_files(files)[0]
