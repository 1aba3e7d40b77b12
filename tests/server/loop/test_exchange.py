"""An exchange: which answer is whose, which are refused and why, what a quorum is, and what scores add up to."""

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, Failed, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import LONGEST_REASON, pack, unpack
from hyperbloom.server.loop import exchange
from hyperbloom.server.loop.exchange import (
    Evaluated,
    Outcome,
    Sent,
    accept,
    capped_examples,
    slices,
)
from hyperbloom.server.loop.post import Failure
from hyperbloom.strategies.exchange import Train, Update, train
from tests.strategies.conftest import (
    Inline,
    RecordingGrid,
    assert_same,
    introduction,
    joined,
    scored,
    scripted_grid,
    texts,
    turn,
)

from .desk import LENGTH, NAMES, SHAPES, config, delta_of, federation, result_of, state_after

ALL = {name: delta_of(name) for name in NAMES}


def without(name: str) -> dict[str, Tensor]:
    return {other: delta for other, delta in ALL.items() if other != name}


# ---------------------------------------------------------------------- whose answer it is


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_answers_are_matched_to_orders_however_they_arrive(order: str) -> None:
    made, desk = federation()
    desk.deliver = lambda: [desk.replies[name] for name in order]
    outcome = made.train()
    assert outcome.refused == {}
    assert_same(made.state(), state_after(ALL))
    assert {name: result.loss for name, result in outcome.results.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert list(outcome.results) == ["a", "b", "c"]


def test_an_answer_teaches_the_client_whose_order_it_answers_whatever_is_inside() -> None:
    made, desk = federation()
    # a and b answer their own orders with each other's contents.
    desk.deliver = lambda: [
        desk.answer("a", desk.replies["b"].content),
        desk.answer("b", desk.replies["a"].content),
        desk.replies["c"],
    ]
    assert made.train().refused == {}
    assert_same(made.state(), state_after({"a": delta_of("b"), "b": delta_of("a"), "c": delta_of("c")}))


def test_each_client_is_sent_its_own_weights_and_nothing_else_travels() -> None:
    made, desk = federation()
    learner = made.algorithm.learner
    embeddings = learner.table.weight.detach().clone()
    generated = learner.generate([0, 1, 2], "S")
    made.train()
    for row, name in enumerate(NAMES):
        client = made.roster.on_node(desk.orders[name].metadata.dst_node_id)
        assert client is not None and (client.client_id, client.row) == (name, row)
        sent = unpack(TrainOrder, desk.orders[name].content).weights
        assert sent is not None and dict(sent.layout.shapes) == SHAPES
        torch.testing.assert_close(sent.values, generated[row], rtol=0, atol=1e-6)
    assert not torch.allclose(generated[0], generated[1], atol=1e-3)
    payloads = [fields["values"] for fields in desk.fields(TrainOrder)]
    assert [len(payload) for payload in payloads] == [4 * LENGTH] * 6
    assert not any(row.numpy().tobytes() in payload for row in embeddings.repeat(1, 4) for payload in payloads)


def test_an_answer_that_comes_from_another_node_is_refused_and_held_against_nobody() -> None:
    made, desk = federation()

    def forged() -> list[Message]:
        one = desk.answer("a", desk.replies["b"].content)
        one.metadata.__dict__["_src_node_id"] = desk.orders["b"].metadata.dst_node_id
        return [one, desk.replies["b"], desk.replies["c"]]

    desk.deliver = forged
    outcome = made.train()
    assert texts(outcome) == {"a": "the reply came from another node than the order went to"}
    assert outcome.lied == []
    assert_same(made.state(), state_after(without("a")))


def test_of_two_answers_to_one_order_only_the_first_counts() -> None:
    made, desk = federation()
    desk.deliver = lambda: [*desk.replies.values(), desk.weights("a", 5 * delta_of("a"), 9.0), desk.replies["b"]]
    outcome = made.train()
    assert outcome.refused == {} and outcome.results["a"].loss == 1.0
    assert_same(made.state(), state_after(ALL))


def test_answers_to_no_order_of_this_round_are_ignored() -> None:
    made, desk = federation()
    made.train(1)
    late = desk.weights("a", 5 * delta_of("a"), 9.0)

    def with_strangers() -> list[Message]:
        unknown = desk.answer("a", late.content)
        unknown.metadata.__dict__["_reply_to_message_id"] = "never-sent"
        return [late, unknown, *desk.replies.values()]

    desk.deliver = with_strangers
    outcome = made.train(2)
    twin, _ = federation()
    twin.train(1)
    assert twin.train(2).refused == {} == outcome.refused
    assert_same(made.state(), twin.state())
    assert outcome.results["a"].loss == 1.0


def test_errors_and_silence_are_noted_and_the_others_still_learn() -> None:
    made, desk = federation()
    desk.deliver = lambda: [desk.answer("a", Error(3, "ValueError: out of memory")), desk.replies["b"]]
    outcome = made.train()
    assert outcome.refused == {
        "a": Failure(Reason.FAILED, "ValueError: out of memory"),
        "c": Failure(Reason.NO_REPLY, "no reply"),
    }
    assert_same(made.state(), state_after({"b": delta_of("b")}))


def test_a_spoiled_answer_is_left_out_and_the_others_still_learn() -> None:
    made, desk = federation()
    desk.deliver = lambda: [desk.replies["c"], desk.weights("b", torch.full((LENGTH,), math.nan)), desk.replies["a"]]
    outcome = made.train()
    assert outcome.lied == list(outcome.refused) == ["b"] and list(outcome.results) == ["a", "c"]
    assert_same(made.state(), state_after(without("b")))


def test_an_exception_on_a_client_becomes_a_refusal() -> None:
    def fail(name: str, order: TrainOrder) -> TrainResult:
        if name == "b":
            raise RuntimeError("the disk is full")
        return result_of(name, order)

    made, _ = federation(train=fail)
    outcome = made.train()
    assert list(outcome.refused) == ["b"] and "the disk is full" in outcome.refused["b"].text
    assert_same(made.state(), state_after(without("b")))


def test_a_round_without_a_usable_answer_changes_nothing() -> None:
    made, desk = federation()
    before = made.state()
    desk.deliver = list
    outcome = made.train()
    assert texts(outcome) == dict.fromkeys(NAMES, "no reply") and outcome.results == {}
    assert_same(made.state(), before)


def test_who_has_left_or_works_on_something_else_is_not_asked_and_named_once() -> None:
    made, _ = federation()
    clients = list(made.roster)
    node = made.roster.node_of(clients[1])
    assert node is not None
    made.roster.leave(node)
    outcome = Outcome()
    wanted = turn(made.algorithm).training(clients)
    found = made.loop().director.play(train(wanted), outcome)
    assert [update.client.client_id for update in found] == ["a", "c"]
    assert outcome.refused == {"b": Failure(Reason.LEFT, "left before it was asked")}


def test_an_order_that_cannot_be_pushed_is_named_and_counts_as_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    made, desk = federation(min_replies=1.0)
    push = desk.push_messages
    monkeypatch.setattr(desk, "push_messages", lambda messages: [*list(push(list(messages)[:2])), None])
    outcome = made.train()
    dropped = Failure(Reason.DROPPED, "dropped: only 2 of 3 answered")
    unreachable = Failure(Reason.UNREACHABLE, "its node cannot be reached")
    assert outcome.refused == {"a": dropped, "b": dropped, "c": unreachable}


def test_what_an_exchange_brings_is_in_order_of_rows_and_who_failed_is_told_to_the_algorithm() -> None:
    """Three exchanges of one round: what comes of the first is there for the second."""
    made, desk = federation()
    failed: list[tuple[str, Reason]] = []
    clients = list(made.roster)

    def play() -> Any:
        wanted = turn(made.algorithm).training(clients)
        wanted = replace(wanted, failed=lambda client, reason: failed.append((client.client_id, reason)))
        first = yield from train(wanted)
        desk.deliver = lambda: [desk.replies["c"], desk.replies["a"]]
        second = yield from train(replace(wanted, clients=[update.client for update in first]))
        return first, second

    desk.deliver = lambda: [desk.replies["c"], desk.answer("b", Error(3, "no")), desk.replies["a"]]
    outcome = Outcome()
    first, second = made.loop().director.play(play(), outcome)
    assert [[update.client.client_id for update in updates] for updates in (first, second)] == [["a", "c"]] * 2
    assert failed == [("b", Reason.FAILED)] and texts(outcome) == {"b": "no"}


# ---------------------------------------------------------------------- quorum


@pytest.mark.parametrize(
    ("share", "answered", "counts"),
    [
        (0.0, "a", True),
        (0.3, "a", True),
        (0.4, "a", False),
        (0.66, "ac", True),
        (0.67, "ac", False),
        (1.0, "abc", True),
    ],
)
def test_a_round_with_too_few_answers_changes_nothing_and_says_so(share: float, answered: str, counts: bool) -> None:
    made, desk = federation(min_replies=share)
    before = made.state()
    desk.deliver = lambda: [desk.replies[name] for name in answered]
    outcome = made.train()
    silent = dict.fromkeys((name for name in NAMES if name not in answered), "no reply")
    if counts:
        assert texts(outcome) == silent and list(outcome.results) == list(answered)
        assert_same(made.state(), state_after({name: delta_of(name) for name in answered}))
    else:
        dropped = dict.fromkeys(answered, f"dropped: only {len(answered)} of 3 answered")
        assert texts(outcome) == silent | dropped and outcome.results == {}
        assert_same(made.state(), before)


def test_refused_answers_are_none_to_the_fraction_that_is_asked_for() -> None:
    made, desk = federation(min_replies=0.6)
    before = made.state()
    desk.deliver = lambda: [desk.answer("b", Error(3, "ValueError: no")), desk.replies["a"]]
    assert texts(made.train()) == {"a": "dropped: only 1 of 3 answered", "b": "ValueError: no", "c": "no reply"}
    assert_same(made.state(), before)


def test_the_fraction_is_met_exactly_where_its_product_is_rounded_up() -> None:
    assert 0.28 * 25 > 7
    grid: RecordingGrid = scripted_grid(
        list(map(introduction, "abcdefg")), {TrainOrder: lambda name, order: result_of("a", order)}
    )
    made = Inline(config(clients=7, cohort=7, min_replies=0.28), grid).join()
    wanted = turn(made.algorithm).training(list(made.roster))
    found = [len(made.loop().director.play(train(wanted), Outcome(), cohort)) for cohort in (25, 26)]
    assert found == [7, 0]


# ---------------------------------------------------------------------- memory


def test_slices_are_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: Any = range(7)
    assert [len(each) for each in slices(clients, 0)] == [7]
    monkeypatch.setattr(exchange, "BYTES_AT_ONCE", 8 * LENGTH)
    assert [len(each) for each in slices(clients, LENGTH)] == [2, 2, 2, 1]
    assert [len(each) for each in slices(clients, 100 * LENGTH)] == [1] * 7
    monkeypatch.setattr(exchange, "MOST_AT_ONCE", 3)
    assert [len(each) for each in slices(clients, 1)] == [3, 3, 1]
    assert list(slices([], LENGTH)) == []


@pytest.mark.parametrize("at_once", [1, 2])
def test_everyone_is_asked_however_few_orders_fit_into_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Orders to train all go out before answers are waited for; evaluations go in turns."""
    monkeypatch.setattr(exchange, "BYTES_AT_ONCE", at_once * 4 * LENGTH)
    made, desk = federation({EvaluateOrder: lambda name, order: SCORES[name]})
    pushed: list[tuple[str, int]] = []
    push = desk.push_messages

    def noted(messages: Iterable[Message]) -> Iterable[str]:
        outgoing = list(messages)
        pushed.append((outgoing[0].metadata.message_type, len(outgoing)))
        return push(outgoing)

    monkeypatch.setattr(desk, "push_messages", noted)
    outcome = made.evaluate()
    assert outcome.evaluation is not None and outcome.evaluation.scores == SCORES and outcome.refused == {}
    made.train()
    pieces = [1, 1, 1] if at_once == 1 else [2, 1]
    assert pushed == [(kind, count) for kind in ("evaluate", "train") for count in pieces]


def test_nobody_counts_for_more_than_a_hundred_times_the_median() -> None:
    """Three say 10, 20 and 2 ** 62; the last counts for 2,000."""
    said = joined(config(), *(introduction(n, train_examples=k) for n, k in zip("abc", (10, 20, 2**62), strict=True)))
    clients = list(said.clients.values())
    assert capped_examples(clients, 100) == [10, 20, 2000]
    assert capped_examples(clients, 1) == [10, 20, 20]
    assert capped_examples([], 100) == []
    assert capped_examples(clients[1:], 100) == [20, 2000], "of two, one alone cannot raise the median"


def test_updates_bring_the_capped_examples() -> None:
    made, _ = federation(examples_cap=1.5)
    for client, examples in zip(made.roster, (10, 20, 2**62), strict=True):
        object.__setattr__(client, "about", replace(client.about, train_examples=examples))
    wanted = turn(made.algorithm).training(list(made.roster))
    found = made.loop().director.play(train(wanted), Outcome())
    assert [update.examples for update in found] == [10, 20, 30]


# ---------------------------------------------------------------------- what is accepted


def asked(codec: Codec | None = None, reply: str = "delta") -> tuple[Train, Sent]:
    """Return an exchange in which one client trains, and what is remembered of its order."""
    made = joined(config(), introduction("a"))
    wanted = replace(turn(made).training([made.clients[0]]), codec=codec)
    (order,) = wanted.orders(wanted.clients)
    assert order.weights is not None
    values, layout = order.weights.values, order.weights.layout
    return wanted, Sent(made.clients[0], TrainOrder, values.dtype, values, layout, reply)


def verdict(content: Any, **changes: Any) -> Failure:
    """Return why an answer is refused. Judging it twice tells the same: nothing remembers the first time."""
    wanted, sent = asked(**changes)
    content = content(sent) if callable(content) else content
    found = [accept(wanted, sent, content) for _ in range(2)]
    assert isinstance(found[0], Failure) and found[0] == found[1]
    return found[0]


def test_a_sound_answer_becomes_an_update_without_what_it_was_made_of() -> None:
    wanted, sent = asked()
    assert sent.values is not None and sent.layout is not None
    delta, before = delta_of("a"), sent.values.clone()
    found = accept(wanted, sent, pack(TrainResult(2.0, Weights(sent.layout, delta), 0.5)))
    assert isinstance(found, Update)
    update = found
    assert update.result == TrainResult(2.0, None, 0.5) and update.client == sent.client
    assert update.returned is not None and torch.equal(update.returned, delta)
    assert update.sent is sent.values and torch.equal(sent.values, before)
    assert (update.layout, update.examples, update.staleness) == (sent.layout, 10, 0)


def test_failures_of_the_way_and_of_the_client_say_why() -> None:
    assert verdict(Failure(Reason.FAILED, "error 4")) == Failure(Reason.FAILED, "error 4")
    assert verdict(pack(Failed(Reason.DIVERGED, "too fast"))) == Failure(Reason.DIVERGED, "too fast")
    # Nobody is believed who accuses itself of a lie.
    assert verdict(pack(Failed(Reason.CONTENT, "I lie"))) == Failure(Reason.FAILED, "I lie")
    assert str(Failure(Reason.FAILED, "error 4")) == "error 4"


def test_what_a_refusal_quotes_of_an_answer_is_printable_and_short() -> None:
    quoted = verdict(RecordDict({"\x1b[2J" + "x" * 2**20: MetricRecord({"loss": 0.5})})).text
    assert quoted.isprintable() and len(quoted) == LONGEST_REASON and "[2Jxxx" in quoted


def test_what_an_algorithm_finds_impossible_is_held_against_the_client() -> None:
    def check(client: Any, answer: Any) -> None:
        raise WireError(f"{client.client_id} sent a loss of {answer.loss}")

    wanted, sent = asked()
    found = accept(replace(wanted, check=check), sent, pack(TrainResult(0.0, None, 0.25)))
    assert found == Failure(Reason.CONTENT, "a sent a loss of 0.25")
    with pytest.raises(ZeroDivisionError):  # our own mistakes are nobody's lie
        accept(replace(wanted, check=lambda client, answer: 1 / 0), sent, pack(TrainResult(0.0)))


def test_where_no_weights_are_to_come_back_none_are_asked_for() -> None:
    """Whether none were sent, or the algorithm wants to know nothing but the loss."""
    wanted, sent = asked(reply="nothing")
    for remembered in (replace(sent, dtype=None, values=None, layout=None), sent):
        found = accept(wanted, remembered, pack(TrainResult(1.0, loss=0.5)))
        assert isinstance(found, Update)
        assert (found.returned, found.result.loss) == (None, 0.5)


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


def with_two_of(size: float) -> Spoil:
    """Return a change that is finite, as its square need not be."""

    def spoil(weights: Weights) -> Weights:
        values = torch.zeros(LENGTH)
        values[5:7] = size
        return Weights(weights.layout, values)

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
    "huge": (with_two_of(2e6), "expected a norm of at most 1e+06, found 2.83e+06"),
    "overflow": (with_two_of(3e38), "expected a norm of at most 1e+06, found 4.24e+38"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_tensors_are_refused_by_name(case: str) -> None:
    spoil, text = SPOILED[case]
    found = verdict(lambda sent: pack(TrainResult(0.0, spoil(Weights(sent.layout, delta_of("a"))), 1.0)))
    assert found.reason is Reason.CONTENT and found.reason.is_lie
    assert text in found.text


LENGTHS = "TrainResult.weights.tensors: expected names and whole lengths from 0"
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"loss": math.nan}, "TrainResult.loss: expected a finite number, found nan"),
    "huge loss": ({"loss": 1e31}, "loss: expected at most 1e+30, found 1e+31"),
    "low loss": ({"loss": -1e31}, "loss: expected at most 1e+30, found -1e+31"),
    "infinite": ({"seconds": math.inf}, "TrainResult.seconds: expected a finite number"),
    "type": ({"loss": "low"}, "TrainResult.loss: expected float, found str"),
    "absent": ({"seconds": None}, "TrainResult.seconds is missing"),
    "claim": ({"client_id": "b"}, "TrainResult: unknown field 'client_id'"),
    "row": ({"row": 1}, "TrainResult: unknown field 'row'"),
    "none": ({"values": None, "tensors": None, "dtype": None}, "expected weights in the reply, found none"),
    "half": ({"tensors": None}, "TrainResult.weights.tensors: expected str, found NoneType"),
    "short": (
        {"values": b"1234567"},
        f"TrainResult.weights.values: expected {4 * LENGTH} bytes for 4 tensors, found 7",
    ),
    "dtype": ({"dtype": "bfloat16"}, "TrainResult.weights.dtype: expected one of"),
    "json": ({"tensors": '[["fc1.weight",'}, "TrainResult.weights.tensors: expected names and shapes as JSON"),
    "number": ({"tensors": "5"}, "TrainResult.weights.tensors: expected names and shapes as JSON"),
    "word": ({"tensors": '[["fc1.weight",["many"]]]'}, LENGTHS),
    "negative": ({"tensors": '[["fc1.weight",[-1]]]'}, LENGTHS),
    "fraction": ({"tensors": '[["fc1.weight",[1.5]]]'}, LENGTHS),
    "infinite-length": ({"tensors": '[["fc1.weight",[Infinity]]]'}, LENGTHS),
    "yes": ({"tensors": '[["fc1.weight",[true]]]'}, LENGTHS),
    "list-name": ({"tensors": '[[["fc1.weight"],[1]]]'}, LENGTHS),
    "deep": ({"tensors": "[" * 200_000}, "TrainResult.weights.tensors: expected names and shapes as JSON"),
    "long": ({"tensors": f'[["fc1.weight",[{10**60}]]]'}, LENGTHS),
    "twice": (
        {"tensors": json.dumps([["fc1.weight", [50, 4]], *SHAPES.items()]), "values": bytes(4 * (LENGTH + 200))},
        "tensors: expected in the order",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_answers_are_refused(case: str) -> None:
    changes, text = MALFORMED[case]

    def content(sent: Sent) -> RecordDict:
        assert sent.layout is not None
        record = dict(pack(TrainResult(0.0, Weights(sent.layout, delta_of("a")), 1.0))["hyperbloom"]) | changes
        return RecordDict({"hyperbloom": ConfigRecord({key: v for key, v in record.items() if v is not None})})

    found = verdict(content)
    assert found.reason is Reason.CONTENT and text in found.text


def test_an_answer_of_something_else_is_refused() -> None:
    found = verdict(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"loss": 1.0})}))
    assert found.text == "expected a record 'hyperbloom' with a TrainResult, found ['arrays', 'metrics']"
    assert verdict(RecordDict()).reason is Reason.CONTENT


CODEC = Codec.parse("top-k:0.1+int8")
assert CODEC is not None


def with_float(at: int, value: float) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + struct.pack("<f", value) + raw[at + 4 :]


BYTES = CODEC.size(Layout(tuple(SHAPES.items())))
PLACES = BYTES - 4 * 4 - 40  # before four scales and 40 values
EXPECTED = f"{CODEC.name}: expected {BYTES} bytes for 403 values in 4 tensors, found"
ENCODED: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "absent": (lambda raw: None, f"expected a change encoded as {CODEC.name}, found none"),
    "short": (lambda raw: raw[:-1], f"{EXPECTED} {BYTES - 1}"),
    "bomb": (lambda raw: raw * 1000, f"{EXPECTED} {1000 * BYTES}"),
    "indices": (lambda raw: bytes(PLACES) + raw[PLACES:], f"{CODEC.name}: expected 40 indices, found 0"),
    "scale": (with_float(PLACES, math.nan), "tensor fc1.weight: expected a finite scale from 0, found nan"),
    "overflow": (with_float(PLACES, 3e38), "values are not finite"),
    "huge": (with_float(PLACES, 1e6), "expected a norm of at most 1e+06"),
}


@pytest.mark.parametrize("reply", ["delta", "weights"])
@pytest.mark.parametrize("case", ENCODED)
def test_encoded_changes_that_do_not_fit_are_refused_in_one_line(case: str, reply: str) -> None:
    spoil, text = ENCODED[case]

    def content(sent: Sent) -> RecordDict:
        assert CODEC is not None and sent.layout is not None
        return pack(TrainResult(0.0, None, 1.0, spoil(CODEC.encode(delta_of("a"), sent.layout))))

    found = verdict(content, codec=CODEC, reply=reply)
    assert found.reason is Reason.CONTENT and text in found.text and "\n" not in found.text


# ---------------------------------------------------------------------- evaluation

SCORES = {
    "a": scored((1, 10, 0.5), (9, 10, 0.25)),
    "b": scored((2, 5, 1.5), (10, 100, 2.0)),
    "c": scored((15, 15, 1.0), (2, 4, 0.75)),
}


def test_metrics_by_hand() -> None:
    metrics = Evaluated(SCORES).metrics()
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
    novel = Evaluated(SCORES, frozenset("bc")).metrics()
    assert (novel["test_mean"], novel["novel_test_mean"], novel["novel_test_worst"]) == (90.0, 30.0, 10.0)
    assert not [name for name in novel if name.startswith("novel_val")]


def test_everyone_is_evaluated_on_its_own_weights_and_scores_are_kept_by_name() -> None:
    made, desk = federation({EvaluateOrder: lambda name, order: SCORES[name]})
    outcome = made.evaluate()
    assert outcome.evaluation is not None and outcome.evaluation.scores == SCORES
    assert list(outcome.evaluation.scores) == ["a", "b", "c"]
    rows = made.algorithm.learner.generate([0, 1, 2], "S")
    sent = [order.weights for order in desk.sent(EvaluateOrder)]
    assert all(
        weights is not None and torch.equal(weights.values, row) for weights, row in zip(sent, rows, strict=True)
    )


class Lie(EvaluateResult):
    """A result that its client does not check."""

    def check(self) -> None:
        """Find nothing wrong."""


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (scored((11, 10, 0.5), (9, 10, 0.25)), "val: expected accuracy from 0 to 1, found 1.1"),
        (scored((1, 10, 0.5), (-1, 10, 0.25)), "test: expected accuracy from 0 to 1, found -0.1"),
        (scored((1, 10, 0.5), (90, 101, 0.25)), "expected at most the validation and test examples that it said"),
        (scored((1, 10, -1e31), (9, 10, 0.25)), "val: expected a loss of at most"),
        (scored((1, 10, 0.5), (9, 10, 1e31)), "test: expected a loss of at most"),
        (scored((0, 0, 0.5), (9, 10, 0.25)), "val: expected examples, found 0"),
        (scored((1, 10, math.nan), (9, 10, 0.25)), "EvaluateResult.val.loss: expected a finite number"),
    ],
)
def test_impossible_scores_are_refused_and_do_not_count(bad: EvaluateResult, text: str) -> None:
    made, _ = federation({EvaluateOrder: lambda name, order: (SCORES | {"b": Lie(**vars(bad))})[name]})
    outcome = made.evaluate()
    assert outcome.lied == list(outcome.refused) == ["b"] and text in outcome.refused["b"].text
    assert outcome.evaluation is not None
    assert outcome.evaluation.scores == {name: SCORES[name] for name in "ac"}


def test_a_client_that_does_not_answer_is_left_out_of_the_scores() -> None:
    def evaluate(silent: str) -> Outcome:
        def answer(name: str, order: EvaluateOrder) -> EvaluateResult:
            if name in silent:
                raise RuntimeError("no")
            return SCORES[name]

        return federation({EvaluateOrder: answer})[0].evaluate()

    outcome = evaluate("c")
    assert list(outcome.refused) == ["c"] and outcome.evaluation is not None
    assert outcome.evaluation.metrics()["val_pooled"] == 20.0
    assert evaluate("abc").evaluation is None


def test_one_that_is_busy_is_not_evaluated_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made, desk = federation({EvaluateOrder: lambda name, order: SCORES[name]})
    desk.deliver = lambda: [desk.replies[name] for name in "ac"]
    made.train()  # b's answer is still to come
    outcome = made.evaluate()
    assert outcome.refused == {"b": Failure(Reason.BUSY, "not evaluated: it still works on an earlier round")}
    assert outcome.evaluation is not None and list(outcome.evaluation.scores) == ["a", "c"]


@pytest.mark.parametrize(("seconds", "ttl"), [(60.0, 43_200), (86_400.0, 87_000)])
def test_an_order_lives_as_long_as_its_answer_is_waited_for(seconds: float, ttl: float) -> None:
    made, desk = federation(round_timeout_s=seconds)
    made.train()
    assert {message.metadata.ttl for message in desk.orders.values()} == {ttl}
