"""Hypernetworks that map a descriptor to all weights of a target network, with one matrix product per cohort.

They are those of pFedHN, https://arxiv.org/abs/2103.04628, section 3 and appendix B.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hyperbloom.common.layout import Layout


def trunk(inputs: int, hidden_dim: int, hidden_layers: int) -> nn.Sequential:
    """Return `Linear(inputs, H)`, then `hidden_layers` times `ReLU, Linear(H, H)`."""
    layers: list[nn.Module] = [nn.Linear(inputs, hidden_dim)]
    for _ in range(hidden_layers):
        layers += [nn.ReLU(), nn.Linear(hidden_dim, hidden_dim)]
    return nn.Sequential(*layers)


class StartingNetwork(nn.Module):
    """A hypernetwork, from descriptors `(C, k)` and a size to weights `(C, P)`, that may start at given weights.

    It then generates the deviations from them, which are zero at first.
    """

    def start_at(self, starts: Mapping[str, Tensor]) -> None:
        """Make the weights of each size start at `starts[size]` `(P,)` for every descriptor."""
        for size, values in starts.items():
            self.register_buffer(f"start_{size}", values)
        for name, parameter in self.named_parameters():
            if name.startswith("head"):  # the layers that write weights
                nn.init.zeros_(parameter)

    @torch.no_grad()
    def move_start(self, size: str, step: Tensor) -> None:
        """Add `step` `(P,)` to the start of a size, and so to the weights of all its clients."""
        self.get_buffer(f"start_{size}").add_(step.to(next(self.parameters())))

    def start(self, size: str) -> Tensor:
        """Return the start `(P,)` of a size, on the CPU; zero if weights are generated from nothing."""
        start = self._buffers.get(f"start_{size}")
        return torch.zeros(()) if start is None else start.cpu()

    def from_start(self, deviations: Tensor, size: str, ones: Tensor | None = None) -> Tensor:
        """Return the weights `(C, P)` for deviations, with `ones` `(C,)` times the start."""
        start = self._buffers.get(f"start_{size}")
        if start is None:
            return deviations
        return deviations + (start if ones is None else ones[:, None] * start)


class MLPHypernetwork(StartingNetwork):
    """Shared trunk `Linear(k, H)`, then `hidden_layers` times `ReLU, Linear(H, H)`; one head per target network.

    The paper has one linear head per tensor of the target network. Stacked, they form one linear layer whose output row
    is the flat vector of all weights. Default initialisation depends only on the fan-in H, so the stacked layer has the
    same initial distribution as separate heads.

    Args:
        layouts: by size (S, M, L), the target network; all heads share the trunk.
        embedding_dim: dimension k of a descriptor.
        hidden_dim: width H of the trunk.
        hidden_layers: number of hidden H x H layers; 3 in the paper.
    """

    def __init__(
        self, layouts: Mapping[str, Layout], embedding_dim: int, hidden_dim: int = 100, hidden_layers: int = 3
    ) -> None:
        super().__init__()
        self.trunk = trunk(embedding_dim, hidden_dim, hidden_layers)
        self.hidden_dim = hidden_dim
        self.heads = nn.ModuleDict()
        for size, layout in layouts.items():
            self.add_head(size, layout)

    def add_head(self, size: str, layout: Layout) -> nn.Module:
        """Add and return a head for another target network, initialised from torch's global generator."""
        self.heads[size] = nn.Linear(self.hidden_dim, layout.numel)
        return self.heads[size]

    def forward(self, descriptors: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)` of a cohort of one size."""
        return self.from_start(self.heads[size](self.features(descriptors, size)), size)  # (C, k) -> (C, H) -> (C, P)

    def features(self, descriptors: Tensor, size: str) -> Tensor:
        """Return a head's inputs `(C, H)`."""
        return self.trunk(descriptors)

    def write(self, features: Tensor, ones: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)`, linear in features `(C, H)` and in `ones` `(C,)`, which scale the bias."""
        head: Any = self.heads[size]
        return self.from_start(linear(features, head.weight).addcmul(ones[:, None], head.bias), size, ones)

    def gram(self, features: Tensor) -> Tensor:
        """Return the inner products `(C, C)` of a head's inputs: features `(C, H)` and the bias's one."""
        return features @ features.T + 1
