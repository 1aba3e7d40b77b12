"""A member that announces replies and never uploads them: it joins as a client of the digits and then sends nothing.

The server must lose no more than a moment to it. With --speechless it does not even say who it is.

    python -m siege.hostile_member HOST:PORT NAME [--speechless]
"""

import argparse
import time

import grpc
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.client.grpc_rere_client.connection import grpc_request_response
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.retry.retry_invoker import exponential
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom import __version__
from hyperbloom.common.wire.orders import Greeting, Introduction
from hyperbloom.common.wire.pack import pack

__all__ = ["attack"]

PAUSE_S = 0.01


def attack(address: str, name: str, speechless: bool) -> None:
    """Wait for the server, and answer all its orders with announcements alone, until the process is ended."""
    about = Introduction(name, f"secret of {name}", __version__, "M", (1, 8, 8), 10, 60, 20, 20, (), divisor=16.0)
    patient = RetryInvoker(exponential, grpc.RpcError, max_tries=None, max_time=None)
    with grpc_request_response(address, True, patient) as (node, receive, send, _, _, _, push, _):
        while True:
            received = receive()
            if received is None:
                time.sleep(PAUSE_S)
                continue
            order = received[0]
            TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, order.metadata.run_id, node
            introduces = order.metadata.message_type == Greeting.message_type and not speechless
            content = pack(about) if introduces else RecordDict({"hyperbloom": ConfigRecord({"values": b"never"})})
            reply = Message(content, reply_to=order)
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                wanted, session = send(reply, get_object_tree(reply), 0.0)
                for object_id, each in get_all_nested_objects(reply).items():
                    if introduces and object_id in wanted:
                        push(order.metadata.run_id, session, object_id, each.deflate())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("name")
    parser.add_argument("--speechless", action="store_true")
    args = parser.parse_args()
    attack(args.address, args.name, args.speechless)
