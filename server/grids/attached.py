"""A run on a SuperLink that somebody else has started, over its HTTP API.

A SuperLink with `--isolation process` starts no ServerApp; the first process that asks gets the run's task. We ask, so
the strategy is an ordinary object of this process. The public way (`flwr run --stream`) would put the strategy into
another process, with 3 s between polls.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import httpx
from flwr.app import Message

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.server.broker.bundle import bundle
from hyperbloom.server.broker.flower import (
    SUPERLINK_NODE_ID,
    AcquireTaskRequest,
    ConfirmMessageReceivedRequest,
    ControlHttpClient,
    Fab,
    GetNodesRequest,
    HeartbeatSender,
    Node,
    NodeInfo,
    ObjectPullError,
    ObjectPushError,
    ObjectTree,
    ObjectUnavailableError,
    ProtoMetadata,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    StartRunRequest,
    SubStatus,
    TaskIdentity,
    TaskType,
    fab_to_proto,
    get_all_nested_objects,
    get_object_tree,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    make_simple_http_retry_invoker,
    make_task_heartbeat_fn_http,
    message_to_proto,
    push_objects,
    remove_content_from_message,
)
from hyperbloom.server.grids.live import LiveGrid

PATIENCE_S = 30.0  # with a SuperLink that does not answer


class Attached:
    """A run on a SuperLink over HTTP, as a `LiveGrid` uses it.

    Args:
        client: Flower's client of the SuperLink's Runtime API.
        run_id: the run.
    """

    def __init__(self, client: RuntimeHttpClient, run_id: int) -> None:
        """Store the arguments."""
        self.run_id = run_id
        self._client, self._node = client, Node(node_id=SUPERLINK_NODE_ID)

    def nodes(self) -> Sequence[NodeInfo]:
        """Return the nodes that are here."""
        return list(self._client.GetNodes(GetNodesRequest()).nodes)

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Announce orders and push their objects; return their ids, "" for a node that is gone."""
        try:
            return self._send(messages)
        except ObjectPushError:
            # Flower repeats a call whose answer was lost, but the SuperLink takes no object twice. Announcing the same
            # messages again makes it report the objects that it still lacks.
            return self._send(messages)

    def _send(self, messages: Sequence[Message]) -> list[str]:
        announced = PushAppMessagesRequest(
            messages_list=[message_to_proto(remove_content_from_message(message)) for message in messages],
            message_object_trees=[get_object_tree(message) for message in messages],
        )
        response = self._client.PushMessages(announced)
        objects = {name: item for message in messages for name, item in get_all_nested_objects(message).items()}
        push = make_push_object_fn_protobuf(self._client.PushObject, self._node, self.run_id, response.session_id)
        push_objects(objects, push, object_ids_to_push=set(response.objects_to_push))
        return [name or "" for name in response.message_ids]

    def replies(self, orders: set[str]) -> list[tuple[ProtoMetadata, ObjectTree]]:
        """Return the replies to `orders` that were announced since the last call; the orders are closed."""
        found = self._client.PullMessages(PullAppMessagesRequest(message_ids=orders))
        messages = [message.metadata for message in found.messages_list]
        return list(zip(messages, found.message_object_trees, strict=True))

    def content(self, name: str) -> bytes | None:
        """Return an object, b"" if it is not there yet, or None if it will never be."""
        try:
            return make_pull_object_fn_protobuf(self._client.PullObject, self._node, self.run_id)(name)
        except ObjectUnavailableError:
            return b""
        except ObjectPullError:
            return None

    def confirm(self, message_id: str) -> None:
        """Let the SuperLink delete a reply and its objects."""
        confirmed = ConfirmMessageReceivedRequest(node=self._node, run_id=self.run_id, message_object_id=message_id)
        self._client.ConfirmMessageReceived(confirmed)

    def wait(self, seconds: float) -> None:
        """Sleep: the SuperLink tells of nothing by itself."""
        time.sleep(seconds)


@contextmanager
def attached(address: str, version: str, ca: bytes | None = None) -> Iterator[LiveGrid]:
    """Start a run on a SuperLink and hold its ServerApp task, with heartbeats; yield its grid.

    Args:
        address: `HOST:PORT` of the SuperLink's HTTP API.
        version: of the app, as the run announces it.
        ca: PEM of the SuperLink's CA; None for plain text.

    Raises:
        ConnectionFailed: another process took the run's task, or the SuperLink does not answer any more.
    """
    try:
        with _task(address, version, ca) as superlink:
            yield LiveGrid(superlink)
    except httpx.HTTPError as error:
        raise ConnectionFailed(f"the SuperLink at {address} does not answer ({error})") from None


@contextmanager
def _task(address: str, version: str, ca: bytes | None) -> Iterator[Attached]:
    told = RuntimeVersionHttpInterceptor(component_name="flower-server")
    content = bundle(version)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    with closing(ControlHttpClient.from_server_address(address, ca is None, ca, [told])) as control:
        run_id = control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
    with closing(RuntimeHttpClient.from_server_address(address, ca is None, ca, [told])) as runtime:
        token = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    if not token:
        raise ConnectionFailed(
            "the SuperLink did not hand out the run's task; another process took it first: start it with "
            "flower-superlink --isolation process"
        )

    retries = make_simple_http_retry_invoker()
    retries.max_time = PATIENCE_S
    client = RuntimeHttpClient.from_server_address(
        address, ca is None, ca, [told, RuntimeTokenHttpInterceptor(token=token)], retry_invoker=retries
    )
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    sub_status, details = SubStatus.FAILED, "flower-server ended early"
    try:
        start = client.PullTaskInput(PullTaskInputRequest())
        if start.run.run_id != run_id:
            raise ConnectionFailed(f"the SuperLink handed out run {start.run.run_id}, which somebody else has started")
        TaskIdentity.task_id, TaskIdentity.run_id = start.task_id, run_id
        TaskIdentity.node_id = start.context.node_id
        yield Attached(client, run_id)
        sub_status, details = SubStatus.COMPLETED, ""
    finally:
        heartbeat.stop()
        retries.max_tries = 1
        with suppress(httpx.HTTPError):  # the SuperLink may be gone, and the run with it
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=sub_status, details=details))
        client.close()
