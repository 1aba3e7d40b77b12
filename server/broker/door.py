"""The check of each call to the SuperLink, before its message is read.

Flower's SuperNode authentication (flwr 1.39) reads a call's message, for as long as the caller likes, before it refuses
the call. It also leaves some things unchecked. `Door` replaces it:

* It checks key, signature and timestamp in the metadata, and refuses a bad call before reading a byte of its message.
* It lets a client enrol that shows a token with its first call (`server/access/invitations.py`).
* It reads one message of at most `MOST_WORDS` bytes, or one object, within `READING_S` or `UPLOAD_S` seconds. It limits
  the messages of one key that are read at a time. gRPC itself limits messages of all methods to `largest_message()`.
* A key is one process's at a time: a second one waits until the first has left. Stock SuperNodes do not tell.
* A key activates only its own node; Flower compares them in every other call. Activation works at once even if Flower
  believes that the node is alive, because the owner of the key is that client, back after a crash.
* A node answers only in its own name; Flower does not compare the sender's id in a reply.

Without registries, any client may make a key for itself, as Flower allows. All else still applies.
"""

import datetime as dt
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from hyperbloom.common.enclosed import PROCESS, TAKEN
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.storage import FileState, file_state
from hyperbloom.common.program.names import check_name
from hyperbloom.common.secrecy import token
from hyperbloom.common.secrecy.keys import fingerprint
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.broker import flower
from hyperbloom.server.broker.limits import MOST_WORDS
from hyperbloom.server.broker.log import say
from hyperbloom.server.broker.port import Connections

UPLOAD = "/flwr.proto.Fleet/PushObject"

READING_S, UPLOAD_S = 20.0, 900.0
"""Most seconds for a message, and for an object of a reply, to arrive."""

MOST_CALLS, MOST_UPLOADS = 8, 4
"""Most messages and objects of one key that are read at a time. Flower's client uploads two at a time."""

GONE_S = 60.0
"""Seconds without a call after which a process is gone although its connection stands. Heartbeats come every 20 s."""

AHEAD_S, BEHIND_S = 60.0, 300.0
"""Most seconds that a client's clock may be ahead of ours or behind; behind includes the call's waiting time."""


class Keys:
    """Keeps the SuperLink's list of nodes equal to the registries: one node per client that may join.

    A client in several registries has the key of the last one.
    """

    def __init__(self, state: flower.LinkState, registries: Sequence[ClientRegistry]) -> None:
        self._state = state
        self._registries = registries
        self._nodes: dict[str, tuple[int, str]] = {}  # node and name by public key
        self._seen: list[FileState] | None = None
        self._trouble = ""
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key.decode(errors="replace") in self._nodes

    def follow(self) -> None:
        """Apply the changes in the files since the last call. One that is damaged or out of reach changes nothing."""
        with self._lock:
            try:
                seen = [file_state(registry.path) for registry in self._registries]
                if seen == self._seen:
                    return
                names = {key: name for registry in self._registries for key, name in registry.keys().items()}
            except (OSError, ConfigError) as error:  # the next call looks again: it may be a lack of free files
                cause = error.strerror if isinstance(error, OSError) else None
                why = f"the list of clients cannot be read ({cause})" if cause else str(error)
                if why != self._trouble:
                    say(f"{why}; who may join stays as it was")
                self._trouble = why
                return
            for key in self._nodes.keys() - names.keys():
                self._unregister(key)
            for key in names.keys() - self._nodes.keys():
                self._register(key, names[key])
            self._seen, self._trouble = seen, ""

    def _register(self, key: str, name: str) -> None:
        try:
            node = self._state.create_node(
                flower.constant.NOOP_FLWR_AID, flower.constant.NOOP_ACCOUNT_NAME, key.encode(), 0, name=name
            )
        except ValueError:  # Flower refuses a key that was unregistered before
            say(f"{name} needs a new key, or a new start of the server: this one was taken away from it")
            return
        self._nodes[key] = node, name

    def _unregister(self, key: str) -> None:
        node, name = self._nodes.pop(key)
        with suppress(TypeError):  # flwr 1.39 raises this for a node that never came, after removing it
            self._state.delete_node(flower.constant.NOOP_FLWR_AID, node)
        say(f"{name} may not join any more: its key {fingerprint(key)} was revoked or replaced")


@dataclass
class _Process:
    """The process that has a key, with the connection and the time of its last call."""

    name: str
    peer: str
    seen: float


class Door(grpc.ServerInterceptor):  # type: ignore[misc]
    """Checks each call before it is read, and reads it within limits; without `keys`, any key may join."""

    def __init__(
        self,
        state_factory: flower.LinkStateFactory,
        keys: Keys | None,
        connections: Connections,
        server: str = "",
        invitations: Invitations | None = None,
    ) -> None:
        self._server, self._invitations = server, invitations
        self._state_factory = state_factory
        self._keys = keys
        self._connections = connections
        self._lock = threading.Lock()
        self._reading = Counter[tuple[bytes, bool]]()  # open messages, by key and kind
        self._due: dict[grpc.ServicerContext, float] = {}
        self._processes: dict[bytes, _Process] = {}  # by key

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Return a handler for any call, even of an unknown method.

        gRPC reads the message of a unary method before it calls us. It leaves a stream for us to read.
        """
        return grpc.stream_unary_rpc_method_handler(partial(self._serve, continuation, handler_call_details))

    def cancel_overdue(self) -> None:
        """Cancel the calls whose message has not arrived in time."""
        with self._lock:
            overdue = [context for context, due in self._due.items() if due < time.monotonic()]
        for context in overdue:
            context.cancel()

    def _serve(
        self,
        continuation: Callable[[Any], Any],
        details: grpc.HandlerCallDetails,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> bytes:
        key = self._caller(details.invocation_metadata, context)
        name = flower.get_metadata_str(details.invocation_metadata, PROCESS)
        if name and self._keys is not None:
            self._claim(key, name, context)
        self._connections.served(context.peer())
        handler = continuation(details)
        if handler is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        is_upload = details.method == UPLOAD
        with self._turn(key, is_upload, context):
            content = next(requests, None)
        if content is None or (len(content) > MOST_WORDS and not is_upload):
            found, wrong = len(content or b""), grpc.StatusCode.INVALID_ARGUMENT
            answer = f"expected a message of at most {MOST_WORDS} bytes, found {found}"
            self._refuse(context, f"its call of {details.method} brings {found} bytes", answer, wrong)
        try:
            request = handler.request_deserializer(content)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a message of this method")
        del content
        self._check(request, key, context)
        with flower.rpc_error_translator(context, details.method):
            response: bytes = handler.response_serializer(handler.unary_unary(request, context))
        return response

    def _caller(self, metadata: Any, context: grpc.ServicerContext) -> bytes:
        """Return the public key that signed a call; abort the call if the check fails."""
        key = flower.get_metadata_bytes(metadata, flower.constant.PUBLIC_KEY_HEADER)
        shown = flower.get_metadata_str(metadata, token.HEADER)
        if self._keys is not None:
            self._keys.follow()
            if key and key not in self._keys and not shown:
                self._refuse_key(context, key)
        stamp = flower.get_metadata_str(metadata, flower.constant.TIMESTAMP_HEADER)
        signature = flower.get_metadata_bytes(metadata, flower.constant.SIGNATURE_HEADER)
        if not key or not stamp or not signature:
            self._refuse(context, "it does not show one key and one signature", "Missing authentication metadata")
        try:
            texts = {stamp + self._server, stamp}
            signed = any(flower.verify_signature(_public_key(key), text.encode(), signature) for text in texts)
            age = (flower.now() - dt.datetime.fromisoformat(stamp)).total_seconds()
        except Exception:  # parsers may raise anything for hostile bytes
            signed, age = False, 0.0
        if not signed:
            self._refuse(context, "its signature is not that of its key", "Invalid signature")
        if not -AHEAD_S < age < BEHIND_S:
            clock = f"clock is {abs(age):.0f} s {'behind' if age > 0 else 'ahead'}"
            self._refuse(context, f"its {clock}", f"Invalid timestamp: the {clock}")
        if shown and self._keys is not None and key not in self._keys:
            self._enrol(shown, key, context)
        return key

    def _enrol(self, shown: str, key: bytes, context: grpc.ServicerContext) -> None:
        """Let the owner of a key in, or abort the call, whose token is not good. Its signature is."""
        assert self._invitations is not None and self._keys is not None
        secret, _, name = shown.partition(" ")
        try:
            self._invitations.redeem(secret, check_name(name, "its name"), key.decode())
        except (ConfigError, UnicodeDecodeError) as error:
            self._refuse(context, f"{error}", f"{token.REFUSED}{error}", grpc.StatusCode.PERMISSION_DENIED)
        except OSError as error:
            say(f"{name} cannot enrol: {error}")
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server cannot write down who enrols")
        say(f"{name} has enrolled with a token; its key is {fingerprint(key.decode())}")
        self._keys.follow()

    def _claim(self, key: bytes, name: str, context: grpc.ServicerContext) -> None:
        """Note which process has a key, or abort the call of a second one while the first is here."""
        now, peer = time.monotonic(), context.peer()
        with self._lock:
            held = self._processes.get(key)
            if held is None or held.name == name:
                self._processes[key] = _Process(name, peer, now)
                return
        if now - held.seen < GONE_S and self._connections.is_open(held.peer):
            say(f"refused {peer}: another process has its key {fingerprint(key.decode())}")
            context.abort(grpc.StatusCode.ABORTED, TAKEN)
        with self._lock:
            self._processes[key] = _Process(name, peer, now)

    @contextmanager
    def _turn(self, key: bytes, is_upload: bool, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold one of the few places for reading messages of a key."""
        most, seconds = (MOST_UPLOADS, UPLOAD_S) if is_upload else (MOST_CALLS, READING_S)
        kind = (key, is_upload)
        with self._lock:
            if self._reading[kind] >= most:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"expected at most {most} calls at a time")
            self._reading[kind] += 1
            self._due[context] = time.monotonic() + seconds
        try:
            yield
        finally:
            with self._lock:
                del self._due[context]
                self._reading[kind] -= 1
                if not self._reading[kind]:
                    del self._reading[kind]

    def _check(self, request: Any, key: bytes, context: grpc.ServicerContext) -> None:
        """Refuse a call in another node's name, or with a key that was revoked during the reading."""
        is_new = isinstance(request, flower.fleet.RegisterNodeFleetRequest)
        if (is_new or isinstance(request, flower.fleet.ActivateNodeRequest)) and request.public_key != key:
            answer = "this is another client's public key"
            self._refuse(context, "it asked to be another client", answer, grpc.StatusCode.PERMISSION_DENIED)
        if is_new:  # it has no node to compare with
            return
        if self._keys is not None and key not in self._keys:
            self._refuse_key(context, key)
        state = self._state_factory.state()
        node = state.get_node_id_by_public_key(key)
        if isinstance(request, flower.fleet.ActivateNodeRequest):
            if node is not None:
                state.deactivate_node(node)
        elif node != (request.node.node_id if hasattr(request, "node") else request.node_id):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid node ID")
        if isinstance(request, flower.fleet.PushMessagesRequest):
            if any(message.metadata.src_node_id != node for message in request.messages_list):
                say(f"refused {context.peer()}: node {node} answered in the name of another")
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "a reply in another client's name")
            if len(request.messages_list) != len(request.message_object_trees):  # Flower would fail half-way
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a tree of objects for each reply")

    def _refuse_key(self, context: grpc.ServicerContext, key: bytes) -> NoReturn:
        try:
            shown = f"key {fingerprint(key.decode())} is unknown or revoked"
        except ValueError:
            shown = "key is damaged"
        self._refuse(context, f"its {shown}", shown, grpc.StatusCode.PERMISSION_DENIED)

    def _refuse(
        self,
        context: grpc.ServicerContext,
        said: str,
        answer: str,
        code: grpc.StatusCode = grpc.StatusCode.UNAUTHENTICATED,
    ) -> NoReturn:
        if self._connections.refused(context):
            say(f"refused {context.peer()}: {said}")
        context.abort(code, answer)
        raise AssertionError("abort returned")


_public_key = lru_cache(maxsize=4096)(flower.bytes_to_public_key)
