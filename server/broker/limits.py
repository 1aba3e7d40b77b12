"""How much of the SuperLink's memory its clients can take.

Flower 1.39 lets every call to the Fleet port have 2 GB, and keeps whatever was announced. Here

* gRPC refuses a message of over `largest_message()` bytes when it has read the five bytes that say how long it is;
* an object of a reply over `reply_limit` is thrown away as it comes: the store notes `TOO_LARGE` in its place, so that
  the server, which collects the reply, can count it against its sender;
* all objects of a reply together may have twice that, and a reply may be announced as `MOST_OBJECTS` objects and one;
* of an announcement that answers no order nothing is kept, and objects that are announced as parts of each other are
  walked once.

Flower takes one reply to each order, from the node that it went to. So what clients have in the store is bounded by the
orders that are out. `superlink_door.py` bounds what they have in calls.

Internals used: `FleetServicer`, `InMemoryObjectStore`.
"""

import os
import threading
from dataclasses import dataclass

import grpc
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

from hyperbloom.common.errors import ConfigError

__all__ = [
    "LARGEST_VARIABLE",
    "MOST_OBJECTS",
    "MOST_WORDS",
    "TOO_LARGE",
    "Fleet",
    "Store",
    "largest_message",
    "reply_limit",
]

LARGEST_VARIABLE, LARGEST_MIB = "HYPERBLOOM_MESSAGE_MIB", 512

MOST_OBJECTS = 64
"""Objects of a reply: ours have three."""

MOST_WORDS = 2**20
"""Bytes of a call that uploads no object."""

MOST_REPLIES = 10_000  # that are being uploaded

TOO_LARGE = b"too large"
"""What the store holds in place of an object that is."""

SMALLEST_LIMIT = 16 * 2**20
"""Bytes that a reply may have, and twice those of the largest order beside."""


def largest_message() -> int:
    """Return the bytes that one message over the network may have: 512 MiB, or `$HYPERBLOOM_MESSAGE_MIB`.

    Raises:
        ConfigError: that is no number from 1 to 2047.
    """
    text = os.environ.get(LARGEST_VARIABLE, "") or str(LARGEST_MIB)
    if not text.isdecimal() or not 1 <= int(text) <= 2047:
        raise ConfigError(f"{LARGEST_VARIABLE}: expected MiB from 1 to 2047, found {text!r}")
    return int(text) * 2**20


def reply_limit(largest_order: int) -> int:
    """Return the bytes that a reply may have when the largest order had so many."""
    return SMALLEST_LIMIT + 2 * largest_order


@dataclass
class _Reply:
    """One that is being uploaded."""

    missing: int
    size: int = 0


_call = threading.local()  # `reply`: whose object the Fleet call in this thread brings; the server's calls have none


class Store(InMemoryObjectStore):
    """Flower's store of objects, which keeps no more of a client's than a reply may have."""

    largest = 0  # bytes of an object that the server put here

    def put(self, object_id: str, object_content: bytes) -> None:
        """Keep an object, or, if a client's is too large by itself, that it was.

        Raises:
            ValueError: its reply is too large, or Flower does not take it.
        """
        size, reply = len(object_content), getattr(_call, "reply", None)
        if reply is None:
            super().put(object_id, object_content)
            self.largest = max(self.largest, size)
            return
        limit = reply_limit(self.largest)
        if reply.size + size > 2 * limit and size <= limit:
            raise ValueError(f"the reply has over {2 * limit} bytes")
        if size <= limit:
            super().put(object_id, object_content)
            reply.size += size
            return
        # Or a client could make another's object unreadable, one that they have in common.
        if self.verify and get_object_id(object_content) != object_id:
            raise ValueError(f"object {object_id} has another content")
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry and not entry.is_available:
                entry.content, entry.is_available = TOO_LARGE, True

    def get_object_tree(self, object_id: str) -> ObjectTree:
        """Return an object and those under it, each once, and no more than show that they are too many.

        Flower's own walk goes every way to an object: the 61 objects of an announcement can have 2^30 of them.

        Raises:
            NoObjectInStoreError: one is missing.
        """
        seen: set[str] = set()

        def tree(name: str) -> ObjectTree:
            seen.add(name)
            entry = self.store.get(name)
            if entry is None:
                raise NoObjectInStoreError(f"object {name} was not announced")
            children = (child for child in entry.child_object_ids if child not in seen and len(seen) <= MOST_OBJECTS)
            return ObjectTree(object_id=name, children=[tree(child) for child in children])

        with self.lock_store:
            return tree(object_id)


class Fleet(FleetServicer):
    """Flower's answers to clients' calls, within the limits above."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take Flower's arguments."""
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._replies: dict[str, _Reply] = {}  # by session

    def PushMessages(self, request: PushMessagesRequest, context: grpc.ServicerContext) -> PushMessagesResponse:
        """Take the announcement of a reply; of too many objects as many as show that there are."""
        for tree in request.message_object_trees:
            ids = [node.object_id for node in iterate_object_tree(tree)]
            if len(ids) > MOST_OBJECTS:
                leaves = [ObjectTree(object_id=each) for each in ids[:MOST_OBJECTS]]
                tree.CopyFrom(ObjectTree(object_id=tree.object_id, children=leaves))
        response = super().PushMessages(request, context)
        if response.objects_to_push:
            self._replies[response.session_id] = _Reply(len(response.objects_to_push))
            if len(self._replies) > MOST_REPLIES:  # the oldest was given up long ago
                self._replies.pop(next(iter(self._replies)), None)
        else:  # to no order, or of objects that are all there: Flower would keep the session until the run ends
            self.state_factory.state()._cleanup_push_session(response.session_id, cleanup_messages=False)
        return response

    def PushObject(self, request: PushObjectRequest, context: grpc.ServicerContext) -> PushObjectResponse:
        """Take an object of a reply that was announced."""
        reply = self._replies.get(request.session_id)
        if reply is None:
            return PushObjectResponse(stored=False)
        _call.reply = reply
        try:
            response = super().PushObject(request, context)
        finally:
            _call.reply = None
        if response.stored:
            reply.missing -= 1
            if reply.missing <= 0:
                self._replies.pop(request.session_id, None)
        return response
