"""CKA against the formula with its `n x n` matrices, against finite differences, and what it is invariant to."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from figures.fedhenn_rbf import cka, rbf_gram
from hyperbloom.common.cka import linear_cka_with, linear_factor, unit

N = 23


def features(width: int, seed: int, rows: int = N) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.7


def naive_hsic(k: Tensor, other: Tensor) -> Tensor:
    """Return the formula, letter by letter."""
    n = len(k)
    h = torch.eye(n, dtype=k.dtype) - torch.ones(n, n, dtype=k.dtype) / n
    return torch.trace(k @ h @ other @ h) / (n - 1) ** 2


def naive_cka(k: Tensor, other: Tensor) -> Tensor:
    return naive_hsic(k, other) / (naive_hsic(k, k) * naive_hsic(other, other)).sqrt()


def naive_rbf(a: Tensor, bandwidth: float) -> Tensor:
    n = len(a)
    squared = torch.stack([torch.stack([(p - q).square().sum() for q in a]) for p in a])
    median = torch.stack([squared[p, q] for p in range(n) for q in range(p)]).median()
    return (-squared / (2 * bandwidth**2 * median)).exp()


def value_of(kernel: str, a: Tensor, b: Tensor) -> Tensor:
    return linear_cka_with(b)(a) if kernel == "linear" else cka(rbf_gram(a, 0.8), rbf_gram(b, 0.8))


def naive_value(kernel: str, a: Tensor, b: Tensor) -> Tensor:
    if kernel == "linear":
        return naive_cka(a @ a.T, b @ b.T)
    return naive_cka(naive_rbf(a, 0.8), naive_rbf(b, 0.8))


KERNELS = pytest.mark.parametrize("kernel", ["linear", "rbf"])


@KERNELS
@pytest.mark.parametrize("widths", [(3, 5), (40, 4), (40, 60)], ids=str)  # narrower and wider than there are rows
def test_values_and_gradients_are_those_of_the_formula(kernel: str, widths: tuple[int, int]) -> None:
    a, b = features(widths[0], 1).requires_grad_(), features(widths[1], 2)
    b[:, 0] += a.detach()[:, 0]
    value, expected = value_of(kernel, a, b), naive_value(kernel, a, b)
    assert 0.02 < float(value.detach()) < 0.99
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    (found,), (wanted,) = torch.autograd.grad(value, a), torch.autograd.grad(expected, a)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert float(wanted.abs().max()) > 1e-3


@KERNELS
def test_gradients_pass_finite_differences(kernel: str) -> None:
    a, b = features(3, 1, 7).requires_grad_(), features(2, 2, 7).requires_grad_()
    assert gradcheck(lambda x, y: value_of(kernel, x, y), (a, b), atol=1e-7)


@KERNELS
def test_it_is_one_with_itself_and_with_what_is_turned_shifted_and_scaled(kernel: str) -> None:
    a, b = features(4, 1), features(6, 2)
    turn, _ = torch.linalg.qr(features(4, 3, 4))
    moved = 7.3 * a @ turn + features(4, 4, 1)
    for other in (a, moved, -a):
        torch.testing.assert_close(value_of(kernel, a, other), torch.ones((), dtype=a.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(value_of(kernel, moved, b), value_of(kernel, a, b), rtol=0, atol=1e-12)
    torch.testing.assert_close(value_of(kernel, b, a), value_of(kernel, a, b), rtol=0, atol=1e-12)
    wider = torch.cat([a, torch.zeros(N, 3, dtype=a.dtype)], 1)  # an isometry into a larger space
    torch.testing.assert_close(value_of(kernel, wider, b), value_of(kernel, a, b), rtol=0, atol=1e-12)


@KERNELS
def test_it_is_not_invariant_to_invertible_maps(kernel: str) -> None:
    a = features(4, 1)
    stretched = a * torch.tensor([1.0, 1.0, 1.0, 30.0], dtype=a.dtype)
    assert float(value_of(kernel, a, stretched)) < 0.8


@KERNELS
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_does_not_vary_is_like_nothing_and_has_finite_gradients(
    kernel: str, constant: float, dtype: torch.dtype
) -> None:
    a = torch.full((N, 5), constant, dtype=dtype).requires_grad_()
    b = features(3, 2).to(dtype).requires_grad_()
    for value in (value_of(kernel, a, b), value_of(kernel, b, a), value_of(kernel, a, a)):
        assert value.item() == 0.0
        for gradient in torch.autograd.grad(value, (a, b), allow_unused=True):
            assert gradient is None or torch.equal(gradient, torch.zeros_like(gradient))


@KERNELS
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_no_scale_is_too_small_or_too_large_for_single_precision(kernel: str, scale: float) -> None:
    a, b = features(4, 1).float(), features(4, 2).float()
    scaled = (scale * a).requires_grad_()
    value = value_of(kernel, scaled, b)
    torch.testing.assert_close(value, value_of(kernel, a, b), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(value, scaled)
    assert bool(gradient.isfinite().all()) and float(gradient.abs().max()) > 0


def test_nothing_hides_what_is_not_finite() -> None:
    a = features(4, 1)
    a[3, 1] = float("nan")
    assert linear_cka_with(features(4, 2))(a).isnan()


def test_rows_that_are_mostly_equal_leave_the_rbf_kernel_defined() -> None:
    a = torch.zeros(N, 3, dtype=torch.float64)
    a[:2] = features(3, 1, 2)
    a.requires_grad_()
    value = cka(rbf_gram(a), rbf_gram(features(3, 2)))
    assert 0 < float(value.detach()) <= 1
    assert bool(torch.autograd.grad(value, a)[0].isfinite().all())


def test_joined_features_have_the_mean_kernel() -> None:
    parts, weights = [features(3, 1), features(5, 2), features(2, 3)], (0.5, 2.0, 1.0)
    mean = sum((w * a @ a.T for w, a in zip(weights, parts, strict=True)), torch.zeros(N, N, dtype=torch.float64))
    joined = torch.cat([w**0.5 * a for w, a in zip(weights, parts, strict=True)], 1)
    own = features(4, 4)
    torch.testing.assert_close(linear_cka_with(joined)(own), naive_cka(own @ own.T, mean), rtol=0, atol=1e-12)


def test_factors_have_kernels_of_one_size_so_that_their_mean_asks_for_the_mean_alignment() -> None:
    parts, own = [10.0 * features(3, 1), features(30, 2), 0.1 * features(2, 3)], features(4, 4)
    factors = [linear_factor(a) for a in parts]
    for factor in factors:
        torch.testing.assert_close((factor @ factor.T).norm(), torch.ones((), dtype=own.dtype))
    joined = torch.cat(factors, 1)
    mean = torch.stack([naive_cka(own @ own.T, a @ a.T) for a in parts]).sum() / (joined @ joined.T).norm()
    torch.testing.assert_close(linear_cka_with(joined)(own), mean, rtol=0, atol=1e-12)
    assert not linear_factor(torch.ones(N, 3)).any()


def test_unit_of_zeros_is_zeros() -> None:
    assert not unit(torch.zeros(3, 2)).any()
    torch.testing.assert_close(unit(features(3, 1)).norm(), torch.ones((), dtype=torch.float64))
