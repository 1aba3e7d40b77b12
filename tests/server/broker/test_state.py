"""The link state: who gets which order, and who waits for how long."""

import threading
import time
from typing import cast

import pytest
from flwr.app import Message, RecordDict

from hyperbloom.server.broker import state as superlink_state
from hyperbloom.server.broker.flower import constant
from hyperbloom.server.broker.hosted import Hosted
from hyperbloom.server.broker.state import State, state_factory

LONG_S = 60.0


class Link:
    """A state with a run and some nodes."""

    def __init__(self) -> None:
        self.state = cast(State, state_factory().state())
        self.hosted = Hosted(self.state)
        self.latest: list[bool] = []  # what each wait that has ended returned

    def node(self, key: bytes) -> int:
        node = self.state.create_node(constant.NOOP_FLWR_AID, constant.NOOP_ACCOUNT_NAME, key, 0)
        assert self.state.activate_node(node, 30)
        return node

    def send(self, node: int, kind: str = "train", ttl: float | None = None) -> str:
        message = Message(RecordDict(), node, kind, ttl=ttl)
        message.metadata.__dict__["_message_id"] = message.object_id
        (name,) = self.hosted.send([message])
        return name

    def wait(self, node: int) -> tuple[threading.Thread, threading.Event]:
        """Wait for an order in a thread; returns when it waits, with the event that ends the wait."""
        bells: list[threading.Event] = []
        waits = threading.Event()

        def tell(bell: threading.Event) -> None:
            bells.append(bell)
            waits.set()

        thread = threading.Thread(target=lambda: self.latest.append(self.state.wait_for_order(node, LONG_S, tell)))
        thread.start()
        assert waits.wait(30)
        return thread, bells[0]


@pytest.fixture
def link() -> Link:
    return Link()


def ended(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def waits(bell: threading.Event) -> None:
    """Fail, for a call that must not wait."""
    raise AssertionError


def test_each_node_gets_its_own_orders_once_and_in_turn(link: Link) -> None:
    a, b = link.node(b"a"), link.node(b"b")
    sent = [link.send(a, "train"), link.send(b, "train"), link.send(a, "evaluate")]
    first = link.state.get_message_ins(a, 1)
    rest = link.state.get_message_ins(a, None)
    assert [each.metadata.message_id for each in (*first, *rest)] == [sent[0], sent[2]]
    assert first[0].metadata.delivered_at
    assert link.state.get_message_ins(a, 1) == []
    assert [each.metadata.message_id for each in link.state.get_message_ins(b, 5)] == [sent[1]]


def test_an_order_that_is_too_old_is_handed_to_nobody(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    node = link.node(b"a")
    link.send(node, ttl=5.0)
    now = time.time()
    monkeypatch.setattr(superlink_state.time, "time", lambda: now + 6)
    assert link.state.get_message_ins(node, 1) == []


def test_an_order_ends_the_wait_of_its_node_and_of_no_other(link: Link) -> None:
    a, b = link.node(b"a"), link.node(b"b")
    (thread, _), (other, bell) = link.wait(a), link.wait(b)
    link.send(a)
    assert ended(thread) and other.is_alive()
    link.state.wait_for_order(a, LONG_S, waits)  # it has not fetched the order yet
    bell.set()  # as a lost connection does
    assert ended(other)


def test_an_unanswered_order_goes_to_the_same_session_again_and_to_no_other(link: Link) -> None:
    a, b = link.node(b"a"), link.node(b"b")
    sent = [link.send(a), link.send(a)]

    def ask(node: int) -> list[str]:
        assert link.state.wait_for_order(node, 0.0, lambda bell: None)
        return [each.metadata.message_id for each in link.state.get_message_ins(node, 1)]

    assert [ask(a), ask(b), ask(a)] == [sent[:1], [], sent[:1]]
    link.state.note_answer(b, sent[0])
    link.state.note_answer(a, sent[1])
    assert ask(a) == sent[:1], "neither was for what it has"
    link.state.note_answer(a, sent[0])
    assert [ask(a), ask(a)] == [sent[1:], sent[1:]]
    link.state.activate_node(a, 30)
    assert ask(a) == []


def test_a_call_that_another_has_followed_gets_no_order(link: Link) -> None:
    node = link.node(b"a")
    (first, _), (second, _) = link.wait(node), link.wait(node)
    assert ended(first) and link.latest == [False]
    link.send(node)
    assert ended(second) and link.latest == [False, True]


def test_a_second_call_a_new_session_a_revocation_and_the_end_end_a_wait(link: Link) -> None:
    node = link.node(b"a")
    first, _ = link.wait(node)
    second, _ = link.wait(node)
    assert ended(first) and second.is_alive()
    link.state.activate_node(node, 30)
    assert ended(second)
    third, _ = link.wait(node)
    link.send(node)
    assert ended(third)
    link.state.note_answer(node, link.state.get_message_ins(node, 1)[0].metadata.message_id)
    fourth, _ = link.wait(node)
    link.state.delete_node(constant.NOOP_FLWR_AID, node)
    assert ended(fourth)
    other = link.node(b"b")
    fifth, _ = link.wait(other)
    link.state.close()
    assert ended(fifth)
    link.state.wait_for_order(other, LONG_S, waits)


def test_a_node_that_is_gone_gets_no_order_and_leaves_none(link: Link) -> None:
    node = link.node(b"a")
    link.send(node)
    link.state.delete_node(constant.NOOP_FLWR_AID, node)
    assert link.send(node) == ""
    assert link.state.get_message_ins(node, None) == []
    assert not link.state._queues


def test_of_too_many_calls_those_that_come_later_do_not_wait(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_state, "MOST_WAITING", 1)
    a, b = link.node(b"a"), link.node(b"b")
    told = list[threading.Event]()
    for node in (a, b):  # whose time is over waits no longer
        assert link.state.wait_for_order(node, 0.0, told.append)
    assert len(told) == 2
    thread, bell = link.wait(a)
    link.state.wait_for_order(b, LONG_S, waits)
    assert thread.is_alive()
    bell.set()
    assert ended(thread)


def test_a_run_survives_that_its_process_was_suspended(link: Link) -> None:
    for record in link.state.task_token_store.values():
        record.active_until = record.active_until.replace(year=2000)
    assert link.send(link.node(b"a"))
    assert link.state.get_run_status({link.hosted.run_id})[link.hosted.run_id].status == "running"
