"""The book of messages, over a scripted grid and a clock that a test turns."""

from collections.abc import Callable, Sequence

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.exchanges import DescribeOrder, ReferenceOrder, RepresentOrder
from hyperbloom.common.wire.orders import SGD, CompareOrder, EvaluateOrder, Notice, Order, Scope, Target, TrainOrder
from hyperbloom.common.wire.pack import weigh
from hyperbloom.server.loop import post as module
from hyperbloom.server.loop.post import UNREADABLE, Failure, Letter, Post, Traffic

from ..conftest import Clock, ScriptedGrid, StallingGrid, app_error

SCOPE, TARGET = Scope("run-1", 1, 0), Target("mlp", 10, "all")
TRAIN = TrainOrder(SCOPE, TARGET, SGD(1, 1, 0.1, 0.0, 0.0, 1.0), "nothing")
EVALUATE = EvaluateOrder(SCOPE, TARGET)


@pytest.fixture
def post(grid: ScriptedGrid) -> Post:
    """Return an empty book."""
    return Post(grid)


def send(post: Post, *nodes: int, order: Order = TRAIN) -> list[Letter]:
    """Send nodes an order each."""
    return post.send([(node, order, f"for {node}") for node in nodes], 3)


def senders(post: Post) -> list[int]:
    """Return the nodes whose answers have come."""
    return [arrival.letter.node for arrival in post.poll()]


def answers(grid: ScriptedGrid, node: int, when: Callable[[Message], bool]) -> None:
    """Let a node answer an order once a condition holds."""
    grid.nodes[node] = lambda message: RecordDict() if when(message) else None


def test_an_order_is_expected_and_its_node_busy_until_it_is_answered(
    post: Post, grid: ScriptedGrid, clock: Clock
) -> None:
    answers(grid, 2, lambda message: clock.now > ready)
    answers(grid, 3, lambda message: True)
    ready = clock.now + 1.0
    letters = send(post, 2, 3)
    assert [(letter.node, letter.about, letter.sent) for letter in letters] == [
        (2, "for 2", clock.now),
        (3, "for 3", clock.now),
    ]
    assert grid.sent[0][1].metadata.group_id == "3"
    assert post.busy == {2, 3} and post.give_up(letters, 60.0) == []
    assert senders(post) == [3]
    assert post.busy == {2} and post.give_up(letters, 60.0) == letters[1:]
    assert post.waits_for(letters) and not post.waits_for(letters[1:])
    clock.sleep(1.1)
    assert senders(post) == [2]
    assert post.busy == set() and not post.waits_for(letters)
    assert post.poll() == []


def test_a_node_with_two_orders_is_busy_until_it_has_answered_both(
    post: Post, grid: ScriptedGrid, clock: Clock
) -> None:
    answers(grid, 2, lambda message: message.metadata.message_type == answered)
    send(post, 2)
    send(post, 2, order=EVALUATE)
    answered = "train"
    assert senders(post) == [2] and post.busy == {2}
    answered = "evaluate"
    assert senders(post) == [2] and post.busy == set()


def test_a_notice_makes_nobody_busy(post: Post, grid: ScriptedGrid, clock: Clock) -> None:
    answers(grid, 2, lambda message: False)
    (letter,) = send(post, 2, order=Notice("finished", "done"))
    assert post.busy == set() and post.open(Notice) == [letter] and post.open(TrainOrder) == []


def test_only_orders_that_are_old_enough_are_given_up(post: Post, grid: ScriptedGrid, clock: Clock) -> None:
    for node in (2, 3):
        answers(grid, node, lambda message: clock.now > ready)
    ready = clock.now + 10.0
    letters = send(post, 2)
    clock.sleep(3.0)
    letters += send(post, 3)
    clock.sleep(2.0)
    assert post.give_up(letters, 5.0) == letters[:1]
    assert post.busy == {2, 3}  # who is given up works all the same
    assert post.poll() == []
    clock.sleep(6.0)
    assert [(arrival.letter.node, arrival.late) for arrival in post.poll()] == [(2, True), (3, False)]
    assert post.busy == set()


def test_a_stalled_upload_is_given_up_before_other_answers(clock: Clock) -> None:
    grid = StallingGrid(clock, 3)
    answers(grid, 2, lambda message: False)
    post = Post(grid)
    letters = send(post, 2, 3)
    post.poll()
    assert post.waits_for(letters[1:])
    clock.sleep(6)
    assert post.waits_for(letters) and not post.waits_for(letters[1:])
    assert post.give_up(letters, 300.0) == letters[1:]
    clock.sleep(30)
    (arrival,) = post.poll()
    assert (arrival.late, arrival.is_lie, arrival.content) == (
        True,
        True,
        Failure(Reason.CONTENT, "it was never uploaded"),
    )


def test_a_node_that_cannot_be_reached_gets_no_letter(post: Post, grid: ScriptedGrid, clock: Clock) -> None:
    answers(grid, 2, lambda message: True)
    answers(grid, 3, lambda message: True)
    grid.unreachable.add(3)
    assert [letter.node for letter in send(post, 3, 2)] == [2]
    assert post.busy == {2}


def test_answers_of_nodes_that_are_gone_are_not_waited_for(post: Post, grid: ScriptedGrid, clock: Clock) -> None:
    for node in (2, 3, 4):
        answers(grid, node, lambda message: False)
    letters = send(post, 2, 3, 4)
    post.give_up(letters[2:])
    post.keep(lambda letter: letter.node == 2)
    assert post.busy == {2} and post.give_up(letters, 60.0) == letters[1:]


def test_a_second_answer_to_an_order_is_none(
    post: Post, grid: ScriptedGrid, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(grid, 2, lambda message: True)
    pull = grid.pull_messages
    monkeypatch.setattr(grid, "pull_messages", lambda ids: 2 * pull(ids))
    send(post, 2)
    assert senders(post) == [2]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (app_error("ValueError: no"), Failure(Reason.FAILED, "ValueError: no")),
        (Error(ErrorCode.UNKNOWN), Failure(Reason.FAILED, f"error {ErrorCode.UNKNOWN}")),
        (Error(ErrorCode.UNKNOWN, "\x1b[2J" + "x" * 2**20), Failure(Reason.FAILED, " [2J" + "x" * 296)),
        (Error(UNREADABLE, "too large"), Failure(Reason.CONTENT, "too large")),
        (Error(ErrorCode.NODE_UNAVAILABLE, "gone"), Failure(Reason.FAILED, "gone", network=True)),
        (Error(ErrorCode.MESSAGE_UNAVAILABLE, "gone"), Failure(Reason.FAILED, "gone", network=True)),
        (app_error("x" * 1000), Failure(Reason.FAILED, "x" * 300)),
    ],
)
def test_an_error_is_a_failure_for_a_reason(
    post: Post, grid: ScriptedGrid, clock: Clock, answer: Error, failure: Failure
) -> None:
    grid.nodes[2] = lambda message: answer
    send(post, 2)
    (arrival,) = post.poll()
    assert arrival.content == failure
    assert arrival.is_lie == (failure.reason is Reason.CONTENT)


def test_an_answer_from_another_node_is_held_against_nobody(
    post: Post, grid: ScriptedGrid, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(grid, 2, lambda message: True)
    pull = grid.pull_messages

    def forged(message_ids: Sequence[str]) -> list[Message]:
        replies = pull(message_ids)
        for reply in replies:
            reply.metadata.__dict__["_src_node_id"] = 9
        return replies

    monkeypatch.setattr(grid, "pull_messages", forged)
    send(post, 2)
    (arrival,) = post.poll()
    assert arrival.content == Failure(Reason.FAILED, "the reply came from another node than the order went to")


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (TrainOrder, True),
        (DescribeOrder, True),
        (ReferenceOrder, True),
        (RepresentOrder, True),
        (EvaluateOrder, False),
        (CompareOrder, False),
        (Notice, False),
    ],
)
def test_traffic_is_what_training_sends_of_whatever_type(
    grid: ScriptedGrid, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: type[Order], counts: bool
) -> None:
    content = RecordDict({"order": ConfigRecord({"values": b"1234567"})})
    monkeypatch.setattr(module, "pack", lambda order: content)
    grid.nodes[2] = lambda message: content
    post = Post(grid)
    send(post, 2, order=kind.__new__(kind))
    post.poll()
    size = weigh(content) if counts else 0
    assert post.take_traffic() == Traffic(down=size, up=size)
    assert post.take_traffic() == Traffic()
