"""The networks of the papers: layers, sizes, and that padding means nothing to those for text."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from figures.networks import TextLSTM
from hyperbloom.common.errors import ModelError
from hyperbloom.common.models import ModelSpec, build, full_layout

CIFAR = (3, 32, 32)


@pytest.mark.parametrize(
    ("number", "convolutions", "linear", "parameters"),
    [
        (1, 1, 1, 448 + 10 * (4096 + 1)),
        (2, 1, 2, 448 + 84 * (4096 + 1) + 10 * 85),
        (3, 2, 2, 448 + 32 * 145 + 84 * (2048 + 1) + 10 * 85),
        (4, 2, 3, 448 + 32 * 145 + 120 * (2048 + 1) + 84 * 121 + 10 * 85),
        (5, 3, 3, 448 + 32 * 145 + 64 * 289 + 120 * (1024 + 1) + 84 * 121 + 10 * 85),
    ],
)
def test_the_five_cnns(number: int, convolutions: int, linear: int, parameters: int) -> None:
    spec = ModelSpec(f"cnn-{number}", "M", CIFAR, 10)
    parts = list(build(spec).modules())
    assert sum(isinstance(part, nn.Conv2d) for part in parts) == convolutions
    assert sum(isinstance(part, nn.Linear) for part in parts) == linear
    assert full_layout(spec).numel == parameters


@pytest.mark.parametrize("linear", [2, 3, 4])
def test_the_cnns_of_the_authors_code(linear: int) -> None:
    """Two convolutions without padding and two poolings leave 5 x 5 of 32 x 32 points."""
    hidden = {2: [120], 3: [120, 64], 4: [200, 120, 64]}[linear]
    widths = [64 * 5 * 5, *hidden, 10]
    convolutions = 64 * (3 * 25 + 1) + 64 * (64 * 25 + 1)
    spec = ModelSpec(f"cnn-64-{linear}", "M", CIFAR, 10)
    assert full_layout(spec).numel == convolutions + sum(out * (into + 1) for into, out in pairwise(widths))
    assert build(ModelSpec(f"cnn-64-{linear}", "S", (1, 16, 16), 3))(torch.zeros(2, 1, 16, 16)).shape == (2, 3)
    with pytest.raises(ModelError, match="at least 16"):
        build(ModelSpec(f"cnn-64-{linear}", "S", (1, 15, 16), 3))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("shape", [(7,), (1, 7, 5)], ids=str)
def test_lstms_have_their_layers_and_two_linear_ones(layers: int, shape: tuple[int, ...]) -> None:
    network = build(ModelSpec(f"lstm-{layers}", "S", shape, 3))
    assert isinstance(network, TextLSTM) and network.lstm.num_layers == layers
    assert sum(isinstance(part, nn.Linear) for part in network.modules()) == 2
    assert (network.embedding is not None) == (len(shape) == 1)
    assert network(torch.ones(4, *shape)).shape == (4, 3)


def test_padding_changes_nothing() -> None:
    network = build(ModelSpec("lstm-1", "S", (7,), 3))
    tokens = torch.tensor([[5.0, 3.0, 0.0, 9.0, 0.0, 0.0, 0.0]])
    longer = torch.cat([tokens, torch.zeros(1, 4)], 1)
    torch.testing.assert_close(network(longer), network(tokens))
    torch.testing.assert_close(network(tokens[:, :4]), network(tokens))
    assert not torch.allclose(network(tokens[:, :2]), network(tokens))
    embedded = build(ModelSpec("lstm-2", "S", (1, 4, 5), 3))
    vectors = torch.randn(2, 1, 4, 5)
    padded = torch.cat([vectors, torch.zeros(2, 1, 3, 5)], 2)
    torch.testing.assert_close(embedded(padded), embedded(vectors))
    assert torch.isfinite(network(torch.zeros(2, 7))).all()  # a text without words


def test_tokens_beyond_the_vocabulary_are_one_unknown_word() -> None:
    network = build(ModelSpec("lstm-1", "S", (3,), 2))
    far = network(torch.tensor([[4.0, 123_456.0, 2.0]]))
    torch.testing.assert_close(far, network(torch.tensor([[4.0, 9_999.0, 2.0]])))
    assert not torch.allclose(far, network(torch.tensor([[4.0, 9_998.0, 2.0]])))


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("cnn-5", (3, 7, 8), "cnn-5: expected images (channels, height, width) of at least 8 x 8, found (3, 7, 8)"),
        ("cnn-1", (64,), "cnn-1: expected images (channels, height, width) of at least 2 x 2, found (64,)"),
        ("lstm-1", CIFAR, "lstm-1: expected tokens (length,) or embedded tokens (1, length, width), found (3, 32, 32)"),
    ],
)
def test_what_they_cannot_read_is_refused(name: str, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(ModelSpec(name, "S", shape, 2))
    assert str(caught.value).startswith(text)
