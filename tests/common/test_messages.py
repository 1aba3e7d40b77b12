"""The wire: what is packed comes back bit for bit, and what does not fit is refused before it is used."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    BackpropOrder,
    BackpropResult,
    ConfirmOrder,
    ConfirmResult,
    Delivery,
    DescribeOrder,
    DescribeResult,
    Description,
    ErrorsOrder,
    ErrorsResult,
    EvaluateOrder,
    EvaluateResult,
    FitOrder,
    FitResult,
    Greeting,
    Introduction,
    KeysOrder,
    KeysResult,
    MaskedOrder,
    MaskedResult,
    MomentsOrder,
    MomentsResult,
    Notice,
    Offer,
    Packable,
    ReferenceOrder,
    ReferenceResult,
    RepresentOrder,
    RepresentResult,
    SharesOrder,
    SharesResult,
    SplitScore,
    TrainOrder,
    TrainResult,
    TryOrder,
    UnmaskOrder,
    UnmaskResult,
    Weights,
)
from hyperbloom.common.models import ModelSpec, full_layout
from hyperbloom.server.inline import InlineGrid

KEY = "hyperbloom"
TWO = Layout((("weight", (2, 3)), ("bias", (2,))))
ONE = Layout((("descriptor", (3,)),))
VALUES = torch.tensor([0.5, -1.25, 3e-30, -0.0, 1e30, 0.1, -7.0, 2.0])

INTRODUCTION = Introduction(
    client_id="ward-7",
    token="5ec2e7",
    version="0.1.0",
    size="S",
    input_shape=(1, 8, 8),
    num_classes=10,
    train_examples=100,
    val_examples=20,
    test_examples=30,
    class_shares=(0.25, 0.75),
)
TRAIN = TrainOrder(
    run_id="run-1",
    round=3,
    model="mlp",
    num_classes=10,
    private="none",
    reply="delta",
    seed=2**40,
    steps=50,
    batch_size=64,
    learning_rate=5e-3,
    momentum=0.9,
    weight_decay=5e-5,
    clip=50.0,
    weights=None,
)
EVALUATE = EvaluateOrder(
    run_id="run-1", round=3, model="mlp", num_classes=10, private="head", seed=0, weights=Weights(TWO, VALUES)
)
OFFER = Offer(
    version="0.1.0",
    run="a-run",
    round=3,
    clients=12,
    accuracy=62.5,
    model="lenet",
    sizes=("S", "M"),
    input_shape=(3, 32, 32),
    num_classes=10,
    divisor=255.0,
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.25),
    encoder="private",
    dim=3,
    encoder_version="0a1b",
    weights=Weights(TWO, VALUES),
)
OPTIONAL = {
    "accuracy",
    "weights",
    "compression",
    "encoded",
    "asks",
    "norms",
    "types",
    "graph",
    "hypernetwork",
    "method",
    "resume_points",
    "rewound",
    "distil_temperature",
    "gamma",
    "descriptor",
    "classifiers",
    "has_reference",
    "reference",
    "target",
    "factor",
    "complete",
    "dp_clip",
    "quiet",
    "dp_noise",
} | {f"refine_{name}" for name in ("epochs", "rate", "batch", "part")}
MESSAGES: list[Packable] = [
    Greeting("0.1.0"),
    Greeting("0.1.0", "types", "local"),
    INTRODUCTION,
    dataclasses.replace(INTRODUCTION, types=("input", "linear 3,4 wb"), graph="{}"),
    dataclasses.replace(INTRODUCTION, types=()),
    dataclasses.replace(EVALUATE, norms="local", hypernetwork="{}", refine_epochs=2, refine_rate=0.5, refine_batch=9),
    dataclasses.replace(EVALUATE, distil_temperature=4.0, refine_part="all"),
    dataclasses.replace(INTRODUCTION, class_shares=(), input_shape=(12,)),
    Notice("refused", "näme — taken"),
    TRAIN,
    dataclasses.replace(TRAIN, weights=Weights(TWO, VALUES)),
    TrainResult(0.125, 1.5, None),
    TrainResult(0.125, 1.5, Weights(TWO, VALUES)),
    dataclasses.replace(TRAIN, compression="top-k:0.1+int8", method="{}"),
    TrainResult(0.125, 1.5, None, b"\0\xff"),
    TrainResult(0.125, 1.5, None, b""),
    dataclasses.replace(TRAIN, target=Weights(TWO, VALUES)),
    dataclasses.replace(TRAIN, weights=Weights(TWO, VALUES), target=Weights(Layout((("factor", (2,)),)), VALUES[:2])),
    Greeting("0.1.0", reference="5ec2e7"),
    dataclasses.replace(INTRODUCTION, has_reference=False),
    ReferenceOrder("5ec2e7", Weights(Layout((("inputs", (4, 2)),)), VALUES.nan_to_num(posinf=0).clamp(-9, 9).half())),
    ReferenceResult("5ec2e7"),
    RepresentOrder("run-1", 3, "mlp", 10, "all", 2**40, None, "5ec2e7", 20, 2**62),
    RepresentResult(Weights(Layout((("factor", (4, 2)),)), VALUES)),
    RepresentResult(None),
    EVALUATE,
    dataclasses.replace(EVALUATE, weights=None),
    EvaluateResult(1, 2, 0.5, 3, 4, 0.25),
    DescribeOrder("run-1", 3, "deepset", 2, "0a1b", True, Weights(TWO, VALUES)),
    DescribeResult("0a1b", Weights(ONE, VALUES[:3])),
    BackpropOrder("run-1", "deepset", 2, "0a1b", Weights(ONE, VALUES[:3])),
    BackpropResult("0a1b", Weights(TWO, VALUES)),
    FitOrder(
        **(vars(TRAIN) | {"weights": Weights(TWO, VALUES)}),
        encoder="dss",
        version="0a1b",
        gamma=Weights(ONE, VALUES[3:6]),
        descriptor=Weights(ONE, VALUES[:3]),
        fit_steps=5,
        fit_rate=0.125,
    ),
    FitResult(0.125, 1.5, Weights(TWO, VALUES), None, "0a1b", 0.5, Weights(ONE, VALUES[:3])),
    FitResult(0.125, 1.5, Weights(TWO, VALUES), None, "0a1b", 0.5, None),
    OFFER,
    dataclasses.replace(OFFER, accuracy=None, mean=(), std=()),
    Description("M", "0a1b", Weights(ONE, VALUES[:3])),
    Delivery(Weights(TWO, VALUES)),
    TryOrder(**vars(EVALUATE), together=True),
    MomentsOrder(**vars(EVALUATE)),
    MomentsResult(Weights(ONE, VALUES[:3])),
    ErrorsOrder(**vars(EVALUATE), sign=-1, classifiers=Weights(ONE, VALUES[:3])),
    ErrorsResult((0.5, 0.0)),
    KeysOrder("run-1", 3),
    KeysResult(b"\0\xff", b"", b"key", b"signature"),
    SharesOrder("run-1", 3, 1, 2, 8.0, 100, (b"a", b"b"), (b"c", b"d"), (b"e", b"f"), (b"g", b"h")),
    SharesResult((b"", b"\0"), b"s", (b"a",), (b"b",)),
    MaskedOrder(
        **vars(TRAIN),
        there=(0, 2),
        sealed=(b"", b"\0"),
        digests=(b"a", b"b"),
        parts=(b"p",),
        lengths=(4,),
        owners=(b"\5",),
    ),
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
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, Weights):
            if a.layout != b.layout or a.values.dtype != b.values.dtype:
                return False
            if a.values.numpy().tobytes() != b.values.numpy().tobytes():
                return False
        elif a != b or type(a) is not type(b):
            return False
    return type(left) is type(right)


def over_the_network(content: RecordDict) -> tuple[RecordDict, int, int]:
    """Send content through Flower's serialisation; returns it, the number of objects and the number of bytes."""
    message = Message(content, 2, "train")
    contents = {name: item.deflate() for name, item in get_all_nested_objects(message).items()}
    count, size = len(contents), sum(map(len, contents.values()))
    arrived = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(arrived, Message)
    return arrived.content, count, size


def record(message: Packable, **changes: Any) -> RecordDict:
    """Return a packed message with some fields replaced; `None` removes one."""
    fields: dict[str, Any] = dict(message.pack()[KEY]) | changes
    return RecordDict({KEY: ConfigRecord({name: value for name, value in fields.items() if value is not None})})


def refusal(kind: type[Packable], content: RecordDict) -> str:
    """Return what a message is refused with."""
    with pytest.raises(WireError) as caught:
        kind.unpack(content)
    return str(caught.value)


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: Packable) -> None:
    assert same(type(message).unpack(message.pack()), message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_flowers_serialisation(message: Packable) -> None:
    content, count, _ = over_the_network(message.pack())
    assert same(type(message).unpack(content), message)
    assert count == 3  # message, record dict, record: each one more is one more request


def test_the_list_above_holds_every_message() -> None:
    # a message that is added to the wire must be added to the tests
    direct = set(Packable.__subclasses__())
    assert {type(message) for message in MESSAGES} == direct.union(*(kind.__subclasses__() for kind in direct))


def test_weights_of_one_message_are_not_mistaken_for_each_other() -> None:
    order = next(message for message in MESSAGES if isinstance(message, FitOrder))
    without = record(order, **{"gamma.values": None})
    assert refusal(FitOrder, without).startswith("FitOrder: unknown field 'gamma.")
    broken = record(order, **{"descriptor.values": b"x"})
    assert refusal(FitOrder, broken) == "FitOrder.descriptor.values: expected 12 bytes for 1 tensors, found 1"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_of_every_type_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0], values[1] = torch.finfo(dtype).tiny / 4, -0.0  # a subnormal, and a sign that == does not see
    content, _, _ = over_the_network(TrainResult(0.0, 0.0, Weights(TWO, values)).pack())
    arrived = TrainResult.unpack(content).weights
    assert arrived is not None
    assert arrived.values.dtype == dtype
    assert arrived.values.numpy().tobytes() == values.numpy().tobytes()
    assert {name: tuple(view.shape) for name, view in arrived.layout.views(arrived.values).items()} == {
        "weight": (2, 3),
        "bias": (2,),
    }


def test_what_arrives_is_a_copy_that_can_be_written_to() -> None:
    sent = VALUES.clone()
    arrived = TrainResult.unpack(TrainResult(0.0, 0.0, Weights(TWO, sent)).pack()).weights
    assert arrived is not None
    arrived.values.zero_()
    assert torch.equal(sent, VALUES)


def test_a_strided_vector_that_wants_gradients_is_sent_by_value() -> None:
    strided = torch.stack([VALUES, -VALUES]).T.contiguous().requires_grad_()[:, 1]
    arrived = TrainResult.unpack(TrainResult(0.0, 0.0, Weights(TWO, strided)).pack()).weights
    assert arrived is not None
    assert torch.equal(arrived.values, -VALUES)
    assert not arrived.values.requires_grad


def test_no_tensors_at_all_are_sent_as_an_empty_vector() -> None:
    content, _, _ = over_the_network(TrainResult(0.0, 0.0, Weights(Layout(()), torch.empty(0))).pack())
    arrived = TrainResult.unpack(content).weights
    assert arrived is not None
    assert (arrived.layout.shapes, arrived.values.shape) == ((), (0,))


def test_integers_are_taken_for_floats_but_not_the_other_way() -> None:
    assert TrainResult.unpack(record(TrainResult(0.0, 0.0, None), loss=2)).loss == 2.0
    found = refusal(EvaluateResult, record(EvaluateResult(1, 2, 0.5, 3, 4, 0.25), val_total=2.0))
    assert found == "EvaluateResult.val_total: expected int, found float"


def test_a_lenet_costs_at_most_two_percent_over_its_numbers() -> None:
    layout = full_layout(ModelSpec("lenet", "M", (3, 32, 32), 10))
    assert layout.numel == 121_182
    order = dataclasses.replace(TRAIN, weights=Weights(layout, torch.zeros(layout.numel)))
    content, count, size = over_the_network(order.pack())
    assert count == 3
    assert 4 * layout.numel < size <= 1.02 * 4 * layout.numel
    assert same(TrainOrder.unpack(content), order)


# ---------------------------------------------------------------------- refused: fields


def test_a_record_under_another_name_is_no_message() -> None:
    assert refusal(Greeting, RecordDict()) == "expected a record 'hyperbloom' with a Greeting, found []"
    content = RecordDict({"b": ConfigRecord({"version": "1"}), "a": MetricRecord({"x": 1.0})})
    assert refusal(Greeting, content) == "expected a record 'hyperbloom' with a Greeting, found ['a', 'b']"
    metrics = RecordDict({KEY: MetricRecord({"version": 1})})
    assert refusal(Greeting, metrics) == "expected a record 'hyperbloom' with a Greeting, found ['hyperbloom']"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_other_field_must_be_there_and_no_other_may(message: Packable) -> None:
    kind = type(message)
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in names - OPTIONAL:
        assert refusal(kind, record(message, **{name: None})) == f"{kind.__name__}: field {name!r} is missing"
    assert refusal(kind, record(message, zz=1, extra="x")) == f"{kind.__name__}: unknown field 'extra'"


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
    assert set(dict(TRAIN.pack()[KEY])) == {field.name for field in dataclasses.fields(TRAIN)} - OPTIONAL
    assert refusal(Introduction, record(INTRODUCTION, types=[7])) == "Introduction.types: expected str, found int"
    assert refusal(TrainOrder, record(TRAIN, compression=7)) == "TrainOrder.compression: expected str, found int"
    found = refusal(TrainResult, record(TrainResult(0.0, 0.0, None), encoded="text"))
    assert found == "TrainResult.encoded: expected bytes, found str"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(value: float) -> None:
    found = refusal(TrainResult, TrainResult(value, 0.0, None).pack())
    assert found == f"TrainResult.loss: expected a finite number, found {value}"


# ---------------------------------------------------------------------- refused: tensors

RESULT = TrainResult(0.0, 0.0, Weights(TWO, VALUES))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": None}, "TrainResult.tensors: expected str, found NoneType"),
        ({"tensors": "[" * 5_000_000}, "TrainResult.tensors: expected at most 4194304 characters, found 5000000"),
        ({"dtype": None}, "TrainResult.dtype: expected str, found NoneType"),
        ({"values": "text"}, "TrainResult.values: expected bytes, found str"),
        ({"values": None}, "TrainResult: unknown field 'dtype'"),
        ({"dtype": "bfloat16"}, "TrainResult.dtype: expected one of float16, float32, float64"),
        ({"dtype": "int32"}, "TrainResult.dtype: expected one of float16, float32, float64"),
        ({"dtype": "float64"}, "TrainResult.values: expected 64 bytes for 2 tensors, found 32"),
        ({"values": b"\0" * 31}, "TrainResult.values: expected 32 bytes for 2 tensors, found 31"),
        ({"values": b""}, "TrainResult.values: expected 32 bytes for 2 tensors, found 0"),
        ({"tensors": "{"}, "TrainResult.tensors: expected names and shapes as JSON, found '{'"),
        ({"tensors": "7"}, "TrainResult.tensors: expected names and shapes as JSON, found '7'"),
        ({"tensors": '[["a"]]'}, """TrainResult.tensors: expected names and shapes as JSON, found '[["a"]]'"""),
        ({"tensors": '[["a",8]]'}, """TrainResult.tensors: expected names and shapes as JSON, found '[["a",8]]'"""),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(TrainResult, record(RESULT, **changes)) == message


def test_an_error_quotes_only_the_beginning_of_what_a_client_sent() -> None:
    found = refusal(TrainResult, record(RESULT, tensors="x" * 10_000))
    assert found == f"TrainResult.tensors: expected names and shapes as JSON, found '{'x' * 60}'"


def test_json_that_is_too_deep_is_refused() -> None:
    found = refusal(TrainResult, record(RESULT, tensors="[" * 100_000))
    assert found == f"TrainResult.tensors: expected names and shapes as JSON, found '{'[' * 60}'"


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
    assert found == f"TrainResult.tensors: expected names and whole lengths from 0, found {tensors!r}"


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
    assert found.startswith("TrainResult.tensors: expected names and whole lengths from 0, found ")
    found.encode()


def test_a_negative_length_is_refused_though_nothing_would_be_read() -> None:
    found = refusal(TrainResult, record(RESULT, tensors='[["a",[0,-4]]]', values=b""))
    assert found == """TrainResult.tensors: expected names and whole lengths from 0, found '[["a",[0,-4]]]'"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_only_known_types_are_sent(dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match=rf"^cannot send {dtype} from a little-endian machine; send float32$"):
        TrainResult(0.0, 0.0, Weights(TWO, VALUES.to(dtype))).pack()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout((("weight", (2, 3)),)), "tensor bias: expected with shape (2,), but it is missing"),
        (Layout((("weight", (3, 2)), ("bias", (2,)))), "tensor weight: expected shape (2, 3), found (3, 2)"),
        (
            Layout((("weight", (2, 3)), ("bias", (2,)), ("spy", (1,)))),
            "tensor spy: not expected; expected weight, bias",
        ),
        (
            Layout((("bias", (2,)), ("weight", (2, 3)))),
            "tensors: expected in the order weight, bias, found bias, weight",
        ),
        (
            Layout((("weight", (2, 3)), ("bias", (2,)), ("bias", (2,)))),
            "tensors: expected in the order weight, bias, found weight, bias",
        ),
    ],
)
def test_weights_of_another_layout_are_refused_by_the_first_tensor(layout: Layout, message: str) -> None:
    with pytest.raises(WireError) as caught:
        Weights(layout, torch.zeros(layout.numel)).check(TWO, torch.float32)
    assert str(caught.value) == message


def test_weights_of_another_type_are_refused() -> None:
    with pytest.raises(WireError, match=r"^tensor weight: expected torch\.float32, found torch\.float64$"):
        Weights(TWO, VALUES.double()).check(TWO, torch.float32)


@pytest.mark.parametrize(
    ("places", "value", "message"),
    [
        ([6], math.nan, "tensor bias: 1 values are not finite"),
        ([5], math.inf, "tensor weight: 1 values are not finite"),
        ([7, 2, 3], -math.inf, "tensor weight: 3 values are not finite"),
    ],
)
def test_weights_that_are_not_finite_are_refused(places: list[int], value: float, message: str) -> None:
    values = VALUES.clone()
    values[places] = value
    with pytest.raises(WireError) as caught:
        Weights(TWO, values).check(TWO, torch.float32)
    assert str(caught.value) == message


def test_infinities_that_cancel_are_refused_too() -> None:
    values = VALUES.clone()
    values[0], values[1] = math.inf, -math.inf
    with pytest.raises(WireError, match="tensor weight: 2 values are not finite"):
        Weights(TWO, values).check(TWO, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_weights_whose_sum_is_not_are_accepted(dtype: torch.dtype) -> None:
    values = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    assert not math.isfinite(values.sum().item())
    Weights(TWO, values).check(TWO, dtype)


def test_weights_that_fit_are_accepted() -> None:
    Weights(TWO, VALUES).check(Layout((("weight", (2, 3)), ("bias", (2,)))), torch.float32)
    Weights(Layout(()), torch.empty(0)).check(Layout(()), torch.float32)


# ---------------------------------------------------------------------- counts


def test_scores_are_read_by_split() -> None:
    result = EvaluateResult(1, 2, 0.5, 3, 4, 0.25)
    assert result.score("val") == SplitScore(1, 2, 0.5)
    assert result.score("test") == SplitScore(3, 4, 0.25)
    assert (result.score("val").accuracy, result.score("test").accuracy) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (EvaluateResult(3, 2, 0.5, 3, 4, 0.25), "val: .* found SplitScore\\(correct=3, total=2, loss=0.5\\)"),
        (EvaluateResult(-1, 2, 0.5, 3, 4, 0.25), "val: .*\\(correct=-1"),
        (EvaluateResult(1, 2, 0.5, 0, 0, 0.25), "test: .* total=0"),
        (EvaluateResult(1, 2, 0.5, -2, -1, 0.25), "test: .* total=-1"),
    ],
)
def test_impossible_counts_are_refused(result: EvaluateResult, message: str) -> None:
    with pytest.raises(WireError, match=message):
        result.check()
    EvaluateResult(0, 1, 0.5, 4, 4, 0.25).check()


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
    st.sampled_from([*Introduction.__dataclass_fields__, *TrainOrder.__dataclass_fields__, "loss", "extra"]),
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
def test_whatever_arrives_is_read_or_refused(
    message: Packable, changes: dict[str, Any], tensors: dict[str, Any]
) -> None:
    kind = type(message)
    content = record(message, **changes | tensors)
    try:
        read = kind.unpack(content)
    except WireError as error:
        assert str(error)
        return
    for field in dataclasses.fields(read):  # type: ignore[arg-type]
        value = getattr(read, field.name)
        if isinstance(value, float):
            assert math.isfinite(value)
        if isinstance(value, Weights):
            assert isinstance(value.values, Tensor)
            assert value.values.shape == (value.layout.numel,)
