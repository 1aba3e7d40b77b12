"""Target networks: their sizes, what they accept and what they refuse."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from hyperbloom.common.errors import ModelError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import HEAD, MODELS, ModelSpec, body_layout, build, full_layout

CIFAR, MNIST, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)


@pytest.mark.parametrize(
    ("name", "size", "input_shape", "classes", "parameters"),
    [
        ("lenet", "M", CIFAR, 10, 121_182),
        ("lenet", "M", CIFAR, 100, 121_182 + 90 * 85),
        ("lenet", "S", CIFAR, 10, 600 + 8 + 3200 + 16 + 48_000 + 120 + 10_164 + 850),
        ("lenet", "L", CIFAR, 10, 2432 + 51_264 + 192_120 + 10_164 + 850),
        ("lenet", "M", MNIST, 10, 416 + 12_832 + 61_560 + 10_164 + 850),
        ("mlp", "M", MNIST, 10, 78_500 + 1010),
        ("mlp", "S", DIGITS, 10, 65 * 50 + 510),
        ("mlp", "L", (12,), 3, 13 * 200 + 603),
        ("hafl-0", "L", CIFAR, 10, 11_181_642 - 3 * 64 * (49 - 9)),  # torchvision's resnet18, with a 3x3 stem
        (
            "hafl-1",
            "S",
            (1, 8, 8),
            3,
            9 * (8 + 2 * 8**2 + (8 + 16) * 16 + (16 + 32) * 32 + (32 + 64) * 64)
            + 2 * (3 * 8 + 2 * (16 + 32 + 64))
            + 65 * 3,
        ),
        ("plain-4", "S", CIFAR, 10, 8 * 27 + 2 * 8 * 72 + 3 * 16 + 90),
        ("plain-13", "M", MNIST, 7, 16 * 9 + 11 * 16 * 144 + 12 * 32 + 17 * 7),
        ("omniglot", "M", MNIST, 55, 160 + 4640 + 9248 + 9248 + 32 * 84 + 84 + 85 * 55),
    ],
)
def test_parameter_counts(name: str, size: str, input_shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert full_layout(ModelSpec(name, size, input_shape, classes)).numel == parameters


@pytest.mark.parametrize("size", ["S", "M", "L"])
@pytest.mark.parametrize(
    ("name", "input_shape"),
    [
        *[("lenet", CIFAR), ("lenet", (1, 16, 20)), ("mlp", DIGITS), ("mlp", (7,)), ("omniglot", (1, 16, 47))],
        *[("plain-4", DIGITS), *((f"hafl-{number}", (2, 9, 7)) for number in range(4))],
    ],
)
def test_logits_have_one_row_per_input(name: str, size: str, input_shape: tuple[int, ...]) -> None:
    network = build(ModelSpec(name, size, input_shape, 5)).eval()  # batch norm of one input would depend on the rest
    batch = torch.randn(3, *input_shape)
    logits = network(batch)
    assert logits.shape == (3, 5)
    assert torch.allclose(network(batch[1:2])[0], logits[1], atol=1e-5)  # no row depends on another one


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_network_ends_in_the_head(name: str) -> None:
    spec = ModelSpec(name, "M", MNIST, 7)
    full, body = full_layout(spec), body_layout(spec)
    head = full.shapes[-2:]
    assert [(n, shape[0]) for n, shape in head] == [("head.weight", 7), ("head.bias", 7)]
    assert body.shapes == full.shapes[:-2]
    assert not any(n.startswith(HEAD) for n, _ in body.shapes)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_layouts_are_those_of_the_network_that_is_built(name: str) -> None:
    spec = ModelSpec(name, "S", MNIST, 4)
    assert Layout.of(build(spec)) == full_layout(spec)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_initial_values_come_from_the_global_generator(name: str) -> None:
    def first() -> torch.Tensor:
        torch.manual_seed(5)
        return next(build(ModelSpec(name, "M", MNIST, 4)).parameters())

    assert torch.equal(first(), first())


def test_asking_for_a_layout_draws_no_random_number() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    full_layout(ModelSpec("lenet", "M", CIFAR, 10))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("input_shape", "name"),
    [
        (CIFAR, "lenet"),
        (MNIST, "lenet"),
        ((1, 28, 27), "mlp"),
        ((1, 27, 28), "mlp"),
        (DIGITS, "mlp"),
        ((784,), "mlp"),
        ((64, 64), "mlp"),
    ],
)
def test_auto_takes_a_lenet_for_images_of_28_pixels(input_shape: tuple[int, ...], name: str) -> None:
    assert ModelSpec("auto", "M", input_shape, 10).resolved() == ModelSpec(name, "M", input_shape, 10)


def test_a_name_is_taken_as_it_is() -> None:
    assert ModelSpec("mlp", "S", CIFAR, 10).resolved() == ModelSpec("mlp", "S", CIFAR, 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec("resnet", "M", CIFAR, 10), f"model: expected one of {', '.join(sorted(MODELS))}, found 'resnet'"),
        (ModelSpec("auto", "M", CIFAR, 10), f"model: expected one of {', '.join(sorted(MODELS))}, found 'auto'"),
        (ModelSpec("mlp", "XL", CIFAR, 10), "size: expected one of S, M, L, found 'XL'"),
        (ModelSpec("mlp", "M", CIFAR, 0), "expected inputs and classes, found shape (3, 32, 32) and 0 classes"),
        (ModelSpec("mlp", "M", (), 10), "expected inputs and classes, found shape () and 10 classes"),
        (ModelSpec("mlp", "M", (3, 0), 10), "expected inputs and classes, found shape (3, 0) and 10 classes"),
        (
            ModelSpec("lenet", "M", DIGITS, 10),
            "lenet: expected images (channels, height, width) of at least 16 x 16, found (1, 8, 8); use model: mlp",
        ),
        (
            ModelSpec("lenet", "M", (784,), 10),
            "lenet: expected images (channels, height, width) of at least 16 x 16, found (784,); use model: mlp",
        ),
        (
            ModelSpec("hafl-3", "S", (784,), 10),
            "hafl-3: expected images (channels, height, width), found (784,); use model: mlp",
        ),
        (
            ModelSpec("plain-7", "S", (28, 28), 10),
            "plain-7: expected images (channels, height, width), found (28, 28); use model: mlp",
        ),
        (
            ModelSpec("omniglot", "M", (1, 28, 15), 10),
            (
                "omniglot: expected images (channels, height, width) of at least 16 x 16, found (1, 28, 15); "
                "use model: mlp"
            ),
        ),
    ],
)
def test_what_cannot_be_built_is_refused(spec: ModelSpec, message: str) -> None:
    for make in (build, full_layout, body_layout):
        with pytest.raises(ModelError) as caught:
            make(spec)
        assert str(caught.value) == message


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^expected inputs and classes, found shape \(-8, -8\) and 10 classes$"):
        full_layout(ModelSpec("mlp", "M", (-8, -8), 10))


@pytest.mark.parametrize("name", ["lenet", "omniglot"])
def test_the_smallest_image_leaves_one_pixel(name: str) -> None:
    network = MODELS[name].make((1, 16, 16), 2, 4)
    first_linear = next(m for m in network.modules() if isinstance(m, nn.Linear))
    assert first_linear.in_features == 8
    assert network(torch.zeros(1, 1, 16, 16)).shape == (1, 2)


def test_widths_grow_with_the_size() -> None:
    for info in MODELS.values():
        widths: Sequence[int] = [info.widths[size] for size in ("S", "M", "L")]
        assert widths == sorted(set(widths))


# ---------------------------------------------------------------------- the architectures of HAFL-GHN


def layers(network: nn.Module) -> list[nn.Module]:
    """Return what the paper counts: convolutions, but for those in a skip, and linear layers."""
    named = network.named_modules()
    return [m for name, m in named if isinstance(m, nn.Conv2d | nn.Linear) and ".skip." not in name]


@pytest.mark.parametrize(
    ("name", "count"),
    [("hafl-0", 18), ("hafl-1", 10), ("hafl-2", 12), ("hafl-3", 12), *((f"plain-{n}", n) for n in (4, 7, 10, 13))],
)
def test_layers_are_as_many_as_the_paper_counts(name: str, count: int) -> None:
    assert len(layers(build(ModelSpec(name, "S", CIFAR, 10)))) == count


@pytest.mark.parametrize(("number", "skips"), [(0, [2] * 8), (1, []), (2, [2] * 4 + [0] * 2), (3, [0] * 2 + [2] * 4)])
def test_skips_are_where_the_paper_has_them(number: int, skips: list[int]) -> None:
    # After the stem: 2 for a block of two layers with a skip, 0 for one layer without.
    network = build(ModelSpec(f"hafl-{number}", "S", CIFAR, 10))
    body = list(network.get_submodule("body").children())[2:-2]
    found = [2 if hasattr(part, "skip") else 0 for part in body if not isinstance(part, nn.ReLU)]
    assert found == (skips or [0] * 8)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_architectures_share_their_layers_with_resnet18(number: int) -> None:
    def kinds(number: int) -> set[str]:
        return {repr(layer) for layer in layers(build(ModelSpec(f"hafl-{number}", "M", CIFAR, 10)))}

    assert kinds(number) <= kinds(0)


@pytest.mark.parametrize("depth", [4, 13])
def test_inner_layers_of_a_plain_network_are_of_one_kind(depth: int) -> None:
    inner = layers(build(ModelSpec(f"plain-{depth}", "M", CIFAR, 10)))[1:-1]
    assert len({repr(layer) for layer in inner}) == 1
