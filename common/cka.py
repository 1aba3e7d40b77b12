"""Centred kernel alignment (CKA): how alike two networks' representations of the same inputs are.

Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network Representations Revisited, ICML 2019,
https://arxiv.org/abs/1905.00414. With `n x n` kernel matrices `K` and `L` and `H = I - 11^T / n`

    HSIC(K, L) = tr(K H L H) / (n - 1)^2
    CKA(K, L)  = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))            between 0 and 1

linear: `K = A A^T` of features `A` `(n, d)`. With centred columns `tr(K H L H) = ||A^T B||_F^2`, so that no `n x n`
matrix is needed. Adding kernels is joining features: `sum_j w_j A_j A_j^T` is that of `[sqrt(w_1) A_1, ...]`.

rbf: `K_pq = exp(-|a_p - a_q|^2 / (2 s^2 m))`, with `s` the bandwidth and `m` the median of the squared distances
between different rows, as in the paper: it makes the kernel invariant to isotropic scaling too. Gradients pass
through `m`.

Either is invariant to orthogonal maps and isotropic scaling of the features, and not to invertible maps in general.
Representations that do not vary, all zeros among them, are like nothing: CKA is 0 there, and its gradient too.
"""

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Kernel", "centred", "centred_gram", "cka", "gram", "linear_cka", "linear_factor", "rbf_gram", "unit"]

Kernel = Literal["linear", "rbf"]

ROUNDING = 8.0
"""Rounding errors of a mean, in units of the last place, below which what varies does not."""


def centred(features: Tensor) -> Tensor:
    """Return features `(n, d)` with columns of mean zero; exact zeros if they vary by rounding errors only."""
    made = features - features.mean(0, keepdim=True)
    return _unless_rounding(made, features)


def _unless_rounding(made: Tensor, of: Tensor) -> Tensor:
    """Return what was made by taking means from `of`, or zeros where nothing but rounding errors is left."""
    floor = ROUNDING * torch.finfo(of.dtype).eps * of.detach().abs().amax()
    return torch.where(made.detach().abs().amax() <= floor, torch.zeros_like(made), made)


def unit(values: Tensor) -> Tensor:
    """Return a matrix scaled to a Frobenius norm of 1; zeros stay zeros, with a gradient of zero."""
    # The largest first: squares of numbers as small as 1e-30 would vanish.
    largest = values.detach().abs().amax()
    none = largest == 0
    scaled = values / torch.where(none, 1.0, largest)
    norm = torch.where(none, 1.0, torch.where(none, torch.ones_like(scaled), scaled).norm())
    return torch.where(none, torch.zeros_like(scaled), scaled / norm)


def linear_cka(a: Tensor, b: Tensor) -> Tensor:
    """Return the CKA of two linear kernels from their features `(n, d)` and `(n, e)`, as a scalar.

    Takes `O(n d e)`, or `O(n^2 d)` where representations are wider than they are long.
    """
    # Of norm 1, so that the products below are between 1 / d and 1.
    a, b = unit(centred(a)), unit(centred(b))
    return _ratio(_overlap(a, b), _overlap(a, a), _overlap(b, b))


def linear_factor(features: Tensor) -> Tensor:
    """Return features `(n, d)` centred and scaled such that their kernel matrix has a Frobenius norm of 1, or 0."""
    made = unit(centred(features))
    size = _overlap(made, made)
    return made * torch.where(size > 0, size, 1.0) ** -0.25


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return `tr(A A^T B B^T)` by way of the smaller matrices."""
    if a.shape[1] * b.shape[1] <= len(a) ** 2:
        return (a.T @ b).square().sum()
    return ((a @ a.T) * (b @ b.T)).sum()


def _ratio(both: Tensor, one: Tensor, other: Tensor) -> Tensor:
    none = (one == 0) | (other == 0)
    return torch.where(none, torch.zeros_like(both), both / torch.where(none, 1.0, one * other).sqrt())


# ---------------------------------------------------------------------- with kernel matrices


def cka(k: Tensor, other: Tensor) -> Tensor:
    """Return the CKA of two symmetric kernel matrices `(n, n)`, as a scalar."""
    k, other = unit(centred_gram(k)), unit(centred_gram(other))
    return (k * other).sum()


def centred_gram(k: Tensor) -> Tensor:
    """Return `H K H`; exact zeros if that is rounding errors only."""
    made = k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()
    return _unless_rounding(made, k)


def rbf_gram(features: Tensor, bandwidth: float = 1.0) -> Tensor:
    """Return the kernel matrix `(n, n)` of features `(n, d)`, `n` at least 2; ones if the features do not vary."""
    made = unit(centred(features))
    squares = made.square().sum(1)
    distances = (squares[:, None] + squares - 2 * made @ made.T).clamp_min(0)
    n = len(made)
    # Each pair once; the diagonal, which is zero but for rounding, is no distance.
    median = distances[*torch.triu_indices(n, n, 1, device=made.device)].median()
    # Where most rows are equal the median is no measure of how far the others are.
    spread = torch.where(median > 0, median, distances.mean())
    none = spread == 0
    exponent = distances / (-2 * bandwidth**2 * torch.where(none, 1.0, spread))
    return torch.where(none, torch.ones_like(exponent), exponent.exp())


def gram(kernel: Kernel, features: Tensor, bandwidth: float = 1.0) -> Tensor:
    """Return the kernel matrix `(n, n)` of features `(n, d)`."""
    return features @ features.T if kernel == "linear" else rbf_gram(features, bandwidth)
