"""The Fleet port: gRPC's options, and limits on connections of strangers, which gRPC cannot count.

gRPC Python neither reports nor closes connections. So this module looks at the process's own sockets, and shuts down

* a connection with refused calls, once its address had `PATIENCE` refused calls within a minute. But `MOST_HELD` such
  calls are answered late in place of that, over a connection that sends `SLOW_BYTES` a second: who waits does not come
  back at once, with another handshake;
* a connection that has brought no call with a valid key for `SILENT_S` seconds, or in `STRANGER_BYTES` bytes: gRPC
  keeps headers that do not end, at many times their size;
* where files run short, the oldest such connections of an address that has more than `MOST_STRANGERS` of them. Not
  otherwise: who is cut off comes back at once, too, and a silent connection costs less than a new one.

gRPC cleans up as after any lost connection. Connections of known clients stay, whatever their address.
"""

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from operator import methodcaller

import grpc

from hyperbloom.common.errors import ConnectionFailed
from hyperbloom.server.broker.flower import FleetServicer, add_FleetServicer_to_server, is_port_in_use
from hyperbloom.server.broker.limits import largest_message
from hyperbloom.server.broker.log import say
from hyperbloom.server.broker.state import MOST_WAITING

PATIENCE = 10
MOST_HELD, HELD_S = 256, 5.0
SO_MAX_PACING_RATE, SLOW_BYTES, NO_LIMIT = 47, 1000, -1  # a constant of Linux that Python does not name
SILENT_S, STRANGER_BYTES = 20.0, 2**17  # a handshake, the headers of a call, and one window of its message
MOST_STRANGERS = 256
MINUTE_S = 60.0

WORKERS = 1000 + MOST_WAITING
"""Most calls served at a time; further calls are refused. Flower's number, and the calls that wait for an order."""
MOST_FILES = 65_536
"""Open files that a server wants, as in the units of `deploy/`: each connection is one, and 1,024 are soon taken."""

SPARE_FILES = 256  # for everything but connections


class Connections:
    """The connections to a port of this process. A `peer` is named as in gRPC, for example `ipv4:10.0.0.9:53334`."""

    def __init__(self) -> None:
        self.port, self.most = 0, MOST_FILES
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._refused: Counter[str] = Counter()  # refused calls in this minute, by address
        self._doomed: set[str] = set()
        self._slow: set[str] = set()
        self._slowed: set[str] = set()
        self._opened: dict[str, float] = {}
        self._minute = 0.0
        self._something = threading.Event()
        self._rest = 0.0
        self._places = threading.BoundedSemaphore(MOST_HELD)

    def served(self, peer: str) -> None:
        """Record that a connection brought a call with a valid key."""
        self._known.add(peer)

    def is_open(self, peer: str) -> bool:
        """Return whether a connection stands, as far as this machine knows."""
        return peer in _sockets(self.port)

    def refused(self, context: grpc.ServicerContext) -> bool:
        """Record a refused call; return whether to report it, which is False once an address has too many."""
        peer = context.peer()
        if not _address(peer):
            return False  # the connection is gone
        with self._lock:
            self._refused[_address(peer)] += 1
            count = self._refused[_address(peer)]
        if count == PATIENCE + 1:
            say(f"{peer} floods the port with calls that are refused; they are answered late, or it is cut off")
        if count > PATIENCE and not self._hold(context, peer):
            with self._lock:
                self._doomed.add(peer)
                self._something.set()
        return count <= PATIENCE

    def _hold(self, context: grpc.ServicerContext, peer: str) -> bool:
        """Let a call wait, unless too many do; return whether it has waited."""
        is_over = threading.Event()
        if not self._places.acquire(blocking=False):
            return False
        with self._lock:
            self._slow.add(peer)
        try:
            return context.add_callback(is_over.set) and not is_over.wait(HELD_S)
        finally:
            self._places.release()

    def wait(self, seconds: float) -> None:
        """Wait until a connection must be closed, at most `seconds`, and longer if sweeping has become expensive."""
        time.sleep(self._rest)
        self._something.wait(seconds)

    def sweep(self) -> None:
        """Close the connections that exceed the limits."""
        self._something.clear()
        began, known = time.thread_time(), self._known.copy()  # first: who becomes known meanwhile may not be listed
        sockets, now = _sockets(self.port), time.monotonic()
        with self._lock:
            doomed, self._doomed = self._doomed & sockets.keys(), set()
            slow, self._slow = (self._slow & sockets.keys()) - self._known, set()
            if now - self._minute > MINUTE_S:
                self._minute = now
                self._refused.clear()
        self._opened = {peer: self._opened.get(peer, now) for peer in sockets}
        self._known -= known - sockets.keys()
        crowds, few = Counter[str](), 2 * len(sockets) > self.most
        for peer in sorted(sockets.keys() - self._known, key=lambda peer: -self._opened[peer]):
            crowds[_address(peer)] += 1
            if few and crowds[_address(peer)] == MOST_STRANGERS + 1:
                say(f"{peer} holds over {MOST_STRANGERS} connections without a call; the oldest are closed")
            is_over = now - self._opened[peer] > SILENT_S or _received(sockets[peer]) > STRANGER_BYTES
            if is_over or (few and crowds[_address(peer)] > MOST_STRANGERS):
                doomed.add(peer)
        for peer in doomed:
            _with(sockets[peer], peer, _cut)
        freed = self._slowed & self._known & sockets.keys()  # such as of a client whose clock is right now
        for peers, rate in ((slow, SLOW_BYTES), (freed, NO_LIMIT)):
            for peer in peers:
                pace = methodcaller("setsockopt", socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
                _with(sockets[peer], peer, pace)
        self._slowed = (self._slowed | slow) & sockets.keys() - freed
        self._rest = 30 * (time.thread_time() - began)


def _address(peer: str) -> str:
    return peer.rpartition(":")[0]


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of an open file descriptor, and leave it open; OSError if it is none, or closed by now."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _sockets(port: int) -> dict[str, int]:
    """Return the file descriptors of the connections to a port of this process, by peer."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), _borrowed(int(name)) as each:
            if (peer := _peer(each)) and each.getsockname()[1] == port:
                found[peer] = int(name)
    return found


def _received(descriptor: int) -> int:
    """Return how many bytes a connection has brought, as Linux counts them (`tcpi_bytes_received`); 0 elsewhere."""
    with suppress(OSError, AttributeError), _borrowed(descriptor) as each:
        return int.from_bytes(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[128:], sys.byteorder)
    return 0


def _peer(connection: socket.socket) -> str:
    """Return a connection's peer as gRPC names it, or "" for other kinds of sockets."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port, _, scope = (*connection.getpeername(), 0, 0)[:4]
    host = host.removeprefix("::ffff:") + (f"%25{scope}" if scope else "")  # of a link-local address
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _with(descriptor: int, peer: str, act: Callable[[socket.socket], None]) -> None:
    """Do something with a connection, unless the descriptor belongs to another one by now."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if _peer(connection) == peer:
            act(connection)


def _cut(connection: socket.socket) -> None:
    """End a connection, and read what has come, which gRPC would go on with."""
    connection.shutdown(socket.SHUT_RDWR)
    connection.recv(2**24, socket.MSG_DONTWAIT)


def options() -> list[tuple[str, int]]:
    """Return gRPC's options for the Fleet port."""
    return [
        ("grpc.max_send_message_length", largest_message()),
        ("grpc.max_receive_message_length", largest_message()),
        ("grpc.max_concurrent_streams", 32),
        ("grpc.max_metadata_size", 8 * 2**10),
        ("grpc.absolute_max_metadata_size", 16 * 2**10),
        # Refuse compressed messages: a few bytes would unpack to gigabytes.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
        # A fixed flow-control window: data that nobody reads stays small.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", int(1000 * SILENT_S)),
        ("grpc.max_connection_idle_ms", 300_000),
        # The grace lets the upload of a large object finish.
        ("grpc.max_connection_age_ms", 3_600_000),
        ("grpc.max_connection_age_grace_ms", 900_000),
        # Flower's value: some clouds end connections after four minutes of silence.
        ("grpc.keepalive_time_ms", 210_000),
        ("grpc.so_reuseport", 0),
    ]


def fleet_server(
    servicer: FleetServicer,
    server_address: str,
    certificates: tuple[bytes, bytes, bytes] | None,
    interceptors: Sequence[grpc.ServerInterceptor],
    connections: Connections,
) -> grpc.Server:
    """Return a Fleet server with our limits, not yet started, at `HOST:PORT`; in plain text without `certificates`.

    Raises:
        ConnectionFailed: the port is taken.
    """
    if is_port_in_use(server_address):
        raise ConnectionFailed(f"cannot listen at {server_address}: the port is taken; choose another one (--port)")
    import resource  # late: Windows has none, and only starts clients

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(MOST_FILES, most) if most != resource.RLIM_INFINITY else MOST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    connections.most = files
    server = grpc.server(
        ThreadPoolExecutor(WORKERS),
        interceptors=interceptors,
        options=[*options(), ("grpc.max_allowed_incoming_connections", files - SPARE_FILES)],
        maximum_concurrent_rpcs=WORKERS,
    )
    add_FleetServicer_to_server(servicer, server)
    if certificates:
        ca, certificate, key = certificates
        credentials = grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca)
        connections.port = server.add_secure_port(server_address, credentials)
    else:
        connections.port = server.add_insecure_port(server_address)
    return server
