"""A run on a SuperLink in this process, from the server's side: orders in, replies out, without a network."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from flwr.app import Message

from hyperbloom import __version__
from hyperbloom.server.broker import flower
from hyperbloom.server.broker.limits import Store
from hyperbloom.server.broker.state import State

LOOK_EVERY_S = 1.0
"""Seconds between looks at all orders: for those that expired, whose node is gone, or for whom nobody waits."""

_PROJECT = Path(__file__).parent.with_name("app.toml")
_CODE = b"""\
from flwr.serverapp import ServerApp
from hyperbloom.client.app import app

client = app
server = ServerApp()
"""


class Hosted:
    """A fresh run on a SuperLink in this process, as a `LiveGrid` uses it."""

    def __init__(self, state: State) -> None:
        self.run_id = _begin(state)
        self._state, self._store = state, cast(Store, state.object_store)
        self._looked = -LOOK_EVERY_S

    def nodes(self) -> Sequence[flower.node.NodeInfo]:
        """Return the nodes that are here."""
        return self._state.get_node_info(node_ids=list(self._state.get_nodes(self.run_id)))

    def send(self, messages: Sequence[Message]) -> list[str]:
        """Store orders, each with its objects first: a node may wait for it. Return their ids, "" if a node is gone."""
        ids = []
        for message in messages:
            missing = set(self._store.order(self.run_id, flower.objects.get_object_tree(message)))
            for each, item in flower.objects.get_all_nested_objects(message).items():
                if each in missing:
                    self._store.put(each, item.deflate())
            stored = self._state.store_message_ins(flower.remove_content_from_message(message))
            if not stored:
                self._store.delete(message.metadata.message_id)
            ids.append(stored or "")
        return ids

    def replies(self, orders: set[str]) -> list[tuple[flower.message.Metadata, flower.message.ObjectTree]]:
        """Return the replies to `orders` that were announced since the last call; the orders are closed."""
        asked, moment = self._state.take_replied(orders), time.monotonic()
        if moment - self._looked >= LOOK_EVERY_S:
            asked, self._looked = set(orders), moment
            with self._state.lock:
                forgotten = self._state.get_message_ids_from_run_id(self.run_id) - asked
                for order in forgotten:  # nobody will confirm a reply to it
                    self._store.delete(self._state.message_ins_id_to_message_res_id.get(order, ""))
                self._close(forgotten)
        if not asked:
            return []
        found = self._state.get_message_res(message_ids=asked, run_id=self.run_id)
        self._close({message.metadata.reply_to_message_id for message in found})
        announced = []
        for message in found:
            try:
                tree = self._store.get_object_tree(message.metadata.message_id)
            except flower.NoObjectInStoreError:
                continue  # its session expired; whoever waits for it hears of that by the next look
            announced.append((flower.message_to_proto(message).metadata, tree))
        return announced

    def _close(self, orders: set[str]) -> None:
        """Delete orders, with their objects if they are still there."""
        self._state.delete_messages(orders)
        for order in orders:
            self._store.delete(order)

    def content(self, name: str) -> bytes | None:
        """Return an object, b"" if it is not there yet, or None if it will never be."""
        return self._state.get_object(self.run_id, name)

    def confirm(self, message_id: str) -> None:
        """Delete a reply and its objects."""
        self._store.delete(message_id)

    def wait(self, seconds: float) -> None:
        """Wait until a reply is complete, at most `seconds`."""
        self._state.came.wait(seconds)
        self._state.came.clear()


def _begin(state: State) -> int:
    """Begin a run, whose task is this process; return its id."""
    run_id = state.create_run(
        fab_id="hyperbloom/hyperbloom",
        fab_version=__version__,
        fab_hash=state.store_fab(bundle()),
        override_config={},
        federation_id=flower.supercore.NOOP_FEDERATION_ID,
        federation_config=None,
        flwr_aid=flower.constant.NOOP_FLWR_AID,
        primary_task_type=flower.supercore.TaskType.SERVER_APP,
    )
    (run,) = state.get_run_info(run_ids=[run_id])
    assert run.primary_task_id is not None
    state.claim_task(run.primary_task_id)
    state.activate_task(run.primary_task_id)
    identity = flower.TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = run.primary_task_id, run_id, flower.constant.SUPERLINK_NODE_ID
    return run_id


def bundle() -> flower.Fab:
    """Return the app bundle for stock SuperNodes in Flower's format: two files, always the same bytes."""
    # No dependencies: a SuperNode of flwr 1.40 and later would fetch them, and its ClientApp has them installed.
    about = {"name": "hyperbloom", "module": "hyperbloom_bundle", "version": __version__, "needs": ""}
    project = _PROJECT.read_text(encoding="utf-8").format(**about, keys="")
    content, *_ = flower.build_fab_from_files({"pyproject.toml": project.encode(), "hyperbloom_bundle.py": _CODE})
    return flower.Fab(hashlib.sha256(content).hexdigest(), content, {})
