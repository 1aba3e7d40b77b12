"""The clients as the server sees them, over a scripted grid and a clock that a test turns."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from hyperbloom import __version__
from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import CohortError, RefusedError
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import SGD, Failed, Greeting, Notice, Scope, Target, TrainOrder
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.exchange import Director, Outcome
from hyperbloom.server.loop.federation import GREETING_TTL_S, NOTICE_TTL_S, Federation
from hyperbloom.server.loop.listener import Joined, Refused
from hyperbloom.server.loop.post import UNREADABLE
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.session import greeting_of
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Ask, Client, ask

from ..conftest import ABOUT, TRAINED, Clock, ScriptedGrid, StallingGrid, app_error

IMPOSTOR = (
    "a client named 'a' with another identity is connected. Choose another --client-id, or, if this is that client, "
    "give it back the state folder (--state-dir) that it had"
)

TRAIN = TrainOrder(Scope("run-1", 1, 0), Target("mlp", 10, "all"), SGD(1, 1, 0.1, 0.0, 0.0, 1.0), "nothing")


class Party:
    """A federation, its algorithm, and everything that it told."""

    def __init__(self, grid: ScriptedGrid, watch: Callable[[], None] = lambda: None, **config: Any) -> None:
        self.grid = grid
        self.events: list[str] = []
        self.joined: list[str] = []
        self.outcome = Outcome()
        self.roster = Roster()
        self.config = RunConfig(**{"strategy": "local", **config})
        algorithm = make_algorithm(self.config)
        algorithm.join = lambda client, first: self.joined.extend([client.client_id] * first)  # type: ignore[method-assign]
        self.federation = Federation(grid, self.roster, self.events.append, watch)
        self.federation.admission = Admission(self.config, algorithm)
        self.federation.greeting = greeting_of(algorithm)

    def gather(self, wanted: int, timeout_s: float = 60.0) -> None:
        """Wait for clients."""
        self.federation.gather(wanted, timeout_s)

    def begin(self, wanted: int) -> None:
        """Wait for clients and hand them to the algorithm."""
        self.gather(wanted)
        self.federation.admission.begin(self.roster, 0)
        self.events.clear()
        self.grid.sent.clear()

    def where(self) -> dict[str, int | None]:
        """Return the node of each client."""
        return {client.client_id: self.roster.node_of(client) for client in self.roster}

    def idle(self) -> list[str]:
        """Return the names of those who have no order left to answer."""
        return [client.client_id for client in self.federation.idle]

    def on(self, *nodes: int) -> list[Client]:
        """Return the clients on some nodes."""
        return [client for node in nodes if (client := self.roster.on_node(node))]

    def exchange(
        self, *nodes: int, timeout_s: float = 60.0, heard: Callable[[Client, Any], object] = lambda client, answer: None
    ) -> list[str]:
        """Ask the clients on some nodes to train; returns those whose answers came in time, in order of rows."""
        director = Director(self.federation, self.config.model_copy(update={"round_timeout_s": timeout_s}))
        wanted = Ask(self.on(*nodes), lambda clients: [TRAIN] * len(clients), heard)
        answers: Sequence[tuple[Client, Any]] = director.play(ask(wanted), self.outcome)
        return [client.client_id for client, _ in answers]


@pytest.fixture
def party(grid: ScriptedGrid) -> Party:
    """Return a federation that admits everyone whose data look alike."""
    return Party(grid)


def refuse_once(answer: Error, then: Callable[[Message], Any]) -> Callable[[Message], Any]:
    """Return a node that answers once with an error and then as another one."""
    answers = [answer]
    return lambda message: answers.pop() if answers else then(message)


# ---------------------------------------------------------------------- joining


def test_newcomers_are_greeted_once_and_admitted(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(7, "b")
    clock.after(3.0, lambda: grid.join(5, "a", train_examples=1))
    party.gather(2)
    assert party.where() == {"b": 7, "a": 5}
    assert grid.greeted() == [7, 5]
    assert clock.passed == pytest.approx(3.5, abs=0.6)
    greeting = grid.sent[0][1]
    assert unpack(Greeting, greeting.content) == Greeting(__version__, asks="own")
    assert greeting.metadata.ttl == GREETING_TTL_S
    assert party.events[1:] == [
        "b joined (60 training examples, size M); 1 client is here",
        "a joined (1 training examples, size M); 2 clients are here",
    ]
    assert re.fullmatch(r"waiting for 2 clients until \d\d:\d\d:\d\d \S+", party.events[0])
    assert [type(event) for event in party.events] == [str, Joined, Joined]


def test_a_client_is_who_its_key_says(party: Party, grid: ScriptedGrid) -> None:
    grid.join(7, "a")
    grid.owners[7] = "a"
    grid.join(8, "b")  # it has b's secret, for all we know, but not b's key
    grid.owners[8] = "c"
    with pytest.raises(CohortError):
        party.gather(2, timeout_s=3)
    assert party.where() == {"a": 7}
    reason = "its key is that of c, but it says that it is b"
    assert f"refused c: {reason}" in party.events
    assert [(node, notice.reason) for node, notice in grid.notices()] == [(8, reason)]


def test_many_nodes_are_greeted_in_one_go_in_order_of_their_numbers(party: Party, grid: ScriptedGrid) -> None:
    for node in (9, 3, 6):
        grid.join(node, f"client-{node}")
    party.gather(3)
    assert grid.greeted() == [3, 6, 9]
    assert len({moment for moment, _ in grid.sent}) == 1


@pytest.mark.parametrize(("comes", "passed"), [(3, 20), (30, 30)])
def test_after_a_while_one_client_is_enough_if_the_others_may_have_left(
    party: Party, grid: ScriptedGrid, clock: Clock, comes: int, passed: int
) -> None:
    clock.after(comes, lambda: grid.join(5, "a", train_examples=1))
    party.federation.gather(2, 60.0, soon=20.0)
    assert clock.passed == pytest.approx(passed, abs=0.6)
    assert party.events[-1] == f"1 of 2 clients joined within {passed} s (a); going on without the others"
    with pytest.raises(CohortError, match=r"^1 of 2 clients joined within 60 s \(a\)"):
        party.federation.gather(2, 60.0)


def test_enough_clients_are_not_waited_for(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2)
    party.gather(1)
    party.events.clear()
    before = clock.now
    party.gather(1)
    assert (clock.now, party.events) == (before, [])


def test_a_slow_node_is_not_greeted_twice(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.nodes[4] = lambda message: None
    clock.after(GREETING_TTL_S - 2, lambda: grid.join(4))
    party.gather(1, timeout_s=600)
    assert grid.greeted() == [4]
    assert clock.passed == pytest.approx(GREETING_TTL_S - 2, abs=0.2)


def test_an_answer_to_a_greeting_that_was_replaced_is_not_heard(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    """It was asked with a schema whose columns had no scale yet, so its answer would be refused."""
    heard: list[Message] = []
    grid.join(4, input_shape=(9,))
    late, grid.nodes[4] = grid.nodes[4], lambda message: heard.append(message)
    with pytest.raises(CohortError):
        party.gather(1, timeout_s=1.0)
    party.federation.greet_again(Greeting("2"))
    clock.after(0.5, lambda: grid.nodes.update({4: late}))
    party.gather(1)
    assert grid.greeted() == [4, 4] and party.joined == [] and grid.notices() == []
    assert sum(text.startswith("a joined") for text in party.events) == 1


def test_a_silent_node_is_greeted_again_when_its_greeting_has_expired(
    party: Party, grid: ScriptedGrid, clock: Clock
) -> None:
    grid.nodes[4] = lambda message: None
    with pytest.raises(CohortError):
        party.gather(1, timeout_s=2.5 * GREETING_TTL_S)
    moments = [moment for moment, message in grid.sent if message.metadata.message_type == Greeting.message_type]
    assert moments == pytest.approx([0, GREETING_TTL_S, 2 * GREETING_TTL_S], abs=1.5)
    assert grid.notices() == []


def test_a_node_that_left_and_came_back_is_greeted_again(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(4)
    party.begin(1)
    clock.after(1.0, lambda: grid.leave(4))
    clock.after(2.0, lambda: grid.join(4))
    grid.join(5, "b")
    clock.after(5.0, lambda: grid.join(6, "c"))
    party.gather(3)
    assert grid.greeted() == [5, 4, 6]
    assert party.events[1:] == [
        "b joined (60 training examples, size M); 2 clients are here",
        "a left",
        "a is back (60 training examples, size M); 2 clients are here",
        "c joined (60 training examples, size M); 3 clients are here",
    ]
    assert party.joined == ["a", "b", "c"]  # a row is made once


def test_the_greeting_of_a_node_that_vanished_is_forgotten(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.nodes[4] = lambda message: None
    clock.after(1.0, lambda: grid.leave(4))
    clock.after(3.0, lambda: grid.join(4))
    clock.after(2 * GREETING_TTL_S, lambda: grid.join(5, "b"))
    party.gather(2, timeout_s=600)
    assert grid.greeted() == [4, 4, 5]
    assert [event for event in party.events if event.startswith("a ")] == [
        "a joined (60 training examples, size M); 1 client is here"
    ]


def test_a_client_of_another_version_is_named(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a", version="9.9")
    party.gather(1)
    assert party.events[-1].startswith("a joined (60 training examples, size M; version 9.9, here it is ")


def test_too_few_clients_in_time_are_named(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "b")
    grid.join(3, "a")
    with pytest.raises(CohortError) as caught:
        party.gather(3, timeout_s=5)
    assert str(caught.value) == (
        "2 of 3 clients joined within 5 s (b, a). Start the others, or set clients to fewer or join_timeout_s to more"
    )
    assert clock.passed == pytest.approx(5, abs=0.1)


def test_waiting_ends_when_it_has_become_pointless(grid: ScriptedGrid, clock: Clock) -> None:
    def watch() -> None:
        if clock.passed > 3:
            raise CohortError("client-2 ended with code 2")

    party = Party(grid, watch)
    with pytest.raises(CohortError, match=r"^client-2 ended with code 2$"):
        party.gather(1, 600.0)
    assert clock.passed == pytest.approx(3, abs=0.1)


def test_those_that_are_connected_and_silent_are_counted(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    grid.nodes[3] = lambda message: None
    with pytest.raises(CohortError, match=r"^1 of 2 clients joined within 2 s \(a\); 1 connected without an answer\."):
        party.gather(2, timeout_s=2)


def test_nobody_in_time_is_said_so(party: Party) -> None:
    with pytest.raises(CohortError, match=r"^0 of 1 clients joined within 2 s \(none\)\. Start the others"):
        party.gather(1, timeout_s=2)


def test_a_client_that_left_before_the_others_came_does_not_count(
    party: Party, grid: ScriptedGrid, clock: Clock
) -> None:
    grid.join(2, "a")
    clock.after(1.0, lambda: grid.leave(2))
    clock.after(2.0, lambda: grid.join(3, "b"))
    with pytest.raises(CohortError, match=r"^1 of 2 clients joined within 9 s \(b\)\."):
        party.gather(2, timeout_s=9)
    assert party.where() == {"a": None, "b": 3}


# ---------------------------------------------------------------------- refused

CLASSES = "; name them all, images by a folder each, which may be empty"


@pytest.mark.parametrize(
    ("config", "about", "reason"),
    [
        ({"num_classes": 5}, {}, f"expected 5 classes as in this federation, found 10{CLASSES}"),
        (
            {"num_classes": 5},
            {"task": "segmentation"},
            "expected 5 classes as in this federation, found 10; name them all",
        ),
        (
            {"input_shape": (1, 28, 28)},
            {},
            "expected inputs of shape (1, 28, 28) as in this federation, found (1, 8, 8)",
        ),
        ({}, {"size": "L"}, "expected --size to be one of M, found L"),
        ({}, {"size": "\x1b[2J" + "L" * 2**20}, "expected --size to be one of M, found  [2J" + "L" * 258),
        ({}, {"val_examples": 0}, "expected examples for training, validation and test, found an empty set"),
        (
            {"model": "lenet"},
            {},
            "lenet: expected images (channels, height, width) of at least 16 x 16, found (1, 8, 8); use model: mlp",
        ),
    ],
)
def test_a_newcomer_that_does_not_fit_is_told_why(
    grid: ScriptedGrid, config: dict[str, Any], about: dict[str, Any], reason: str
) -> None:
    party = Party(grid, **config)
    grid.join(4, **about)
    with pytest.raises(CohortError):
        party.gather(1, timeout_s=3 * GREETING_TTL_S)
    assert grid.greeted() == [4]  # and it is not asked again
    assert grid.notices() == [(4, Notice("refused", reason))]
    assert grid.sent[-1][1].metadata.ttl == NOTICE_TTL_S
    (refused,) = party.events[1:]
    assert isinstance(refused, Refused)
    assert refused == f"refused node 4: {reason}"
    assert len(party.roster) == 0


@pytest.mark.parametrize(
    ("strategy", "about"),
    [("local", {"input_shape": (2**62,)}), ("pfedhn", {"num_classes": 10**13}), ("fedavg", {"num_classes": 6_000})],
)
def test_a_first_client_with_absurd_numbers_is_refused(
    grid: ScriptedGrid, strategy: str, about: dict[str, Any]
) -> None:
    party = Party(grid, strategy=strategy)
    grid.join(4, "a", **about)
    grid.join(5, "b")
    party.gather(1)
    assert party.where() == {"b": 5}
    assert [node for node, _ in grid.notices()] == [4]


def test_the_first_client_decides_for_the_others(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    party.gather(1)
    grid.join(3, "b", input_shape=(1, 28, 28))
    grid.join(4, "c", num_classes=3)
    grid.join(5, "d")
    party.gather(2)
    assert party.where() == {"a": 2, "d": 5}
    assert grid.notices() == [
        (3, Notice("refused", "expected inputs of shape (1, 8, 8) as in this federation, found (1, 28, 28)")),
        (4, Notice("refused", f"expected 10 classes as in this federation, found 3{CLASSES}")),
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (pack(Failed(Reason.UNFIT, "the table does not fit")), "the table does not fit"),
        (app_error("DataError: no such file"), "it cannot say who it is: DataError: no such file"),
        (Error(UNREADABLE, "it was never uploaded"), "it cannot say who it is: it was never uploaded"),
        (RecordDict(), "expected a record 'hyperbloom' with a Introduction, found []"),
        (pack(Greeting("0.1.0")), "Introduction.client_id is missing"),
    ],
)
def test_a_newcomer_that_cannot_introduce_itself_is_told_why(
    party: Party, grid: ScriptedGrid, answer: RecordDict | Error, reason: str
) -> None:
    greets = Greeting.message_type
    grid.nodes[4] = lambda message: answer if message.metadata.message_type == greets else message.content
    grid.join(5, "b")
    party.gather(1)
    assert grid.notices() == [(4, Notice("refused", reason))]
    assert f"refused node 4: {reason}" in party.events
    assert party.where() == {"b": 5}


def test_an_introduction_from_another_node_is_refused(
    party: Party, grid: ScriptedGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid.join(4)
    pull = grid.pull_messages

    def forged(message_ids: Any) -> list[Message]:
        replies = pull(message_ids)
        for reply in replies:
            reply.metadata.__dict__["_src_node_id"] = 9
        return replies

    monkeypatch.setattr(grid, "pull_messages", forged)
    with pytest.raises(CohortError):
        party.gather(1, timeout_s=2)
    assert grid.notices() == [
        (4, Notice("refused", "it cannot say who it is: the reply came from another node than the order went to"))
    ]


@pytest.mark.parametrize("code", [ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE])
def test_an_error_of_the_network_is_no_reason_to_refuse(party: Party, grid: ScriptedGrid, code: int) -> None:
    grid.join(4)
    grid.nodes[4] = refuse_once(Error(code, "Error: it may have expired due to its TTL"), grid.nodes[4])
    party.gather(1)
    assert grid.greeted() == [4, 4]
    assert grid.notices() == []
    assert party.where() == {"a": 4}


# ---------------------------------------------------------------------- one name, two processes


def test_of_two_clients_with_one_name_the_first_stays(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    party.gather(1)
    grid.join(3, "a", token="another")
    grid.join(4, "b")
    party.gather(2)
    assert party.where() == {"a": 2, "b": 4}
    assert grid.notices() == [(3, Notice("refused", IMPOSTOR))]
    assert f"refused node 3: {IMPOSTOR}" in party.events


def test_an_absent_clients_name_is_kept_for_it(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    party.gather(1)
    grid.leave(2)
    grid.join(3, "a", token="another")
    grid.join(4, "b")
    with pytest.raises(CohortError):
        party.gather(2, timeout_s=5)
    assert party.where() == {"a": None, "b": 4}
    assert grid.notices() == [(3, Notice("refused", IMPOSTOR.replace("is connected", "took part before")))]


def test_a_client_that_shows_its_secret_moves_and_the_old_process_is_told(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    party.begin(1)
    grid.join(3, "a", train_examples=70)
    grid.join(4, "b")
    party.gather(2)
    assert party.where() == {"a": 3, "b": 4}
    assert grid.notices() == [(2, Notice("refused", "a has joined again from another process"))]
    assert next(iter(party.roster)).about.train_examples == 70
    assert "a is back (70 training examples, size M; 60 before); 1 client is here" in party.events
    assert party.joined == ["a", "b"]


def test_a_client_that_lost_its_secret_comes_back_by_its_key(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    grid.join(5, "b")
    grid.owners[2] = "a"
    party.begin(2)
    before = {client.client_id: client.row for client in party.roster}
    grid.leave(2)
    grid.join(3, "a", token="another")
    grid.owners[3] = "a"
    grid.join(4, "c")
    party.gather(3)
    assert party.where() == {"a": 3, "b": 5, "c": 4}
    assert {client.client_id: client.row for client in party.roster} == before | {"c": 2}
    assert grid.notices() == []
    # Its secret of now counts where a later process has no key.
    grid.leave(3)
    grid.join(6, "a", token="another")
    grid.join(7, "d")
    party.gather(4)
    assert party.where()["a"] == 6


def test_a_client_that_comes_back_with_a_third_of_its_data_is_known_by_what_is_left(
    party: Party, grid: ScriptedGrid
) -> None:
    grid.join(2, "a", train_examples=60)
    party.begin(1)
    grid.join(3, "a", train_examples=20)
    grid.join(4, "b")
    party.gather(2)
    back = next(iter(party.roster))
    assert (back.client_id, back.row, back.about.train_examples) == ("a", 0, 20)
    assert "a is back (20 training examples, size M; 60 before); 1 client is here" in party.events


# ---------------------------------------------------------------------- beginning


def test_beginning_makes_rows_for_clients_that_the_algorithm_does_not_know(party: Party, grid: ScriptedGrid) -> None:
    for node, name in ((2, "a"), (3, "b"), (4, "c")):
        grid.join(node, name)
    party.gather(3)
    assert party.joined == []
    party.federation.admission.begin(party.roster, 1)
    assert party.joined == ["b", "c"]


def test_beginning_refuses_a_client_that_another_strategy_admitted(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    party.gather(1)
    config = RunConfig(strategy="local", num_classes=3)
    with pytest.raises(RefusedError, match="expected 3 classes as in this federation, found 10"):
        Admission(config, make_algorithm(config)).begin(party.roster, 0)


# ---------------------------------------------------------------------- exchanges


def test_nobody_to_ask_is_no_exchange(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    before = clock.now
    assert party.exchange() == []
    assert (grid.sent, clock.now) == ([], before)


def test_a_round_goes_on_without_a_stalled_upload_which_counts_as_a_lie_when_it_is_given_up(clock: Clock) -> None:
    grid = StallingGrid(clock, 3)
    grid.join(2, "a")
    party = Party(grid)
    party.begin(2)
    for lies in (1, 2, 3):
        start, party.outcome = clock.now, Outcome()
        assert party.exchange(2, 3, timeout_s=300.0) == ["a"]
        assert clock.now - start == pytest.approx(5, abs=0.1)
        assert party.idle() == ["a"], "the other is not asked meanwhile"
        assert party.outcome.refused["stalls"].reason is Reason.NO_REPLY and party.outcome.lied == []
        while clock.now < start + 31:
            assert party.exchange(2) == ["a"]
            clock.sleep(0.5)
        assert party.outcome.lied == ["stalls"]
        assert party.outcome.refused["stalls"].text == "it was never uploaded"
        assert party.outcome.quarantined == ({"stalls": 10} if lies == 3 else {})
    why = "another reply was refused for its content (it was never uploaded)"
    assert party.events == [f"stalls is in quarantine until after round 10: {why}"]
    assert party.federation.late == 0 and not party.federation.post.busy


def test_a_lie_that_comes_while_clients_are_waited_for_is_held_against_its_client(clock: Clock) -> None:
    grid = StallingGrid(clock, 3)
    party = Party(grid)
    party.begin(1)
    for _ in range(3):
        party.exchange(3, timeout_s=300.0)
        party.gather(1)
    assert party.roster.conduct.in_quarantine("stalls", 10)


def test_answers_are_judged_as_they_come(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a", orders=lambda message: TRAINED if clock.now > ready else None)
    grid.join(3, "b")
    party.begin(2)
    ready = clock.now + 1.0
    heard: list[tuple[str, float]] = []
    answered = party.exchange(2, 3, heard=lambda client, answer: heard.append((client.client_id, clock.now)))
    assert answered == ["a", "b"]
    assert [name for name, _ in heard] == ["b", "a"]
    assert heard[0][1] < ready < heard[1][1] < ready + 0.1


def test_the_deadline_ends_an_exchange_with_those_who_answered(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    grid.join(3, "b", orders=lambda message: None)
    party.begin(2)
    start = clock.now
    assert party.exchange(2, 3, timeout_s=7.0) == ["a"]
    assert clock.now - start == pytest.approx(7.0, abs=0.06)


def test_an_order_to_a_node_that_vanishes_is_not_waited_for(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    grid.join(3, "b", orders=lambda message: None)
    party.begin(2)
    start = clock.now
    clock.after(2.0, lambda: grid.leave(3))
    assert party.exchange(2, 3, timeout_s=300.0) == ["a"]
    assert 2.0 <= clock.now - start < 2.7
    assert party.events == ["b left"]


def test_an_order_to_a_client_that_moves_is_not_waited_for(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    grid.join(3, "b", orders=lambda message: None)
    party.begin(2)
    start = clock.now
    clock.after(2.0, lambda: grid.join(8, "b"))
    assert party.exchange(2, 3, timeout_s=300.0) == ["a"]
    assert 2.0 <= clock.now - start < 2.7
    assert party.where() == {"a": 2, "b": 8}
    assert grid.notices() == [(3, Notice("refused", "b has joined again from another process"))]


def test_an_order_that_flower_could_not_push_is_not_waited_for(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    grid.join(3, "b")
    party.begin(2)
    grid.unreachable.add(3)
    start = clock.now
    assert party.exchange(2, 3) == ["a"]
    assert clock.now - start < 1
    assert party.outcome.refused["b"].reason is Reason.UNREACHABLE


def test_newcomers_are_welcomed_while_a_round_runs(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a", orders=lambda message: TRAINED if clock.now > ready else None)
    party.begin(1)
    ready = clock.now + 4.0
    clock.after(1.0, lambda: grid.join(3, "b"))
    assert party.exchange(2) == ["a"]
    assert party.where() == {"a": 2, "b": 3}
    assert party.joined == ["a", "b"]
    assert party.events == ["b joined (60 training examples, size M); 2 clients are here"]


def test_polls_slow_down_while_nothing_comes(
    party: Party, grid: ScriptedGrid, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid.join(2, "a", orders=lambda message: None)
    party.begin(1)
    waits: list[float] = []
    sleep = clock.sleep

    def noted(seconds: float) -> None:
        waits.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(clock, "sleep", noted)
    party.exchange(2, timeout_s=2.0)
    assert waits[:4] == pytest.approx([0.004, 0.006, 0.009, 0.0135])
    assert waits[-1] == 0.05
    answer = clock.now + 1.5
    grid.join(3, "b", orders=lambda message: TRAINED if clock.now > answer else None)
    grid.join(4, "c", orders=lambda message: None)
    party.gather(2)  # a still works on its order
    waits.clear()
    party.exchange(3, 4, timeout_s=2.0)
    assert waits.count(0.004) == 2  # fast at first, and again after an answer


def test_a_client_is_busy_until_it_has_answered_and_idle_again_after_that(
    party: Party, grid: ScriptedGrid, clock: Clock
) -> None:
    grid.join(2, "a", orders=lambda message: TRAINED if clock.now > ready else None)
    grid.join(3, "b")
    party.begin(2)
    ready, federation = clock.now + 1.0, party.federation
    federation.send([(client, TRAIN, None) for client in party.on(2, 3)])
    assert party.idle() == [] and federation.idle_count == 0
    federation.poll()
    assert party.idle() == ["b"] and federation.post.busy == {2}
    assert federation.count() == {"live": 2, "idle": 1, "busy": 1, "away": 0, "quarantined": 0}
    clock.sleep(1.1)
    federation.poll()
    assert federation.idle_count == 2


def test_those_who_are_busy_do_not_count_as_gathered(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a", orders=lambda message: TRAINED if clock.now > ready else None)
    grid.join(3, "b")
    party.begin(2)
    ready = clock.now + 20.0
    assert party.exchange(2, 3, timeout_s=1.0) == ["b"]
    with pytest.raises(
        CohortError, match=r"^1 of 2 clients joined within 5 s \(a, b\); 1 still work on an earlier round"
    ):
        party.gather(2, timeout_s=5.0)
    party.gather(2, timeout_s=60.0)
    assert clock.now == pytest.approx(ready, abs=0.1)
    assert party.federation.late == 1
    assert "a answered after the deadline; its reply is dropped" in party.events


def test_a_node_that_an_order_cannot_reach_is_looked_for_at_once(
    party: Party, grid: ScriptedGrid, clock: Clock
) -> None:
    grid.join(2, "a")
    grid.join(3, "b")
    party.begin(2)
    party.federation.poll()  # has just looked
    clients = party.on(2, 3)
    grid.unreachable.add(3)
    grid.leave(3)
    party.federation.send([(client, TRAIN, None) for client in clients])
    assert party.where() == {"a": 2, "b": None}
    assert party.federation.post.busy == {2}


# ---------------------------------------------------------------------- goodbye


def test_everyone_who_is_here_hears_that_the_run_is_over(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a", orders=lambda message: TRAINED if clock.now > ready else None)
    grid.join(3, "b")
    grid.join(4, "c")
    party.begin(3)
    ready = clock.now + 1.0
    grid.leave(4)
    party.exchange(2)
    party.federation.say_goodbye("the run is over")
    assert grid.notices() == [(node, Notice("finished", "the run is over")) for node in (2, 3)]


def test_goodbye_ends_when_all_have_heard_it(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    party.begin(1)
    start = clock.now
    party.federation.say_goodbye("done")
    assert clock.now - start <= 0.1 and not any("waiting up" in event for event in party.events)


def test_goodbye_waits_half_a_minute_for_who_does_not_listen(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    party.begin(1)
    grid.nodes[2] = lambda message: None
    start = clock.now
    party.federation.say_goodbye("done")
    assert clock.now - start == pytest.approx(30, abs=0.1)
    assert party.events[-1:] == ["waiting up to 30 s until clients hear that the run is over (Ctrl-C leaves)"]


def test_goodbye_does_not_wait_for_those_who_are_gone(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    grid.join(2, "a")
    party.begin(1)
    grid.nodes[2] = lambda message: None
    clock.after(1.0, lambda: grid.leave(2))
    start = clock.now
    party.federation.say_goodbye("done")
    assert clock.now - start == pytest.approx(1, abs=0.1)


def test_without_clients_there_is_nobody_to_say_goodbye_to(party: Party, grid: ScriptedGrid, clock: Clock) -> None:
    party.federation.say_goodbye("done")
    assert (grid.sent, clock.passed) == ([], 0)


def test_secrets_are_forgotten_at_once(party: Party, grid: ScriptedGrid) -> None:
    grid.join(2, "a")
    party.gather(1)
    (client,) = party.roster
    assert (client.about.token, client.about.client_id, client.about.train_examples) == ("", "a", ABOUT.train_examples)
