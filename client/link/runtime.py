"""The live client: it calls the `ClientApp` in this process.

A stock SuperNode starts a process per message and sleeps seconds between polls. This client keeps its model and data
loaded, and a server of ours tells it at once of an order. Another SuperLink is polled: fast while a run is active, and
seldom when it is idle.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
from flwr.app import Context, Error, Message, RecordDict

from hyperbloom.client.link import internals as flower
from hyperbloom.client.link.connection import WAIT_S, Connection
from hyperbloom.client.link.pacer import Pacer
from hyperbloom.client.link.server import FOR_NOW, REASONS, UNKNOWN_NODE, Link, explanation, refusal, speaks_tls
from hyperbloom.common.errors import ConnectionFailed, RefusedError, describe
from hyperbloom.common.program.signals import terminate_as_interrupt
from hyperbloom.common.wire.orders import Notice
from hyperbloom.common.wire.pack import unpack

log = logging.getLogger("hyperbloom.client")

App = Callable[[Message, Context], Message]

RECONNECT_DELAY_S = 10
SHORTEST_S = 2.0  # of a session: some server may say "finished" to whoever comes

# Status codes of a server that is away or too busy. It cancels calls of a machine that was suspended.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
_TOO_LARGE = "message larger than max"  # in gRPC's error text, which has the code of a busy server


def run_client(link: Link, app: App, node_config: dict[str, Any], stay: bool = False) -> None:
    """Serve `app` until the server says that the run is over, or until Ctrl-C. With `stay`, wait for the next run.

    It reconnects without a time limit when the network or the server fails.

    Raises:
        RefusedError: the server does not admit this client or its key.
        ConnectionFailed: the connection can never work, because of certificates or another protocol at the port.
    """
    with terminate_as_interrupt():
        while True:
            begin, is_over = time.monotonic(), _serve(link, app, node_config)
            if is_over and not stay:
                return
            if is_over:
                log.info("the run is over; waiting for the next one (Ctrl-C leaves)")
                time.sleep(max(0.0, SHORTEST_S - (time.monotonic() - begin)))
                continue
            delay = RECONNECT_DELAY_S * random.uniform(0.5, 1.0)
            log.warning("connection lost; connecting again in %.0f s", delay)
            time.sleep(delay)


def _serve(link: Link, app: App, node_config: dict[str, Any]) -> bool:
    """Hold one session with the SuperLink; return True when the run is over, False when the session is lost."""
    try:
        connection = Connection(link, retries_of(link))
    except OSError as error:  # the disk with the CA may come back, too
        log.error("cannot read %s: %s", link.root_certificates, error.strerror)
        return False
    try:
        try:
            connection.open()
        except grpc.RpcError as error:
            if link.key is None and UNKNOWN_NODE in str(error):
                return False  # it has registered with the server before this one
            raise explanation(link, error) from None
        log.info("connected to %s as node %d", link.address, connection.node_id)
        _answer_orders(app, node_config, connection)
        return True
    except (grpc.RpcError, OSError, flower.inflation.ObjectPullError, flower.inflation.ObjectPushError) as error:
        log.debug("session lost: %s", error)
        if refused := refusal(error):
            raise refused from None
        return False
    except (RefusedError, ConnectionFailed):
        raise
    except Exception as error:  # Flower's parsers may raise anything
        log.error("what the server has sent cannot be read (%s)", describe(error))
        return False
    finally:
        connection.close()


def _answer_orders(app: App, node_config: dict[str, Any], connection: Connection) -> None:
    """Receive orders, let the app answer them, and send the answers, until the server says that the run is over."""
    pacer = Pacer()
    while True:
        asked = time.monotonic()
        message = connection.receive()
        now = time.monotonic()
        if message is None:
            if now - asked < WAIT_S / 2:  # the server did not wait for an order
                time.sleep(pacer.delay(now, now - asked))
            continue
        context = Context(message.metadata.run_id, connection.node_id, node_config, RecordDict(), {}, 0)
        _answer(app, message, context, connection)
        pacer.message(time.monotonic())
        if message.metadata.message_type == Notice.message_type:
            notice = unpack(Notice, message.content)
            if notice.kind == "refused":
                raise RefusedError(f"the server refused this client: {notice.reason}")
            log.info("the server says: %s", notice.reason)
            return


def _answer(app: App, message: Message, context: Context, connection: Connection) -> None:
    failed = flower.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    try:
        reply = app(message, context)
    except KeyboardInterrupt:
        connection.leave(Message(Error(failed, "the client is leaving"), reply_to=message))
        raise
    except Exception as error:
        log.exception("%s failed: %s", message.metadata.message_type, error)
        # The text of an error that nobody expected may have a path, or what stands in the data.
        reply = Message(Error(failed, f"{type(error).__name__}; its own log says more"), reply_to=message)
    connection.send(reply)


def retries_of(link: Link) -> flower.RetryInvoker:
    """Return retries that never end while the server is away or too busy, and give up at once on permanent errors.

    A failed TLS handshake is retried unless its reason is one of `REASONS`, because a server under attack also breaks
    off handshakes.
    """

    def for_now(error: Exception | None) -> bool:
        return any(sign in str(error) for sign in FOR_NOW)

    def hopeless(error: Exception) -> bool:
        # A TLS port closes plain-text connections without an error, like a server that shuts down. So test for TLS.
        wrong = any(one in str(error) for one in (*REASONS, _TOO_LARGE)) or (link.insecure and speaks_tls(link.address))
        return wrong or not (cast(grpc.RpcError, error).code() in _AWAY or for_now(error))

    def away(state: flower.RetryState) -> None:
        if state.tries == 1 and for_now(state.exception):
            details = cast(grpc.RpcError, state.exception).details()
            log.warning("%s refuses this client for now (%s); trying until it does not", link.address, details)
        elif state.tries == 1:
            why = f"{cast(grpc.RpcError, state.exception).details()}{': is --http right?' if link.http else ''}"
            log.warning("%s does not answer (%s); trying until it does (Ctrl-C leaves)", link.address, why)

    def back(state: flower.RetryState) -> None:
        if state.tries > 1:
            log.info("%s answers after %.0f s", link.address, state.elapsed_time)

    return flower.RetryInvoker(
        lambda: flower.exponential(base_delay=0.2, max_delay=RECONNECT_DELAY_S),
        grpc.RpcError,
        max_tries=None,
        max_time=None,
        on_backoff=away,
        on_success=back,
        should_giveup=hopeless,
    )
