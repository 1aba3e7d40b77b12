"""FedHeNN with CKA of rbf kernels, which one row of its paper's table 1 needs: `figures.fedhenn_rbf:FedHeNNRBF`.

Importing this module registers its local method, so its clients are those of this process (engine `inline`).

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757. Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network Representations
Revisited, ICML 2019, https://arxiv.org/abs/1905.00414:

    K_pq = exp(-|a_p - a_q|^2 / (2 s^2 m))

with `s` the bandwidth and `m` the median of the squared distances between different rows. The median makes the kernel
invariant to isotropic scaling. Gradients pass through `m`. For constant representations CKA and its gradient are 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hyperbloom.client.work.methods import LOCAL_METHODS, aligned
from hyperbloom.common.cka import centred, unit, unless_rounding
from hyperbloom.common.methods import METHODS, Aligned
from hyperbloom.strategies.fedhenn import FedHeNNHomogeneous


def cka(k: Tensor, other: Tensor) -> Tensor:
    """Return the CKA of two symmetric kernel matrices `(n, n)`, as a scalar."""
    k, other = unit(centred_gram(k)), unit(centred_gram(other))
    return (k * other).sum()


def centred_gram(k: Tensor) -> Tensor:
    """Return `H K H` `(n, n)`; exact zeros if it holds rounding errors only."""
    made = k - k.mean(0, keepdim=True) - k.mean(1, keepdim=True) + k.mean()
    return unless_rounding(made, k)


def rbf_gram(features: Tensor, bandwidth: float = 1.0) -> Tensor:
    """Return the kernel matrix `(n, n)` of features `(n, d)`, `n` at least 2; ones if the features do not vary."""
    made = unit(centred(features))
    squares = made.square().sum(1)
    distances = (squares[:, None] + squares - 2 * made @ made.T).clamp_min(0)
    n = len(made)
    # Count each pair once, and leave out the diagonal, which is zero up to rounding.
    median = distances[*torch.triu_indices(n, n, 1, device=made.device)].median()
    # If most rows are equal, the median is 0, and the mean measures the distance of the others.
    spread = torch.where(median > 0, median, distances.mean())
    none = spread == 0
    exponent = distances / (-2 * bandwidth**2 * torch.where(none, 1.0, spread))
    return torch.where(none, torch.ones_like(exponent), exponent.exp())


def rbf_cka_with(b: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the CKA with features `b` `(n, e)`, of rbf kernels of bandwidth 1, as a function of features `(n, d)`."""
    kernel = rbf_gram(b)
    return lambda a: cka(rbf_gram(a), kernel)


class AlignedRBF(Aligned):
    """`Aligned` with CKA of rbf kernels."""

    kind: Literal["aligned-rbf"] = "aligned-rbf"  # type: ignore[assignment]


class FedHeNNRBF(FedHeNNHomogeneous):
    """FedHeNN for one architecture with CKA of rbf kernels."""

    def method(self, number: int) -> Aligned:
        """Return the alignment method of round `number`."""
        return AlignedRBF(**super().method(number).model_dump(exclude={"kind"}))


METHODS["aligned-rbf"] = AlignedRBF
LOCAL_METHODS["aligned-rbf"] = partial(aligned, similarity_to=rbf_cka_with)
