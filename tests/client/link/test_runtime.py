"""The live client: how it paces, when it gives up, and what becomes of each message."""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.client.link import runtime
from hyperbloom.client.link.runtime import _answer_orders, retries_of, run_client
from hyperbloom.client.link.server import Link
from hyperbloom.common.errors import ConnectionFailed, RefusedError
from hyperbloom.common.secrecy.keys import make_key
from hyperbloom.common.wire.orders import Greeting, Notice
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.access.certificates import init

RUN, NODE = 77, 5
LINK = Link("127.0.0.1:1", insecure=True)


@pytest.fixture(autouse=True)
def identity() -> None:
    """Give this process the identity that Flower's messages ask for."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the waits that the runtime asks for; none of them happens."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


# ---------------------------------------------------------------------- pacing


# ---------------------------------------------------------------------- retries


class Lost(grpc.RpcError):  # type: ignore[misc]
    """An error as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__(details)
        self._code = code

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return what the server said."""
        return str(self)


def failing(*errors: Exception) -> Callable[[], str]:
    """Return a call that raises these errors in turn and then answers."""
    left = deque(errors)

    def call() -> str:
        if left:
            raise left.popleft()
        return f"answer, {len(left)} errors left"

    return call


def test_a_server_that_is_away_is_asked_again_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []
    retries = retries_of(LINK)
    retries.wait_function = waits.append
    retries.jitter = None
    errors = [Lost(grpc.StatusCode.UNAVAILABLE, "connection refused") for _ in range(40)]
    with caplog.at_level(logging.INFO, "hyperbloom.client"):
        assert retries.invoke(failing(*errors)) == "answer, 0 errors left"
    assert waits[:7] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0])
    assert waits[7:] == [10] * 33
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "127.0.0.1:1 does not answer (connection refused); trying until it does (Ctrl-C leaves)"
    assert said[1].startswith("127.0.0.1:1 answers after ")
    assert len(said) == 2


@pytest.mark.parametrize(
    "error",
    [
        Lost(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"),
        Lost(grpc.StatusCode.CANCELLED, "RST_STREAM with error code 8"),
        Lost(grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed (TSI_PROTOCOL_FAILURE): Socket closed"),
        Lost(grpc.StatusCode.UNAVAILABLE, "handshaker shutdown"),
    ],
)
def test_a_server_under_attack_is_asked_again_until_it_answers(error: Exception) -> None:
    retries = retries_of(Link("127.0.0.1:1"))
    retries.wait_function = lambda seconds: None
    assert retries.invoke(failing(*[error] * 40)) == "answer, 0 errors left"


def test_an_answer_at_once_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hyperbloom.client"):
        assert retries_of(LINK).invoke(failing()) == "answer, 0 errors left"
    assert caplog.records == []


@pytest.mark.parametrize(
    "error",
    [
        Lost(grpc.StatusCode.PERMISSION_DENIED),
        Lost(grpc.StatusCode.UNIMPLEMENTED),
        Lost(grpc.StatusCode.DEADLINE_EXCEEDED),
        Lost(grpc.StatusCode.INTERNAL),
        Lost(grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"),
        Lost(grpc.StatusCode.UNAVAILABLE, "Tls handshake failed: OPENSSL_internal:WRONG_VERSION_NUMBER"),
        Lost(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (34 vs. 32)"),
        ValueError("no error of gRPC"),
    ],
)
def test_what_waiting_does_not_mend_is_raised_at_once(error: Exception) -> None:
    retries = retries_of(LINK)
    waits: list[float] = []
    retries.wait_function = waits.append
    with pytest.raises(type(error)) as caught:
        retries.invoke(failing(error))
    assert caught.value is error
    assert waits == []


# ---------------------------------------------------------------------- a session


class NobodyThere(ConnectionError):
    """The fake server's last word."""


class FakeServer:
    """A connection over a queue of messages."""

    node_id = NODE

    def __init__(self, *messages: Message | None) -> None:
        self.queue = deque(messages)
        self.sent: list[Message] = []
        self.is_closed = False

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    def receive(self) -> Message | None:
        """Hand out the next message."""
        if not self.queue:
            raise NobodyThere
        message = self.queue.popleft()
        if message is not None:
            message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def send(self, reply: Message) -> None:
        """Take a reply."""
        self.sent.append(reply)

    def leave(self, reply: Message) -> None:
        """Take the last reply."""
        self.send(reply)


def greeting() -> Message:
    """Return a message to the node."""
    return Message(pack(Greeting("0.1.0")), NODE, Greeting.message_type)


def notice(kind: str, reason: str = "because") -> Message:
    """Return the server's last word."""
    return Message(pack(Notice(kind, reason)), NODE, Notice.message_type)


def app_that(act: Callable[[Message, Context], Any]) -> ClientApp:
    """Return an app that answers greetings by `act` and notices as the real one does."""
    app = ClientApp()

    @app.query("greet")
    def greet(message: Message, context: Context) -> Message:
        found = act(message, context)
        return found if isinstance(found, Message) else Message(pack(Greeting(str(found))), reply_to=message)

    @app.query("notice")
    def notice(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return app


def serve(app: ClientApp, server: FakeServer) -> None:
    """Run a session until the fake server has nothing more to say."""
    with pytest.raises(NobodyThere):
        _answer_orders(app, {"client-id": "ward-7"}, server)


def test_an_order_is_answered(slept: list[float]) -> None:
    sent = greeting()
    server = FakeServer(sent)
    seen: list[tuple[str, int, Any]] = []

    def act(message: Message, context: Context) -> str:
        seen.append((unpack(Greeting, message.content).version, context.node_id, context.node_config))
        return "answer"

    serve(app_that(act), server)
    assert seen == [("0.1.0", NODE, {"client-id": "ward-7"})]
    (reply,) = server.sent
    assert unpack(Greeting, reply.content) == Greeting("answer")
    assert reply.metadata.reply_to_message_id == sent.metadata.message_id
    assert (reply.metadata.src_node_id, reply.metadata.run_id) == (NODE, RUN)


def test_an_exception_in_the_app_becomes_an_error_reply_and_the_client_lives_on(
    slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    errors = [KeyError("ours"), ValueError("theirs")]

    def act(message: Message, context: Context) -> str:
        if errors:
            raise errors.pop()
        return "well"

    orders = [greeting() for _ in range(3)]
    server = FakeServer(*orders)
    with caplog.at_level(logging.ERROR, "hyperbloom.client"):
        serve(app_that(act), server)
    first, second, third = server.sent
    assert first.has_error()
    assert first.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert first.error.reason == "ValueError; its own log says more"
    assert first.metadata.reply_to_message_id == orders[0].metadata.message_id
    assert second.error.reason == "KeyError; its own log says more"
    assert unpack(Greeting, third.content) == Greeting("well")
    logged = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
    assert logged == [("query.greet failed: theirs", True), ("query.greet failed: 'ours'", True)]


def test_a_message_that_the_app_does_not_know_is_answered_with_an_error(slept: list[float]) -> None:
    server = FakeServer(Message(pack(Greeting("0")), NODE, "query.other"))
    serve(app_that(lambda message, context: "x"), server)
    assert server.sent[0].error.reason == "ValueError; its own log says more"


def test_ctrl_c_in_the_app_tells_the_server_and_goes_on_up(slept: list[float]) -> None:
    def act(message: Message, context: Context) -> NoReturn:
        raise KeyboardInterrupt

    server = FakeServer(greeting())
    with pytest.raises(KeyboardInterrupt):
        _answer_orders(app_that(act), {}, server)
    (reply,) = server.sent
    assert reply.error.reason == "the client is leaving"
    assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def test_a_refusal_is_answered_first_and_raised_then(slept: list[float]) -> None:
    server = FakeServer(notice("refused", "the name is taken"))
    with pytest.raises(RefusedError, match=r"^the server refused this client: the name is taken$"):
        _answer_orders(app_that(lambda message, context: ""), {}, server)
    assert unpack(Notice, server.sent[0].content) == Notice("refused", "the name is taken")


def test_the_end_of_the_run_is_answered_first_and_ends_the_session_then(
    slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeServer(notice("finished", "the run is over"), greeting())
    with caplog.at_level(logging.INFO, "hyperbloom.client"):
        _answer_orders(app_that(lambda message, context: ""), {}, server)
    assert unpack(Notice, server.sent[0].content) == Notice("finished", "the run is over")
    assert len(server.queue) == 1
    assert [record.getMessage() for record in caplog.records] == ["the server says: the run is over"]


def test_each_order_comes_with_the_run_the_node_and_the_settings(slept: list[float]) -> None:
    contexts: list[Context] = []
    server = FakeServer(greeting(), greeting())
    with pytest.raises(NobodyThere):
        _answer_orders(app_that(lambda message, context: contexts.append(context)), {"client-id": "a"}, server)
    told = [(each.run_id, each.node_id, each.node_config) for each in contexts]
    assert told == [(RUN, server.node_id, {"client-id": "a"})] * 2


def test_polls_are_paced(slept: list[float]) -> None:
    serve(app_that(lambda message, context: ""), FakeServer(None, None, None, greeting(), None, None))
    assert len(slept) == 5
    assert slept[2] > slept[0]
    assert 0.75 * 0.0075 <= slept[3] <= 1.25 * 0.0075


# ---------------------------------------------------------------------- connections


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Link]]]:
    """Return a function that sets what each attempt to connect brings, a server or an error, and counts attempts."""
    opened: list[Any] = []

    def prepare(*outcomes: Any) -> list[Link]:
        left, links = deque(outcomes), []

        def connection(link: Link, retries: Any) -> Any:
            links.append(link)
            outcome = left.popleft()
            if isinstance(outcome, grpc.RpcError):
                outcome = Closed(partial(retries.invoke, failing(outcome)))
            opened.append(outcome)
            return outcome

        monkeypatch.setattr(runtime, "Connection", connection)
        return links

    yield prepare
    assert all(server.is_closed for server in opened), "an open channel keeps the process from ending"


class Closed(FakeServer):
    """A server with which no session can be opened."""

    def __init__(self, error: Callable[[], object]) -> None:
        super().__init__()
        self.open = error  # type: ignore[method-assign, assignment]


class Garbled(FakeServer):
    """A server whose messages Flower's parser cannot read."""

    def receive(self) -> Message | None:
        """Raise what the parser raises."""
        raise IndexError("list index out of range")


NOTHING = app_that(lambda message, context: "")


def test_a_client_leaves_when_the_run_is_over(connect: Callable[..., Any], slept: list[float]) -> None:
    calls = connect(FakeServer(notice("finished")), FakeServer())
    run_client(LINK, NOTHING, {})
    assert calls == [LINK]


def test_a_client_that_stays_waits_for_the_next_run(connect: Callable[..., Any], slept: list[float]) -> None:
    calls = connect(FakeServer(notice("finished")), FakeServer(notice("finished")), FakeServer(notice("refused")))
    with pytest.raises(RefusedError):
        run_client(LINK, NOTHING, {}, stay=True)
    assert len(calls) == 3
    assert len(slept) == 2 and all(1.5 < wait <= 2 for wait in slept), "a server may say so to whoever comes"


def test_a_ca_that_cannot_be_read_for_a_while_is_waited_for(
    slept: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Enough(Exception):
        pass

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise Enough

    link = Link("127.0.0.1:1", root_certificates=tmp_path / "ca.pem")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
        patch.setattr(runtime.time, "sleep", sleep)
        run_client(link, NOTHING, {})
    assert f"cannot read {tmp_path / 'ca.pem'}: No such file or directory" in caplog.text
    assert all(5 <= wait <= 10 for wait in slept)


def test_what_cannot_be_read_ends_the_session_and_no_client(
    connect: Callable[..., Any], slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    unfit = Message(pack(Greeting("x")), NODE, Notice.message_type)
    calls = connect(Garbled(), FakeServer(unfit), FakeServer(notice("finished")))
    run_client(LINK, NOTHING, {})
    assert len(calls) == 3
    assert "what the server has sent cannot be read (IndexError: list index out of range)" in caplog.text
    assert "what the server has sent cannot be read (WireError: " in caplog.text


def test_a_lost_connection_is_opened_again_after_a_while(
    connect: Callable[..., Any], slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    calls = connect(FakeServer(), FakeServer(None), FakeServer(notice("finished")))
    with caplog.at_level(logging.WARNING, "hyperbloom.client"):
        run_client(LINK, NOTHING, {})
    assert len(calls) == 3
    long = [wait for wait in slept if wait > 1]
    assert len(long) == 2
    assert all(5 <= wait <= 10 for wait in long)
    assert [record.getMessage()[:33] for record in caplog.records] == ["connection lost; connecting again"] * 2


def test_a_server_that_began_between_two_calls_is_greeted_anew(connect: Callable[..., Any], slept: list[float]) -> None:
    """It does not know the node that the one before it has registered. A client with a key is refused."""
    unknown = Lost(grpc.StatusCode.FAILED_PRECONDITION, "[ApiError:2004] Failed to activate SuperNode")
    server = FakeServer(notice("finished"))
    links = connect(unknown, server)
    run_client(LINK, app_that(lambda message, context: message), {})
    assert len(links) == 2 and server.sent and 5 <= slept[0] <= 10
    connect(unknown)
    with pytest.raises(ConnectionFailed, match="it does not know this client's key"):
        run_client(replace(LINK, key=make_key()), NOTHING, {})


def test_a_session_that_cannot_be_opened_says_what_may_be_wrong(connect: Callable[..., Any]) -> None:
    connect(Lost(grpc.StatusCode.UNIMPLEMENTED))
    with pytest.raises(ConnectionFailed) as caught:
        run_client(LINK, NOTHING, {})
    assert str(caught.value) == (
        "cannot open a session with 127.0.0.1:1: is it the server's Fleet port, and do TLS, certificates and protocol "
        "match on both sides (--insecure, or --root-certificates and --key; --http)?"
    )


HANDSHAKE = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed ({})"
VERIFY = "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: {}: OK"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            VERIFY.format("unable to get local issuer certificate"),
            "its certificate is not signed by the CA that this client trusts",
        ),
        (
            VERIFY.format("self signed certificate in chain"),
            "its certificate is not signed by the CA that this client trusts",
        ),
        (VERIFY.format("certificate has expired"), "its certificate has expired; whoever runs it can make a new one"),
        (VERIFY.format("certificate is not yet valid"), "its certificate does not hold yet; is this machine's clock"),
        ("Hostname Verification Check failed.", "its certificate does not name this address; add it there"),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch, certificate is not valid",
            "its certificate does not name this address; add it there",
        ),
        ("error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "it does not speak TLS; is it the Fleet"),
        (
            "Expected SETTINGS frame (Trying to connect an http1.x server (HTTP status 400))",
            "it speaks HTTP, not gRPC; is",
        ),
        ("Cannot check peer: missing selected ALPN property.", "it speaks TLS, but not gRPC; is it the Fleet port, or"),
    ],
)
def test_a_handshake_that_fails_says_why(connect: Callable[..., Any], error: str, reason: str) -> None:
    connect(Lost(grpc.StatusCode.UNAVAILABLE, HANDSHAKE.format(error)))
    with pytest.raises(ConnectionFailed) as caught:
        run_client(Link("127.0.0.1:1"), NOTHING, {})
    assert str(caught.value).startswith(f"cannot open a session with 127.0.0.1:1: {reason}")


def test_a_clock_that_is_wrong_is_told_and_may_be_set(caplog: pytest.LogCaptureFixture) -> None:
    retries = retries_of(LINK)
    retries.wait_function = lambda seconds: None
    wrong = Lost(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp: the clock is 70 s ahead")
    with caplog.at_level(logging.INFO, "hyperbloom.client"):
        assert retries.invoke(failing(wrong, wrong, wrong)) == "answer, 0 errors left"
    said = [record.getMessage() for record in caplog.records]
    assert "refuses this client for now" in said[0] and "70 s ahead" in said[0]
    assert len(said) == 2  # and that it answers now


REFUSED = Lost(grpc.StatusCode.PERMISSION_DENIED, "key SHA256:abc is unknown or revoked")


def test_a_key_that_the_server_does_not_know_is_a_refusal(connect: Callable[..., Any]) -> None:
    connect(REFUSED)
    with pytest.raises(RefusedError) as caught:
        run_client(Link("127.0.0.1:1"), NOTHING, {})
    assert str(caught.value) == (
        "the server refused this client: key SHA256:abc is unknown or revoked. Ask whoever runs the server for a token "
        "(flower-server clients invite NAME), or to add this client's public key (flower-server clients add NAME "
        "--public-key FILE)"
    )


class Broken(FakeServer):
    """A server whose first poll brings an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def receive(self) -> NoReturn:
        """Raise it."""
        raise self.error


def test_a_key_that_is_revoked_in_the_middle_ends_the_client(connect: Callable[..., Any], slept: list[float]) -> None:
    calls = connect(Broken(REFUSED))
    with pytest.raises(RefusedError, match="key SHA256:abc is unknown or revoked"):
        run_client(Link("127.0.0.1:1"), NOTHING, {}, stay=True)
    assert len(calls) == 1


@pytest.mark.parametrize("text", ["Run finished.", "Run is pending.", ""])
def test_a_run_that_is_over_is_no_refusal(connect: Callable[..., Any], slept: list[float], text: str) -> None:
    """Flower answers calls of a run whose server was stopped with the door's status."""
    over = Broken(Lost(grpc.StatusCode.PERMISSION_DENIED, text))
    calls = connect(over, over, FakeServer(notice("finished")))
    run_client(Link("127.0.0.1:1"), NOTHING, {})
    assert len(calls) == 3


def test_a_node_that_a_new_superlink_does_not_know_connects_again(
    connect: Callable[..., Any], slept: list[float]
) -> None:
    calls = connect(Broken(Lost(grpc.StatusCode.UNAUTHENTICATED, "Invalid node ID")), FakeServer(notice("finished")))
    run_client(Link("127.0.0.1:1"), NOTHING, {})
    assert len(calls) == 2


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """Return a port that speaks TLS."""
    files = init(tmp_path, [], 30)
    server = grpc.server(ThreadPoolExecutor(1))
    pair = (files.server_key.read_bytes(), files.server.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port
    server.stop(None)


def test_plain_text_at_a_tls_port_is_told_at_once_and_a_server_that_is_away_is_not_that(
    connect: Callable[..., Any], slept: list[float], tls_port: int
) -> None:
    connect(Lost(grpc.StatusCode.UNAVAILABLE, "Socket closed"))
    with pytest.raises(ConnectionFailed) as caught:
        run_client(Link(f"127.0.0.1:{tls_port}", insecure=True), NOTHING, {})
    assert str(caught.value) == (
        f"cannot open a session with 127.0.0.1:{tls_port}: it speaks TLS; use --token, or --root-certificates and "
        "--key, instead of --insecure"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        retries = retries_of(Link(f"127.0.0.1:{silent.getsockname()[1]}", insecure=True))
        assert retries.invoke(failing(Lost(grpc.StatusCode.UNAVAILABLE, "refused"))) == "answer, 0 errors left"
    secure = retries_of(Link(f"127.0.0.1:{tls_port}"))
    assert secure.invoke(failing(Lost(grpc.StatusCode.UNAVAILABLE, "Socket closed"))) == "answer, 0 errors left"


def test_sigterm_is_ctrl_c_while_serving_and_itself_again_afterwards(
    connect: Callable[..., Any], slept: list[float]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def act(message: Message, context: Context) -> str:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)  # the handler runs by now
        return "not reached"

    server = FakeServer(greeting())
    connect(server)
    with pytest.raises(KeyboardInterrupt):
        run_client(LINK, app_that(act), {})
    assert server.sent[0].error.reason == "the client is leaving"
    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_signals_are_left_alone(connect: Callable[..., Any]) -> None:
    connect(FakeServer(notice("finished")))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run_client(LINK, NOTHING, {})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == []


def test_a_client_beside_a_server_hears_of_its_end_though_it_was_started_to_ignore_it() -> None:
    words = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    words += "from hyperbloom.common.program.signals import end_with; end_with(os.getppid()); "
    words += "print(flush=True); [time.sleep(0.1) for _ in range(600)]; print('it slept to the end')"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {words!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"\n"
        parent.kill()
        assert parent.stdout.read() == b""  # it ends when the child does, too
