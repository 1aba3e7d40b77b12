"""A member that attacks the server with a key that is in order, as a client of the digits.

* `mute`: announces replies and never uploads them;
* `speechless`: never even says who it is;
* `babble`: answers each order with an error of 0.9 MB;
* `nonsense`: answers each order with random bytes, and sends 20 replies to orders that nobody gave.

The server must lose no more than a moment to it.

    python -m siege.hostile_member HOST:PORT NAME [--how mute] [--ca CA.pem --key NAME.pem]
"""

import argparse
import os
from pathlib import Path
from typing import Any

import grpc
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.message_pb2 import PushObjectResponse

from hyperbloom import __version__
from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.internals import RetryInvoker, exponential
from hyperbloom.client.link.server import Link
from hyperbloom.common.secrecy.keys import read_private_key
from hyperbloom.common.wire.orders import Greeting, Introduction
from hyperbloom.common.wire.pack import pack

ATTACKS = ("mute", "speechless", "babble", "nonsense")
NOISE_BYTES, STRAYS = 900_000, 20


class _Mute(Connection):
    """A connection that uploads nothing while it is told not to."""

    uploads = True

    def send(self, reply: Message) -> None:
        """Send a reply, or announce it alone."""
        self._encloses = self._encloses and self.uploads
        super().send(reply)

    def _call(self, method: str, *args: Any, **more: Any) -> Any:
        if method == "PushObject" and not self.uploads:
            return PushObjectResponse(stored=True)
        return super()._call(method, *args, **more)


def attack(link: Link, name: str, how: str) -> None:
    """Wait for the server, and answer all its orders in this way, until the process is ended."""
    about = Introduction(name, f"secret of {name}", __version__, "M", (1, 8, 8), 10, 60, 20, 20, (), divisor=16.0)
    patient = RetryInvoker(exponential, grpc.RpcError, max_tries=None, max_time=None)
    connection = _Mute(link, patient)
    connection.open()
    while True:
        if (order := connection.receive()) is None:
            continue
        if order.metadata.message_type == Greeting.message_type and how != "speechless":
            connection.uploads = True
            connection.send(Message(pack(about), reply_to=order))
        elif how == "babble":
            connection.send(Message(Error(0, "x" * NOISE_BYTES), reply_to=order))
        else:
            connection.uploads = how == "nonsense"
            connection.send(_reply(order))
            for _ in range(STRAYS if how == "nonsense" else 0):
                stray = _reply(order)
                stray.metadata.__dict__["_reply_to_message_id"] = os.urandom(32).hex()
                connection.send(stray)


def _reply(order: Message) -> Message:
    return Message(RecordDict({"hyperbloom": ConfigRecord({"values": os.urandom(8)})}), reply_to=order)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("name")
    parser.add_argument("--how", choices=ATTACKS, default="mute")
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--key", type=Path)
    args = parser.parse_args()
    key = read_private_key(args.key, "--key") if args.key else None
    attack(Link(args.address, not args.ca, args.ca, key), args.name, args.how)
