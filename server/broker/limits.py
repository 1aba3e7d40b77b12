"""Limits on the SuperLink's memory that clients can use.

Flower 1.39 accepts 2 GB in every call to the Fleet port, and stores whatever was announced. These limits apply here:

* gRPC refuses a message of over `largest_message()` bytes as soon as it has read the five bytes of its length.
* The store discards an object of a reply over `reply_limit`, and notes `TOO_LARGE` instead. The server, which collects
  the reply, can then count it against its sender.
* All objects of a reply together may have twice that size. A reply may have at most `MOST_OBJECTS` + 1 objects.
* An announcement that answers no order is not stored, nor the parts of one in the name of another object. Objects that
  are announced as parts of each other are walked once. A reply to an order that is forgotten is deleted.

Flower accepts one reply to each order, from the order's node. So the open orders bound what clients have in the store.
`servicer.py` applies the limits to calls, and `door.py` bounds what clients have in calls.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hyperbloom.common.errors import ConfigError
from hyperbloom.server.broker.flower import InMemoryObjectStore, NoObjectInStoreError, message, objects

LARGEST_VARIABLE, LARGEST_MIB = "HYPERBLOOM_MESSAGE_MIB", 512

MOST_OBJECTS = 64
"""Most objects of a reply; ours have three."""
MOST_WORDS = 2**20
"""Most bytes of a call that uploads no object."""

MOST_REPLIES = 10_000  # under upload

TOO_LARGE = b"too large"
"""Content that the store keeps in place of a too large object."""
SMALLEST_LIMIT = 16 * 2**20
"""Bytes that any reply may have; twice the size of the largest order comes on top."""


def largest_message() -> int:
    """Return the most bytes of a message: 512 MiB, or `$HYPERBLOOM_MESSAGE_MIB`; ConfigError unless it is 1 to 2047."""
    text = os.environ.get(LARGEST_VARIABLE, "") or str(LARGEST_MIB)
    if not text.isdecimal() or not 1 <= int(text) <= 2047:
        raise ConfigError(f"{LARGEST_VARIABLE}: expected MiB from 1 to 2047, found {text!r}")
    return int(text) * 2**20


def reply_limit(largest_order: int) -> int:
    """Return the most bytes of a reply, given the bytes of the largest order."""
    return SMALLEST_LIMIT + 2 * largest_order


@dataclass
class Reply:
    """A reply under upload: how many of its objects are missing, and the bytes of the others."""

    missing: int
    size: int = 0


_call = threading.local()  # `reply`: to which the Fleet call in this thread uploads; the server's calls have none


class Store(InMemoryObjectStore):
    """Flower's object store, limited to the size of a reply for each upload of a client."""

    largest = 0  # bytes of the server's largest object

    @contextmanager
    def upload(self, reply: Reply) -> Iterator[None]:
        """Count the objects that this thread puts to a client's reply."""
        _call.reply = reply
        try:
            yield
        finally:
            _call.reply = None

    def order(self, run_id: int, tree: message.ObjectTree) -> list[str]:
        """Register the objects of an order, each with its own parts; return those that are missing.

        A client may have announced one of them in a reply, with parts for which whoever gets the order would ask.
        """
        with self.lock_store:
            missing = self.preregister(run_id, tree)
            for node in objects.iterate_object_tree(tree):
                entry, parts = self.store[node.object_id], [child.object_id for child in node.children]
                before, entry.child_object_ids = entry.child_object_ids, parts
                if parts != before:
                    for name in parts:
                        self.store[name].ref_count += 1
                    for name in before:
                        self.store[name].ref_count -= 1
                        self.delete(name)
            return missing

    def put(self, object_id: str, object_content: bytes) -> None:
        """Store an object. If a client's object alone is too large, store `TOO_LARGE` instead.

        Raises:
            ValueError: the whole reply is too large, or Flower rejects the object.
        """
        size, reply = len(object_content), getattr(_call, "reply", None)
        if reply is None:  # from the server, which has just computed the id
            with self.lock_store:
                announced = self.store[object_id]
                announced.content, announced.is_available = object_content, True
            self.largest = max(self.largest, size)
            return
        limit = reply_limit(self.largest)
        if reply.size + size > 2 * limit and size <= limit:
            raise ValueError(f"the reply has over {2 * limit} bytes")
        if size <= limit:
            # Another reply had an equal object: the server may have taken this reply with that one, and deleted both.
            with suppress(NoObjectInStoreError):
                super().put(object_id, object_content)
            reply.size += size
            return
        # Check the hash, or a client could make an object unreadable that another client shares.
        if self.verify and objects.get_object_id(object_content) != object_id:
            raise ValueError(f"object {object_id} has another content")
        with self.lock_store:
            entry = self.store.get(object_id)
            if entry and not entry.is_available:
                entry.content, entry.is_available = TOO_LARGE, True

    def get_object_tree(self, object_id: str) -> message.ObjectTree:
        """Return an object's tree with each object once, cut off as soon as it shows that there are too many.

        Flower's own walk follows every path to an object: an announcement of 61 objects can have 2^30 paths.

        Raises:
            NoObjectInStoreError: an object is missing.
        """
        seen: set[str] = set()

        def tree(name: str) -> message.ObjectTree:
            seen.add(name)
            entry = self.store.get(name)
            if entry is None:
                raise NoObjectInStoreError(f"object {name} was not announced")
            children = (child for child in entry.child_object_ids if child not in seen and len(seen) <= MOST_OBJECTS)
            return message.ObjectTree(object_id=name, children=[tree(child) for child in children])

        with self.lock_store:
            return tree(object_id)
