"""pFedHN for clients with different models: one trunk, and a head for every architecture.

Importing this module registers it.

The baseline of Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using
Graph HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, section 5.1. It applies pFedHN (Shamsian et al., ICML 2021)
to different networks. Clients of one architecture share a head. Different architectures share only the trunk, which
knows nothing of layers. A head has `hidden_dim + 1` times the parameters of the network that it generates.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field

from hyperbloom.common.config import Positive
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import OWN, ModelSpec
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.orders import Introduction
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Setting
from hyperbloom.strategies.exchange import Client
from hyperbloom.strategies.ghn import disclosed_graph, models_of
from hyperbloom.strategies.hypernetworks import MLPHypernetwork
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions


class PFedHNHeadsOptions(PFedHNOptions):
    """Options of pFedHN with heads."""

    hypernetwork: Literal["mlp"] = Field("mlp", description="only the MLP has a head for each architecture")
    start: Literal["hypernetwork"] = Field("hypernetwork", description="networks that differ have no common start")
    max_parameters: Positive = Field(
        300_000_000, description="parameters of all heads beyond which a client with a new architecture is refused"
    )


class PFedHNHeads(PFedHN):
    """pFedHN with a head per architecture, for clients that disclose the graphs of their own models."""

    options: PFedHNHeadsOptions
    own_models: ClassVar[Literal["no", "may", "must"]] = "must"
    asks: ClassVar[str] = "graph"
    asynchronous: ClassVar[bool] = False

    def check(self) -> None:
        """Refuse to start from another run: its heads are unknown before the clients join."""
        super().check()
        if self.config.init_from:
            raise ConfigError("init_from: pfedhn-heads has no way to start from another run")

    def settle(self, about: Introduction) -> Setting:
        """Return a setting without layouts, as every client has a network of its own."""
        return Setting(ModelSpec(OWN, about.size, about.input_shape, about.num_classes), {})

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse an architecture whose head would be too large."""
        super().serves(about, others)
        own, models = disclosed_graph(about), models_of(others, but=about)
        if models is None:
            return
        weights = own.layout.numel + sum(disclosed_graph(each).layout.numel for each in models)
        needed = (self.options.hidden_dim + 1) * weights
        if needed > self.options.max_parameters:
            raise RefusedError(
                f"a head for its architecture would make {needed:,} parameters of at most "
                f"{self.options.max_parameters:,}; raise options.max_parameters if they are meant"
            )

    def join(self, client: Client, first: bool) -> None:
        """Add the client's embedding row, and a head if it is the first of its architecture."""
        super().join(client, first)
        graph, network = disclosed_graph(client.about), self.learner.hypernetwork
        assert isinstance(network, MLPHypernetwork)
        if graph.digest not in network.heads:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(self.config.seed, "head", graph.digest))
                head = network.add_head(graph.digest, graph.layout).to(self.device)
            self.learner.optimizer.param_groups[0]["params"].extend(head.parameters())

    def head_of(self, client: Client) -> str:
        """Return the digest of the client's graph."""
        return disclosed_graph(client.about).digest

    def layout(self, client: Client) -> Layout:
        """Return the layout of all parameters of the client's own model."""
        return disclosed_graph(client.about).layout


STRATEGIES["pfedhn-heads"] = PFedHNHeads
