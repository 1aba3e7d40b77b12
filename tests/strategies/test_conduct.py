"""Clients whose replies are refused for their content: counted, left alone for a while, weighed with care."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import RefusedError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import UNREADABLE, TrainOrder, TrainResult, Weights
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.conduct import Conduct
from hyperbloom.strategies.personalised import ClientUpdate
from hyperbloom.strategies.roster import Roster
from tests.server.conftest import Clock, app_error
from tests.server.conftest import clock as clock  # the fixture
from tests.server.crew import Crew, LoggingGrid

from .conftest import introduction


def test_three_lies_lead_to_ten_rounds_and_each_further_time_to_twice_as_many() -> None:
    conduct = Conduct()
    assert [conduct.lied("a", number) for number in (1, 2, 3)] == [None, None, 13]
    assert conduct.lied("b", 3) is None
    assert [conduct.in_quarantine("a", number) for number in (4, 13, 14)] == [True, True, False]
    assert not conduct.in_quarantine("b", 4) and not conduct.in_quarantine("c", 4)
    conduct = Conduct.from_json(json.loads(json.dumps(conduct.to_json())))
    assert [conduct.lied("a", 14), conduct.lied("a", 15), conduct.lied("a", 20)] == [None, None, 40]
    assert [conduct.lied("b", 21), conduct.lied("b", 21)] == [None, 31]


def lie(message: Message, fill: float = math.nan, loss: float = 1.0, layout: Layout | None = None) -> RecordDict:
    """Return a reply whose values are not finite, or another one."""
    order = TrainOrder.unpack(message.content)
    assert order.weights is not None
    layout = layout or order.weights.layout
    return TrainResult(loss, 0.0, Weights(layout, torch.full((layout.numel,), fill))).pack()


@pytest.fixture
def crew(clock: Clock) -> Crew:
    """Return three clients; each round asks all of them."""
    config: dict[str, Any] = {"strategy": "pfedhn", "options": {"hidden_dim": 4}, "clients": 3, "cohort": 3}
    made = Crew(LoggingGrid(clock), clock, rounds=16, eval_every=8, **config)
    for node, name in enumerate("abc", start=2):
        made.join(node, name)
    return made


def asked(crew: Crew, name: str) -> list[int]:
    """Return the rounds in which a client was ordered to train."""
    orders = {m.metadata.message_id: m for _, m in crew.grid.sent}
    return [
        TrainOrder.unpack(orders[each.id].content).round for each in crew.entries("train", name) if each.what == "order"
    ]


def test_a_liar_is_left_alone_and_everybody_is_told(crew: Crew, tmp_path: Path) -> None:
    crew.answer["b"] = lie
    heard: list[str] = []
    crew.told.event = heard.append  # type: ignore[method-assign]
    crew.run(RunFolder(tmp_path, crew.config, "run-1"))
    assert asked(crew, "a") == list(range(1, 17))
    assert asked(crew, "b") == [1, 2, 3, 14, 15, 16]
    assert [text.partition(":")[0] for text in heard] == [
        "b is in quarantine until after round 13",
        "b is in quarantine until after round 36",
    ]
    assert "values are not finite" in heard[0]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("lied", 0) for line in metrics] == [1] * 3 + [0] * 10 + [1] * 3
    assert [line["quarantined"] for line in metrics if "quarantined" in line] == [{"b": 13}, {"b": 36}]
    lines = [json.loads(line) for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    until = [line.get("quarantined_until") for line in lines if line.get("lied")]
    assert until == [None, None, 13, None, None, 36]
    stored = json.loads((tmp_path / "roster.json").read_text())
    assert Roster.from_json(stored).conduct.in_quarantine("b", 13)
    assert all(tensor.isfinite().all() for tensor in crew.state().values())


def test_in_asynchronous_mode_too(clock: Clock) -> None:
    config: dict[str, Any] = {"strategy": "pfedhn", "options": {"hidden_dim": 4}, "clients": 3, "cohort": 3}
    crew = Crew(LoggingGrid(clock), clock, rounds=8, eval_every=8, asynchronous=True, **config)
    for node, name in enumerate("abc", start=2):
        crew.join(node, name)
    crew.answer["b"] = lie
    crew.run()
    assert len(asked(crew, "b")) == 3
    assert crew.roster.conduct.in_quarantine("b", 10)


@pytest.mark.parametrize(
    "answer",
    [
        lambda message: app_error("HyperbloomError: training diverged (loss nan); lower local.learning_rate"),
        lambda message: Error(5, "the node is offline"),
    ],
)
def test_who_fails_is_asked_again(crew: Crew, answer: Any) -> None:
    crew.answer["b"] = answer
    crew.run()
    assert asked(crew, "b") == list(range(1, 17))
    assert not any(report.outcome.lied for report in crew.told.reports)


@pytest.mark.parametrize(
    "answer",
    [
        lambda message: lie(message, fill=math.inf),
        lambda message: lie(message, fill=1e6),
        lambda message: lie(message, fill=0.0, layout=Layout((("zz", (54,)),))),
        lambda message: lie(message, loss=-1.0),
        lambda message: lie(message, loss=1e300),
        lambda message: Error(UNREADABLE, "expected a reply of at most 7 bytes"),
        lambda message: RecordDict(),
    ],
)
def test_each_lie_counts(crew: Crew, answer: Any) -> None:
    crew.answer["b"] = answer
    crew.run()
    assert asked(crew, "b") == [1, 2, 3, 14, 15, 16]


def update_of(name: str, examples: int, returned: Tensor) -> ClientUpdate:
    roster = Roster(0)
    client, _ = roster.admit(2, introduction(name, train_examples=examples))
    return ClientUpdate(client, TrainResult(0.0, 0.0, None), None, returned, None)


def test_nobody_counts_for_more_than_a_hundred_times_the_median() -> None:
    """Three say 10, 20 and 2 ** 62; the last counts for 2,000, as closed form of the average."""
    config = RunConfig(strategy="fedavg", sizes=("S",))
    strategy = make_strategy(config, "run", Roster(0))
    strategy.check_newcomer(introduction("a"))
    layout = strategy.layouts["S"]
    rows = [torch.full((layout.numel,), float(value)) for value in (1, 2, 3)]
    updates = [update_of(*each) for each in zip("abc", (10, 20, 2**62), rows, strict=True)]
    assert strategy.counts(updates) == [10, 20, 2000]
    strategy.update(updates)
    expected = (10 * 1 + 20 * 2 + 2000 * 3) / 2030
    (first, *_) = strategy.state().values()
    assert float(first.flatten()[0]) == pytest.approx(expected, rel=1e-6)
    assert strategy.counts([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_id": ""}, "--client-id: expected 1 to 64 letters"),
        ({"client_id": "x" * 65}, "--client-id: expected 1 to 64 letters"),
        ({"class_shares": (1e30, -1e30, 1.0)}, "expected a share from 0 to 1 for each class"),
        ({"class_shares": (0.5, 0.5)}, "expected a share from 0 to 1 for each class"),
        ({"class_shares": (0.5, 0.5, 0.5)}, "expected a share from 0 to 1 for each class"),
        ({"divisor": 0.0}, "expected a divisor, and a mean"),
        ({"divisor": float("nan")}, "expected a divisor, and a mean"),
        ({"divisor": 1.0, "mean": (0.5,)}, "expected a divisor, and a mean"),
        ({"divisor": 1.0, "mean": (0.5,), "std": (0.0,)}, "expected a divisor, and a mean"),
        ({"divisor": 1.0, "mean": (0.5,) * 2, "std": (1.0,) * 2}, "expected a divisor, and a mean"),
    ],
)
def test_what_a_newcomer_cannot_be(changes: dict[str, Any], message: str) -> None:
    strategy = make_strategy(RunConfig(strategy="pfedhn"), "run", Roster(0))
    with pytest.raises(RefusedError, match=message):
        strategy.check_newcomer(replace(introduction("a", size="M"), **changes))
