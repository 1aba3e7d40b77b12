"""What the server needs of Flower's internals: that it is there, and does what the server takes for granted."""

import inspect

import pytest
from flwr.proto.message_pb2 import Message as ProtoMessage

from hyperbloom.server.broker.flower import FleetServicer, InMemoryLinkState, InMemoryObjectStore
from hyperbloom.server.broker.limits import Store
from hyperbloom.server.broker.state import State


@pytest.mark.parametrize(("ours", "flowers"), [(State, InMemoryLinkState), (Store, InMemoryObjectStore)])
def test_each_method_that_is_replaced_has_the_same_parameters(ours: type, flowers: type) -> None:
    replaced = [name for name in vars(ours) if name in dir(flowers) and callable(getattr(ours, name))]
    for name in replaced:
        if name not in ("__init__", "__doc__", "__module__"):
            expected = list(inspect.signature(getattr(flowers, name)).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name
    assert len([name for name in replaced if not name.startswith("__")]) >= 2


def test_what_is_replaced_is_what_flower_calls() -> None:
    """Flower's own methods must go through the replaced ones, or a message would reach nobody's queue."""
    stores = inspect.getsource(InMemoryLinkState.store_message_and_object_tree)
    assert "self.store_message_ins(" in stores and "self.store_message_res(" in stores
    assert "_cleanup_expired_task_tokens_locked" in inspect.getsource(InMemoryLinkState.get_run_status)
    assert {"PullMessages", "PushMessages", "PushObject"} <= set(vars(FleetServicer))


def test_the_content_of_an_announcement_can_hold_objects() -> None:
    message = ProtoMessage()
    message.content.items.add(key="objects").config_record.items.add(key="name").value.bytes = b"content"
    assert ProtoMessage.FromString(message.SerializeToString()) == message
