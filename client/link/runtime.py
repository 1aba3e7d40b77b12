"""The live client: Flower's own gRPC connection, with the `ClientApp` called in this process.

A stock SuperNode starts a process per message and sleeps seconds between polls. This client keeps its model and data
loaded, polls fast while a run is active and backs off when it is idle. It is the only client module that uses Flower's
internals (flwr 1.39): `grpc_request_response` (TLS, authentication, heartbeat) and the `flwr_exit` that it calls,
`RetryInvoker`, and the functions that convert a message to objects and back.
"""

import logging
import random
import signal
import threading
import time
from typing import Any, NoReturn, cast

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Context, Error, Message, RecordDict
from flwr.client.grpc_rere_client import connection as flower_connection
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import RetryState, exponential

from hyperbloom.client.link.pacer import Pacer
from hyperbloom.client.link.server import CLOCK, REASONS, Link, explanation, refusal, speaks_tls
from hyperbloom.common.errors import HyperbloomError, RefusedError
from hyperbloom.common.program.signals import terminate_as_interrupt
from hyperbloom.common.secrecy.keys import BoundKey
from hyperbloom.common.wire.orders import Notice
from hyperbloom.common.wire.pack import unpack

__all__ = ["exit_with_parent", "run_client"]

log = logging.getLogger("hyperbloom.client")

RECONNECT_DELAY_S = 10
TRANSFER_DEADLINE_S = 120.0
LEAVING_S = 5.0

# Status codes of a server that is away or too busy. It cancels calls of a machine that was suspended.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
_TOO_LARGE = "message larger than max"  # in gRPC's error text, which has the code of a busy server


class _Finished(Exception):
    """The server said that the run is over."""


def run_client(link: Link, app: ClientApp, node_config: dict[str, Any], stay: bool = False) -> None:
    """Serve `app` until the server says that the run is over, or until Ctrl-C.

    It reconnects without a time limit when the network or the server fails.

    Args:
        link: the server.
        app: the `ClientApp`, which is called in this process.
        node_config: configuration that the app reads from its context.
        stay: wait for the next run when one is over, instead of returning.

    Raises:
        RefusedError: the server does not admit this client or its key.
        ConnectionFailed: the connection can never work, because of certificates or another protocol at the port.
    """
    threading.excepthook = _quiet_heartbeat
    with terminate_as_interrupt():
        while True:
            try:
                _serve(link, app, node_config)
            except _Finished:
                if not stay:
                    return
                log.info("the run is over; waiting for the next one (Ctrl-C leaves)")
                continue
            delay = RECONNECT_DELAY_S * random.uniform(0.5, 1.0)
            log.warning("connection lost; connecting again in %.0f s", delay)
            time.sleep(delay)


def _serve(link: Link, app: ClientApp, node_config: dict[str, Any]) -> None:
    """Hold one session with the SuperLink and return when it is lost."""
    certificates = link.root_certificates.read_bytes() if link.root_certificates else None
    keys = (cast(EllipticCurvePrivateKey, BoundKey(link.key, link.name)), link.key.public_key()) if link.key else None
    retries = _retries(link)
    flower_connection.flwr_exit = _session_not_opened  # type: ignore[attr-defined]
    outcome: Exception | None = None
    channels: list[grpc.Channel] = []

    def stub(channel: grpc.Channel) -> FleetStub:
        channels.append(channel)
        return FleetStub(channel)

    def close() -> None:
        for channel in channels:
            channel.close()

    # When it leaves, Flower waits for the server's answer without a limit. Closing the channels ends that wait.
    patience = threading.Timer(LEAVING_S, close)
    patience.daemon = True
    try:
        connection = grpc_request_response(
            link.address,
            link.insecure,
            retries,
            root_certificates=certificates,
            authentication_keys=keys,
            adapter_cls=cast(type[FleetStub], stub),
        )
        with connection as primitives:
            session = _Session(app, node_config, *primitives)
            log.info("connected to %s as node %d", link.address, session.node_id)
            try:
                session.run()
            except (grpc.RpcError, OSError) as error:
                log.debug("session lost: %s", error)
                outcome = refusal(error)
            except (_Finished, HyperbloomError) as error:
                outcome = error  # Flower's context manager would log and swallow it
            finally:
                patience.start()
    except SystemExit:  # from `_session_not_opened`
        raise explanation(link, retries.gave_up_on) from None
    except RuntimeError as error:
        # The heartbeat found first that the SuperLink does not know us any more. Flower then leaves the channel open,
        # which would keep the process from ending, so `close` below closes it.
        log.debug("session closed uncleanly: %s", error)
    finally:
        patience.cancel()
        close()
    if outcome is not None:
        raise outcome


class _Session:
    """One node's session: pull a message, let the app answer it, push the answer."""

    def __init__(self, app: ClientApp, node_config: dict[str, Any], node_id: int, *primitives: Any) -> None:
        self.app = app
        self.node_config = node_config
        self.node_id = node_id
        self._receive, self._send, _, _, self._pull_object, self._push_object, self._confirm = primitives
        self._contexts: dict[int, Context] = {}

    def run(self) -> None:
        pacer = Pacer()
        while True:
            asked = time.monotonic()
            received = self._receive()
            if received is None:
                now = time.monotonic()
                time.sleep(pacer.delay(now, now - asked))
                continue
            message = self._pull(*received)
            self._answer(message)
            pacer.message(time.monotonic())
            if message.metadata.message_type == Notice.message_type:
                self._act_on(unpack(Notice, message.content))

    def _pull(self, announced: Message, tree: ObjectTree) -> Message:
        metadata = announced.metadata
        contents = pull_objects(
            [node.object_id for node in iterate_object_tree(tree)],
            lambda object_id: self._pull_object(metadata.run_id, object_id),
            initial_backoff=0.004,
            backoff_cap=0.25,
            max_time=TRANSFER_DEADLINE_S,
            max_tries_per_object=None,
        )
        self._confirm(metadata.run_id, metadata.message_id)
        message = cast(Message, inflate_object_from_contents(metadata.message_id, contents))
        message.metadata.__dict__["_message_id"] = metadata.message_id
        return message

    def _answer(self, message: Message) -> None:
        start = time.perf_counter()
        try:
            reply = self.app(message, self._context(message.metadata.run_id))
        except KeyboardInterrupt:
            self._push(Message(_failure("the client is leaving"), reply_to=message), 0.0)
            raise
        except Exception as error:
            log.exception("%s failed: %s", message.metadata.message_type, error)
            reply = Message(_failure(f"{type(error).__name__}: {error}"), reply_to=message)
        self._push(reply, time.perf_counter() - start)

    def _push(self, reply: Message, seconds: float) -> None:
        run_id = reply.metadata.run_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session_id = self._send(reply, get_object_tree(reply), seconds)
            push_objects(
                get_all_nested_objects(reply),
                lambda object_id, content: self._push_object(run_id, session_id, object_id, content),
                object_ids_to_push=wanted,
            )

    def _context(self, run_id: int) -> Context:
        if run_id not in self._contexts:
            self._contexts = {run_id: Context(run_id, self.node_id, self.node_config, RecordDict(), {}, 0)}
        return self._contexts[run_id]

    def _act_on(self, notice: Notice) -> None:
        if notice.kind == "refused":
            raise RefusedError(f"the server refused this client: {notice.reason}")
        log.info("the server says: %s", notice.reason)
        raise _Finished


def _quiet_heartbeat(failure: threading.ExceptHookArgs) -> None:
    """Log the error that ends Flower's heartbeat thread. The main loop meets the same error and reconnects."""
    if isinstance(failure.exc_value, grpc.RpcError | RuntimeError):
        log.debug("heartbeat ended: %s", failure.exc_value)
    else:
        threading.__excepthook__(failure)


def _session_not_opened(code: int, *arguments: object, **options: object) -> NoReturn:
    """Replace Flower's exit when a session cannot be opened.

    Flower's own function starts a thread that ends the process after 5 s with exit code 1, before we can explain.
    """
    raise SystemExit(code)


def _failure(reason: str) -> Error:
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)


class _Retries(RetryInvoker):
    """Flower's retries, which also remember the error on which they gave up."""

    gave_up_on: Exception | None = None


def _retries(link: Link) -> _Retries:
    """Return retries that never end while the server is away or too busy, and give up at once on permanent errors.

    A failed TLS handshake is retried unless its reason is one of `REASONS`, because a server under attack also breaks
    off handshakes.

    When it leaves, Flower sets `max_tries` to 1 and waits for its heartbeats to end. These may have tried more often
    already, so `wait` and `hopeless` stop them as soon as `max_tries` is set.
    """

    def wait(seconds: float) -> None:
        while retries.max_tries is None and seconds > 0:
            time.sleep(min(seconds, 0.1))
            seconds -= 0.1

    def hopeless(error: Exception) -> bool:
        if retries.max_tries is not None:
            return True
        away = cast(grpc.RpcError, error).code() in _AWAY or CLOCK in str(error)
        # A TLS port closes plain-text connections without an error, like a server that shuts down. So test for TLS.
        wrong = any(sign in str(error) for sign in (*REASONS, _TOO_LARGE)) or (
            link.insecure and speaks_tls(link.address)
        )
        if wrong or not away:
            retries.gave_up_on = error
        return wrong or not away

    def away(state: RetryState) -> None:
        if state.tries == 1 and CLOCK in str(state.exception):
            details = cast(grpc.RpcError, state.exception).details()
            log.warning("%s refuses this machine's clock (%s); trying until it is right", link.address, details)
        elif state.tries == 1:
            log.warning("%s does not answer; trying until it does (Ctrl-C leaves)", link.address)

    def back(state: RetryState) -> None:
        if state.tries > 1:
            log.info("%s answers again after %.0f s", link.address, state.elapsed_time)

    retries = _Retries(
        lambda: exponential(base_delay=0.2, max_delay=RECONNECT_DELAY_S),
        grpc.RpcError,
        max_tries=None,
        max_time=None,
        on_backoff=away,
        on_success=back,
        should_giveup=hopeless,
        wait_function=wait,
    )
    return retries


def exit_with_parent(parent_pid: int) -> None:
    """Leave as on Ctrl-C when the process `parent_pid` ends. Servers use it for the local clients that they start."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # inherited from a script that runs the server in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start_parent_process_monitor(parent_pid)
