"""A hypernetwork for large target networks: one head writes their weights chunk by chunk.

Johannes von Oswald, Christian Henning, Benjamin F. Grewe, Joao Sacramento: Continual learning with hypernetworks, ICLR
2020, https://arxiv.org/abs/1906.00695, section 2.2 ("chunking"). A head for all weights has H x P parameters, 1.1
billion for a ResNet-18. Here, chunk c of client i is `h([v_i; e_c])` with a learned embedding `e_c`, and the head has
only H x chunk.

LoRA's adapters are written layer by layer: a chunk is the part of one rank in one layer, a row of A with a column of B.
Its embedding is the sum of the layer's and the rank's, over the root of two. So the head is as large as the widest
layer needs, however many layers there are. The prediction head follows in chunks of this size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks.mlp import StartingNetwork, trunk


@dataclass(frozen=True)
class Cut:
    """How the weights `(P,)` of a network are cut into chunks.

    Attributes:
        parts: number of embeddings: one for each layer with an adapter, then one for each other chunk.
        layers: number of layers with adapters, and `ranks` the number of chunks in each.
        places: `(P,)`, where the weights are in the joined chunks; None: in their own order.
    """

    numel: int
    parts: int
    layers: int = 0
    ranks: int = 0
    places: Tensor | None = None

    @classmethod
    def of(cls, numel: int, adapters: Sequence[Tensor], chunk: int) -> "Cut":
        """Give each row of `adapters` a chunk; they hold indices of weights, `(ranks, weights)` for each layer."""
        if not adapters:
            return cls(numel, math.ceil(numel / chunk))
        places, layers, ranks = torch.full((numel,), -1), len(adapters), len(adapters[0])
        for number, indices in enumerate(row for adapter in adapters for row in adapter):
            places[indices] = number * chunk + torch.arange(len(indices))
        others = int((places < 0).sum())
        places[places < 0] = layers * ranks * chunk + torch.arange(others)
        return cls(numel, layers + math.ceil(others / chunk), layers, ranks, places)

    def join(self, chunks: Tensor) -> Tensor:
        """Return the weights `(C, P)` in chunks `(C, N, chunk)`."""
        flat = chunks.flatten(1)
        return flat[:, : self.numel] if self.places is None else flat[:, self.places.to(flat.device)]


def _adapters(layout: Layout) -> list[Tensor]:
    """Return the indices of the weights of each of LoRA's layers: by rank, a row of A and a column of B."""
    layers: dict[str, list[Tensor]] = {}
    for (name, shape), indices in zip(layout.shapes, torch.arange(layout.numel).split(layout.sizes), strict=True):
        layer, found, leaf = name.partition(".lora_")
        if found:  # A is (r, ...), and B is (out, r, ...)
            values = indices.view(shape)
            layers.setdefault(layer, []).append((values if "A." in leaf else values.transpose(0, 1)).flatten(1))
    return [torch.cat(parts, dim=1) for parts in layers.values()]


class ChunkedHypernetwork(StartingNetwork):
    """Trunk and head, and their arguments, as in `MLPHypernetwork`. The input is a descriptor with a chunk's embedding.

    Args:
        layouts: by size, the target network; each has its own chunk embeddings, and all share trunk and head.
        chunk: number of weights written at a time; the last chunk of a network is cut. LoRA's layers decide it instead.
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
        adapters = {size: _adapters(layout) for size, layout in layouts.items()}
        chunk = max((part.shape[1] for parts in adapters.values() for part in parts), default=chunk)
        self.cuts = {size: Cut.of(layout.numel, adapters[size], chunk) for size, layout in layouts.items()}
        self.head = nn.Linear(hidden_dim, chunk)
        # Deviation 1, as for descriptors: chunks must be as easy to tell apart as clients.
        self.chunks = nn.ParameterDict({s: torch.randn(cut.parts, chunk_dim) for s, cut in self.cuts.items()})
        self.ranks = nn.ParameterDict({s: torch.randn(c.ranks, chunk_dim) for s, c in self.cuts.items() if c.ranks})

    def forward(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)` of a cohort of one size."""
        weights: Tensor = self.head(self.features(descriptors, size))  # (C, N, H) -> (C, N, chunk)
        return self.from_start(self.cuts[size].join(weights), size)

    def write(self, features: Tensor, ones: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)`, linear in features `(C, N, H)` and in `ones` `(C,)`, which scale the bias."""
        weights = nn.functional.linear(features, self.head.weight) + ones[:, None, None] * self.head.bias
        return self.from_start(self.cuts[size].join(weights), size, ones)

    def gram(self, features: Tensor) -> Tensor:
        """Return the inner products `(C, C)` of the head's inputs, with the bias's one, averaged over chunks."""
        flat = features.flatten(1)
        return flat @ flat.T / features.shape[1] + 1

    def features(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the head's inputs `(C, N, H)`."""
        chunks, cut = self.chunks[size], self.cuts[size]
        if cut.ranks:
            adapters = (chunks[: cut.layers, None] + self.ranks[size]) / 2**0.5  # (layers, ranks, d)
            chunks = torch.cat([adapters.flatten(0, 1), chunks[cut.layers :]])
        # The first layer is linear, so its outputs for descriptors and chunks can be added. This avoids holding all
        # (C, N, k + d) pairs.
        first: nn.Linear = self.trunk[0]  # type: ignore[assignment]
        split = descriptors.shape[1]
        of_clients = nn.functional.linear(descriptors, first.weight[:, :split], first.bias)
        of_chunks = nn.functional.linear(chunks, first.weight[:, split:])
        return self.trunk[1:](of_clients[:, None] + of_chunks)
