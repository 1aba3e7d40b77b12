"""A hypernetwork for large target networks: one head writes their weights chunk by chunk.

Johannes von Oswald, Christian Henning, Benjamin F. Grewe, Joao Sacramento: Continual learning with hypernetworks, ICLR
2020, https://arxiv.org/abs/1906.00695, section 2.2 ("chunking"). A head for all weights has H x P parameters, 1.1
billion for a ResNet-18. Here, chunk c of client i is `h([v_i; e_c])` with a learned embedding `e_c`, and the head has
only H x chunk.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks.mlp import StartingNetwork, trunk


class ChunkedHypernetwork(StartingNetwork):
    """Trunk and head, and their arguments, as in `MLPHypernetwork`. The input is a descriptor with a chunk's embedding.

    Args:
        layouts: by size, the target network; each has its own chunk embeddings, and all share trunk and head.
        chunk: number of weights written at a time; the last chunk of a network is cut.
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
        super().__init__()
        self.trunk = trunk(embedding_dim + chunk_dim, hidden_dim, hidden_layers)
        self.head = nn.Linear(hidden_dim, chunk)
        self.numel = {size: layout.numel for size, layout in layouts.items()}
        counts = {size: math.ceil(numel / chunk) for size, numel in self.numel.items()}
        # Deviation 1, as for descriptors: chunks must be as easy to tell apart as clients.
        self.chunks = nn.ParameterDict({size: torch.randn(count, chunk_dim) for size, count in counts.items()})

    def forward(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the weights of a cohort of one size."""
        weights: Tensor = self.head(self.features(descriptors, size))  # (C, N, H) -> (C, N, chunk)
        return self.from_start(weights.flatten(1)[:, : self.numel[size]], size)

    def write(self, features: Tensor, ones: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)`, linear in features `(C, N, H)` and in `ones` `(C,)`, which scale the bias."""
        weights = nn.functional.linear(features, self.head.weight) + ones[:, None, None] * self.head.bias
        return self.from_start(weights.flatten(1)[:, : self.numel[size]], size, ones)

    def gram(self, features: Tensor) -> Tensor:
        """Return the inner products `(C, C)` of the head's inputs, with the bias's one, averaged over chunks."""
        flat = features.flatten(1)
        return flat @ flat.T / features.shape[1] + 1

    def features(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the head's inputs `(C, N, H)`."""
        chunks = self.chunks[size]
        # The first layer is linear, so its outputs for descriptors and chunks can be added. This avoids holding all
        # (C, N, k + d) pairs.
        first: nn.Linear = self.trunk[0]  # type: ignore[assignment]
        split = descriptors.shape[1]
        of_clients = nn.functional.linear(descriptors, first.weight[:, :split], first.bias)
        of_chunks = nn.functional.linear(chunks, first.weight[:, split:])
        features: Tensor = self.trunk[1:](of_clients[:, None] + of_chunks)
        return features
