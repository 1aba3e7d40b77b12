"""Clients whose answers are refused for their content: counted, and left alone for a while."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict

from hyperbloom.common.layout import Layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire import EvaluateOrder, Failed, TrainOrder, TrainResult, Weights
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.loop.conduct import Conduct
from hyperbloom.server.loop.post import UNREADABLE
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import run_rounds
from hyperbloom.server.runs.folder import RunFolder
from tests.strategies.conftest import History, Inline, scored

from .desk import Desk, federation


def test_three_lies_lead_to_ten_rounds_and_each_further_time_to_twice_as_many() -> None:
    conduct = Conduct()
    assert [conduct.lied("a", number) for number in (1, 2, 3)] == [None, None, 13]
    assert conduct.lied("b", 3) is None
    assert [conduct.in_quarantine("a", number) for number in (4, 13, 14)] == [True, True, False]
    assert not conduct.in_quarantine("b", 4) and not conduct.in_quarantine("c", 4)
    assert [conduct.count_in_quarantine(number) for number in (13, 14)] == [1, 0]
    conduct = Conduct.from_json(json.loads(json.dumps(conduct.to_json())))
    assert [conduct.lied("a", 14), conduct.lied("a", 15), conduct.lied("a", 20)] == [None, None, 40]
    assert [conduct.lied("b", 21), conduct.lied("b", 21)] == [None, 31]


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
