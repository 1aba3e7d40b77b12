"""The client's half of ODPFL-HN: the same descriptor twice, its gradient, and a fit that comes closer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperbloom.client.encoding import backprop, describe, fit
from hyperbloom.client.state import ClientState
from hyperbloom.client.worker import Worker
from hyperbloom.common.encoders import (
    Encoder,
    EncoderSpec,
    build_encoder,
    descriptor_layout,
    encoder_layout,
    version_of,
)
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import BackpropOrder, DescribeOrder, FitOrder, Weights

DIM = 3
INPUTS = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SPEC = EncoderSpec("dss", (6,), DIM)


def encoder(seed: int = 1) -> Encoder:
    torch.manual_seed(seed)
    return build_encoder(SPEC).double()


def weights(module: Encoder) -> Weights:
    return Weights(encoder_layout(SPEC), encoder_layout(SPEC).flatten(dict(module.named_parameters())))


def describing(module: Encoder, keep: bool = True, **changes: Any) -> DescribeOrder:
    sent = weights(module)
    return replace(DescribeOrder("run-1", 1, "dss", DIM, version_of(sent.values), keep, sent), **changes)


def asking_back(version: str, gradient: Tensor) -> BackpropOrder:
    return BackpropOrder("run-1", "dss", DIM, version, Weights(descriptor_layout(DIM), gradient))


@pytest.fixture
def state(tmp_path: Path) -> ClientState:
    return ClientState(tmp_path / "state")


def test_a_descriptor_and_its_gradient_are_those_of_the_encoder_that_came(state: ClientState) -> None:
    module, gradient = encoder(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    order = describing(module)
    told = describe(order, INPUTS, state)
    assert told.version == order.version
    assert torch.allclose(told.weights.values, module(INPUTS), rtol=0, atol=1e-12)
    describe(describing(encoder(2), keep=False), INPUTS, state)  # another encoder passes by, such as an evaluation's
    back = backprop(asking_back(told.version, gradient), INPUTS, state)
    expected = torch.autograd.grad(module(INPUTS) @ gradient, list(module.parameters()))
    assert back.version == order.version
    assert torch.allclose(back.weights.values, torch.cat([each.reshape(-1) for each in expected]), rtol=0, atol=1e-12)
    assert not (state.folder / "encoder.safetensors").exists()


def test_the_encoder_outlives_the_process_between_the_two(state: ClientState) -> None:
    order = describing(encoder())
    describe(order, INPUTS, state)
    version = order.version
    result = backprop(asking_back(version, torch.ones(DIM, dtype=torch.float64)), INPUTS, ClientState(state.folder))
    assert result.version == version


@pytest.mark.parametrize("change", [{"version": "0" * 16}, {"run_id": "run-2"}], ids=str)
def test_a_gradient_for_another_encoder_is_refused(state: ClientState, change: dict[str, str]) -> None:
    order = describing(encoder())
    describe(order, INPUTS, state)
    wrong = replace(asking_back(order.version, torch.ones(DIM, dtype=torch.float64)), **change)
    with pytest.raises(WireError, match=r"^order: for the encoder \w{16}, which this client does not hold$"):
        backprop(wrong, INPUTS, state)


def test_who_was_not_described_for_training_holds_nothing(state: ClientState) -> None:
    order = describing(encoder(), keep=False)
    describe(order, INPUTS, state)
    with pytest.raises(WireError, match="which this client does not hold"):
        backprop(asking_back(order.version, torch.ones(DIM, dtype=torch.float64)), INPUTS, state)


def test_other_examples_than_were_described_are_noticed(state: ClientState) -> None:
    order = describing(encoder())
    describe(order, INPUTS, state)
    with pytest.raises(HyperbloomError, match="no longer those that were described"):
        backprop(asking_back(order.version, torch.ones(DIM, dtype=torch.float64)), INPUTS[1:], state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0" * 16}, "^order: the encoder is not the one that it says, 0000000000000000$"),
        ({"encoder": "mean"}, "^order: encoder: expected one of deepset"),
        ({"dim": DIM + 1}, r"^tensor tail.weight: expected shape \(4, 500\), found \(3, 500\)$"),
    ],
    ids=["version", "name", "dim"],
)
def test_an_encoder_that_does_not_fit_is_refused(state: ClientState, change: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        describe(describing(encoder(), **change), INPUTS, state)
    assert not state.folder.exists()


# ---------------------------------------------------------------------- fitting


def fitting(module: Encoder, wanted: Tensor, **changes: Any) -> FitOrder:
    sent = weights(module)
    training = dict.fromkeys(("num_classes", "steps", "batch_size", "round", "seed"), 1)
    training |= dict.fromkeys(("learning_rate", "momentum", "weight_decay", "clip"), 0.0)
    training |= dict.fromkeys(("model", "private", "reply"), "") | {"run_id": "run-1", "weights": None}
    order = FitOrder(
        **training,
        encoder="dss",
        version=version_of(sent.values),
        gamma=sent,
        descriptor=Weights(descriptor_layout(DIM), wanted),
        fit_steps=2,
        fit_rate=0.01,
    )
    return replace(order, **changes)


def test_a_fit_is_gradient_descent_on_the_squared_distance() -> None:
    module, wanted = encoder(), torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)
    change, distance = fit(fitting(module, wanted), INPUTS)
    before = weights(module).values
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(2):
        optimiser.zero_grad()
        loss = (module(INPUTS) - wanted).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    assert distance == pytest.approx(losses[0])
    assert torch.allclose(change.values, weights(module).values - before, rtol=0, atol=1e-12)
    assert losses[1] < losses[0]


def test_a_fit_comes_close() -> None:
    wanted = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    module = encoder()
    change, before = fit(fitting(module, wanted, fit_steps=60), INPUTS)
    after = Weights(change.layout, weights(module).values + change.values)
    torch.nn.utils.vector_to_parameters(after.values, module.parameters())
    assert float((module(INPUTS) - wanted).square().mean().detach()) < 0.05 * before


@pytest.mark.parametrize("change", [{"gamma": None}, {"descriptor": None}, {"fit_steps": 0}], ids=str)
def test_an_order_to_fit_nothing_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=r"^order: expected an encoder, a descriptor and steps to fit it$"):
        fit(fitting(encoder(), torch.zeros(DIM, dtype=torch.float64), **change), INPUTS)


# ---------------------------------------------------------------------- through the worker


def test_a_worker_describes_its_training_examples_and_no_label(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    spec = EncoderSpec("deepset", worker.input_shape, DIM)
    torch.manual_seed(0)
    module = build_encoder(spec)
    sent = Weights(Layout.of(module), Layout.of(module).flatten(dict(module.named_parameters())))
    order = DescribeOrder("run-1", 1, "deepset", DIM, version_of(sent.values), True, sent)
    told = worker.describe(order)
    assert torch.allclose(told.weights.values, module(worker.train_data.inputs))
    object.__setattr__(worker.train_data, "labels", worker.train_data.labels.flip(0) * 0)
    assert torch.equal(worker.describe(order).weights.values, told.weights.values)
    gradient = Weights(descriptor_layout(DIM), torch.ones(DIM))
    back = worker.backprop(BackpropOrder("run-1", "deepset", DIM, order.version, gradient))
    assert back.weights.layout == sent.layout and float(back.weights.values.norm()) > 0
