"""Training at once is training one after the other: same weights, losses, files and refusals, up to float rounding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from figures.pfedme import Moreau
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import together as module
from hyperbloom.client.work.together import train_together
from hyperbloom.client.work.vectorised import train_rows
from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.methods import FedProx, FedRep, Method
from hyperbloom.common.models import MODELS, ModelSpec, build, full_layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import Scope, TrainOrder, TrainResult
from tests.slow import quick

from ..conftest import SHARE
from ..orders import Worker, change, evaluate_order, train_order
from .test_vectorised import SHAPES, split

ALONE = sorted(name for name in MODELS if name.startswith(("hafl-", "plain-", "lstm-")))

# ---------------------------------------------------------------------- clients

Workers = Callable[..., list[Worker]]


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    """Return a function that makes clients of the sizes given; of seven, the fifth has few examples."""

    def make(folder: str, sizes: str = "MSMLMSM") -> list[Worker]:
        few = 4 if len(sizes) == 7 else None
        specs = [replace(SHARE, partition=i % 6, max_train=5 if i == few else 40) for i in range(len(sizes))]
        return [
            Worker(ClientSettings(f"client-{i}", spec, "cpu", size, tmp_path / folder / f"client-{i}"))
            for i, (spec, size) in enumerate(zip(specs, sizes, strict=True))
        ]

    return make


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of clients of every group that trains at once."""
    sizes: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        sizes.append(len(arguments[-1]))
        return train_rows(*arguments)

    monkeypatch.setattr(module, "train_rows", noted)
    return sizes


def orders_for(clients: Sequence[Worker], private: str = "none", **changes: Any) -> list[TrainOrder]:
    """Return for each client an order with weights of its own."""
    orders = []
    for seed, worker in enumerate(clients):
        spec = ModelSpec("mlp", worker.settings.size, (1, 8, 8), 10)
        layout = split(spec, private)[0]
        torch.manual_seed(seed)
        values: dict[str, nn.Parameter] = dict(build(spec).named_parameters())
        weights = Weights(layout, layout.flatten(values)) if layout.numel else None
        orders.append(train_order(private, **{"weights": weights} | changes))
    return orders


def one_by_one(clients: Sequence[Worker], orders: Sequence[TrainOrder]) -> list[TrainResult]:
    return [worker.answer(order) for worker, order in zip(clients, orders, strict=True)]


def at_once(clients: Sequence[Worker], orders: Sequence[TrainOrder]) -> list[TrainResult | Exception]:
    return train_together(list(zip(clients, orders, strict=True)))


def assert_close(got: TrainResult | Exception, want: TrainResult) -> None:
    """Demand the same result up to the rounding of float32."""
    assert isinstance(got, TrainResult), got
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert 0 < got.seconds < 60
    assert (got.weights is None) == (want.weights is None)
    if got.weights is not None and want.weights is not None:
        assert got.weights.layout == want.weights.layout
        torch.testing.assert_close(got.weights.values, want.weights.values, rtol=1e-5, atol=1e-6)


def personal_files(clients: Sequence[Worker]) -> list[dict[str, Tensor]]:
    """Return what lies on each client's disk; every client must have a file."""
    return [load_file(worker.state.folder / "personal" / "run-1.safetensors") for worker in clients]


@pytest.mark.parametrize(
    ("private", "reply"),
    [("none", "delta"), ("none", "weights"), ("head", "delta"), ("body", "weights"), ("all", "nothing")],
)
def test_clients_of_every_size_and_with_few_examples(
    workers: Workers, groups: list[int], private: str, reply: str
) -> None:
    ones, others = workers("one"), workers("other")
    for number in range(3):
        # In the first round some are absent: later they come without momentum among others that have some.
        present = slice(0, 3) if number == 0 else slice(0, 7)
        orders = orders_for(ones[present], private, reply=reply, round=number, clip=0.5)
        wanted = one_by_one(ones[present], orders)
        for got, want in zip(at_once(others[present], orders), wanted, strict=True):
            assert_close(got, want)
        if private != "none":
            files = zip(personal_files(others[present]), personal_files(ones[present]), strict=True)
            for one, other in files:
                assert one.keys() == other.keys() == {"values", "momentum", "moment"}
                for name in one:
                    torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5)
    # Two of size M; then four of M, one of them with smaller batches, and two of S. The L is alone.
    assert groups == [2, 4, 2, 4, 2]


def test_a_restart_finds_what_training_at_once_left(workers: Workers) -> None:
    steady, others = workers("one"), workers("other")
    one_by_one(steady, orders_for(steady, "head"))
    at_once(others, orders_for(others, "head"))
    again = workers("other")
    wanted = one_by_one(steady, orders_for(steady, "head", round=2))
    for got, want in zip(at_once(again, orders_for(again, "head", round=2)), wanted, strict=True):
        assert_close(got, want)


def test_the_limit_divides_a_group_and_does_not_show(
    workers: Workers, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INPUTS_AT_ONCE", 2 * 8 * 64 + 1)  # two clients with eight images of 64 pixels
    ones, others = workers("one", "MMMMM"), workers("other", "MMMMM")
    wanted = one_by_one(ones, orders_for(ones))
    for got, want in zip(at_once(others, orders_for(others)), wanted, strict=True):
        assert_close(got, want)
    assert groups == [2, 2]


def test_orders_that_differ_train_apart(workers: Workers, groups: list[int]) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = orders_for(ones)
    orders[1] = change(orders[1], learning_rate=0.01)
    for got, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert_close(got, want)
    assert groups == []


@pytest.mark.parametrize(
    ("private", "method"),
    [
        ("none", FedProx(mu=0.5)),
        ("head", FedRep(head_share=0.5)),
        ("copy", Moreau(lamda=3.0, inner_steps=2, inner_rate=0.1)),
    ],
)
def test_orders_with_a_method_train_one_by_one(
    workers: Workers, groups: list[int], private: str, method: Method
) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = [change(each, private=private, method=method) for each in orders_for(ones, _travels(private))]
    for got, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert isinstance(got, TrainResult)
        assert got.weights is not None and want.weights is not None
        assert torch.equal(got.weights.values, want.weights.values)
    if private != "none":
        for one, other in zip(personal_files(others), personal_files(ones), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
    assert groups == []


def _travels(private: str) -> str:
    """Return what is private of the weights that an order with a copy brings: nothing."""
    return "none" if private == "copy" else private


def test_every_model_trains_at_once_or_alone() -> None:
    assert sorted([*SHAPES, *ALONE]) == sorted(MODELS)


def test_own_models_and_those_with_batch_normalisation_train_one_by_one(
    workers: Workers, groups: list[int], tmp_path: Path
) -> None:
    ones, others = workers("one", "SS"), workers("other", "SS")
    spec = ModelSpec("plain-4", "S", (1, 8, 8), 10)
    layout = full_layout(spec)
    weights = Weights(layout, layout.flatten(dict(build(spec).named_parameters())))
    orders = [train_order(model="plain-4", weights=weights)] * 2
    for got, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert_close(got, want)
    own = [
        Worker(replace(w.settings, model="mlp", disclose="graph", state_dir=tmp_path / w.settings.client_id))
        for w in ones
    ]
    orders = [train_order(model="own", weights=orders_for(ones)[0].weights)] * 2
    assert all(isinstance(result, TrainResult) for result in at_once(own, orders))
    assert groups == []


def test_two_orders_to_one_client_are_taken_one_after_the_other(workers: Workers, groups: list[int]) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = [*orders_for(ones, "all", round=1), *orders_for(ones, "all", round=2)]
    for got, want in zip(at_once([*others, *others], orders), one_by_one([*ones, *ones], orders), strict=True):
        assert_close(got, want)
    again = [*orders_for(ones, "all", round=3), *orders_for(ones, "all", round=3)]
    for got, want in zip(at_once([*others, *others], again), one_by_one([*ones, *ones], again), strict=True):
        assert_close(got, want)
    assert groups == [2, 2, 2, 2]


def test_a_client_that_was_loaded_twice_is_still_one(workers: Workers, groups: list[int]) -> None:
    (client,), (again,) = workers("one", "M"), workers("one", "M")
    orders = 2 * orders_for([client], "all")
    at_once([client, again], orders)
    assert groups == []
    (other,) = workers("other", "M")
    one_by_one([other, other], orders)
    assert torch.equal(personal_files([client])[0]["values"], personal_files([other])[0]["values"])


def test_who_refuses_or_diverges_leaves_the_others_alone(workers: Workers, groups: list[int]) -> None:
    ones, others = workers("one", "MMMMM"), workers("other", "MMMMM")
    one_by_one(ones, orders_for(ones, "head"))
    at_once(others, orders_for(others, "head"))
    healthy = personal_files(others)
    orders = orders_for(ones, "head", round=2)
    layout = split(ModelSpec("mlp", "M", (1, 8, 8), 10), "head")[0]
    orders[1] = replace(orders[1], weights=None)
    orders[2] = replace(orders[2], weights=Weights(layout, torch.full((layout.numel,), torch.nan)))
    orders[3] = replace(orders[3], weights=Weights(layout, torch.full((layout.numel,), 1e30)))
    got = at_once(others, orders)
    assert groups == [5, 3]
    for index, kind in ((1, WireError), (2, WireError), (3, HyperbloomError)):
        with pytest.raises(kind) as caught:
            ones[index].answer(orders[index])
        assert type(got[index]) is caught.type
        assert str(got[index]) == str(caught.value)
        assert torch.equal(personal_files(others)[index]["values"], healthy[index]["values"])
    for index in (0, 4):
        assert_close(got[index], ones[index].answer(orders[index]))
    orders = orders_for(ones, "head", round=3)
    for outcome, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert_close(outcome, want)  # and they go on from where they were


def test_changes_of_clients_that_train_at_once_are_counted(workers: Workers, groups: list[int]) -> None:
    careful = [Worker(replace(each.settings, max_changes=1)) for each in workers("careful", "MM")]
    for one in train_together([(worker, train_order()) for worker in careful]):
        assert isinstance(one, TrainResult) and one.loss is None
    for refused in train_together([(worker, train_order(round=2)) for worker in careful]):
        assert isinstance(refused, HyperbloomError) and refused.reason is Reason.FORBIDDEN
    assert groups == [2]


def test_who_diverges_leaves_nothing_in_the_network_that_all_share(workers: Workers, groups: list[int]) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = orders_for(ones, "head")
    layout = split(ModelSpec("mlp", "M", (1, 8, 8), 10), "head")[0]
    orders[1] = replace(orders[1], weights=Weights(layout, torch.full((layout.numel,), 1e30)))
    first, second = at_once(others, orders)
    assert groups == [2] and isinstance(second, HyperbloomError)
    score = evaluate_order("head", weights=orders[0].weights)
    got = others[0].answer(score)  # next in the network
    assert_close(first, ones[0].answer(orders[0]))
    want = ones[0].answer(score)
    assert got.val.loss == pytest.approx(want.val.loss, rel=1e-4)


# Rounding may take an entry over the edge between two levels, or out of the k largest; the next replies make up for it.
FLIPPED = 2e-3


def assert_nearly_all_close(got: Tensor, want: Tensor) -> None:
    """Demand equality up to the rounding of float32, but for a share `FLIPPED` of the entries."""
    assert got.shape == want.shape
    different = ~torch.isclose(got, want, rtol=1e-4, atol=1e-6)
    assert float(different.double().mean()) <= FLIPPED


@pytest.mark.parametrize(("private", "reply"), [("none", "delta"), ("none", "weights"), ("head", "delta")])
@pytest.mark.parametrize("name", quick(["int8", "top-k:0.1", "top-k:0.1+int8"], "top-k:0.1+int8"))
def test_compressed_replies_and_what_is_owed_are_those_of_one_by_one(
    workers: Workers, groups: list[int], name: str, private: str, reply: str
) -> None:
    ones, others = workers("one", "MMSMS"), workers("other", "MMSMS")
    codec = Codec.parse(name)
    assert codec is not None
    for number in range(3):
        orders = orders_for(ones, private, reply=reply, round=number, codec=codec)
        wanted = one_by_one(ones, orders)
        for worker, other, order, want, got in zip(ones, others, orders, wanted, at_once(others, orders), strict=True):
            assert isinstance(got, TrainResult) and order.weights is not None
            assert got.weights is None and got.encoded is not None and want.encoded is not None
            layout = order.weights.layout
            sent = codec.decode(want.encoded, layout)
            assert float((sent != 0).double().mean()) > 20 * FLIPPED
            assert_nearly_all_close(codec.decode(got.encoded, layout), sent)
            owed, expected = (each.state.load_residual(Scope("run-1", number, 5), layout) for each in (other, worker))
            assert owed is not None and expected is not None and bool(expected.any())
            assert_nearly_all_close(owed, expected)
    assert groups == [3, 2] * 3


def test_a_failure_of_all_is_each_ones_own(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(module, "train_rows", exhausted)
    clients = workers("one", "MMS")
    first, second, alone = at_once(clients, orders_for(clients))
    assert all(isinstance(each, HyperbloomError) and each.reason is Reason.MEMORY for each in (first, second))
    assert isinstance(alone, TrainResult)


def test_a_network_that_decides_by_values_trains_one_by_one(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_axis(*_: Any) -> Tensor:
        raise RuntimeError("vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow")

    monkeypatch.setattr(module, "train_rows", no_axis)
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = orders_for(ones)
    for got, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("dropout", [True, False])
def test_a_network_with_dropout_trains_one_by_one(monkeypatch: pytest.MonkeyPatch, dropout: bool) -> None:
    """Many at once draw other neurons than one by one."""
    parts = [nn.Linear(4, 2), nn.Dropout(0.5)] if dropout else [nn.Linear(4, 2)]
    monkeypatch.setattr(module, "build", lambda spec: nn.Sequential(*parts))
    assert module._has_no_axis.__wrapped__(ModelSpec("mlp", "M", (4,), 2)) is dropout


def test_a_network_with_frozen_weights_trains_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once all weights would move."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    monkeypatch.setattr(module, "build", lambda spec: network)
    for frozen in (False, True):
        network[0].requires_grad_(not frozen)
        assert module._has_no_axis.__wrapped__(ModelSpec("mlp", "M", (4,), 2)) is frozen


def test_nobody_is_nothing() -> None:
    assert train_together([]) == []
