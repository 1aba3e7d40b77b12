"""pFedHN for clients with models of their own: one trunk, and a head for every architecture.

The baseline of Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using
Graph HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, section 5.1: what pFedHN (Shamsian et al., ICML 2021) can
do where networks differ. Clients of one architecture share its head; those of different ones share the trunk alone,
which knows nothing of layers. A head has `hidden_dim + 1` times the parameters of the network that it writes.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from hyperbloom import __version__
from hyperbloom.common.config import Positive, Section
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import Greeting, Introduction
from hyperbloom.common.models import OWN, ModelSpec
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.ghn import disclosed_graph
from hyperbloom.strategies.hypernetworks import MLPHypernetwork
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions
from hyperbloom.strategies.roster import Client

__all__ = ["PFedHNHeads", "PFedHNHeadsOptions"]


class PFedHNHeadsOptions(PFedHNOptions):
    """Options of pFedHN with heads."""

    hypernetwork: Literal["mlp"] = Field("mlp", description="only the MLP has a head for each architecture")
    max_parameters: Positive = Field(
        300_000_000, description="parameters of all heads beyond which a client with a new architecture is refused"
    )


class PFedHNHeads(PFedHN):
    """pFedHN with a head per architecture, for clients that disclose the graphs of their own models."""

    options_type: ClassVar[type[Section]] = PFedHNHeadsOptions
    options: PFedHNHeadsOptions
    own_models: ClassVar[Literal["no", "may", "must"]] = "must"
    asks: ClassVar[str] = "graph"
    asynchronous: ClassVar[bool] = False

    def check_config(self) -> None:
        """Heads come and go with the clients; nothing is known of another run's before they do."""
        super().check_config()
        if self.config.init_from:
            raise ConfigError("init_from: pfedhn-heads has no way to start from another run")

    def greeting(self) -> Greeting:
        """Ask each client for its graph."""
        return Greeting(__version__, self.asks, "generated")

    def check_newcomer(self, about: Introduction) -> None:
        """Refuse an architecture whose head would be too large."""
        graph = disclosed_graph(about)
        layouts = self.layouts | {graph.digest: graph.layout}
        needed = (self.options.hidden_dim + 1) * sum(layout.numel for layout in layouts.values())
        if needed > self.options.max_parameters:
            raise RefusedError(
                f"a head for its architecture would make {needed:,} parameters of at most "
                f"{self.options.max_parameters:,}; raise options.max_parameters if they are meant"
            )
        super().check_newcomer(about)

    def _adopt(self, about: Introduction) -> None:
        self.spec = ModelSpec(OWN, about.size, about.input_shape, about.num_classes)
        self.build()

    def joined(self, client: Client) -> None:
        """Give the client its embedding row, and its architecture a head if it is the first to bring it."""
        super().joined(client)
        self.make_room(client)

    def make_room(self, client: Client) -> None:
        """Give the client's architecture a head if it is the first to bring it."""
        graph = disclosed_graph(client.about)
        if graph.digest not in self.layouts:
            self.layouts[graph.digest] = graph.layout
            self._add_head(graph.digest, graph.layout)

    def _add_head(self, name: str, layout: Layout) -> None:
        network = self.learner.hypernetwork
        assert isinstance(network, MLPHypernetwork)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.config.seed, "head", name))
            head = network.add_head(name, layout)
        self.learner.optimizer.param_groups[0]["params"].extend(head.parameters())

    def head_of(self, client: Client) -> str:
        """The digest of the client's graph."""
        return disclosed_graph(client.about).digest

    def layout_for(self, client: Client) -> Layout:
        """All parameters of the client's own model."""
        return self.layouts[self.head_of(client)]

    def _common(self, server_round: int) -> dict[str, Any]:
        return super()._common(server_round) | {"norms": "generated"}
