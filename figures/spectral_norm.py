"""pFedHN with spectral normalisation: every layer of the hypernetwork is divided by its largest singular value.

`--strategy figures.spectral_norm:PFedHNSpectral` runs it.

Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021,
https://arxiv.org/abs/2103.04628, table 4. The normalisation is that of Miyato, Kataoka, Koyama, Yoshida: Spectral
Normalization for Generative Adversarial Networks, ICLR 2018, https://arxiv.org/abs/1802.05957.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import spectral_norm

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ALL
from hyperbloom.strategies.hypernetworks import MLPHypernetwork
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions


class SplitHead(nn.Module):
    """One normalised linear layer per tensor; the spectral norm of the stacked matrix would be different."""

    def __init__(self, hidden_dim: int, layout: Layout) -> None:
        super().__init__()
        self.parts = nn.ModuleList(spectral_norm(nn.Linear(hidden_dim, size)) for size in layout.sizes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the weights `(C, P)` for features `(C, H)`."""
        return torch.cat([part(features) for part in self.parts], dim=-1)


class SpectralHypernetwork(MLPHypernetwork):
    """The MLP with each layer, and each tensor's head, divided by its spectral norm, in evaluation mode."""

    def __init__(
        self, layouts: Mapping[str, Layout], embedding_dim: int, hidden_dim: int = 100, hidden_layers: int = 3
    ) -> None:
        super().__init__(layouts, embedding_dim, hidden_dim, hidden_layers)
        for layer in self.trunk:
            if isinstance(layer, nn.Linear):
                spectral_norm(layer)
        self.eval()  # in training mode, writing weights would change the network

    def add_head(self, size: str, layout: Layout) -> nn.Module:
        """Add and return a head for another target network, initialised from torch's global generator."""
        self.heads[size] = SplitHead(self.hidden_dim, layout)
        return self.heads[size]

    def write(self, features: Tensor, ones: Tensor, size: str) -> Tensor:
        """Return the weights `(C, P)`, linear in features `(C, H)` and in `ones` `(C,)`, which scale the bias."""
        head: Any = self.heads[size]
        made = [linear(features, part.weight).addcmul(ones[:, None], part.bias) for part in head.parts]
        return torch.cat(made, dim=-1)

    def iterate(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Follow a step of the optimiser by one power iteration, unless the hypernetwork is frozen."""
        if any(parameter.grad is not None for parameter in self.parameters()):
            self.train()
            with torch.no_grad():
                for size in self.heads:
                    self(optimizer.param_groups[1]["params"][0][:1], size)
            self.eval()


class PFedHNSpectralOptions(PFedHNOptions):
    """Options of pFedHN with spectral normalisation."""

    hypernetwork: Literal["mlp"] = Field("mlp", description="only the MLP is normalised")
    start: Literal["hypernetwork"] = Field("hypernetwork", description="a start at zero has no spectral norm")


class PFedHNSpectral(PFedHN):
    """pFedHN whose hypernetwork is normalised after each step (table 4)."""

    options: PFedHNSpectralOptions

    def check(self) -> None:
        """Refuse pretrained networks: their adapters start at zero."""
        super().check()
        if self.config.adapt != ALL or self.config.backbone:
            raise ConfigError("adapt: expected all, and no backbone; a start at zero has no spectral norm")

    def hypernetwork(self, layouts: Mapping[str, Layout], dim: int) -> SpectralHypernetwork:
        """Return a new normalised hypernetwork."""
        return SpectralHypernetwork(layouts, dim, self.options.hidden_dim, self.options.hidden_layers)

    def make(self, dim: int) -> None:
        """Make all networks; each step of the optimiser is followed by a power iteration."""
        super().make(dim)
        network = self.learner.hypernetwork
        assert isinstance(network, SpectralHypernetwork)
        self.learner.optimizer.register_step_post_hook(network.iterate)
