"""Where each parameter lies in the flat vector; weights that are not what was expected are refused before use."""

import math

import pytest
import torch
from torch import nn

from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import LARGEST_NORM, Layout, Weights

THREE = Layout((("a", (2, 3)), ("b", ()), ("c", (0, 4)), ("d", (4,))))


def test_sizes_add_up_and_a_scalar_counts_one() -> None:
    assert THREE.sizes == (6, 1, 0, 4)
    assert THREE.numel == 11
    assert Layout(()).numel == 0


def test_slices_are_contiguous_in_order() -> None:
    assert list(THREE.slices()) == [
        ("a", slice(0, 6), (2, 3)),
        ("b", slice(6, 7), ()),
        ("c", slice(7, 7), (0, 4)),
        ("d", slice(7, 11), (4,)),
    ]


def test_views_show_the_vector_and_write_to_it() -> None:
    flat = torch.arange(11.0)
    views = THREE.views(flat)
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert views["b"].item() == 6
    views["d"][1] = -1
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1, 9, 10]


def test_flatten_is_the_inverse_of_views_and_copies() -> None:
    flat = torch.arange(11.0)
    again = THREE.flatten(THREE.views(flat))
    assert torch.equal(again, flat)
    again.zero_()
    assert flat.sum() == 55


def test_flatten_follows_the_layout_not_the_mapping() -> None:
    tensors = {"y": torch.tensor([3.0, 4.0]), "x": torch.tensor([[1.0], [2.0]], requires_grad=True)}
    flat = Layout((("x", (2, 1)), ("y", (2,)))).flatten(tensors)
    assert flat.tolist() == [1, 2, 3, 4]
    assert not flat.requires_grad


def test_a_module_is_laid_out_as_it_was_built() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
    shapes = (("0.weight", (2, 3)), ("0.bias", (2,)), ("1.weight", (2,)), ("1.bias", (2,)), ("2.weight", (1, 2)))
    assert Layout.of(module).shapes == shapes  # parameters only: buffers neither travel nor are generated


def test_the_digest_depends_on_names_shapes_and_order() -> None:
    a, b = ("a", (2, 3)), ("b", (3,))
    digests = [Layout(shapes).digest for shapes in ((a, b), (b, a), (("x", (2, 3)), b), (("a", (3, 2)), b), (a,))]
    assert len(set(digests)) == len(digests)
    assert Layout((a, b)).digest == digests[0]
    assert digests[0] == "6ce7401b7043efad"  # stored beside personal classifiers: it must not change


TWO = Layout((("weight", (2, 3)), ("bias", (2,))))
VALUES = torch.tensor([0.5, -1.25, 3e-30, -0.0, 1e30, 0.1, -7.0, 2.0])


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


def test_norms_beyond_all_that_is_sound_are_refused() -> None:
    Weights(TWO, torch.full((8,), LARGEST_NORM / 3)).check_norm()
    with pytest.raises(WireError, match=r"^expected a norm of at most 1e\+06, found 1\.41e\+06$"):
        Weights(TWO, torch.full((8,), LARGEST_NORM / 2)).check_norm()
