"""The round as Flower sees it: which reply is whose, which are refused and why, and what the scores add up to."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import EvaluateOrder, EvaluateResult, TrainOrder, TrainResult, Weights
from hyperbloom.server import rounds
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.hypernetworks.learner import Reply, UpdateRule
from hyperbloom.strategies.personalised import Evaluation
from hyperbloom.strategies.roster import Roster
from tests.strategies.conftest import Evaluate, Inline, assert_same, introduction, no_evaluation, scripted_grid

NAMES = ("a", "b", "c")
SHAPES = {"fc1.weight": (50, 4), "fc1.bias": (50,), "head.weight": (3, 50), "head.bias": (3,)}
LENGTH = sum(math.prod(shape) for shape in SHAPES.values())


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "clients": 3,
        "cohort": 3,
        "rounds": 5,
        "sizes": ("S",),
        "options": {"hidden_dim": 8, "learning_rate": 0.1, "update": "sequential"},
    }
    return RunConfig(**(values | changes))


def delta_of(name: str) -> Tensor:
    return 0.1 * torch.randn(LENGTH, generator=torch.Generator().manual_seed(NAMES.index(name)))


def result_of(name: str, order: TrainOrder) -> TrainResult:
    assert order.weights is not None
    return TrainResult(1.0 + NAMES.index(name), 0.0, Weights(order.weights.layout, delta_of(name)))


def federation(evaluate: Evaluate = no_evaluation, **changes: Any) -> Inline:
    """Return three scripted clients that have joined."""
    return Inline(config(**changes), scripted_grid([introduction(name) for name in NAMES], result_of, evaluate)).join()


@dataclass
class Desk:
    """A round whose orders are out and whose replies lie open, in the order of the clients' names."""

    federation: Inline
    orders: dict[str, Message]
    replies: dict[str, Message]
    number: int = 1

    @classmethod
    def open(cls, federation: Inline, number: int = 1) -> "Desk":
        orders = federation.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), federation.grid)
        replies = list(federation.grid.send_and_receive(orders))
        return cls(federation, cls._by_name(federation, orders), cls._by_name(federation, replies), number)

    @staticmethod
    def _by_name(federation: Inline, messages: Sequence[Message]) -> dict[str, Message]:
        named = {}
        for message in messages:
            metadata = message.metadata
            client = federation.roster.on_node(max(metadata.src_node_id, metadata.dst_node_id))
            assert client is not None
            named[client.client_id] = message
        return named

    def sent(self, name: str) -> Weights:
        weights = TrainOrder.unpack(self.orders[name].content).weights
        assert weights is not None
        return weights

    def answer(self, name: str, content: RecordDict | Error) -> Message:
        """Return another reply to a client's order."""
        return Message(content, reply_to=self.orders[name])

    def aggregate(self, replies: Sequence[Message]) -> dict[str, str]:
        """Hand in replies; returns who was refused and why."""
        self.federation.strategy.aggregate_train(self.number, replies)
        refused: dict[str, str] = self.federation.strategy.round.refused
        return refused


def state_after(deltas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a server whose learner was given these changes directly, in order of rows."""
    desk = Desk.open(federation())
    learner = desk.federation.strategy.learner
    replies = [Reply(NAMES.index(name), "S", desk.sent(name).values, delta) for name, delta in deltas.items()]
    learner.update(replies, "sequential")
    return desk.federation.state()


ALL = {name: delta_of(name) for name in NAMES}


def without(name: str) -> dict[str, Tensor]:
    return {other: delta for other, delta in ALL.items() if other != name}


# ---------------------------------------------------------------------- whose reply it is


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_replies_are_matched_to_orders_however_they_arrive(order: str) -> None:
    desk = Desk.open(federation())
    assert desk.aggregate([desk.replies[name] for name in order]) == {}
    assert_same(desk.federation.state(), state_after(ALL))
    results = desk.federation.strategy.round.results
    assert {name: result.loss for name, result in results.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert list(results) == ["a", "b", "c"]


def test_a_reply_teaches_the_client_whose_order_it_answers_whatever_is_inside() -> None:
    desk = Desk.open(federation())
    # a and b answer their own orders with each other's contents
    swapped = [desk.answer("a", desk.replies["b"].content), desk.answer("b", desk.replies["a"].content)]
    assert desk.aggregate([*swapped, desk.replies["c"]]) == {}
    assert_same(desk.federation.state(), state_after({"a": delta_of("b"), "b": delta_of("a"), "c": delta_of("c")}))


def test_each_client_is_sent_its_own_weights_and_nothing_else_travels() -> None:
    desk = Desk.open(federation())
    learner = desk.federation.strategy.learner
    for row, name in enumerate(NAMES):
        client = desk.federation.roster.on_node(desk.orders[name].metadata.dst_node_id)
        assert client is not None and (client.client_id, client.row) == (name, row)
        generated = learner.hypernetwork(learner.table.weight[row][None], "S")[0].detach()
        torch.testing.assert_close(desk.sent(name).values, generated, rtol=0, atol=1e-6)
        assert dict(desk.sent(name).layout.shapes) == SHAPES
    assert not torch.allclose(desk.sent("a").values, desk.sent("b").values, atol=1e-3)
    embeddings = learner.table.weight.detach()
    payloads = [fields["values"] for fields in desk.federation.grid.fields("train")]
    assert len(payloads) == 6
    assert all(len(payload) == 4 * LENGTH for payload in payloads)
    assert not any(row.numpy().tobytes() in payload for row in embeddings.repeat(1, 4) for payload in payloads)


def test_a_reply_that_comes_from_another_node_is_refused() -> None:
    desk = Desk.open(federation())
    forged = desk.answer("a", desk.replies["b"].content)
    forged.metadata.__dict__["_src_node_id"] = desk.orders["b"].metadata.dst_node_id
    refused = desk.aggregate([forged, desk.replies["b"], desk.replies["c"]])
    assert refused == {"a": "the reply came from another node than the order went to"}
    assert_same(desk.federation.state(), state_after(without("a")))


def test_of_two_replies_to_one_order_only_the_first_counts() -> None:
    desk = Desk.open(federation())
    again = desk.answer("a", TrainResult(9.0, 0.0, Weights(desk.sent("a").layout, 5 * delta_of("a"))).pack())
    assert desk.aggregate([*desk.replies.values(), again, desk.replies["b"]]) == {}
    assert_same(desk.federation.state(), state_after(ALL))
    assert desk.federation.strategy.round.results["a"].loss == 1.0


def test_replies_to_no_order_of_this_round_are_ignored() -> None:
    first = Desk.open(federation())
    first.aggregate(list(first.replies.values()))
    late = first.answer("a", TrainResult(9.0, 0.0, Weights(first.sent("a").layout, 5 * delta_of("a"))).pack())
    twin = Desk.open(federation())
    twin.aggregate(list(twin.replies.values()))
    second, expected = Desk.open(first.federation, 2), Desk.open(twin.federation, 2)
    unknown = second.answer("a", late.content)
    unknown.metadata.__dict__["_reply_to_message_id"] = "never-sent"
    assert second.aggregate([late, unknown, *second.replies.values()]) == {}
    assert expected.aggregate(list(expected.replies.values())) == {}
    assert_same(first.federation.state(), twin.federation.state())
    assert second.federation.strategy.round.results["a"].loss == 1.0


# ---------------------------------------------------------------------- what is refused

Spoil = Callable[[Weights], Weights]


def with_value(name: str, value: float) -> Spoil:
    def spoil(weights: Weights) -> Weights:
        values = weights.values.clone()
        weights.layout.views(values)[name].view(-1)[1] = value
        return Weights(weights.layout, values)

    return spoil


def with_shapes(change: Callable[[dict[str, tuple[int, ...]]], dict[str, tuple[int, ...]]]) -> Spoil:
    def spoil(weights: Weights) -> Weights:
        layout = Layout(tuple(change(dict(weights.layout.shapes)).items()))
        return Weights(layout, torch.zeros(layout.numel))

    return spoil


SPOILED: dict[str, tuple[Spoil, str]] = {
    "nan": (with_value("fc1.bias", math.nan), "tensor fc1.bias: 1 values are not finite"),
    "infinity": (with_value("head.weight", math.inf), "tensor head.weight: 1 values are not finite"),
    "first": (with_value("fc1.weight", -math.inf), "tensor fc1.weight: 1 values are not finite"),
    "shape": (
        with_shapes(lambda shapes: shapes | {"fc1.weight": (4, 50)}),
        "tensor fc1.weight: expected shape (50, 4), found (4, 50)",
    ),
    "size": (
        with_shapes(lambda shapes: shapes | {"head.weight": (3, 100)}),
        "tensor head.weight: expected shape (3, 50), found (3, 100)",
    ),
    "missing": (
        with_shapes(lambda shapes: {name: s for name, s in shapes.items() if name != "head.bias"}),
        "tensor head.bias: expected with shape (3,), but it is missing",
    ),
    "extra": (with_shapes(lambda shapes: shapes | {"spy.weight": (2,)}), "tensor spy.weight: not expected"),
    "order": (
        with_shapes(lambda shapes: dict(reversed(shapes.items()))),
        "tensors: expected in the order fc1.weight, fc1.bias, head.weight, head.bias, found head.bias",
    ),
    "half": (lambda w: Weights(w.layout, w.values.half()), "expected torch.float32, found torch.float16"),
    "double": (lambda w: Weights(w.layout, w.values.double()), "tensor fc1.weight: expected torch.float32"),
}


@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("culprit", ["a", "c"])
def test_spoiled_tensors_are_refused_by_name_and_the_others_still_learn(case: str, culprit: str) -> None:
    spoil, text = SPOILED[case]
    desk = Desk.open(federation())
    bad = spoil(Weights(desk.sent(culprit).layout, delta_of(culprit)))
    replies = desk.replies | {culprit: desk.answer(culprit, TrainResult(1.0, 0.0, bad).pack())}
    refused = desk.aggregate(list(replies.values()))
    assert list(refused) == [culprit]
    assert text in refused[culprit]
    assert_same(desk.federation.state(), state_after(without(culprit)))
    assert list(desk.federation.strategy.round.results) == [name for name in NAMES if name != culprit]


def fields(desk: Desk, name: str, **changes: Any) -> RecordDict:
    """Return a client's reply with some fields of the record replaced, or removed if None."""
    record = dict(desk.replies[name].content["hyperbloom"]) | changes
    return RecordDict({"hyperbloom": ConfigRecord({key: v for key, v in record.items() if v is not None})})


LENGTHS = "TrainResult.tensors: expected names and whole lengths from 0"
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"loss": math.nan}, "TrainResult.loss: expected a finite number, found nan"),
    "infinite": ({"seconds": math.inf}, "TrainResult.seconds: expected a finite number"),
    "type": ({"loss": "low"}, "TrainResult.loss: expected float, found str"),
    "absent": ({"loss": None}, "TrainResult: field 'loss' is missing"),
    "claim": ({"client_id": "b"}, "TrainResult: unknown field 'client_id'"),
    "row": ({"row": 1}, "TrainResult: unknown field 'row'"),
    "none": ({"values": None, "tensors": None, "dtype": None}, "expected weights in the reply, found none"),
    "half": ({"tensors": None}, "TrainResult.tensors: expected str, found NoneType"),
    "short": ({"values": b"1234567"}, f"TrainResult.values: expected {4 * LENGTH} bytes for 4 tensors, found 7"),
    "dtype": ({"dtype": "bfloat16"}, "TrainResult.dtype: expected one of"),
    "json": ({"tensors": '[["fc1.weight",'}, "TrainResult.tensors: expected names and shapes as JSON"),
    "number": ({"tensors": "5"}, "TrainResult.tensors: expected names and shapes as JSON"),
    "word": ({"tensors": '[["fc1.weight",["many"]]]'}, LENGTHS),
    "negative": ({"tensors": '[["fc1.weight",[-1]]]'}, LENGTHS),
    "fraction": ({"tensors": '[["fc1.weight",[1.5]]]'}, LENGTHS),
    "infinite-length": ({"tensors": '[["fc1.weight",[Infinity]]]'}, LENGTHS),
    "yes": ({"tensors": '[["fc1.weight",[true]]]'}, LENGTHS),
    "list-name": ({"tensors": '[[["fc1.weight"],[1]]]'}, LENGTHS),
    "deep": ({"tensors": "[" * 200_000}, "TrainResult.tensors: expected names and shapes as JSON"),
    "long": ({"tensors": f'[["fc1.weight",[{10**60}]]]'}, LENGTHS),
    "twice": (
        {"tensors": json.dumps([["fc1.weight", [50, 4]], *SHAPES.items()]), "values": bytes(4 * (LENGTH + 200))},
        "tensors: expected in the order",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_replies_are_refused_and_the_others_still_learn(case: str) -> None:
    changes, text = MALFORMED[case]
    desk = Desk.open(federation())
    replies = desk.replies | {"b": desk.answer("b", fields(desk, "b", **changes))}
    refused = desk.aggregate(list(replies.values()))
    assert list(refused) == ["b"]
    assert text in refused["b"]
    assert_same(desk.federation.state(), state_after(without("b")))


def test_a_reply_of_something_else_is_refused() -> None:
    desk = Desk.open(federation())
    other = desk.answer("b", RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"loss": 1.0})}))
    refused = desk.aggregate([other, desk.replies["a"], desk.replies["c"]])
    assert refused == {"b": "expected a record 'hyperbloom' with a TrainResult, found ['arrays', 'metrics']"}
    assert_same(desk.federation.state(), state_after(without("b")))


@pytest.mark.parametrize("rule", get_args(UpdateRule))
@pytest.mark.parametrize("size", [2e6, 3e38])
def test_a_huge_change_is_refused_before_it_overflows_and_reaches_everyone(size: float, rule: str) -> None:
    options = {"hidden_dim": 8, "update": rule}
    desk, twin = Desk.open(federation(options=options)), Desk.open(federation(options=options))
    huge = torch.zeros(LENGTH)
    huge[5:7] = size  # finite, as its square need not be
    answer = desk.answer("b", TrainResult(1.0, 0.0, Weights(desk.sent("b").layout, huge)).pack())
    refused = desk.aggregate([desk.replies["a"], answer, desk.replies["c"]])
    assert list(refused) == ["b"]
    assert "expected a norm of at most 1e+06, found" in refused["b"]
    twin.aggregate([twin.replies["a"], twin.replies["c"]])
    assert_same(desk.federation.state(), twin.federation.state())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in desk.federation.state().values())


@pytest.mark.parametrize("rule", get_args(UpdateRule))
def test_a_large_change_that_is_accepted_is_clipped(rule: str) -> None:
    desk = Desk.open(federation(options={"hidden_dim": 8, "update": rule, "learning_rate": 1e-2, "weight_decay": 0.0}))
    before = desk.federation.state()
    large = torch.full((LENGTH,), 9e5 / math.sqrt(LENGTH))
    answer = desk.answer("b", TrainResult(1.0, 0.0, Weights(desk.sent("b").layout, large)).pack())
    assert desk.aggregate([answer]) == {"a": "no reply", "c": "no reply"}
    after = desk.federation.state()
    moved = math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in before))
    assert moved == pytest.approx(1e-2 * 50, rel=1e-3)


def test_errors_and_silence_are_noted_and_the_others_still_learn() -> None:
    desk = Desk.open(federation())
    failed = desk.answer("a", Error(3, "ValueError: out of memory"))
    assert desk.aggregate([failed, desk.replies["b"]]) == {"a": "ValueError: out of memory", "c": "no reply"}
    assert_same(desk.federation.state(), state_after({"b": delta_of("b")}))


def test_an_error_without_a_reason_is_named_by_its_code_whatever_node_it_comes_from() -> None:
    desk = Desk.open(federation())
    failed = desk.answer("a", Error(4))
    failed.metadata.__dict__["_src_node_id"] = 1  # the SuperLink's: it says that a node is gone
    assert desk.aggregate([failed, desk.replies["b"], desk.replies["c"]]) == {"a": "error 4"}


def test_a_round_without_a_usable_reply_changes_nothing() -> None:
    desk = Desk.open(federation())
    before = desk.federation.state()
    strategy = desk.federation.strategy
    assert strategy.aggregate_train(1, []) == (None, None)
    assert strategy.round.refused == dict.fromkeys(NAMES, "no reply")
    assert strategy.round.results == {}
    assert_same(desk.federation.state(), before)


@pytest.mark.parametrize(("share", "enough"), [(0.0, 1), (0.3, 1), (0.4, 2), (0.66, 2), (0.67, 3), (1.0, 3)])
@pytest.mark.parametrize("answered", ["", "a", "ac", "abc"])
def test_a_round_with_too_few_replies_changes_nothing_and_says_so(answered: str, share: float, enough: int) -> None:
    desk = Desk.open(federation(min_replies=share))
    before = desk.federation.state()
    refused = desk.aggregate([desk.replies[name] for name in answered])
    silent = dict.fromkeys((name for name in NAMES if name not in answered), "no reply")
    if len(answered) < enough:
        dropped = f"dropped: only {len(answered)} of 3 answered"
        assert refused == silent | (dict.fromkeys(answered, dropped) if share else {})
        assert desk.federation.strategy.round.results == {}
        assert_same(desk.federation.state(), before)
    else:
        assert refused == silent
        assert list(desk.federation.strategy.round.results) == list(answered)
        assert_same(desk.federation.state(), state_after({name: delta_of(name) for name in answered}))


def test_refused_replies_are_no_answers_to_the_fraction_that_is_asked_for() -> None:
    desk = Desk.open(federation(min_replies=0.6))
    before = desk.federation.state()
    failed = desk.answer("b", Error(3, "ValueError: no"))
    assert desk.aggregate([failed, desk.replies["a"]]) == {
        "a": "dropped: only 1 of 3 answered",
        "b": "ValueError: no",
        "c": "no reply",
    }
    assert_same(desk.federation.state(), before)


def test_the_fraction_is_met_exactly_where_its_product_is_rounded_up() -> None:
    names = [f"client-{index:02}" for index in range(50)]
    assert 0.14 * 50 > 7
    grid = scripted_grid([introduction(name) for name in names], lambda name, order: zero_result(order))
    made = Inline(config(clients=50, cohort=50, min_replies=0.14), grid).join()
    orders = made.strategy.configure_train(1, ArrayRecord(), ConfigRecord(), made.grid)
    made.strategy.aggregate_train(1, list(made.grid.send_and_receive(orders))[:7])
    assert len(made.strategy.round.results) == 7


def zero_result(order: TrainOrder) -> TrainResult:
    assert order.weights is not None
    return TrainResult(1.0, 0.0, Weights(order.weights.layout, torch.zeros_like(order.weights.values)))


def test_an_order_that_was_never_sent_is_named_and_counts_as_not_answered() -> None:
    made = federation(min_replies=1.0)
    orders = made.strategy.configure_train(1, ArrayRecord(), ConfigRecord(), made.grid)
    replies = list(made.grid.send_and_receive(orders[:2]))  # Flower gives an order its id when it takes it
    made.strategy.aggregate_train(1, replies)
    assert made.strategy.round.refused == {
        "a": "dropped: only 2 of 3 answered",
        "b": "dropped: only 2 of 3 answered",
        "c": "its node cannot be reached",
    }


def test_an_order_that_is_forgotten_is_named_once_and_its_reply_is_nobodys() -> None:
    desk = Desk.open(federation())
    strategy = desk.federation.strategy
    identity = desk.replies["b"].metadata.reply_to_message_id
    assert strategy.forget(identity) == "b"
    assert strategy.forget(identity) is None
    assert strategy.accept(desk.replies["b"]) is None
    update = strategy.accept(desk.replies["a"])
    assert update.client.client_id == "a" and torch.equal(update.returned, delta_of("a"))
    assert strategy.accept(desk.replies["a"]) is None  # answered already
    assert strategy.round.refused == {}


def test_replies_are_checked_as_they_come() -> None:
    desk = Desk.open(federation())
    refused: list[dict[str, str]] = []

    def one_by_one() -> Iterable[Message]:
        yield desk.answer("c", Error(3, "ValueError: no"))
        refused.append(dict(desk.federation.strategy.round.refused))
        yield desk.replies["a"]

    desk.federation.strategy.aggregate_train(1, one_by_one())
    assert refused == [{"c": "ValueError: no"}]
    assert_same(desk.federation.state(), state_after({"a": delta_of("a")}))


def test_an_exception_on_a_client_becomes_a_refusal() -> None:
    def train(name: str, order: TrainOrder) -> TrainResult:
        if name == "b":
            raise RuntimeError("the disk is full")
        return result_of(name, order)

    failing = Inline(config(), scripted_grid([introduction(name) for name in NAMES], train)).join()
    desk = Desk.open(failing)
    refused = desk.aggregate(list(desk.replies.values()))
    assert list(refused) == ["b"] and "the disk is full" in refused["b"]
    assert_same(failing.state(), state_after(without("b")))


def test_the_metrics_of_a_round_are_means_over_those_who_answered() -> None:
    desk = Desk.open(federation())
    _, metrics = desk.federation.strategy.aggregate_train(1, [desk.replies["a"], desk.replies["c"]])
    assert dict(metrics) == {"loss": 2.0, "clients": 2}


# ---------------------------------------------------------------------- evaluation

SCORES = {
    "a": EvaluateResult(1, 10, 0.5, 9, 10, 0.25),
    "b": EvaluateResult(2, 5, 1.5, 10, 100, 2.0),
    "c": EvaluateResult(15, 15, 1.0, 2, 4, 0.75),
}


def test_metrics_by_hand() -> None:
    metrics = Evaluation(SCORES).metrics()
    # validation: 10, 40, 100 percent; 18 of 30. Test: 90, 10, 50 percent; 21 of 114.
    expected = {
        "val_mean": 50.0,
        "val_std": math.sqrt((40**2 + 10**2 + 50**2) / 3),
        "val_worst": 10.0,
        "val_pooled": 60.0,
        "val_loss": 1.0,
        "test_mean": 50.0,
        "test_std": math.sqrt((40**2 + 40**2) / 3),
        "test_worst": 10.0,
        "test_pooled": 100 * 21 / 114,
        "test_loss": 1.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-14)


def evaluated(scores: dict[str, EvaluateResult], drop: str = "") -> tuple[Inline, MetricRecord | None]:
    made = federation(lambda name, order: scores[name])
    strategy = made.strategy
    orders = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), made.grid)
    replies = list(made.grid.send_and_receive(orders))
    kept = [r for r, name in zip(replies, NAMES, strict=True) if name not in drop]
    return made, strategy.aggregate_evaluate(1, reversed(kept))


def test_everyone_is_evaluated_on_its_own_weights_and_scores_are_kept_by_name() -> None:
    made, metrics = evaluated(SCORES)
    assert made.strategy.round.evaluation.scores == SCORES
    assert list(made.strategy.round.evaluation.scores) == ["a", "b", "c"]
    assert metrics is not None and dict(metrics) == Evaluation(SCORES).metrics()
    orders = [f for f in made.grid.fields("evaluate") if "run_id" in f]
    rows = made.strategy.learner.generate([0, 1, 2], "S")
    assert [order["values"] for order in orders] == [row.numpy().tobytes() for row in rows]


@pytest.mark.parametrize(
    ("limit", "value", "most"),
    [("MOST_AT_ONCE", 1000, 3), ("MOST_AT_ONCE", 2, 2), ("BYTES_AT_ONCE", 8 * LENGTH, 2), ("BYTES_AT_ONCE", 1, 1)],
)
def test_everyone_is_evaluated_however_few_fit_into_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, most: int
) -> None:
    monkeypatch.setattr(rounds, limit, value)
    made = federation(lambda name, order: SCORES[name], rounds=1, eval_every=1)
    together: list[int] = []
    push = made.grid.push_messages

    def noted(messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        together.append(sum(message.metadata.message_type == "evaluate" for message in outgoing))
        return push(outgoing)

    monkeypatch.setattr(made.grid, "push_messages", noted)
    history, selection = made.run()
    assert history.rounds[0].evaluation is not None
    assert history.rounds[0].evaluation.scores == SCORES
    assert history.rounds[0].refused == {}
    assert selection.metrics == Evaluation(SCORES).metrics()
    assert (max(together), sum(together)) == (most, 3)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (EvaluateResult(11, 10, 0.5, 9, 10, 0.25), "val: expected 0 <= correct <= total"),
        (EvaluateResult(1, 10, 0.5, -1, 10, 0.25), "test: expected 0 <= correct <= total"),
        (EvaluateResult(1, 10, 0.5, 90, 101, 0.25), "expected at most the validation and test examples that it said"),
        (EvaluateResult(1, 10, -0.5, 9, 10, 0.25), "val: expected a loss of 0 to"),
        (EvaluateResult(1, 10, 0.5, 9, 10, 1e300), "test: expected a loss of 0 to"),
        (EvaluateResult(0, 0, 0.5, 9, 10, 0.25), "val: expected 0 <= correct <= total and examples"),
        (EvaluateResult(1, 10, math.nan, 9, 10, 0.25), "EvaluateResult.val_loss: expected a finite number"),
    ],
)
def test_impossible_scores_are_refused_and_do_not_count(bad: EvaluateResult, text: str) -> None:
    made, metrics = evaluated(SCORES | {"b": bad})
    assert list(made.strategy.round.refused) == ["b"]
    assert text in made.strategy.round.refused["b"]
    rest = {name: SCORES[name] for name in "ac"}
    assert made.strategy.round.evaluation.scores == rest
    assert metrics is not None and dict(metrics) == Evaluation(rest).metrics()


def test_a_client_that_does_not_answer_is_left_out_of_the_scores() -> None:
    made, metrics = evaluated(SCORES, drop="c")
    assert made.strategy.round.refused == {"c": "no reply"}
    assert metrics is not None and metrics["val_pooled"] == 20.0
    made, metrics = evaluated(SCORES, drop="abc")
    assert metrics is None and made.strategy.round.evaluation is None


# ---------------------------------------------------------------------- who may join


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_shape": (5,)}, r"expected inputs of shape \(4,\) as in this federation, found \(5,\)"),
        ({"num_classes": 4}, "expected 3 classes as in this federation, found 4"),
        ({"size": "L"}, "expected --size to be one of S, M, found L"),
        ({"val_examples": 0}, "found an empty set"),
        ({"client_id": "../../home/op/x"}, "--client-id: expected 1 to 64 letters"),
        ({"client_id": ""}, "--client-id: expected 1 to 64 letters"),
        ({"client_id": "a\nb"}, "--client-id: expected 1 to 64 letters"),
        ({"version": "1" * 101}, "expected less to be said of its version and model"),
        ({"types": ("x" * 2**21, "y" * 2**21)}, "expected less to be said of its version and model"),
    ],
)
def test_a_newcomer_that_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    strategy = make_strategy(config(sizes=("S", "M")), "run", Roster(0))
    strategy.check_newcomer(introduction("a"))
    strategy.check_newcomer(introduction("b", size="M"))
    with pytest.raises(RefusedError, match=text):
        strategy.check_newcomer(replace(introduction("c"), **changes))


def test_a_first_client_that_no_network_fits_is_refused_and_decides_nothing() -> None:
    strategy = make_strategy(config(model="lenet"), "run", Roster(0))
    with pytest.raises(RefusedError, match="lenet: expected images"):
        strategy.check_newcomer(introduction("a"))
    assert strategy.layouts == {} and strategy.spec is None
    strategy.check_newcomer(introduction("b", input_shape=(1, 28, 28)))
    assert strategy.layouts["S"].shapes[0] == ("conv1.weight", (8, 1, 5, 5))


def test_unknown_strategies_and_options_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy: expected one of fedavg, .*local, .*pfedhn, .*pfedhn-pc, .*found 'fed'"
    ):
        make_strategy(config(strategy="fed", options={}), "run", Roster(0))
    with pytest.raises(
        ConfigError, match=r"learning_rat: unknown key in options of pfedhn. Did you mean learning_rate"
    ):
        make_strategy(config(options={"learning_rat": 0.1}), "run", Roster(0))


def test_the_order_says_what_the_configuration_says() -> None:
    desk = Desk.open(federation(seed=7), 3)
    order = TrainOrder.unpack(desk.orders["b"].content)
    local = config().local
    expected = TrainOrder(
        "run-of-a-test", 3, "mlp", 3, "none", "delta", 7, local.steps, local.batch_size, local.learning_rate,
        local.momentum, local.weight_decay, local.clip, None,
    )  # fmt: skip
    assert replace(order, weights=None) == expected
    (evaluate, *_) = desk.federation.strategy.configure_evaluate(3, ArrayRecord(), ConfigRecord(), desk.federation.grid)
    asked = EvaluateOrder.unpack(evaluate.content)
    assert replace(asked, weights=None) == EvaluateOrder("run-of-a-test", 3, "mlp", 3, "none", 7, None)
