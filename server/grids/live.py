"""Flower's grid, without waiting for incomplete replies.

A client announces a reply and then uploads its objects. Until all have arrived, the reply is put aside, and
`pull_messages` checks it again later while other replies pass. Only the names of its objects, at most 64, are kept
here, and there is at most one reply to each open order.

Progress is measured in whole objects. Our replies have one large object, so each upload gets an allowance that grows
with its order: the time of the order's bytes at 1 Mbit/s, up to Flower's own limit for an object. Without a new object

* for `STALL_S` and the allowance, the reply is in `stalled`, and the round continues without it;
* for `UPLOAD_DEADLINE_S` and the allowance, it becomes an error message (`UNREADABLE`), which counts as a lie.

The whole upload may take twice as long, so an occasional object does not keep it alive.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from flwr.app import Error, Message, Metadata, RecordDict

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.wire.pack import weigh
from hyperbloom.server.broker import flower, limits
from hyperbloom.server.loop.post import UNREADABLE

if TYPE_CHECKING:
    from hyperbloom.server.broker.hosted import Hosted
    from hyperbloom.server.grids.attached import Attached

STALL_S, UPLOAD_DEADLINE_S = 5.0, 30.0
SLOWEST_LINE = 2**17  # bytes per second
LONGEST_ALLOWANCE_S = flower.supercore.OBJECT_PUSH_SESSION_TTL_SECONDS - UPLOAD_DEADLINE_S
RAREST_LOOK_S = 1.0


@dataclass
class _Upload:
    """An announced reply; `missing` names the objects that have not come. Times are monotonic seconds."""

    announced: flower.message.Metadata
    objects: list[str]
    missing: list[str]
    allowance: float
    begun: float
    progress: float
    next_look: float
    size: int = 0  # bytes of the objects that came

    def is_overdue(self, patience: float) -> bool:
        """Return whether no new object came for longer than `patience` seconds and the allowance."""
        moment, longest = time.monotonic(), patience + self.allowance
        return moment - self.progress > longest or moment - self.begun > 2 * longest


class _Refused(Exception):
    """A reply cannot be used; the message says why."""


class LiveGrid:
    """Flower's grid, but it pulls replies as soon as they are complete."""

    def __init__(self, superlink: "Hosted | Attached") -> None:
        self._superlink = superlink
        self._largest = 0  # bytes of the largest order
        self._sizes: Mapping[str, int] = {}  # bytes of the open orders, by message id
        self._aside: Mapping[str, _Upload] = {}  # by id of the order
        self._activated: Mapping[int, str] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push messages, the largest of which limits replies; ConfigError if one is above the network's limit."""
        outgoing, most = list(messages), limits.largest_message()
        sizes = [weigh(message.content) for message in outgoing]
        self._largest = max([self._largest, *sizes])
        if self._largest + limits.MOST_WORDS > most:
            found, allowed = (round(size / 2**20) for size in (self._largest, most))
            raise ConfigError(
                f"an order has {found} MiB, and a message may have {allowed} MiB; set {limits.LARGEST_VARIABLE} "
                "to more, up to 2047"
            )
        with flower.objects.no_object_id_recompute():
            for message in outgoing:
                message.metadata.__dict__["_message_id"] = message.object_id
            ids = self._superlink.send(outgoing)
        self._sizes = {**self._sizes, **dict(zip(ids, sizes, strict=True))}
        return ids

    def get_nodes(self) -> list[flower.node.NodeInfo]:
        """Return the nodes that are here.

        If a client comes back with its key before Flower misses its node, the node is left out once. It is another
        process now, which does not know the earlier orders.
        """
        before, nodes = self._activated, self._superlink.nodes()
        self._activated = {node.node_id: node.last_activated_at for node in nodes}
        return [node for node in nodes if before.get(node.node_id, node.last_activated_at) == node.last_activated_at]

    def wait(self, seconds: float) -> None:
        """Wait until there may be a reply, at most `seconds`."""
        self._superlink.wait(seconds)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the complete replies to `message_ids`, without waiting for others.

        Pass all orders whose replies are wanted: replies to others that were put aside are dropped. A reply becomes an
        error message (`UNREADABLE`) that names the order if it is too late, too large, no message, or not the announced
        one.
        """
        wanted = set(message_ids)
        for order in self._aside.keys() - wanted:
            self._superlink.confirm(self._aside[order].announced.message_id)
        self._sizes = {order: size for order, size in self._sizes.items() if order in wanted}
        uploads = {order: upload for order, upload in self._aside.items() if order in wanted}
        # The SuperLink forgets an order once it has handed over the announcement of its reply.
        uploads |= self._announced(wanted - uploads.keys())
        replies = {order: self._reply(order, upload) for order, upload in uploads.items()}
        self._aside = {order: upload for order, upload in uploads.items() if replies[order] is None}
        return [reply for reply in replies.values() if reply is not None]

    def stalled(self) -> set[str]:
        """Return the orders whose replies were announced but do not arrive."""
        return {order for order, upload in self._aside.items() if upload.is_overdue(STALL_S)}

    def _announced(self, orders: set[str]) -> dict[str, _Upload]:
        """Return the replies to some orders that were announced since the last call."""
        if not orders:
            return {}
        moment, uploads = time.monotonic(), {}
        for metadata, tree in self._superlink.replies(orders):
            order = metadata.reply_to_message_id
            objects = [node.object_id for node in flower.objects.iterate_object_tree(tree)]
            allowance = min(self._sizes.get(order, 0) / SLOWEST_LINE, LONGEST_ALLOWANCE_S)
            if order in orders:
                uploads[order] = _Upload(metadata, objects, list(objects), allowance, moment, moment, moment)
            else:  # without keys, anybody may send messages that answer nothing
                self._superlink.confirm(metadata.message_id)
        return uploads

    def _reply(self, order: str, upload: _Upload) -> Message | None:
        """Return a complete reply, an error message if it can never be used, or None if it is still incomplete."""
        moment = time.monotonic()
        if moment < upload.next_look:
            return None
        try:
            contents = self._pull(upload)
            if contents is None:
                upload.next_look = moment + min((moment - upload.begun) / 10, RAREST_LOOK_S)
                return None
            reply = _inflated(upload.announced, contents)
        except _Refused as refusal:
            reply = _unreadable(self._superlink.run_id, order, str(refusal))
        self._superlink.confirm(upload.announced.message_id)
        return reply

    def _pull(self, upload: _Upload) -> dict[str, bytes] | None:
        """Return the contents of a reply's objects by name, or None while one is missing.

        Objects are pulled in order up to the first missing one. The earlier ones are not kept, but pulled again later.
        """
        count, limit, contents = len(upload.objects), limits.reply_limit(self._largest), {}
        if count > limits.MOST_OBJECTS:
            raise _Refused(f"expected a reply of at most {limits.MOST_OBJECTS} objects, found {count}")
        unfinished = f"a reply was announced, but {count - len(upload.missing)} of {count} objects came"
        while upload.missing:
            content = self._superlink.content(upload.missing[0])
            if content is None or (not content and upload.is_overdue(UPLOAD_DEADLINE_S)):
                raise _Refused(unfinished)
            if not content:
                return None
            upload.size += limit + 1 if content == limits.TOO_LARGE else len(content)
            if upload.size > limit:
                raise _Refused(f"expected a reply of at most {limit} bytes, found {upload.size} and more")
            contents[upload.missing.pop(0)] = content
            upload.progress = time.monotonic()
        earlier = {name: self._superlink.content(name) for name in upload.objects if name not in contents}
        return contents | {name: content or b"" for name, content in earlier.items()}


def _inflated(announced: flower.message.Metadata, contents: dict[str, bytes]) -> Message:
    """Return the message that a reply's objects form; _Refused if they form no message, or not the announced one."""
    try:
        message = cast(Message, flower.inflation.inflate_object_from_contents(announced.message_id, contents))
        said = message.metadata
        same = said.src_node_id == announced.src_node_id and said.reply_to_message_id == announced.reply_to_message_id
        same &= message.has_error() or isinstance(message.content, RecordDict)
    except Exception as error:  # Flower's parsers may raise anything for hostile bytes
        raise _Refused(f"the reply is no message ({type(error).__name__})") from None
    if not same:
        # The SuperLink checks only the announcement, which also decides the order that is answered.
        raise _Refused("the reply is another message than was announced")
    message.metadata.__dict__["_message_id"] = announced.message_id
    return message


def _unreadable(run_id: int, order: str, reason: str) -> Message:
    """Return an error message in place of a reply that cannot be used."""
    metadata = Metadata(
        run_id=run_id,
        message_id="",
        src_node_id=flower.constant.SUPERLINK_NODE_ID,
        dst_node_id=flower.constant.SUPERLINK_NODE_ID,
        reply_to_message_id=order,
        group_id="",
        created_at=flower.now().timestamp(),
        ttl=0,
        message_type=flower.supercore.SYSTEM_MESSAGE_TYPE,
    )
    return flower.make_message(metadata=metadata, error=Error(UNREADABLE, reason))
