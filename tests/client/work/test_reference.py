"""FedHeNN on the client: what it takes for a reference set, what it makes of it, and how it trains."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom import __version__
from hyperbloom.client.work.methods import Likeness, train_by
from hyperbloom.client.work.methods import aligned as train_aligned
from hyperbloom.client.work.reference import reference_rows
from hyperbloom.client.work.sgd import Flat, FlatPart, Network
from hyperbloom.common.alignment import digest_of, draw_rows, factor_weights, reference_weights
from hyperbloom.common.cka import centred, linear_cka_with
from hyperbloom.common.data import Examples, laid_out
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import Aligned
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.exchanges import ReferenceOrder, RepresentOrder
from hyperbloom.common.wire.orders import SGD, Greeting

from ..orders import Worker, arrange, train_order

MakeWorker = Callable[..., Worker]
INPUTS = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0)).half().float()
REFERENCE = reference_weights(INPUTS)
DIGEST = digest_of(REFERENCE)
ROWS = INPUTS[draw_rows(30, 12, 7)]


def method(**changes: Any) -> Aligned:
    values: dict[str, Any] = {"eta": 2.0}
    return Aligned(**values | {"reference": DIGEST, "rows": 12, "draw": 7} | changes)


def represent_order(**changes: Any) -> RepresentOrder:
    values: dict[str, Any] = {"run_id": "run-1", "round": 1, "model": "mlp", "num_classes": 10, "private": "all"}
    return arrange(RepresentOrder, **values | {"seed": 5, "reference": DIGEST, "rows": 12, "draw": 7} | changes)


@pytest.fixture
def holder(make_worker: MakeWorker) -> Worker:
    """Return a worker that has the reference set."""
    worker = make_worker()
    assert worker.answer(ReferenceOrder(DIGEST, REFERENCE)).reference == DIGEST
    return worker


# ---------------------------------------------------------------------- the reference set


def test_a_client_says_whether_it_has_the_reference_set(make_worker: MakeWorker, holder: Worker) -> None:
    assert holder.answer(Greeting(__version__)).has_reference is None
    assert holder.answer(Greeting(__version__, reference=DIGEST)).has_reference is True
    assert holder.answer(Greeting(__version__, reference="0" * 64)).has_reference is False
    assert make_worker().answer(Greeting(__version__, reference=DIGEST)).has_reference is True
    assert make_worker("other").answer(Greeting(__version__, reference=DIGEST)).has_reference is False


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (reference_weights(INPUTS[:, 0]), r"2 to 5000 inputs of shape \(1, 8, 8\), found \(30, 8, 8\)"),
        (reference_weights(INPUTS[:1]), r"2 to 5000 inputs of shape \(1, 8, 8\), found \(1, 1, 8, 8\)"),
        (reference_weights(INPUTS[:1].expand(5001, -1, -1, -1)), "found \\(5001, 1, 8, 8\\)"),
        (Weights(Layout(()), torch.empty(0)), r"found \(\)"),
        (reference_weights(INPUTS.flip(0)), "is not the one that its digest names"),
        (Weights(REFERENCE.layout, REFERENCE.values.double()), "of float16 or float32, found torch.float64"),
        (Weights(REFERENCE.layout, torch.full_like(REFERENCE.values, float("nan"))), "1920 values are not finite"),
    ],
)
def test_what_is_no_reference_set_is_not_kept(make_worker: MakeWorker, weights: Weights, text: str) -> None:
    worker = make_worker()
    with pytest.raises(WireError, match=text):
        worker.answer(ReferenceOrder(DIGEST, weights))
    assert not worker.state.reference.is_of({"digest": DIGEST})


def test_without_it_nothing_is_represented_or_aligned(make_worker: MakeWorker, holder: Worker) -> None:
    (holder.state.folder / "reference.safetensors").unlink()
    for work in (
        lambda: holder.answer(represent_order()),
        lambda: holder.answer(train_order("all", "nothing", method=method())),
    ):
        with pytest.raises(
            WireError, match=f"expected the reference set {DIGEST[:12]} on this client, found none"
        ) as caught:
            work()
        assert caught.value.reason is Reason.LACKS_REFERENCE
    assert holder.answer(train_order("all", "nothing", method=method(eta=0.0))).loss > 0


def test_the_rows_of_a_round_are_those_that_its_seed_draws(holder: Worker) -> None:
    assert torch.equal(reference_rows(holder, DIGEST, 12, 7), ROWS)


# ---------------------------------------------------------------------- representations


def test_a_client_answers_with_its_centred_representations(make_worker: MakeWorker, holder: Worker) -> None:
    result = holder.answer(represent_order())
    assert result.factor is not None
    holder.answer(train_order("all", "nothing", steps=1, learning_rate=1e-30))  # writes down what it has represented
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    values = load_file(holder.state.folder / "personal" / "run-1.safetensors")["values"]
    nn.utils.vector_to_parameters(values, network.parameters())
    features = centred(network[:-1](ROWS)).detach()
    found = result.factor.values.view(result.factor.layout.shapes[0][1])
    assert found.shape == (12, 12)
    torch.testing.assert_close(found @ found.T, features @ features.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": 1}, "expected at least 2 rows of the reference set, found 1"),
        ({"reference": "0" * 64}, "expected the reference set 000000000000 on this client, found none"),
        ({"num_classes": 3}, "3 classes, but this client's data have 10"),
        ({"private": "some"}, "expected private to be one of"),
    ],
)
def test_orders_that_do_not_fit_are_refused(holder: Worker, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WireError, match=text):
        holder.answer(represent_order(**changes))


def test_a_network_that_has_diverged_says_so(holder: Worker) -> None:
    layout, order = full_layout(ModelSpec("mlp", "M", (1, 8, 8), 10)), represent_order()
    holder.state.save_personal(order.scope, layout, torch.full((layout.numel,), torch.inf))
    with pytest.raises(HyperbloomError, match="the representations are not finite: the network has diverged") as caught:
        holder.answer(order)
    assert caught.value.reason is Reason.DIVERGED


# ---------------------------------------------------------------------- training


class Normed(nn.Module):
    """A network with batch normalisation and dropout, which is off where representations are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.body(x.flatten(1)))))
        return out


def data() -> Examples:
    generator = torch.Generator().manual_seed(1)
    return Examples(torch.rand(16, 1, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator))


def sgd(**changes: Any) -> SGD:
    return train_order(**changes).sgd


def aligned(
    module: nn.Module, steps: SGD, settings: Aligned, copy: bool = False, factor: Weights | None = None
) -> tuple[Tensor, Flat]:
    shared = FlatPart(module, Layout.of(module))
    personal = Flat(shared.layout, torch.zeros_like(shared.values)) if copy else Flat(Layout(()), torch.empty(0))
    train_by(settings, Network(module, shared, personal), data(), steps, 5, (ROWS, factor))
    return shared.values, personal


def test_one_step_goes_down_the_gradient_of_the_loss_and_the_distance() -> None:
    torch.manual_seed(0)
    module, target = Normed(), torch.randn(12, 3)
    start = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    made = module.norm(module.body(ROWS.flatten(1)))
    batch = data()  # of as many examples as there are: the order of a batch does not matter
    loss = F.cross_entropy(module(batch.inputs), batch.labels) + 2 * (1 - linear_cka_with(target)(made))
    gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))
    steps = sgd(steps=1, batch_size=16, learning_rate=0.5, weight_decay=0.0)
    values, _ = aligned(module, steps, method(), factor=factor_weights(target))
    torch.testing.assert_close(values, start - 0.5 * gradient, rtol=0, atol=1e-5)
    alone, _ = aligned(_at(start), steps, method(eta=0.0))
    assert float((values - alone).abs().max()) > 1e-3


def _at(values: Tensor) -> Normed:
    module = Normed()
    nn.utils.vector_to_parameters(values.clone(), module.parameters())
    return module


def test_with_the_weights_sent_as_the_target_the_first_step_is_that_of_the_loss_alone() -> None:
    """There the distance is zero, and its gradient too; the second step differs."""
    start = nn.utils.parameters_to_vector(Normed().parameters()).detach().clone()
    for count, same in ((1, True), (2, False)):
        steps = sgd(steps=count, batch_size=16, learning_rate=0.5)
        one, other = (aligned(_at(start), steps, method(eta=eta))[0] for eta in (0.0, 20.0))
        assert torch.allclose(one, other, atol=1e-4) == same


@pytest.mark.parametrize("wide", [None, 5, 12])
def test_a_target_prepared_once_and_rows_laid_out_as_images_train_the_same_weights(wide: int | None) -> None:
    """The other side computes CKA of both in each step, on rows as they are read."""
    generator = torch.Generator().manual_seed(2)
    rows, inputs = (torch.rand(count, 3, 16, 16, generator=generator) for count in (12, 16))
    factor = None if wide is None else factor_weights(torch.randn(12, wide, generator=generator))
    found = []
    for similarity_to, seen in ((linear_cka_with, laid_out(rows)), (lambda b: lambda a: linear_cka_with(b)(a), rows)):
        torch.manual_seed(0)
        network = build(ModelSpec("lenet", "S", (3, 16, 16), 10))
        shared = FlatPart(network, Layout.of(network))
        made, images = Network(network, shared, Flat(Layout(()), torch.empty(0))), replace(data(), inputs=inputs)
        steps = sgd(steps=2, batch_size=8, learning_rate=0.01)  # more would multiply what rounding changes
        train_aligned(made, images, steps, 5, method(), (seen, factor), similarity_to)
        found.append(shared.values)
    torch.testing.assert_close(*found, rtol=0, atol=2e-6)


def test_a_rounds_rows_lie_in_memory_as_images_do() -> None:
    kept = torch.rand(30, 3, 8, 8)
    reference = SimpleNamespace(load=lambda metadata: {"inputs": kept})
    client: Any = SimpleNamespace(device="cpu", state=SimpleNamespace(reference=reference))
    rows = reference_rows(client, DIGEST, 12, 7)
    assert torch.equal(rows, kept[draw_rows(30, 12, 7)]) and rows.is_contiguous(memory_format=torch.channels_last)


def test_a_private_copy_is_what_was_trained() -> None:
    values, beside = aligned(Normed(), sgd(steps=2, batch_size=4), method(), copy=True)
    assert torch.equal(beside.values, values)


@pytest.mark.parametrize(
    ("likeness", "text"),
    [
        (None, "expected reference inputs, found none"),
        (
            (ROWS, factor_weights(torch.ones(11, 2))),
            r"factor: expected shape \(12, up to 12\), found \(11, 2\)",
        ),
    ],
)
def test_what_cannot_be_aligned_is_refused(likeness: Likeness | None, text: str) -> None:
    module = Normed()
    made = Network(module, FlatPart(module, Layout.of(module)), Flat(Layout(()), torch.empty(0)))
    with pytest.raises(WireError, match=text):
        train_by(method(), made, data(), sgd(), 5, likeness)
