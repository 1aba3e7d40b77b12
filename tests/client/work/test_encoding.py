"""The client's half of ODPFL-HN: the same descriptor twice, its gradient, and a fit that comes closer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import encoding
from hyperbloom.client.work.client import Client
from hyperbloom.client.work.encoding import fit_encoder
from hyperbloom.common.data import Examples
from hyperbloom.common.encoders import (
    Encoder,
    EncoderSpec,
    build_encoder,
    descriptor_layout,
    encoder_layout,
    version_of,
)
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.wire.exchanges import BackpropOrder, BackpropResult, DescribeOrder, DescribeResult, Fit

from ..orders import Worker

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
    return replace(DescribeOrder("run-1", "dss", DIM, version_of(sent.values), keep, sent), **changes)


def asking_back(version: str, gradient: Tensor) -> BackpropOrder:
    return BackpropOrder("run-1", "dss", DIM, version, Weights(descriptor_layout(DIM), gradient))


def client(inputs: Tensor, state: ClientState) -> Client:
    """Return as much of a client as has to do with encoders."""
    made = Client.__new__(Client)
    made.pretrained = None
    made.settings, made.state = ClientSettings("c"), state
    made.releases = Releases(made.settings)
    made.train_data = Examples(inputs.float(), torch.zeros(len(inputs), dtype=torch.int64))
    object.__setattr__(made.train_data, "inputs", inputs)  # float64 gets past the check for float32 on purpose
    return made


def describe(order: DescribeOrder, inputs: Tensor, state: ClientState) -> DescribeResult:
    return encoding.describe(client(inputs, state), order)


def backprop(order: BackpropOrder, inputs: Tensor, state: ClientState) -> BackpropResult:
    return encoding.backprop(client(inputs, state), order)


@pytest.fixture
def state(tmp_path: Path) -> ClientState:
    return ClientState(tmp_path / "state")


def test_a_descriptor_and_its_gradient_are_those_of_the_encoder_that_came(state: ClientState) -> None:
    module, gradient = encoder(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    order = describing(module)
    expected = torch.autograd.grad(module(INPUTS) @ gradient, list(module.parameters()))
    for _ in range(2):  # the process keeps the module from round to round
        told = describe(order, INPUTS, state)
        assert told.version == order.version
        assert torch.allclose(told.weights.values, module(INPUTS), rtol=0, atol=1e-12)
        describe(describing(encoder(2), keep=False), INPUTS, state)  # another one passes by, such as an evaluation's
        back = backprop(asking_back(told.version, gradient), INPUTS, state)
        assert back.version == order.version
        found = torch.cat([each.reshape(-1) for each in expected])
        assert torch.allclose(back.weights.values, found, rtol=0, atol=1e-12)
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


def test_a_gradient_or_a_descriptor_of_other_numbers_is_refused(state: ClientState) -> None:
    module = encoder()
    describe(order := describing(module), INPUTS, state)
    for gradient in (torch.ones(DIM + 1, dtype=torch.float64), torch.ones(DIM), torch.full((DIM,), torch.nan).double()):
        back = asking_back(order.version, torch.ones(DIM, dtype=torch.float64))
        wrong = replace(back, weights=Weights(descriptor_layout(len(gradient)), gradient))
        with pytest.raises(WireError, match=r"^tensor descriptor: (expected|3 values are not finite)"):
            backprop(wrong, INPUTS, state)
        if len(gradient) == DIM:
            with pytest.raises(WireError, match=r"^tensor descriptor: (expected|3 values are not finite)"):
                fit_encoder(fitting(module, gradient), INPUTS)


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


def fitting(module: Encoder, wanted: Tensor, steps: int = 2) -> Fit:
    sent = weights(module)
    return Fit("dss", version_of(sent.values), sent, Weights(descriptor_layout(DIM), wanted), steps, 0.01)


def test_a_fit_is_gradient_descent_on_the_squared_distance() -> None:
    module, wanted = encoder(), torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)
    change = fit_encoder(fitting(module, wanted), INPUTS)
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
    assert torch.allclose(change.values, weights(module).values - before, rtol=0, atol=1e-12)
    assert losses[1] < losses[0]


def test_a_fit_comes_close() -> None:
    wanted = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    module = encoder()
    before = float((module(INPUTS) - wanted).square().mean().detach())
    change = fit_encoder(fitting(module, wanted, steps=60), INPUTS)
    after = Weights(change.layout, weights(module).values + change.values)
    torch.nn.utils.vector_to_parameters(after.values, module.parameters())
    assert float((module(INPUTS) - wanted).square().mean().detach()) < 0.05 * before


def test_an_order_to_fit_nothing_is_refused() -> None:
    with pytest.raises(WireError, match=r"^order: expected at least 1 step to fit the encoder, found 0$"):
        fit_encoder(fitting(encoder(), torch.zeros(DIM, dtype=torch.float64), steps=0), INPUTS)


# ---------------------------------------------------------------------- through the client


def test_a_worker_describes_its_training_examples_and_no_label(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    spec = EncoderSpec("deepset", worker.input_shape, DIM)
    torch.manual_seed(0)
    module = build_encoder(spec)
    sent = Weights(Layout.of(module), Layout.of(module).flatten(dict(module.named_parameters())))
    order = DescribeOrder("run-1", "deepset", DIM, version_of(sent.values), True, sent)
    told = worker.answer(order)
    assert torch.allclose(told.weights.values, module(worker.train_data.inputs))
    object.__setattr__(worker.train_data, "labels", worker.train_data.labels.flip(0) * 0)
    assert torch.equal(worker.answer(order).weights.values, told.weights.values)
    gradient = Weights(descriptor_layout(DIM), torch.ones(DIM))
    back = worker.answer(BackpropOrder("run-1", "deepset", DIM, order.version, gradient))
    assert back.weights.layout == sent.layout and float(back.weights.values.norm()) > 0
