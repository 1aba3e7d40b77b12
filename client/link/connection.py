"""A client's session with a SuperLink over gRPC or HTTP: Flower's calls, signed with the client's key.

Towards a server of ours a call for an order waits until there is one, and small objects travel inside the messages
(`common/enclosed.py`), so a round takes two calls. Any other SuperLink is asked again and again, and each object
takes a call.
"""

import os
import random
import secrets
import threading
from contextlib import suppress
from functools import partial
from typing import Any, cast

import grpc
from flwr.app import Message

from hyperbloom.client.link import internals as flower
from hyperbloom.client.link.http import HttpChannel
from hyperbloom.client.link.server import Link
from hyperbloom.common.enclosed import PROCESS, WAIT, enclose, take_enclosed
from hyperbloom.common.secrecy.keys import make_key, public_pem, sign
from hyperbloom.common.secrecy.token import HEADER

WAIT_S = 20.0
"""Seconds that a call for an order may wait. Routers forget connections that are silent for minutes."""

HEARTBEAT_S = flower.constant.HEARTBEAT_DEFAULT_INTERVAL

ANSWER_S = 60.0
"""Most seconds until a call for an order is answered, beyond its wait; then the connection is lost."""
LEAVING_S = 3.0
"""Most seconds for each of the last three calls. Docker kills a container 10 s after it has asked it to end."""

TRANSFER_DEADLINE_S = 120.0
THIS_IMPORT = secrets.token_hex(8)  # with its number it tells a process, forked or not, from others with its key
SOON_S = 2.0  # until the next try of a heartbeat that failed

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 10_000),  # usually 2 minutes, and a resumed run waits for one
    ("grpc.keepalive_time_ms", 3_600_000),  # gRPC then gives up a connection on which nothing arrives there for 20 s
]


class Connection:
    """The calls of one node, which makes a key for this session if the link has none."""

    def __init__(self, link: Link, retries: flower.RetryInvoker) -> None:
        key, self._retries, self._token = link.key or make_key(), retries, link.token
        self._key, self._name, self._public = key, link.name, public_pem(key).encode()
        self._version = flower.RuntimeVersionMetadata.from_local_component("SuperNode")
        if link.http:
            self._channel = HttpChannel(link, ANSWER_S)
        elif link.insecure:
            self._channel = grpc.insecure_channel(link.address, _OPTIONS)
        else:
            ca = link.root_certificates.read_bytes() if link.root_certificates else None
            self._channel = grpc.secure_channel(link.address, grpc.ssl_channel_credentials(ca), _OPTIONS)
        self._stub = flower.FleetStub(self._channel)
        self._registers = link.key is None
        self._over = threading.Event()
        self._encloses = False  # whether the server sent the last order's objects inside
        self.node_id = 0

    def open(self) -> None:
        """Let the server know of the node, and keep it informed that the node is here."""
        if self._registers:
            self._call("RegisterNode", flower.fleet.RegisterNodeFleetRequest(public_key=self._public))
        here = flower.fleet.ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_S)
        shown = ((HEADER, self._token),) if self._token else ()
        self.node_id = self._call("ActivateNode", here, headers=shown).node_id
        threading.Thread(target=self._beat, daemon=True).start()

    def close(self) -> None:
        """Say goodbye if the server listens, and close the channel."""
        self._over.set()
        try:
            with suppress(grpc.RpcError):
                if self.node_id:
                    self._call("DeactivateNode", flower.fleet.DeactivateNodeRequest(node_id=self.node_id))
                    if self._registers:
                        self._call("UnregisterNode", flower.fleet.UnregisterNodeFleetRequest(node_id=self.node_id))
        finally:
            self._channel.close()

    def receive(self) -> Message | None:
        """Return the next order, or None if there is none for now."""
        request = flower.fleet.PullMessagesRequest(node=self._node)
        response = self._call("PullMessages", request, WAIT_S + ANSWER_S, ((WAIT, str(WAIT_S)),))
        if not response.messages_list:
            return None
        announced, metadata = response.messages_list[0], response.messages_list[0].metadata
        contents = take_enclosed(announced)
        self._encloses = bool(contents)
        names = [node.object_id for node in flower.objects.iterate_object_tree(response.message_object_trees[0])]
        if missing := [name for name in names if name not in contents]:
            contents |= flower.inflation.pull_objects(
                missing,
                flower.transfer.make_pull_object_fn_protobuf(
                    partial(self._call, "PullObject"), self._node, metadata.run_id
                ),
                initial_backoff=0.004,
                backoff_cap=0.25,
                max_time=TRANSFER_DEADLINE_S,
                max_tries_per_object=None,
            )
            received = {"run_id": metadata.run_id, "message_object_id": metadata.message_id}
            self._call(
                "ConfirmMessageReceived", flower.message.ConfirmMessageReceivedRequest(node=self._node, **received)
            )
        message = cast(Message, flower.inflation.inflate_object_from_contents(metadata.message_id, contents))
        message.metadata.__dict__["_message_id"] = metadata.message_id
        return message

    def send(self, reply: Message) -> None:
        """Send a reply, without Flower's note of how long it took, which tells the number of a newcomer's examples."""
        run_id = reply.metadata.run_id
        with flower.objects.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            contents = {name: item.deflate() for name, item in flower.objects.get_all_nested_objects(reply).items()}
            announced = flower.message_to_proto(flower.remove_content_from_message(reply))
            tree = flower.objects.get_object_tree(reply)
        if self._encloses:
            enclose(announced, contents.items())
        sent = flower.fleet.PushMessagesRequest(node=self._node, messages_list=[announced], message_object_trees=[tree])
        response = self._call("PushMessages", sent)
        if response.objects_to_push:
            push = flower.transfer.make_push_object_fn_protobuf(
                partial(self._call, "PushObject"), self._node, run_id, response.session_id
            )
            flower.inflation.push_object_contents_from_iterable(
                ((key, contents[key]) for key in response.objects_to_push), push
            )

    def leave(self, reply: Message) -> None:
        """Send the last reply of a client that leaves, if the server listens."""
        self._over.set()
        with suppress(grpc.RpcError, flower.inflation.ObjectPushError):
            self.send(reply)

    def piece(self, name: str) -> bytes | None:
        """Return what a server of ours has under a name of `common/handout.py`; None if it has nothing."""
        response = self._call("PullObject", flower.message.PullObjectRequest(node=self._node, object_id=name), ANSWER_S)
        return bytes(response.object_content) if response.object_found else None

    @property
    def _node(self) -> flower.node.Node:
        return flower.node.Node(node_id=self.node_id)

    def _call(
        self, method: str, request: Any, timeout: float | None = None, headers: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        """Make a call, again and again if need be; once if this client leaves."""
        if self._over.is_set():
            return self._call_once(method, request, LEAVING_S, headers)
        return self._retries.invoke(self._call_once, method, request, timeout, headers)

    def _call_once(
        self, method: str, request: Any, timeout: float | None, headers: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        stamp = flower.now().isoformat()
        signature = sign(self._key, (stamp + self._name).encode())  # valid at this server alone
        shown = (
            (flower.constant.PUBLIC_KEY_HEADER, self._public),
            (flower.constant.TIMESTAMP_HEADER, stamp),
            (flower.constant.SIGNATURE_HEADER, signature),
            (PROCESS, f"{THIS_IMPORT}-{os.getpid()}"),
        )
        metadata = self._version.append_to_grpc_metadata((*headers, *shown))
        return getattr(self._stub, method)(request, timeout=timeout, metadata=metadata)

    def _beat(self) -> None:
        """Send heartbeats. One that fails is not told: the main thread meets the same error."""
        request = flower.heartbeat.SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_S)
        pause = 0.0
        while not self._over.wait(pause):
            try:
                self._call_once("SendNodeHeartbeat", request, flower.constant.HEARTBEAT_CALL_TIMEOUT)
                pause = HEARTBEAT_S * random.uniform(0.6, 0.8)
            except (grpc.RpcError, ValueError):  # gRPC raises a ValueError for a closed channel
                pause = SOON_S
