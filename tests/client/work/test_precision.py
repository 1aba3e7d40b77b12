"""Half precision: for large frozen networks on devices that gain by it, near the gradient of single precision."""

import pytest
import torch
from torch import nn

from hyperbloom.client.work import precision
from hyperbloom.client.work.sgd import FlatPart, backward
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build

LORA = ModelSpec("mlp", "S", (1, 8, 8), 4, "lora:r=2")
DATA = Examples(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 4)


def gradient() -> torch.Tensor:
    torch.manual_seed(0)
    module = build(LORA)
    part = FlatPart(module, Layout.of(module))
    with torch.no_grad():
        part.values.add_(torch.randn_like(part.values), alpha=0.1)  # LoRA's B starts at zero
    loss = backward(module, [part], DATA, torch.arange(40))
    assert loss.dtype == part.gradient.dtype == torch.float32
    return part.gradient.clone()


@pytest.mark.parametrize(("large", "gains", "half"), [(1, True, True), (1, False, False), (10_000_000, True, False)])
def test_a_large_frozen_network_is_passed_in_half_precision(
    large: int, gains: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradient()
    monkeypatch.setattr(precision, "LARGE", large)
    monkeypatch.setattr(precision, "gains_by_half", lambda device: gains)
    found = gradient()
    assert torch.equal(found, expected) == (not half)
    assert float((found - expected).norm() / expected.norm()) < 0.1  # bfloat16 has eight bits


def test_what_is_trained_as_a_whole_is_passed_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "LARGE", 1)
    monkeypatch.setattr(precision, "gains_by_half", lambda device: True)
    module, inputs = nn.Linear(3, 2), torch.rand(5, 3)
    assert torch.equal(precision.forward(module, inputs), module(inputs))


def test_the_rule_knows_devices() -> None:
    assert precision.gains_by_half(torch.device("cpu")) == torch.cpu._is_amx_tile_supported()
    assert not precision.gains_by_half(torch.device("meta"))
