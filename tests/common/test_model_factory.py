"""Networks from a user's own function."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperbloom.common.data import laid_out
from hyperbloom.common.errors import ModelError
from hyperbloom.common.models import build_from_factory

SOURCE = """
import functools

import torch
from torch import nn

CALLS = []

def good(input_shape, num_classes):
    CALLS.append((input_shape, num_classes))
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, num_classes))

class Made(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.head = nn.Linear(input_shape[0], num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3)))

def fails(input_shape, num_classes):
    raise RuntimeError("one\\ntwo")

def text(input_shape, num_classes):
    return "a model"

def empty(input_shape, num_classes):
    return nn.Flatten()

def fixed(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes)).requires_grad_(False)

def script(input_shape, num_classes):
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes)))

def whole_numbers(input_shape, num_classes):
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))
    module.places = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
    return module

def ten(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 10))

def narrow(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, num_classes))

def styled(input_shape, num_classes):
    norm = nn.InstanceNorm2d(input_shape[0], track_running_stats=True)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(12, num_classes))

def no_arguments():
    return good((3, 2, 2), 4)

class Two(Made):
    def forward(self, x):
        return x, x

def library(*, weights=None, progress=True, num_classes=1000):
    CALLS.append(weights)
    return ten(None, num_classes)

@functools.wraps(library)
def by_place(*args, **kwargs):
    return library(**dict(zip(("weights", "progress"), args)), **kwargs)

def older(pretrained=False, progress=True):
    CALLS.append(pretrained)

@functools.wraps(library)
def around(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), library(num_classes=num_classes)[1])

@functools.wraps(good)
def decorated(*args, **kwargs):
    return good(*args, **kwargs)

def otherwise(shape, weights_per_class):
    return good(shape, weights_per_class)

class Viewed(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 4, 3)
        self.head = nn.Linear(4 * 36, num_classes)

    def forward(self, x):
        return self.head(self.conv(x).view(x.size(0), -1))

number = 3
"""
SHAPE = (3, 2, 2)
WANTED = "expected a function (input_shape, num_classes) that returns a torch.nn.Module"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(SOURCE)
    (tmp_path / "own_broken_models.py").write_text("import hyperbloom_lacks_this")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


def test_a_function_is_called_with_shape_and_classes() -> None:
    path = list(sys.path)
    network = build_from_factory("own_models:good", SHAPE, 4)
    assert network(torch.zeros(5, *SHAPE)).shape == (5, 4)
    assert sys.modules["own_models"].CALLS == [(SHAPE, 4)]
    assert sys.path == path


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_that_views_what_a_convolution_returns_learns_from_images_as_the_client_lays_them_out(
    channels: int,
) -> None:
    network, rows = build_from_factory("own_models:Viewed", (channels, 8, 8), 4), torch.rand(5, channels, 8, 8)
    layouts = (rows, laid_out(rows), torch.cat([laid_out(rows), laid_out(rows)])[torch.arange(5)])
    gradients = [torch.autograd.grad(network(each).square().sum(), list(network.parameters())) for each in layouts]
    for there in gradients[1:]:
        torch.testing.assert_close(there, gradients[0])


def test_a_class_is_a_factory_too() -> None:
    assert type(build_from_factory("own_models:Made", SHAPE, 4)).__name__ == "Made"


@pytest.mark.parametrize("name", ["by_place", "library", "older"])
def test_a_librarys_constructor_is_not_called_with_a_shape_for_its_weights(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_from_factory(f"own_models:{name}", SHAPE, 4)
    first = "pretrained" if name == "older" else "weights"
    assert str(caught.value) == (
        f"own_models:{name}: {WANTED}, found one of {first}, progress; write a function around it (docs/ghn.md): "
        f"def make(input_shape, num_classes): return own_models.{name}(num_classes=num_classes)"
    )
    assert sys.modules["own_models"].CALLS == []


def test_torchvisions_constructors_are_refused_and_a_function_around_one_is_not(torchvision: Any) -> None:
    with pytest.raises(ModelError, match=r"return torchvision.models.resnet18\(num_classes=num_classes\)$"):
        build_from_factory("torchvision.models:resnet18", (3, 32, 32), 4)
    for name in ("decorated", "otherwise"):
        assert build_from_factory(f"own_models:{name}", SHAPE, 4)(torch.zeros(5, *SHAPE)).shape == (5, 4)
    assert build_from_factory("own_models:around", SHAPE, 10)(torch.zeros(5, *SHAPE)).shape == (5, 10)


def test_the_network_is_as_the_factory_made_it() -> None:
    torch.manual_seed(1)
    network = build_from_factory("own_models:good", SHAPE, 4)
    after = torch.rand(1)
    torch.manual_seed(1)
    again = sys.modules["own_models"].good(SHAPE, 4)
    assert torch.equal(after, torch.rand(1))
    assert network.training
    assert all(module.training for module in network.modules())
    states = zip(network.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_missing:make", f"own_missing:make: {WANTED}, found ModuleNotFoundError: "),
        ("own_broken_models:make", f"own_broken_models:make: {WANTED}, found ModuleNotFoundError: "),
        (
            "own_models:absent",
            f"own_models:absent: {WANTED}, found AttributeError: module 'own_models' has no attribute 'absent'",
        ),
        ("own_models:number", f"own_models:number: {WANTED}, found int"),
        ("own_models:fails", f"own_models:fails: {WANTED}; found that it fails with RuntimeError: one two"),
        ("own_models:no_arguments", f"own_models:no_arguments: {WANTED}; found that it fails with TypeError: "),
        ("own_models:text", f"own_models:text: {WANTED}; found str"),
        (
            "own_models:whole_numbers",
            "own_models:whole_numbers: expected parameters in float32, and all else as buffers, found torch.int64",
        ),
        ("own_models:script", f"own_models:script: {WANTED}; found RecursiveScriptModule"),
        ("own_models:empty", "own_models:empty: expected a network with parameters that learn, found none"),
        ("own_models:fixed", "own_models:fixed: expected a network with parameters that learn, found none"),
        ("own_models:ten", "own_models:ten: expected logits of shape (2, 4) for 2 inputs, found shape (2, 10)"),
        ("own_models:Two", "own_models:Two: expected logits of shape (2, 4) for 2 inputs, found tuple of 2"),
        ("own_models:styled", "own_models:styled: expected instance norms without running statistics"),
        ("own_models:narrow", "own_models:narrow: fails on inputs of shape (3, 2, 2): RuntimeError: "),
    ],
)
def test_what_is_no_factory_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_from_factory(name, SHAPE, 4)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
