"""The process that is Flower's SuperLink, with the registry of clients' keys at its door.

Flower's SuperNode authentication (flwr 1.39, `--enable-supernode-auth`) checks that a node signs its calls with a
registered key. On top of it, `Door`

* registers the keys of the registry files, each under its client's name, before the port opens, and follows the files
  while it runs: a key that is no longer in them is unregistered, and its node's next call is refused;
* lets a key activate its own node only (Flower compares them in every call but this one), and at once even where
  Flower still takes the node for alive: whoever holds the key is that client, come back after a crash;
* lets a node answer in its own name only (Flower leaves the sender's id in a reply to the node);
* says which key was refused, to the client and in the log, where Flower says neither, and before it reads what the
  stranger sends.

How much of its memory clients can take is in `superlink_limits.py`.

Internals used: `NodeAuthServerInterceptor`, `LinkState`'s methods for nodes.

    python -m hyperbloom.server.superlink_child PARENT_PID REGISTRIES FLAGS_OF_FLOWER_SUPERLINK...
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, PUBLIC_KEY_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.utils import get_metadata_bytes

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.keys import fingerprint
from hyperbloom.common.signals import run_program
from hyperbloom.server.registry import ClientRegistry
from hyperbloom.server.superlink_limits import Fleet, Store, largest_message
from hyperbloom.server.superlink_log import SAYS

__all__ = ["Door", "Keys", "main"]

FOLLOW_EVERY_S = 0.3


class Keys:
    """The SuperLink's list of nodes, kept like the registry files: one node per client that may join.

    Args:
        state: Flower's.
        registries: the files; a client in two of them has the key of the later one.
    """

    def __init__(self, state: LinkState, registries: Sequence[ClientRegistry]) -> None:
        """Know no key yet."""
        self._state = state
        self._registries = registries
        self._nodes: dict[str, int] = {}  # by public key
        self._names: dict[str, str] = {}
        self._seen: list[object] | None = None
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Register and unregister what has changed in the files since the last call; a damaged file changes nothing."""
        with self._lock:
            seen = [_version(registry.path) for registry in self._registries]
            if seen == self._seen:
                return
            self._seen = seen
            try:
                names = {key: name for registry in self._registries for key, name in registry.keys().items()}
            except ConfigError as error:
                _say(f"{error}; who may join stays as it was")
                return
            for key in self._nodes.keys() - names.keys():
                self._unregister(key)
            for key in names.keys() - self._nodes.keys():
                self._register(key, names[key])

    def _register(self, key: str, name: str) -> None:
        try:
            node = self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key.encode(), 0, name=name)
        except ValueError:  # it was unregistered before; Flower remembers
            _say(f"{name} needs a new key, or a new start of the server: this one was taken away from it")
            return
        self._nodes[key], self._names[key] = node, name

    def _unregister(self, key: str) -> None:
        node, name = self._nodes.pop(key), self._names.pop(key)
        with suppress(TypeError):  # Flower 1.39 stumbles over a node that never came, after it has removed it
            self._state.delete_node(NOOP_FLWR_AID, node)
        _say(f"{name} may not join any more: its key {fingerprint(key)} was revoked or replaced")


class Door(NodeAuthServerInterceptor):
    """Flower's check of signatures, and ours."""

    def __init__(self, state_factory: LinkStateFactory, keys: Keys) -> None:
        """Stand at the door."""
        super().__init__(state_factory)
        self._keys = keys

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Refuse a key that nobody knows, or let Flower check the signature."""
        key = get_metadata_bytes(handler_call_details.invocation_metadata, PUBLIC_KEY_HEADER)
        self._keys.follow()
        if key and self.state_factory.state().get_node_id_by_public_key(key) is None:
            # gRPC reads a message when the method asks for it, if the method is one that takes several.
            return grpc.stream_unary_rpc_method_handler(lambda requests, context: _refuse_key(context, key))
        return super().intercept_service(continuation, handler_call_details)

    def _wrap_method_handler(
        self, method_handler: grpc.RpcMethodHandler, received_public_key: bytes
    ) -> grpc.RpcMethodHandler:
        handler = super()._wrap_method_handler(method_handler, received_public_key)

        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            self._check(request, received_public_key, context)
            return handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            checked,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _check(self, request: Any, key: bytes, context: grpc.ServicerContext) -> None:
        self._keys.follow()
        state = self.state_factory.state()
        node = state.get_node_id_by_public_key(key)
        if node is None:
            _refuse_key(context, key)
        if isinstance(request, ActivateNodeRequest):
            if request.public_key != key:
                _refuse(context, "it asked to be another client", "this is another client's public key")
            state.deactivate_node(node)
        if isinstance(request, PushMessagesRequest) and any(
            message.metadata.src_node_id != node for message in request.messages_list
        ):
            _refuse(context, f"node {node} answered in the name of another", "a reply in another client's name")


def _refuse_key(context: grpc.ServicerContext, key: bytes) -> NoReturn:
    try:
        shown = f"key {fingerprint(key.decode())} is unknown or revoked"
    except ValueError:
        shown = "key is damaged"
    _refuse(context, f"its {shown}", shown)


def _refuse(context: grpc.ServicerContext, said: str, answer: str) -> NoReturn:
    _say(f"refused {context.peer()}: {said}")
    context.abort(grpc.StatusCode.PERMISSION_DENIED, answer)
    raise AssertionError("abort returned")


def _say(text: str) -> None:
    print(f"{SAYS}{text}", file=sys.stderr, flush=True)


def _version(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _door(registries: Sequence[ClientRegistry]) -> Callable[[LinkStateFactory], Door]:
    """Return what stands in for `NodeAuthServerInterceptor`: registers the keys, follows the files, keeps the door."""

    def make(state_factory: LinkStateFactory) -> Door:
        keys = Keys(state_factory.state(), registries)
        keys.follow()

        def follow() -> None:
            # Also while nobody calls: a client that was revoked in the middle of its training is out at once.
            while not pause.wait(FOLLOW_EVERY_S):
                keys.follow()

        threading.Thread(target=follow, daemon=True).start()
        return Door(state_factory, keys)

    pause = threading.Event()
    return make


def main(arguments: list[str]) -> None:
    """Be the SuperLink until the parent process ends."""
    parent, registries, *flags = arguments
    start_parent_process_monitor(int(parent))
    # By its full name: the package has a function of the same name.
    program = importlib.import_module("flwr.superlink.cli.flower_superlink")
    program.GRPC_MAX_MESSAGE_LENGTH = largest_message()  # type: ignore[attr-defined]
    program.FleetServicer = Fleet  # type: ignore[attr-defined]
    object_store_factory.InMemoryObjectStore = Store  # type: ignore[attr-defined]
    if registries:
        paths = [ClientRegistry(Path(path)) for path in registries.split("\n")]
        program.NodeAuthServerInterceptor = _door(paths)  # type: ignore[attr-defined]
    sys.argv = ["flower-superlink", *flags]
    program.flower_superlink()


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
