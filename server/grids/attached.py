"""A run on a SuperLink that somebody else has started, over its HTTP API.

A SuperLink with `--isolation process` starts no ServerApp; the first process that asks gets the run's task. We ask, so
the strategy is an ordinary object of this process. The public way (`flwr run --stream`) would put the strategy into
another process, with 3 s between polls.
"""

import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial

import httpx
from flwr.app import Message

from hyperbloom.common.errors import ConfigError, ConnectionFailed
from hyperbloom.server.broker import flower
from hyperbloom.server.broker.hosted import bundle
from hyperbloom.server.grids.live import LiveGrid

PATIENCE_S = 30.0  # with a SuperLink that does not answer


class Attached:
    """A run on a SuperLink over HTTP, as a `LiveGrid` uses it."""

    def __init__(self, client: flower.RuntimeHttpClient, run_id: int) -> None:
        self.run_id = run_id
        self._client, self._node = client, flower.node.Node(node_id=flower.constant.SUPERLINK_NODE_ID)

    def nodes(self) -> Sequence[flower.node.NodeInfo]:
        """Return the nodes that are here."""
        return list(self._client.GetNodes(flower.runtime.GetNodesRequest()).nodes)

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Announce orders and push their objects; return their ids, "" for a node that is gone."""
        try:
            return self._send(messages)
        except flower.inflation.ObjectPushError:
            # Flower repeats a call whose answer was lost, but the SuperLink takes no object twice. Announcing the same
            # messages again makes it report the objects that it still lacks.
            return self._send(messages)

    def _send(self, messages: Sequence[Message]) -> list[str]:
        announced = flower.runtime.PushAppMessagesRequest(
            messages_list=[flower.message_to_proto(flower.remove_content_from_message(each)) for each in messages],
            message_object_trees=[flower.objects.get_object_tree(message) for message in messages],
        )
        taken = self._client.PushMessages(announced)
        objects = {
            name: item for message in messages for name, item in flower.objects.get_all_nested_objects(message).items()
        }
        push = flower.transfer.make_push_object_fn_protobuf(
            self._client.PushObject, self._node, self.run_id, taken.session_id
        )
        flower.inflation.push_objects(objects, push, object_ids_to_push=set(taken.objects_to_push))
        return [name or "" for name in taken.message_ids]

    def replies(self, orders: set[str]) -> list[tuple[flower.message.Metadata, flower.message.ObjectTree]]:
        """Return the replies to `orders` that were announced since the last call; the orders are closed."""
        found = self._client.PullMessages(flower.runtime.PullAppMessagesRequest(message_ids=orders))
        messages = [message.metadata for message in found.messages_list]
        return list(zip(messages, found.message_object_trees, strict=True))

    def content(self, name: str) -> bytes | None:
        """Return an object, b"" if it is not there yet, or None if it will never be."""
        try:
            return flower.transfer.make_pull_object_fn_protobuf(self._client.PullObject, self._node, self.run_id)(name)
        except flower.inflation.ObjectUnavailableError:
            return b""
        except flower.inflation.ObjectPullError:
            return None

    def confirm(self, message_id: str) -> None:
        """Let the SuperLink delete a reply and its objects."""
        told = flower.message.ConfirmMessageReceivedRequest(
            node=self._node, run_id=self.run_id, message_object_id=message_id
        )
        self._client.ConfirmMessageReceived(told)

    def wait(self, seconds: float) -> None:
        """Sleep: the SuperLink tells of nothing by itself."""
        time.sleep(seconds)


@contextmanager
def attached(address: str, ca: bytes | None = None) -> Iterator[LiveGrid]:
    """Start a run on a SuperLink and hold its ServerApp task, with heartbeats; yield its grid.

    Raises:
        ConnectionFailed: another process took the run's task, or the SuperLink does not answer any more.
        ConfigError: the CA is no certificate.
    """
    try:
        with _task(address, ca) as superlink:
            yield LiveGrid(superlink)
    except httpx.HTTPError as error:
        ended = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED
        why = "has ended the run, as by flwr stop" if ended else f"does not answer ({str(error).splitlines()[0]})"
        on = "--resume goes on with a run that has begun, the same command with a comparison or a search"
        raise ConnectionFailed(f"the SuperLink at {address} {why}; {on}") from None
    except ssl.SSLError:
        raise ConfigError("--certs: its ca.pem holds no certificate") from None


@contextmanager
def _task(address: str, ca: bytes | None) -> Iterator[Attached]:
    told = flower.RuntimeVersionHttpInterceptor(component_name="flower-server")
    connect = partial(flower.ControlHttpClient.from_server_address, address, ca is None, ca, [told])
    request = flower.control.StartRunRequest(fab=flower.fab_to_proto(bundle()))
    with closing(connect()) as control:
        try:
            run_id = control.StartRun(request).run_id
        except ValueError:  # the answer is no message of Flower's
            raise ConfigError(f"--superlink: expected a SuperLink at {address}, found another server") from None

    def given_up(why: str) -> ConnectionFailed:
        """Stop the run, or the next process that asks for a task would get this one's."""
        with closing(connect()) as control:
            control.StopRun(flower.control.StopRunRequest(run_id=run_id))
        return ConnectionFailed(why)

    with closing(flower.RuntimeHttpClient.from_server_address(address, ca is None, ca, [told])) as runtime:
        token = runtime.AcquireTask(
            flower.runtime.AcquireTaskRequest(supported_task_types=[flower.supercore.TaskType.SERVER_APP])
        ).token
    if not token:
        raise given_up(
            "the SuperLink did not hand out the run's task; another process took it first: start it with "
            "flower-superlink --isolation process"
        )

    retries = flower.make_simple_http_retry_invoker()
    retries.max_time = PATIENCE_S
    client = flower.RuntimeHttpClient.from_server_address(
        address, ca is None, ca, [told, flower.RuntimeTokenHttpInterceptor(token=token)], retry_invoker=retries
    )
    heartbeat = flower.HeartbeatSender(flower.make_task_heartbeat_fn_http(client))
    heartbeat.start()
    sub_status, details = flower.constant.SubStatus.FAILED, "flower-server ended early"
    try:
        start = client.PullTaskInput(flower.runtime.PullTaskInputRequest())
        if start.run.run_id != run_id:
            raise given_up(
                f"the SuperLink handed out run {start.run.run_id}, which somebody else has started. "
                "It has failed now: start your own run again, then that one"
            )
        flower.TaskIdentity.task_id, flower.TaskIdentity.run_id = start.task_id, run_id
        flower.TaskIdentity.node_id = start.context.node_id
        yield Attached(client, run_id)
        sub_status, details = flower.constant.SubStatus.COMPLETED, ""
    finally:
        heartbeat.stop()
        retries.max_tries = 1
        with suppress(httpx.HTTPError):  # the SuperLink may be gone, and the run with it
            client.PushTaskOutput(flower.runtime.PushTaskOutputRequest(sub_status=sub_status, details=details))
        client.close()
