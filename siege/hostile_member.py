"""A member that attacks the server with a key that is in order, as a client of the digits.

* `mute`: announces replies and never uploads them;
* `speechless`: never even says who it is;
* `babble`: answers each order with an error of 0.9 MB;
* `nonsense`: answers each order with random bytes, and sends 20 replies to orders that nobody gave;
* `litter`: says politely that it cannot train, and leaves 8 MiB with each reply, of which the reply is a part.

The server must lose no more than a moment to it.

    python -m siege.hostile_member HOST:PORT NAME [--how mute] [--ca CA.pem --key NAME.pem]
"""

import argparse
import os
from pathlib import Path
from typing import Any

import grpc
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_object_id

from hyperbloom import __version__
from hyperbloom.client.link.connection import Connection
from hyperbloom.client.link.internals import RetryInvoker, exponential
from hyperbloom.client.link.server import Link
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy.keys import read_private_key
from hyperbloom.common.wire.orders import Failed, Greeting, Introduction
from hyperbloom.common.wire.pack import pack

ATTACKS = ("mute", "speechless", "babble", "nonsense", "litter")
NOISE_BYTES, STRAYS, LITTER_BYTES = 900_000, 20, 8 * 2**20


class _Hostile(Connection):
    """A connection that uploads nothing while it is told not to, or more than belongs to a reply."""

    uploads = True
    litters = False

    def send(self, reply: Message) -> None:
        """Send a reply, or announce it alone."""
        self._encloses = self._encloses and self.uploads
        super().send(reply)

    def _call(self, method: str, *args: Any, **more: Any) -> Any:
        if method == "PushObject" and not self.uploads:
            return PushObjectResponse(stored=True)
        if method == "PushMessages" and self.litters:
            return self._litter(*args)
        return super()._call(method, *args, **more)

    def _litter(self, request: PushMessagesRequest) -> PushMessagesResponse:
        """Announce a reply as a part of something else, and upload that, too."""
        content = ConfigRecord({"values": os.urandom(16) + bytes(LITTER_BYTES)}).deflate()
        (tree,), whole = request.message_object_trees, get_object_id(content)
        tree.CopyFrom(ObjectTree(object_id=whole, children=[tree]))
        said: PushMessagesResponse = super()._call("PushMessages", request)
        if whole in said.objects_to_push:
            said.objects_to_push.remove(whole)
            about = {"node": self._node, "run_id": request.messages_list[0].metadata.run_id}
            about |= {"session_id": said.session_id, "object_id": whole, "object_content": content}
            super()._call("PushObject", PushObjectRequest(**about))
        return said


def attack(link: Link, name: str, how: str) -> None:
    """Wait for the server, and answer all its orders in this way, until the process is ended."""
    about = Introduction(name, f"secret of {name}", __version__, "M", (1, 8, 8), 10, 60, 20, 20, (), divisor=16.0)
    patient = RetryInvoker(exponential, grpc.RpcError, max_tries=None, max_time=None)
    connection = _Hostile(link, patient)
    connection.open()
    while True:
        if (order := connection.receive()) is None:
            continue
        if order.metadata.message_type == Greeting.message_type and how != "speechless":
            connection.uploads = True
            connection.send(Message(pack(about), reply_to=order))
        elif how == "litter":
            connection.litters = True
            connection.send(Message(pack(Failed(Reason.FAILED, "not now")), reply_to=order))
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
