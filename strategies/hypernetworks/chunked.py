"""A hypernetwork for large target networks: one head writes them chunk by chunk.

Johannes von Oswald, Christian Henning, Benjamin F. Grewe, Joao Sacramento: Continual learning with hypernetworks, ICLR
2020, https://arxiv.org/abs/1906.00695, section 2.2 ("chunking"). A head for all weights has H x P parameters, 1.1
billion for a ResNet-18; here chunk c of client i is `h([v_i; e_c])` with a learned embedding `e_c`, and the head has
H x chunk.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks.mlp import trunk

__all__ = ["ChunkedHypernetwork"]


class ChunkedHypernetwork(nn.Module):
    """Trunk and head as in `MLPHypernetwork`, fed with a client's descriptor and a chunk's embedding.

    Args:
        layouts: target network of each size on offer; each has chunk embeddings of its own, all share trunk and head.
        embedding_dim: dimension k of a descriptor.
        hidden_dim: width H of the trunk.
        hidden_layers: number of hidden H x H layers.
        chunk: weights that are written at a time; the last chunk of a network is cut.
        chunk_dim: dimension d of a chunk's embedding.

    Shape:
        descriptors `(C, k)` and a size to weights `(C, layouts[size].numel)`, by way of `(C, N, k + d)`.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        embedding_dim: int,
        hidden_dim: int = 100,
        hidden_layers: int = 3,
        chunk: int = 16_384,
        chunk_dim: int = 64,
    ) -> None:
        """Initialise from torch's global generator."""
        super().__init__()
        self.trunk = trunk(embedding_dim + chunk_dim, hidden_dim, hidden_layers)
        self.head = nn.Linear(hidden_dim, chunk)
        self.numel = {size: layout.numel for size, layout in layouts.items()}
        counts = {size: math.ceil(numel / chunk) for size, numel in self.numel.items()}
        # As wide as the descriptors: chunks must be as easy to tell apart as clients.
        self.chunks = nn.ParameterDict({size: torch.randn(count, chunk_dim) for size, count in counts.items()})

    def forward(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the weights of a cohort of one size."""
        weights: Tensor = self.head(self.features(descriptors, size))  # (C, N, H) -> (C, N, chunk)
        return weights.flatten(1)[:, : self.numel[size]]

    def write(self, features: Tensor, ones: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)` that are linear in features `(C, N, H)` and in the bias's ones `(C,)`."""
        weights = nn.functional.linear(features, self.head.weight) + ones[:, None, None] * self.head.bias
        return weights.flatten(1)[:, : self.numel[size]]

    def gram(self, features: Tensor) -> Tensor:
        """Return the inner products `(C, C)` of what the head sees, features and the bias's one, mean over chunks."""
        flat = features.flatten(1)
        return flat @ flat.T / features.shape[1] + 1

    def features(self, descriptors: Tensor, size: str) -> Tensor:
        """Return what the head sees, `(C, N, H)`."""
        chunks = self.chunks[size]
        # The first layer is linear: what it makes of a descriptor and of a chunk can be added, without ever holding
        # the (C, N, k + d) pairs of them.
        first: nn.Linear = self.trunk[0]  # type: ignore[assignment]
        split = descriptors.shape[1]
        of_clients = nn.functional.linear(descriptors, first.weight[:, :split], first.bias)
        of_chunks = nn.functional.linear(chunks, first.weight[:, split:])
        features: Tensor = self.trunk[1:](of_clients[:, None] + of_chunks)
        return features
