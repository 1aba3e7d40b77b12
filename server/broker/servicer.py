"""The calls of clients: Flower's own servicer, within our limits and with fewer trips.

Where a client's call for an order may wait and objects travel inside the messages (`common/enclosed.py`), a round takes
two calls: one brings the order, the other the answer. Objects that do not fit, and all of a stock SuperNode, take calls
of their own.
"""

from typing import cast

from grpc import ServicerContext

from hyperbloom.common.enclosed import WAIT, enclose, take_enclosed
from hyperbloom.common.handout import LIST
from hyperbloom.server.broker import flower
from hyperbloom.server.broker.flower import fleet
from hyperbloom.server.broker.handout import Handout
from hyperbloom.server.broker.limits import MOST_OBJECTS, MOST_REPLIES, Reply, Store
from hyperbloom.server.broker.state import State

LONGEST_WAIT_S = 60.0


class Fleet(flower.FleetServicer):
    """Flower's servicer with limits."""

    def __init__(self, factory: flower.LinkStateFactory, has_keys: bool, handout: Handout | None = None) -> None:
        super().__init__(factory, factory.objectstore_factory, has_keys)
        self.handout = handout
        self.state = cast(State, factory.state())
        self.store = cast(Store, self.state.object_store)
        self._replies: dict[str, Reply] = {}  # by session

    def PullMessages(self, request: fleet.PullMessagesRequest, context: ServicerContext) -> fleet.PullMessagesResponse:
        """Return the next order of a node, with its objects if the caller takes them so."""
        seconds = _wait(context)
        if seconds is None:
            return super().PullMessages(request, context)
        if not self.state.wait_for_order(request.node.node_id, seconds, lambda bell: context.add_callback(bell.set)):
            return fleet.PullMessagesResponse()
        response = super().PullMessages(request, context)
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            names = [node.object_id for node in flower.objects.iterate_object_tree(tree)]
            enclose(message, ((name, self.store.get(name) or b"") for name in names))
        return response

    def PushMessages(self, request: fleet.PushMessagesRequest, context: ServicerContext) -> fleet.PushMessagesResponse:
        """Accept the announcement of a reply; cut one with too many objects so that the excess still shows."""
        enclosed = take_enclosed(request.messages_list[0]) if request.messages_list else {}
        for message, tree in zip(request.messages_list, request.message_object_trees, strict=True):
            self.state.note_answer(message.metadata.src_node_id, message.metadata.reply_to_message_id)
            # All objects hang on the reply itself: what hung on nothing would stay when the reply is deleted.
            root, ids = message.metadata.message_id, [x.object_id for x in flower.objects.iterate_object_tree(tree)]
            leaves = [flower.message.ObjectTree(object_id=each) for each in dict.fromkeys(ids) if each != root]
            known = self.store.store.get(root)
            if known and known.child_object_ids != [leaf.object_id for leaf in leaves]:
                leaves = []  # it takes another object's name, with which nothing would ever delete its parts
            tree.CopyFrom(flower.message.ObjectTree(object_id=root, children=leaves[:MOST_OBJECTS]))
        response = super().PushMessages(request, context)
        if response.objects_to_push:
            self._replies[response.session_id] = Reply(len(response.objects_to_push))
            if len(self._replies) > MOST_REPLIES:  # the oldest was abandoned long ago
                self._replies.pop(next(iter(self._replies)), None)
            run_id, session = request.messages_list[0].metadata.run_id, response.session_id
            for name in [each for each in response.objects_to_push if each in enclosed]:  # stored as if pushed by calls
                response.objects_to_push.remove(name)
                about = {"run_id": run_id, "session_id": session, "object_id": name}
                self.PushObject(flower.message.PushObjectRequest(**about, object_content=enclosed.pop(name)), context)
        else:  # nothing to upload; Flower would keep the session until the run ends
            self.state._cleanup_push_session(response.session_id, cleanup_messages=False)
            self.state.came.set()
        return response

    def PullObject(
        self, request: flower.message.PullObjectRequest, context: ServicerContext
    ) -> flower.message.PullObjectResponse:
        """Return an object of an order, or a piece of the backbone."""
        if not request.object_id.startswith(LIST):
            return super().PullObject(request, context)
        piece = self.handout.answer(request.object_id, request.node.node_id) if self.handout else None
        found, part = piece is not None, piece or b""
        return flower.message.PullObjectResponse(object_found=found, object_available=found, object_content=part)

    def PushObject(
        self, request: flower.message.PushObjectRequest, context: ServicerContext
    ) -> flower.message.PushObjectResponse:
        """Accept an object of an announced reply."""
        reply = self._replies.get(request.session_id)
        if reply is None:
            return flower.message.PushObjectResponse(stored=False)
        with self.store.upload(reply):
            response = super().PushObject(request, context)
        if response.stored:
            reply.missing -= 1
            if reply.missing <= 0:
                self._replies.pop(request.session_id, None)
                self.state.came.set()
        return response


def _wait(context: ServicerContext) -> float | None:
    """Return how many seconds a call may wait, or None for a client that is not ours."""
    try:
        seconds = float(flower.get_metadata_str(context.invocation_metadata(), WAIT) or "")
    except ValueError:
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S)
