"""Who is who: rows for ever, and secrets that are not kept."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict

from hyperbloom.common.errors import RefusedError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder, Failed, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.loop.post import UNREADABLE
from hyperbloom.server.loop.roster import Conduct, Roster
from hyperbloom.server.loop.rounds import run_rounds
from hyperbloom.server.runs.folder import RunFolder
from tests.strategies.conftest import History, Inline, introduction, scored

from .desk import Desk, federation


def roster_of(names: str) -> Roster:
    """Return a roster of clients with names of one letter, on nodes 2, 3, ..."""
    roster = Roster()
    for node, name in enumerate(names, start=2):
        roster.admit(node, introduction(name))
    return roster


def rows(roster: Roster) -> dict[str, int]:
    return {client.client_id: client.row for client in roster}


def test_clients_get_rows_in_the_order_in_which_they_are_admitted() -> None:
    roster = Roster()
    for row, (node, name) in enumerate([(9, "c"), (4, "a"), (7, "b")]):
        client, moved_from = roster.admit(node, introduction(name, train_examples=10 + row))
        assert (client.client_id, client.row, roster.node_of(client)) == (name, row, node)
        assert client.about.train_examples == 10 + row
        assert moved_from is None
    assert len(roster) == 3
    assert [client.client_id for client in roster] == ["c", "a", "b"]
    assert [client.client_id for client in roster.live] == ["c", "a", "b"]


def test_a_client_that_shows_its_secret_again_gets_its_row_again() -> None:
    roster = roster_of("abc")
    roster.leave(3)
    client, moved_from = roster.admit(11, introduction("b", train_examples=99))
    assert (client.row, roster.node_of(client), client.about.train_examples) == (1, 11, 99)
    assert moved_from is None  # it had left its node
    assert rows(roster) == {"a": 0, "b": 1, "c": 2}


def test_a_client_that_moves_is_on_its_new_node_only() -> None:
    roster = roster_of("abc")
    client, moved_from = roster.admit(11, introduction("b"))
    assert (client.row, roster.node_of(client), moved_from) == (1, 11, 3)
    assert roster.on_node(3) is None
    found = roster.on_node(11)
    assert found is not None and found.client_id == "b"
    _, moved_again = roster.admit(11, introduction("b"))
    assert moved_again is None  # greeted twice on one node


def test_the_number_of_live_clients_is_that_of_the_live_clients() -> None:
    roster = roster_of("abc")
    steps = [
        lambda: roster.leave(3),
        lambda: roster.leave(3),
        lambda: roster.admit(4, introduction("c")),  # greeted twice
        lambda: roster.admit(9, introduction("b")),
        lambda: roster.admit(10, introduction("a")),  # moved
        lambda: roster.sort(1),
    ]
    for step, expected in zip(steps, (2, 2, 2, 3, 3, 3), strict=True):
        step()
        assert roster.live_count == len(roster.live) == expected
    assert [roster.node_of(client) for client in roster.live] == [10, 9, 4]


def test_a_node_is_one_client() -> None:
    roster = roster_of("ab")
    roster.admit(2, introduction("c"))
    assert {client.client_id: roster.node_of(client) for client in roster} == {"a": None, "b": 3, "c": 2}
    found = roster.on_node(2)
    assert found is not None and found.client_id == "c"
    assert roster.live_count == 2


@pytest.mark.parametrize(("leaves", "where"), [(False, "is connected"), (True, "took part before")])
def test_another_secret_does_not_get_the_name(leaves: bool, where: str) -> None:
    roster = roster_of("abc")
    if leaves:
        roster.leave(3)
    before = list(roster)
    with pytest.raises(RefusedError, match=f"a client named 'b' with another identity {where}"):
        roster.admit(11, introduction("b", token="stolen name"))
    assert list(roster) == before
    assert roster.on_node(11) is None


def test_leaving_keeps_the_row() -> None:
    roster = roster_of("abc")
    for node in (3, 3, 77):
        roster.leave(node)
    assert rows(roster) == {"a": 0, "b": 1, "c": 2}
    assert [client.client_id for client in roster.live] == ["a", "c"]
    assert roster.live_count == 2


def test_sort_numbers_newcomers_by_name_and_leaves_the_first_rows() -> None:
    roster = roster_of("zcaxb")
    roster.sort(2)
    assert rows(roster) == {"z": 0, "c": 1, "a": 2, "b": 3, "x": 4}
    assert [client.client_id for client in roster] == ["z", "c", "a", "b", "x"]
    on_four = roster.on_node(4)
    assert on_four is not None and (on_four.client_id, on_four.row) == ("a", 2)
    permuted = roster_of("bxacz")
    permuted.sort(0)
    assert rows(permuted) == {"a": 0, "b": 1, "c": 2, "x": 3, "z": 4}


def test_a_stored_roster_comes_back_with_everybody_away() -> None:
    roster = roster_of("cab")
    roster.leave(3)
    stored = json.loads(json.dumps(roster.to_json()))
    again = Roster.from_json(stored)
    assert again.live == []
    assert list(again) == list(roster)
    assert json.loads(json.dumps(again.to_json())) == stored
    client, moved_from = again.admit(20, introduction("a"))
    assert (client.row, moved_from) == (1, None)
    with pytest.raises(RefusedError, match="took part before"):
        again.admit(21, introduction("b", token="stolen name"))
    assert again.admit(22, introduction("new"))[0].row == 3


def test_class_shares_and_shapes_come_back_as_they_were() -> None:
    roster = Roster()
    about = introduction("a", class_shares=(0.5, 0.25, 0.25), input_shape=(3, 32, 32))
    roster.admit(2, about)
    (client,) = Roster.from_json(json.loads(json.dumps(roster.to_json())))
    assert client.about.class_shares == (0.5, 0.25, 0.25)
    assert client.about.input_shape == (3, 32, 32)


def test_secrets_are_not_kept() -> None:
    roster = roster_of("ab")
    roster.admit(9, introduction("a"))
    stored = roster.to_json()
    for client, entry in zip(roster, stored["clients"], strict=True):
        secret = f"secret of {client.client_id}"
        assert entry["token_hash"] == hashlib.sha256(secret.encode()).hexdigest()
        assert client.about.token == "" and "token" not in entry["about"]
    assert "secret of" not in json.dumps(stored) + repr(vars(roster))


# ---------------------------------------------------------------------- quarantine


def test_three_lies_lead_to_ten_rounds_and_each_further_time_to_twice_as_many() -> None:
    conduct = Conduct()
    assert [conduct.failed("a", number, lie=True) for number in (1, 2, 3)] == [None, None, 13]
    assert conduct.failed("b", 3, lie=True) is None
    assert [conduct.in_quarantine("a", number) for number in (4, 13, 14)] == [True, True, False]
    assert not conduct.in_quarantine("b", 4) and not conduct.in_quarantine("c", 4)
    for done, until in ((8, 5), (2, 3), (3, 0)):  # where the next strategy of the run counts its rounds anew
        conduct.begin_anew(done)
        assert [conduct.in_quarantine("a", number) for number in (until, until + 1)] == [True, False]
    again = Conduct(conduct.to_json())
    again.begin_anew()  # a run from this one's state begins by scoring it, in round 0
    assert not again.in_quarantine("a", 0) and not again.in_quarantine("a", 1)
    assert again.failed("a", 1, lie=True) is again.failed("a", 2, lie=True) is None
    assert again.failed("a", 3, lie=True) == 23, "a second quarantine is twice as long, also in another run"
    conduct = Conduct(json.loads(json.dumps(conduct.to_json())))
    assert [
        conduct.failed("a", 14, lie=True),
        conduct.failed("a", 15, lie=True),
        conduct.failed("a", 20, lie=True),
    ] == [None, None, 40]
    assert [conduct.failed("b", 21, lie=True), conduct.failed("b", 21, lie=True)] == [None, 31]


def test_deadlines_missed_in_a_row_lead_to_a_quarantine_too() -> None:
    conduct = Conduct()
    assert [conduct.failed("a", number, lie=False) for number in (1, 2)] == [None, None]
    conduct.in_time("a")
    conduct.in_time("b")
    assert [conduct.failed("a", number, lie=False) for number in (3, 4)] == [None, None]
    assert conduct.failed("a", 4, lie=True) is None, "a lie is another thing"
    conduct = Conduct(json.loads(json.dumps(conduct.to_json())))
    assert conduct.failed("a", 5, lie=False) == 15
    assert [conduct.failed("a", number, lie=False) for number in (16, 17, 18)] == [None, None, 38]


def lie(order: Message, fill: float = math.nan, loss: float = 1.0, layout: Layout | None = None) -> RecordDict:
    """Return an answer whose values are not finite, or another one."""
    weights = unpack(TrainOrder, order.content).weights
    assert weights is not None
    layout = layout or weights.layout
    return pack(TrainResult(0.0, Weights(layout, torch.full((layout.numel,), fill)), loss))


def clients(answer: Any, **changes: Any) -> tuple[Inline, Desk]:
    """Return three clients that are all asked in each round; b gives this answer."""
    values: dict[str, Any] = {"rounds": 16, "eval_every": 8, "options": {"hidden_dim": 4}}
    made, desk = federation(
        {EvaluateOrder: lambda name, order: scored((5, 10, 1.0), (5, 10, 1.0))}, **(values | changes)
    )

    def deliver() -> list[Message]:
        others = [reply for name, reply in desk.replies.items() if name != "b"]
        return [*others, desk.answer("b", answer(desk.orders["b"]))] if "b" in desk.replies else others

    desk.deliver = deliver
    return made, desk


def rounds_of(desk: Desk, name: str) -> list[int]:
    """Return the rounds in which a client was ordered to train."""
    return [number for who, number in desk.asked if who == name]


def test_a_liar_is_left_alone_and_everybody_is_told(tmp_path: Path) -> None:
    made, desk = clients(lie)
    history = History(made)
    made.events.clear()
    run_rounds(made.loop(history, RunFolder(tmp_path, made.config, "run-1")))
    assert rounds_of(desk, "a") == list(range(1, 17))
    assert rounds_of(desk, "b") == [1, 2, 3, 14, 15, 16]
    assert [text.partition(":")[0] for text in made.events] == [
        "b is in quarantine until after round 13",
        "b is in quarantine until after round 36",
    ]
    assert "values are not finite" in made.events[0]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("lied", 0) for line in metrics] == [1] * 3 + [0] * 10 + [1] * 3
    assert [line["quarantined"] for line in metrics if "quarantined" in line] == [{"b": 13}, {"b": 36}]
    lines = [json.loads(line) for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    until = [line.get("quarantined_until") for line in lines if line.get("lied")]
    assert until == [None, None, 13, None, None, 36]
    stored = json.loads((tmp_path / "roster.json").read_text())
    assert Roster.from_json(stored).conduct.in_quarantine("b", 13)
    assert all(tensor.isfinite().all() for tensor in made.state().values())


def test_in_asynchronous_mode_too() -> None:
    made, desk = clients(lie, rounds=8, asynchronous=True)
    made.run()
    assert len(rounds_of(desk, "b")) == 3
    assert made.roster.conduct.in_quarantine("b", 10)


@pytest.mark.parametrize(
    "answer",
    [
        lambda order: pack(Failed(Reason.DIVERGED, "training diverged (loss nan); lower local.learning_rate")),
        lambda order: Error(5, "the node is offline"),
    ],
)
def test_who_fails_is_asked_again(answer: Any) -> None:
    made, desk = clients(answer, rounds=5)
    history, _ = made.run()
    assert rounds_of(desk, "b") == list(range(1, 6))
    assert not any(outcome.lied for outcome in history.rounds)


@pytest.mark.parametrize(
    "answer",
    [
        lambda order: lie(order, fill=1e6),
        lambda order: lie(order, fill=0.0, layout=Layout((("zz", (54,)),))),
        lambda order: lie(order, loss=-1.0),
        lambda order: Error(UNREADABLE, "expected a reply of at most 7 bytes"),
        lambda order: RecordDict(),
    ],
)
def test_each_lie_counts(answer: Any) -> None:
    made, desk = clients(answer, rounds=5)
    made.run()
    assert rounds_of(desk, "b") == [1, 2, 3]
