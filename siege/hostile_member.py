"""A member that announces replies and never uploads them: it joins as a client of the digits and then sends nothing.

The server must lose no more than a moment to it. With --speechless it does not even say who it is.

    python -m siege.hostile_member HOST:PORT NAME [--speechless]
"""

import argparse
from typing import Any

import grpc
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PushObjectResponse

from hyperbloom import __version__
from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.internals import RetryInvoker, exponential
from hyperbloom.client.link.server import Link
from hyperbloom.common.wire.orders import Greeting, Introduction
from hyperbloom.common.wire.pack import pack


class _Mute(Connection):
    """A connection that uploads nothing while it is told not to."""

    uploads = True

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply, or announce it alone."""
        self._encloses = self._encloses and self.uploads
        super().send(reply, seconds)

    def _call(self, method: str, *args: Any, **more: Any) -> Any:
        if method == "PushObject" and not self.uploads:
            return PushObjectResponse(stored=True)
        return super()._call(method, *args, **more)


def attack(address: str, name: str, speechless: bool) -> None:
    """Wait for the server, and answer all its orders with announcements alone, until the process is ended."""
    about = Introduction(name, f"secret of {name}", __version__, "M", (1, 8, 8), 10, 60, 20, 20, (), divisor=16.0)
    patient = RetryInvoker(exponential, grpc.RpcError, max_tries=None, max_time=None)
    connection = _Mute(Link(address, insecure=True), patient)
    connection.open()
    while True:
        if (order := connection.receive()) is None:
            continue
        connection.uploads = order.metadata.message_type == Greeting.message_type and not speechless
        content = pack(about) if connection.uploads else RecordDict({"hyperbloom": ConfigRecord({"values": b"never"})})
        connection.send(Message(content, reply_to=order), 0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("name")
    parser.add_argument("--speechless", action="store_true")
    args = parser.parse_args()
    attack(args.address, args.name, args.speechless)
