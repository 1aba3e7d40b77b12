"""Centred kernel alignment (CKA): similarity of two networks' representations of the same inputs.

Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network Representations Revisited, ICML 2019,
https://arxiv.org/abs/1905.00414. With `n x n` kernel matrices `K` and `L` and `H = I - 11^T / n`

    HSIC(K, L) = tr(K H L H) / (n - 1)^2
    CKA(K, L)  = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))            between 0 and 1

Kernels are linear, `K = A A^T` of features `A` `(n, d)`. With centred columns `tr(K H L H) = ||A^T B||_F^2`. That needs
no `n x n` matrix. The sum of kernels `sum_j w_j A_j A_j^T` is that of the joined features `[sqrt(w_1) A_1, ...]`.

CKA is invariant to orthogonal maps and isotropic scaling of the features, but not to invertible maps in general. For
constant representations, such as zeros, CKA and its gradient are 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 8.0
"""Variation, in units in the last place of the largest value, that counts as a rounding error of the mean."""


def centred(features: Tensor) -> Tensor:
    """Return features `(n, d)` with columns of mean zero; exact zeros if only rounding errors vary."""
    return unless_rounding(features - features.mean(0, keepdim=True), features)


def unless_rounding(made: Tensor, of: Tensor) -> Tensor:
    """Return `made`, which is `of` minus means, or zeros if it holds rounding errors only."""
    floor = ROUNDING * torch.finfo(of.dtype).eps * of.detach().abs().amax()
    return torch.where(made.detach().abs().amax() <= floor, torch.zeros_like(made), made)


def unit(values: Tensor) -> Tensor:
    """Return a matrix `(n, d)` scaled to a Frobenius norm of 1; zeros stay zeros, with a gradient of zero."""
    # Divide by the largest value first, because the squares of numbers as small as 1e-30 underflow.
    largest = values.detach().abs().amax()
    none = largest == 0
    scaled = values / torch.where(none, 1.0, largest)
    norm = torch.where(none, 1.0, torch.where(none, torch.ones_like(scaled), scaled).norm())
    return torch.where(none, torch.zeros_like(scaled), scaled / norm)


def linear_cka_with(b: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the CKA with features `b` `(n, e)` as a function of features `(n, d)`; what depends on `b` is done once.

    Takes `O(n d e)`, or `O(n^2 d)` where representations are wider than they are long.
    """
    # Scale to norm 1 so that the products below are between 1 / d and 1.
    b = unit(centred(b))
    own = _overlap(b, b)

    def cka(a: Tensor) -> Tensor:
        a = unit(centred(a))
        both, squares = _overlap(a, b), _overlap(a, a) * own
        return torch.where(squares == 0, torch.zeros_like(both), both / torch.where(squares == 0, 1.0, squares).sqrt())

    return cka


def linear_factor(features: Tensor) -> Tensor:
    """Return centred features `(n, d)`, scaled so that their kernel matrix has Frobenius norm 1; zeros stay zeros."""
    made = unit(centred(features))
    size = _overlap(made, made)
    return made * torch.where(size > 0, size, 1.0) ** -0.25


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return `tr(A A^T B B^T)`, computed from the smaller matrices."""
    if a.shape[1] * b.shape[1] <= len(a) ** 2:
        return (a.T @ b).square().sum()
    return ((a @ a.T) * (b @ b.T)).sum()
