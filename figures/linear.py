"""pFedHN with a linear hypernetwork, which the paper's analysis is of.

`--strategy figures.linear:PFedHNLinear` runs it.

Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021,
https://arxiv.org/abs/2103.04628, section 4.1.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks import MLPHypernetwork
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions


class LinearHypernetwork(MLPHypernetwork):
    """`theta_i = W v_i`. For orthonormal linear regression, its optimum is PCA of the local solutions."""

    def __init__(self, layouts: Mapping[str, Layout], embedding_dim: int) -> None:
        nn.Module.__init__(self)  # no trunk
        self.heads = nn.ModuleDict({s: nn.Linear(embedding_dim, x.numel, bias=False) for s, x in layouts.items()})

    def features(self, descriptors: Tensor, size: str) -> Tensor:
        """Return a head's inputs: the descriptors `(C, k)`."""
        return descriptors

    def write(self, features: Tensor, ones: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)` for features `(C, k)`; there is no bias."""
        return self.from_start(self.heads[size](features), size, ones)

    def gram(self, features: Tensor) -> Tensor:
        """Return the inner products `(C, C)` of a head's inputs."""
        return features @ features.T


class PFedHNLinearOptions(PFedHNOptions):
    """Options of pFedHN with a linear hypernetwork."""

    hypernetwork: Literal["linear"] = Field("linear", description="theta = W v")  # type: ignore[assignment]


class PFedHNLinear(PFedHN):
    """pFedHN whose hypernetwork is a matrix."""

    options: PFedHNLinearOptions  # type: ignore[assignment]

    def hypernetwork(self, layouts: Mapping[str, Layout], dim: int) -> LinearHypernetwork:
        """Return a new matrix for each size."""
        return LinearHypernetwork(layouts, dim)
