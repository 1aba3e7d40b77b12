"""Objects of a message that travel inside the message, between our client and our server.

Flower announces a message without content, and carries each of its objects in a call of its own. Here the objects that
fit travel in the announcement's empty content. The header `WAIT` tells a server that the caller understands this.
"""

from collections.abc import Iterable
from typing import Any

WAIT = "hyperbloom-wait"
"""Header of a call for an order: the seconds that the server may wait for one before it answers."""
PROCESS = "hyperbloom-process"
"""Header of every call: what tells a process of a client from another one with the same key."""
TAKEN = "another process with this client's key is here"
"""The server's text for a call of a second process."""
MOST_ENCLOSED = 768 * 2**10
"""Most bytes of enclosed objects; the server reads no message of over a megabyte."""

_KEY = "objects"


def enclose(message: Any, objects: Iterable[tuple[str, bytes]]) -> None:
    """Put those objects into Flower's announcement that fit; an empty content is one that is not there yet."""
    room = MOST_ENCLOSED
    record = message.content.items.add(key=_KEY).config_record
    for name, content in objects:
        if content and len(content) <= room:
            record.items.add(key=name).value.bytes = content
            room -= len(content)


def take_enclosed(message: Any) -> dict[str, bytes]:
    """Take the objects out of a message; return their contents by name, which nobody has checked."""
    items = [item for record in message.content.items for item in record.config_record.items]
    if message.HasField("error"):
        message.ClearField("content")
    elif message.HasField("content"):
        del message.content.items[:]
    return {item.key: item.value.bytes for item in items}
