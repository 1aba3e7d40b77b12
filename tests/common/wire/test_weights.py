"""Weights that are not what was expected are refused before they are used."""

import math

import pytest
import torch

from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.weights import LARGEST_NORM, Weights

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
