"""The wire: what is packed comes back bit for bit, and what does not fit is refused before it is used."""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from figures.pfl_client import ErrorsOrder, ErrorsResult, MomentsOrder, MomentsResult, TryOrder
from hyperbloom.common.compression import Codec
from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import WireError
from hyperbloom.common.gains import Gain
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import FedProx
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy.masks import Agreement, Scale
from hyperbloom.common.wire.exchanges import (
    BackpropOrder,
    BackpropResult,
    DescribeOrder,
    DescribeResult,
    Fit,
    FitOrder,
    FitResult,
    ReferenceOrder,
    ReferenceResult,
    RepresentOrder,
    RepresentResult,
)
from hyperbloom.common.wire.masks import (
    ConfirmOrder,
    ConfirmResult,
    KeysOrder,
    KeysResult,
    MaskedOrder,
    MaskedResult,
    Masking,
    SharesOrder,
    SharesResult,
    UnmaskOrder,
    UnmaskResult,
)
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.orders import (
    SGD,
    CompareOrder,
    CompareResult,
    EvaluateOrder,
    EvaluateResult,
    Failed,
    Greeting,
    Introduction,
    Noise,
    Notice,
    Order,
    Refinement,
    Scope,
    Target,
    TrainOrder,
    TrainResult,
)
from hyperbloom.common.wire.pack import LONGEST_REASON, pack, unpack, unpack_answer, weigh
from hyperbloom.server.grids.inline import InlineGrid

from ...scores import right
from ...server.conftest import ABOUT

KEY = "hyperbloom"
TWO = Layout((("weight", (2, 3)), ("bias", (2,))))
ONE = Layout((("descriptor", (3,)),))
VALUES = torch.tensor([0.5, -1.25, 3e-30, -0.0, 1e30, 0.1, -7.0, 2.0])

INTRODUCTION = dataclasses.replace(ABOUT, client_id="ward-7", token="5ec2e7", size="S", class_shares=(0.25, 0.75))
SCOPE, TARGET = Scope("run-1", 3, 2**40), Target("mlp", 10, "none")
TRAIN = TrainOrder(SCOPE, TARGET, SGD(50, 64, 5e-3, 0.9, 5e-5, 50.0), "delta")
EVALUATE = EvaluateOrder(SCOPE, Target("mlp", 10, "head"), Weights(TWO, VALUES))
FIT = Fit("dss", "0a1b", Weights(ONE, VALUES[3:6]), Weights(ONE, VALUES[:3]), 5, 0.125)
OFFER = Offer(
    run="a-run",
    round=3,
    clients=12,
    expected="a newcomer gets the model for all",
    model="lenet",
    sizes=("S", "M"),
    input_shape=(3, 32, 32),
    num_classes=10,
    scaling=Scaling(255.0, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    encoder="private",
    dim=3,
    encoder_version="0a1b",
    weights=Weights(TWO, VALUES),
)
MESSAGES: list[Any] = [
    Greeting("0.1.0"),
    Greeting("0.1.0", "types"),
    Greeting("0.1.0", reference="5ec2e7"),
    INTRODUCTION,
    dataclasses.replace(INTRODUCTION, types=("input", "linear 3,4 wb"), graph="{}"),
    dataclasses.replace(INTRODUCTION, types=()),
    dataclasses.replace(INTRODUCTION, class_shares=(), input_shape=(12,)),
    dataclasses.replace(INTRODUCTION, has_reference=False),
    Failed(Reason.DIVERGED, "näme — taken"),
    Notice("refused", "näme — taken"),
    Notice("finished", "", complete="run-1"),
    TRAIN,
    dataclasses.replace(TRAIN, weights=Weights(TWO, VALUES)),
    dataclasses.replace(TRAIN, scope=Scope("run-1", 3, 0, (1, 2), (1,)), quiet=True),
    dataclasses.replace(TRAIN, codec=Codec.parse("top-k:0.1+int8"), method=FedProx(mu=0.5), noise=Noise(1.0, 2.0)),
    dataclasses.replace(TRAIN, resemble=Weights(TWO, VALUES)),
    dataclasses.replace(TRAIN, weights=Weights(TWO, VALUES), resemble=Weights(Layout((("f", (2,)),)), VALUES[:2])),
    TrainResult(1.5),
    TrainResult(1.5, Weights(TWO, VALUES), 0.125),
    TrainResult(1.5, None, 0.125, b"\0\xff"),
    TrainResult(1.5, None, 0.0, b""),
    EVALUATE,
    dataclasses.replace(EVALUATE, weights=None, target=Target("own", 10, "none", "{}")),
    dataclasses.replace(EVALUATE, refinement=Refinement(2, 0.5, 9)),
    dataclasses.replace(EVALUATE, refinement=Refinement(2, 0.5, 9, "all")),
    EvaluateResult(right(1, 2, 0.5), right(3, 4, 0.25)),
    ReferenceOrder("5ec2e7", Weights(Layout((("inputs", (4, 2)),)), VALUES.nan_to_num(posinf=0).clamp(-9, 9).half())),
    ReferenceResult("5ec2e7"),
    RepresentOrder(SCOPE, Target("mlp", 10, "all"), "5ec2e7", 20, 2**62),
    RepresentResult(Weights(Layout((("factor", (4, 2)),)), VALUES)),
    DescribeOrder("run-1", "deepset", 2, "0a1b", True, Weights(TWO, VALUES)),
    DescribeResult("0a1b", Weights(ONE, VALUES[:3])),
    BackpropOrder("run-1", "deepset", 2, "0a1b", Weights(ONE, VALUES[:3])),
    BackpropResult("0a1b", Weights(TWO, VALUES)),
    FitOrder(**vars(dataclasses.replace(TRAIN, weights=Weights(TWO, VALUES))), fit=FIT),
    FitResult(1.5, Weights(TWO, VALUES), 0.125, version="0a1b", gamma=Weights(ONE, VALUES[:3])),
    OFFER,
    dataclasses.replace(OFFER, expected="", scaling=Scaling(1.0)),
    Description("M", "0a1b", Weights(ONE, VALUES[:3])),
    Delivery(Weights(TWO, VALUES)),
    dataclasses.replace(OFFER, shares=(0.25, 1.0)),
    TryOrder(**vars(EVALUATE), together=True),
    CompareOrder(**vars(EVALUATE), sgd=SGD(4, 8, 0.1, 0.9, 0.0, 50.0), decays=True, rounds=5),
    CompareOrder(
        **vars(EVALUATE), sgd=SGD(4, 8, 0.1, 0.9, 0.0, 50.0), decays=True, rounds=5, common=Weights(ONE, VALUES[:3])
    ),
    CompareResult(
        right(1, 2, 0.5),
        right(3, 4, 0.25),
        gain=Gain("tuned", 0.25, -0.5, 0.75, ("personal", "tuned", "alone"), (0.5, 0.75, 0.5)),
    ),
    MomentsOrder(**vars(EVALUATE)),
    MomentsResult(Weights(ONE, VALUES[:3])),
    ErrorsOrder(**vars(EVALUATE), sign=-1, classifiers=Weights(ONE, VALUES[:3])),
    ErrorsResult((0.5, 0.0)),
    KeysOrder("run-1", 3),
    KeysResult(b"\0\xff", b"", b"key", b"signature"),
    SharesOrder(
        Agreement("run-1", 3, 2, Scale(2, 8.0, 100), (b"a", b"b"), (b"c", b"d"), (b"e", b"f")), 1, (b"g", b"h")
    ),
    SharesResult((b"", b"\0"), b"s", (b"a",), (b"b",)),
    MaskedOrder(**vars(TRAIN), masking=Masking((0, 2), (b"p",), (4,), (b"\5",), (b"", b"\0"), (b"a", b"b"))),
    MaskedResult(0.5, b"\0\1\2\3"),
    ConfirmOrder("run-1", 3, (0, 2), ()),
    ConfirmResult(b"signature"),
    UnmaskOrder("run-1", 3, (b"signature", b"")),
    UnmaskResult((b"", b"\xff")),
]


@pytest.fixture(scope="module", autouse=True)
def identity() -> None:
    """Give this process the identity that Flower's messages ask for."""
    InlineGrid(None, [])  # type: ignore[arg-type]


def same(left: Any, right: Any) -> bool:
    """Compare two messages, weights bit by bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return bool(left == right)


def over_the_network(content: RecordDict) -> tuple[RecordDict, int, int]:
    """Send content through Flower's serialisation; returns it, the number of objects and the number of bytes."""
    message = Message(content, 2, "train")
    contents = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    count, size = len(contents), sum(map(len, contents.values()))
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    return arrived.content, count, size


def read(message: Any, content: RecordDict) -> Any:
    """Read content as a message of the same type."""
    return (unpack_answer if isinstance(message, Failed) else unpack)(type(message), content)


def record(message: Any, **changes: Any) -> RecordDict:
    """Return a packed message with some fields replaced; `None` removes one."""
    fields: dict[str, Any] = dict(pack(message)[KEY]) | changes
    return RecordDict({KEY: ConfigRecord({name: value for name, value in fields.items() if value is not None})})


def refusal(kind: type[Any], content: RecordDict) -> str:
    """Return what a message is refused with."""
    with pytest.raises(WireError) as caught:
        unpack(kind, content)
    return str(caught.value)


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: Any) -> None:
    assert same(read(message, pack(message)), message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_flowers_serialisation(message: Any) -> None:
    content, count, _ = over_the_network(pack(message))
    assert same(read(message, content), message)
    assert count == 3  # message, record dict, record: each one more is one more request


def subclasses(kind: type) -> set[type]:
    return set(kind.__subclasses__()).union(*(subclasses(each) for each in kind.__subclasses__()))


def test_the_list_above_holds_every_message() -> None:
    """A message that is added to the wire must be added to the tests."""
    orders = {kind for kind in subclasses(Order) if kind.__module__.startswith(("hyperbloom.", "figures."))}
    assert {type(message) for message in MESSAGES} == {*orders, *(kind.answer for kind in orders), Failed}


def test_a_failure_is_an_answer_to_every_order() -> None:
    failed = Failed(Reason.MEMORY, "lower local.batch_size")
    assert unpack_answer(TrainResult, pack(failed)) == failed
    with pytest.raises(WireError, match="expected a record 'hyperbloom' with a TrainResult"):
        unpack(TrainResult, pack(failed))


def test_what_a_client_says_of_a_failure_is_cut_and_cannot_steer_a_console() -> None:
    found = unpack_answer(TrainResult, pack(Failed(Reason.FAILED, "\x1b[2J" + 1000 * "x")))
    assert found == Failed(Reason.FAILED, (" [2J" + 1000 * "x")[:LONGEST_REASON])


def test_a_client_does_not_accuse_itself_and_an_unknown_reason_is_a_failure() -> None:
    assert unpack_answer(TrainResult, pack(Failed(Reason.CONTENT, "x"))) == Failed(Reason.FAILED, "x")
    later = RecordDict({"hyperbloom.failed": ConfigRecord({"reason": "of a later version", "text": "x"})})
    assert unpack_answer(TrainResult, later) == Failed(Reason.FAILED, "x")


def test_what_a_message_weighs_is_what_it_carries() -> None:
    assert weigh(pack(KeysResult(b"abc", b"defg", b"h", b"ij"))) == 10
    assert weigh(pack(ConfirmOrder("run-1", 3, (0, 2), ()))) == 5 + 8 + 2 * 8


def test_weights_of_one_message_are_not_mistaken_for_each_other() -> None:
    order = next(message for message in MESSAGES if isinstance(message, FitOrder))
    without = record(order, **{"fit.gamma.values": None})
    assert refusal(FitOrder, without) == "FitOrder.fit.gamma.values: expected bytes, found NoneType"
    broken = record(order, **{"fit.descriptor.values": b"x"})
    assert refusal(FitOrder, broken) == "FitOrder.fit.descriptor.values: expected 12 bytes for 1 tensors, found 1"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_of_every_type_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0], values[1] = torch.finfo(dtype).tiny / 4, -0.0  # a subnormal, and a sign that == does not see
    content, _, _ = over_the_network(pack(TrainResult(0.0, Weights(TWO, values))))
    arrived = unpack(TrainResult, content).weights
    assert arrived is not None
    assert arrived.values.dtype == dtype
    assert arrived.values.numpy().tobytes() == values.numpy().tobytes()
    assert {name: tuple(view.shape) for name, view in arrived.layout.views(arrived.values).items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }


def test_what_arrives_is_a_copy_that_can_be_written_to() -> None:
    sent = VALUES.clone()
    arrived = unpack(TrainResult, pack(TrainResult(0.0, Weights(TWO, sent)))).weights
    assert arrived is not None
    arrived.values.zero_()
    assert torch.equal(sent, VALUES)


def test_a_strided_vector_that_wants_gradients_is_sent_by_value() -> None:
    strided = torch.stack([VALUES, -VALUES]).T.contiguous().requires_grad_()[:, 1]
    arrived = unpack(TrainResult, pack(TrainResult(0.0, Weights(TWO, strided)))).weights
    assert arrived is not None
    assert torch.equal(arrived.values, -VALUES)
    assert not arrived.values.requires_grad


def test_no_tensors_at_all_are_sent_as_an_empty_vector() -> None:
    content, _, _ = over_the_network(pack(TrainResult(0.0, Weights(Layout(()), torch.empty(0)))))
    arrived = unpack(TrainResult, content).weights
    assert arrived is not None
    assert (arrived.layout.shapes, arrived.values.shape) == ((), (0,))


def test_integers_are_taken_for_floats_but_not_the_other_way() -> None:
    assert unpack(TrainResult, record(TrainResult(0.0), loss=2)).loss == 2.0
    found = refusal(EvaluateResult, record(EvaluateResult(right(1, 2, 0.5), right(3, 4, 0.25)), **{"val.total": 2.0}))
    assert found == "EvaluateResult.val.total: expected int, found float"


def test_a_lenet_costs_at_most_two_percent_over_its_numbers() -> None:
    layout = full_layout(ModelSpec("lenet", "M", (3, 32, 32), 10))
    assert layout.numel == 121_182
    order = dataclasses.replace(TRAIN, weights=Weights(layout, torch.zeros(layout.numel)))
    content, count, size = over_the_network(pack(order))
    assert count == 3
    assert 4 * layout.numel < size <= 1.02 * 4 * layout.numel
    assert same(unpack(TrainOrder, content), order)


# ---------------------------------------------------------------------- refused: fields


def test_a_record_under_another_name_is_no_message() -> None:
    assert refusal(Greeting, RecordDict()) == "expected a record 'hyperbloom' with a Greeting, found []"
    content = RecordDict({"b": ConfigRecord({"version": "1"}), "a": MetricRecord({"x": 1.0})})
    assert refusal(Greeting, content) == "expected a record 'hyperbloom' with a Greeting, found ['a', 'b']"
    metrics = RecordDict({KEY: MetricRecord({"version": 1})})
    assert refusal(Greeting, metrics) == "expected a record 'hyperbloom' with a Greeting, found ['hyperbloom']"


REQUIRED = [
    (INTRODUCTION, "token", "Introduction.token is missing"),
    (TRAIN, "reply", "TrainOrder.reply is missing"),
    (TRAIN, "scope.run_id", "TrainOrder.scope.run_id is missing"),
    (TRAIN, "sgd.steps", "TrainOrder.sgd.steps is missing"),
    (dataclasses.replace(TRAIN, noise=Noise(1.0, 2.0)), "noise.scale", "TrainOrder.noise.scale is missing"),
    (dataclasses.replace(EVALUATE, refinement=Refinement(1, 0.1, 8)), "refinement.rate", "refinement.rate is missing"),
    (ReferenceOrder("5ec2e7", Weights(TWO, VALUES)), "values", "ReferenceOrder.weights.values: expected bytes"),
    (Failed(Reason.FAILED, "x"), "text", "Failed.text is missing"),
]


@pytest.mark.parametrize(("message", "name", "text"), REQUIRED, ids=lambda value: value if type(value) is str else "")
def test_every_other_field_must_be_there(message: Any, name: str, text: str) -> None:
    ((key, packed),) = pack(message).items()
    fields = {field: value for field, value in dict(packed).items() if field != name}
    with pytest.raises(WireError, match=text):
        read(message, RecordDict({key: ConfigRecord(fields)}))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_other_field_may_be_there(message: Any) -> None:
    ((key, packed),) = pack(message).items()
    with pytest.raises(WireError, match=rf"^{type(message).__name__}: unknown field 'extra'$"):
        read(message, RecordDict({key: ConfigRecord(dict(packed) | {"zz": 1, "extra": "x"})}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_id": 7}, "Introduction.client_id: expected str, found int"),
        ({"num_classes": True}, "Introduction.num_classes: expected int, found bool"),
        ({"num_classes": "10"}, "Introduction.num_classes: expected int, found str"),
        ({"input_shape": 64}, "Introduction.input_shape: expected a list, found int"),
        ({"input_shape": [1.0, 8.0]}, "Introduction.input_shape: expected int, found float"),
        ({"class_shares": ["x"]}, "Introduction.class_shares: expected float, found str"),
        ({"class_shares": [0.5, math.nan]}, "Introduction.class_shares: expected a finite number, found nan"),
        ({"token": b"raw"}, "Introduction.token: expected str, found bytes"),
    ],
)
def test_a_field_of_another_type_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(Introduction, record(INTRODUCTION, **changes)) == message


def test_optional_fields_are_absent_or_of_their_type() -> None:
    assert set(dict(pack(TRAIN)[KEY])) == {
        *(f"scope.{name}" for name in ("run_id", "round", "seed", "resume_points", "rewound")),
        *(f"target.{name}" for name in ("model", "num_classes", "private", "adapt", "backbones")),
        *(f"target.task.{name}" for name in ("name", "mean", "std", "balanced")),
        *(f"sgd.{field.name}" for field in dataclasses.fields(SGD)),
        "reply",
        "quiet",
    }
    assert refusal(Introduction, record(INTRODUCTION, types=[7])) == "Introduction.types: expected str, found int"
    assert refusal(TrainOrder, record(TRAIN, codec=7)) == "TrainOrder.codec: expected str, found int"
    assert refusal(TrainOrder, record(TRAIN, codec="zip")).startswith("order: compression: expected none, int8")
    assert refusal(TrainOrder, record(TRAIN, method="magic")).startswith("order: method: Invalid JSON")
    assert "found 'magic'" in refusal(TrainOrder, record(TRAIN, method='{"kind": "magic"}'))
    found = refusal(TrainResult, record(TrainResult(0.0), encoded="text"))
    assert found == "TrainResult.encoded: expected bytes, found str"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float) -> None:
    found = refusal(TrainResult, pack(TrainResult(0.0, loss=value)))
    assert found == f"TrainResult.loss: expected a finite number, found {value}"


# ---------------------------------------------------------------------- refused: tensors

RESULT = TrainResult(0.0, Weights(TWO, VALUES))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": None}, "tensors: expected str, found NoneType"),
        (
            {"tensors": "[" * 5_000_000},
            "tensors: expected at most 4194304 characters, found 5000000",
        ),
        ({"dtype": None}, "dtype: expected str, found NoneType"),
        ({"values": "text"}, "values: expected bytes, found str"),
        ({"values": None}, "values: expected bytes, found NoneType"),
        ({"dtype": "bfloat16"}, "dtype: expected one of float16, float32, float64"),
        ({"dtype": "int32"}, "dtype: expected one of float16, float32, float64"),
        ({"dtype": "float64"}, "values: expected 64 bytes for 2 tensors, found 32"),
        ({"values": b"\0" * 31}, "values: expected 32 bytes for 2 tensors, found 31"),
        ({"values": b""}, "values: expected 32 bytes for 2 tensors, found 0"),
        ({"tensors": "{"}, "tensors: expected names and shapes as JSON, found '{'"),
        ({"tensors": "7"}, "tensors: expected names and shapes as JSON, found '7'"),
        ({"tensors": '[["a"]]'}, """tensors: expected names and shapes as JSON, found '[["a"]]'"""),
        (
            {"tensors": '[["a",8]]'},
            """tensors: expected names and shapes as JSON, found '[["a",8]]'""",
        ),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(TrainResult, record(RESULT, **changes)) == f"TrainResult.weights.{message}"


def test_an_error_quotes_only_the_beginning_of_what_a_client_sent() -> None:
    found = refusal(TrainResult, record(RESULT, tensors="x" * 10_000))
    assert found == f"TrainResult.weights.tensors: expected names and shapes as JSON, found '{'x' * 60}'"


def test_json_that_is_too_deep_is_refused() -> None:
    found = refusal(TrainResult, record(RESULT, tensors="[" * 100_000))
    assert found == f"TrainResult.weights.tensors: expected names and shapes as JSON, found '{'[' * 60}'"


@pytest.mark.parametrize(
    "tensors",
    [
        '{"ab": 1}',
        '[["a",[null]]]',
        '[["a",[-2,-4]]]',
        '[["a",[4.5,2]]]',
        '[["a",[true,8]]]',
        '[["a",[Infinity]]]',
        '[["a",[1e400]]]',
        '[["a",[[8]]]]',
        '[["a","24"]]',
        '[["a",["8"]]]',
        '["a8"]',
        "[[1,[8]]]",
        "[[null,[8]]]",
    ],
)
def test_names_must_be_words_and_lengths_whole_numbers(tensors: str) -> None:
    found = refusal(TrainResult, record(RESULT, tensors=tensors))
    assert found == f"TrainResult.weights.tensors: expected names and whole lengths from 0, found {tensors!r}"


@pytest.mark.parametrize(
    "tensors",
    [
        json.dumps([["a", [int("9" * 4000)] * 100]]),  # the product would have more digits than Python prints
        json.dumps([["a", [2**40]]]),
        json.dumps([["a", [1] * 17]]),
        '[["\\ud800",[8]]]',  # cannot be encoded, in a log as little as on a console
        '[["a\\u001b[2J",[8]]]',
        json.dumps([["a" * 1001, [8]]]),
    ],
)
def test_names_that_cannot_be_printed_and_lengths_beyond_all_memory_are_refused(tensors: str) -> None:
    found = refusal(TrainResult, record(RESULT, tensors=tensors))
    assert found.startswith("TrainResult.weights.tensors: expected names and whole lengths from 0, found ")
    found.encode()


def test_a_negative_length_is_refused_though_nothing_would_be_read() -> None:
    found = refusal(TrainResult, record(RESULT, tensors='[["a",[0,-4]]]', values=b""))
    assert found == """TrainResult.weights.tensors: expected names and whole lengths from 0, found '[["a",[0,-4]]]'"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_only_known_types_are_sent(dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match=rf"^cannot send {dtype} from a little-endian machine; send float32$"):
        pack(TrainResult(0.0, Weights(TWO, VALUES.to(dtype))))


# ---------------------------------------------------------------------- whatever else may come

# the wire carries 64 bits
SCALAR = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=6), st.binary(max_size=9)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
).map(json.dumps)
LISTS = st.one_of(
    st.lists(st.booleans(), max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.lists(st.floats(), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.binary(max_size=3), max_size=3),
)
CHANGES = st.dictionaries(
    st.sampled_from([*Introduction.__dataclass_fields__, *pack(TRAIN)[KEY], "loss", "codec", "method", "extra"]),
    SCALAR | LISTS,
    max_size=4,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "tensors": JSON | SCALAR,
        "dtype": st.sampled_from(["float16", "float32", "float64", "int8"]) | SCALAR,
        "values": st.binary(max_size=16) | SCALAR,
    },
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(message=st.sampled_from(MESSAGES), changes=CHANGES, tensors=TENSORS)
def test_whatever_arrives_is_read_or_refused(message: Any, changes: dict[str, Any], tensors: dict[str, Any]) -> None:
    ((key, packed),) = pack(message).items()
    content = RecordDict({key: ConfigRecord(dict(packed) | changes | tensors)})
    try:
        found = read(message, content)
    except WireError as error:
        assert str(error)
        return
    for value in every_value(found):
        if isinstance(value, float):
            assert math.isfinite(value)
        if isinstance(value, Weights):
            assert isinstance(value.values, Tensor)
            assert value.values.shape == (value.layout.numel,)


def every_value(message: Any) -> Iterator[Any]:
    """Yield the values of all fields, of parts too."""
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        yield value
        if dataclasses.is_dataclass(value):
            yield from every_value(value)
