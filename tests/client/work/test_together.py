"""Training at once is training one after the other: same weights, losses, files and refusals, up to float rounding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.client import vectorised
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.training import Flat, FlatPart, train
from hyperbloom.client.vectorised import train_rows, train_together
from hyperbloom.client.worker import Worker
from hyperbloom.common.compression import Codec
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import TrainOrder, TrainResult, Weights
from hyperbloom.common.methods import FedProx, FedRep, Method, PFedMe
from hyperbloom.common.models import MODELS, ModelSpec, body_layout, build, full_layout, head_layout

from .conftest import SHARE
from .test_worker import evaluate_order, train_order

SHAPES = {"mlp": (6,), "lenet": (1, 16, 16), "omniglot": (1, 16, 16)} | {f"cnn-{n}": (1, 9, 8) for n in range(1, 6)}
ALONE = sorted(name for name in MODELS if name.startswith(("hafl-", "plain-", "lstm-")))
LENGTHS = (3, 5, 30)  # batches of five: clients with fewer examples than a batch, with just as many, and with more


def split(spec: ModelSpec, private: str) -> tuple[Layout, Layout]:
    """Return the layouts of the shared and the personal part."""
    full = full_layout(spec)
    shared = {"none": full, "head": body_layout(spec), "body": head_layout(spec), "all": Layout(())}[private]
    return shared, Layout(tuple(item for item in full.shapes if item not in shared.shapes))


# ---------------------------------------------------------------------- the arithmetic


def some_examples(name: str, count: int, dtype: torch.dtype, device: str) -> Examples:
    """Return labelled noise; float64 inputs get past the check for float32 on purpose."""
    generator = torch.Generator().manual_seed(count)
    inputs = 3 * torch.randn(count, *SHAPES[name], generator=generator)
    data = Examples(inputs, torch.randint(4, (count,), generator=generator)).to(device)
    object.__setattr__(data, "inputs", data.inputs.to(dtype))
    return data


def three_rounds(name: str, private: str, dtype: torch.dtype, device: str = "cpu") -> Sequence[tuple[Tensor, Tensor]]:
    """Train three clients in both ways; returns pairs of everything that either leaves, one by one first.

    The first client's personal part comes with momentum from the start, as if it had trained before the others.
    """
    spec = ModelSpec(name, "S", SHAPES[name], 4)
    torch.manual_seed(3)
    starts = [build(spec).to(device, dtype) for _ in LENGTHS]
    data = [some_examples(name, count, dtype, device) for count in LENGTHS]
    order = train_order(private, batch_size=5, clip=0.5, weights=None)
    layouts = split(spec, private)
    alone = [tuple(FlatPart(module, layout) for layout in layouts) for module in starts]
    rows = [Flat(layouts[i], torch.stack([parts[i].values for parts in alone])) for i in range(2)]
    alone[0][1].momentum = torch.full_like(alone[0][1].values, 0.1)
    rows[1].momentum = torch.zeros_like(rows[1].values)
    rows[1].momentum[0] = 0.1
    sent = rows[0].values.clone()
    pairs = []
    for number in range(3):
        orders = [replace(order, seed=10 * number + client) for client in range(3)]
        losses = []
        for client, (shared, personal) in enumerate(alone):
            shared.load(sent[client])
            losses.append(train(starts[client], shared, personal, data[client], orders[client]))
        rows[0].load(sent)
        found = train_rows(build(spec).to(device, dtype), rows[0], rows[1], data, orders)
        pairs.append((torch.tensor(losses), found.cpu()))
        for one, together in zip(zip(*alone, strict=True), rows, strict=True):
            if together.layout.numel:
                assert together.momentum is not None
                pairs.append((torch.stack([part.values for part in one]), together.values.clone()))
                momenta = [part.momentum for part in one if part.momentum is not None]
                pairs.append((torch.stack(momenta), together.momentum.clone()))
        assert not torch.equal(sent, rows[0].values) or private == "all"
        sent = sent + 0.01
    return pairs


@pytest.mark.parametrize("private", ["none", "head", "all"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_at_once_is_one_by_one_to_the_last_digits_of_float64(name: str, private: str) -> None:
    for one, together in three_rounds(name, private, torch.float64):
        tolerance = 1e-12 if one.dtype == torch.float64 else 1e-6  # losses are summed in float32
        torch.testing.assert_close(together, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["lenet", "mlp", "omniglot"])  # in others a ReLU may fall to either side of zero
def test_at_once_is_one_by_one_in_float32(name: str) -> None:
    for one, together in three_rounds(name, "head", torch.float32):
        torch.testing.assert_close(together, one, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("private", ["none", "head", "all"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_at_once_is_one_by_one_on_cuda(name: str, private: str) -> None:
    for one, together in three_rounds(name, private, torch.float64, "cuda"):
        tolerance = 1e-9 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(together, one, rtol=tolerance, atol=tolerance)


def test_each_row_is_clipped_to_a_norm_of_its_own() -> None:
    layout = full_layout(ModelSpec("mlp", "S", (6,), 4))
    part = Flat(layout, torch.zeros(3, layout.numel))
    part.gradient.copy_(torch.tensor([1e-3, 1.0, 1e3])[:, None])
    part.clip(0.5)
    assert part.gradient.norm(dim=1).tolist() == pytest.approx([1e-3 * layout.numel**0.5, 0.5, 0.5], rel=1e-4)


def test_the_module_is_read_as_an_architecture_only() -> None:
    spec = ModelSpec("mlp", "S", (6,), 4)
    module = build(spec)
    layout, empty = split(spec, "none")
    before = layout.flatten(dict(module.named_parameters()))
    rows = Flat(layout, torch.randn(2, layout.numel)), Flat(empty, torch.empty(2, 0))
    data = [some_examples("mlp", count, torch.float32, "cpu") for count in (9, 30)]
    train_rows(module, *rows, data, [train_order(batch_size=5), train_order(batch_size=5, seed=6)])
    assert torch.equal(layout.flatten(dict(module.named_parameters())), before)
    assert all(parameter.grad is None for parameter in module.parameters())


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

    monkeypatch.setattr(vectorised, "train_rows", noted)
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
    return [worker.train(order) for worker, order in zip(clients, orders, strict=True)]


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
    monkeypatch.setattr(vectorised, "INPUTS_AT_ONCE", 2 * 8 * 64 + 1)  # two clients with eight images of 64 pixels
    ones, others = workers("one", "MMMMM"), workers("other", "MMMMM")
    wanted = one_by_one(ones, orders_for(ones))
    for got, want in zip(at_once(others, orders_for(others)), wanted, strict=True):
        assert_close(got, want)
    assert groups == [2, 2]


def test_orders_that_differ_train_apart(workers: Workers, groups: list[int]) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = orders_for(ones)
    orders[1] = replace(orders[1], learning_rate=0.01)
    for got, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert_close(got, want)
    assert groups == []


@pytest.mark.parametrize(
    ("private", "method"),
    [
        ("none", FedProx(mu=0.5)),
        ("head", FedRep(head_share=0.5)),
        ("copy", PFedMe(lamda=3.0, inner_steps=2, inner_rate=0.1)),
    ],
)
def test_orders_with_a_method_train_one_by_one(
    workers: Workers, groups: list[int], private: str, method: Method
) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = [replace(each, private=private, method=method.to_json()) for each in orders_for(ones, _travels(private))]
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
    orders = [train_order(model="own", weights=orders_for(ones)[0].weights, norms="generated")] * 2
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
            ones[index].train(orders[index])
        assert type(got[index]) is caught.type
        assert str(got[index]) == str(caught.value)
        assert torch.equal(personal_files(others)[index]["values"], healthy[index]["values"])
    for index in (0, 4):
        assert_close(got[index], ones[index].train(orders[index]))
    orders = orders_for(ones, "head", round=3)
    for outcome, want in zip(at_once(others, orders), one_by_one(ones, orders), strict=True):
        assert_close(outcome, want)  # and they go on from where they were


def test_who_diverges_leaves_nothing_in_the_network_that_all_share(workers: Workers, groups: list[int]) -> None:
    ones, others = workers("one", "MM"), workers("other", "MM")
    orders = orders_for(ones, "head")
    layout = split(ModelSpec("mlp", "M", (1, 8, 8), 10), "head")[0]
    orders[1] = replace(orders[1], weights=Weights(layout, torch.full((layout.numel,), 1e30)))
    first, second = at_once(others, orders)
    assert groups == [2] and isinstance(second, HyperbloomError)
    score = evaluate_order("head", weights=orders[0].weights)
    got = others[0].evaluate(score)  # next in the network
    assert_close(first, ones[0].train(orders[0]))
    want = ones[0].evaluate(score)
    assert got.val_loss == pytest.approx(want.val_loss, rel=1e-4)


# Rounding may take an entry over the edge between two levels, or out of the k largest; the next replies make up for it.
FLIPPED = 2e-3


def assert_nearly_all_close(got: Tensor, want: Tensor) -> None:
    """Demand equality up to the rounding of float32, but for a share `FLIPPED` of the entries."""
    assert got.shape == want.shape
    different = ~torch.isclose(got, want, rtol=1e-4, atol=1e-6)
    assert float(different.double().mean()) <= FLIPPED


@pytest.mark.parametrize(("private", "reply"), [("none", "delta"), ("none", "weights"), ("head", "delta")])
@pytest.mark.parametrize("name", ["int8", "top-k:0.1", "top-k:0.1+fp16"])
def test_compressed_replies_and_what_is_owed_are_those_of_one_by_one(
    workers: Workers, groups: list[int], name: str, private: str, reply: str
) -> None:
    ones, others = workers("one", "MMSMS"), workers("other", "MMSMS")
    codec = Codec.parse(name)
    assert codec is not None
    for number in range(3):
        orders = orders_for(ones, private, reply=reply, round=number, compression=name)
        wanted = one_by_one(ones, orders)
        for worker, other, order, want, got in zip(ones, others, orders, wanted, at_once(others, orders), strict=True):
            assert isinstance(got, TrainResult) and order.weights is not None
            assert got.weights is None and got.encoded is not None and want.encoded is not None
            layout = order.weights.layout
            sent = codec.decode(want.encoded, layout)
            assert float((sent != 0).double().mean()) > 20 * FLIPPED
            assert_nearly_all_close(codec.decode(got.encoded, layout), sent)
            owed, expected = (each.state.load_residual("run-1", layout) for each in (other, worker))
            assert owed is not None and expected is not None and bool(expected.any())
            assert_nearly_all_close(owed, expected)
    assert groups == [3, 2] * 3


def test_a_codec_that_there_is_not_is_refused_before_the_others_train(workers: Workers, groups: list[int]) -> None:
    clients = workers("one", "MM")
    for outcome in at_once(clients, orders_for(clients, compression="zip")):
        assert isinstance(outcome, WireError) and "found 'zip'" in str(outcome)
    assert groups == []


def test_a_failure_of_all_is_each_ones_own(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(vectorised, "train_rows", exhausted)
    clients = workers("one", "MMS")
    first, second, alone = at_once(clients, orders_for(clients))
    assert isinstance(first, torch.OutOfMemoryError) and isinstance(second, torch.OutOfMemoryError)
    assert isinstance(alone, TrainResult)


def test_nobody_is_nothing() -> None:
    assert train_together([]) == []
