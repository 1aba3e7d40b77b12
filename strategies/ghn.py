"""HAFL-GHN: one graph hypernetwork for clients whose models have different architectures.

Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using Graph
HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, algorithm 1.

    ghn          client:  w = GHN(its graph; phi), K steps of SGD on phi through w
                 server:  phi_p <- sum_i n_i phi_p,i / sum_i n_i      over the clients that trained part p
    ghn-server   server:  w_a = GHN(graph_a; phi), once for each architecture a
                 client:  K steps of SGD on w_a give delta_i, which it sends back
                 server:  phi <- phi + eta x, x from `fit_steps` of conjugate gradients on
                          sum_a N_a |J_a x - mean_(i in a) delta_i|^2,  J_a = d GHN(graph_a; phi) / d phi

n_i are a client's examples and N_a their sum over the clients of an architecture; the means are weighted by n_i. Both
placements equal FedAvg on the weights if all clients share an architecture, message passing is the identity, the MLPs
are linear (`mode: linear`), and eta = 1.

docs/ghn.md says what the server learns of an architecture.

Departures: the paper averages all clients' copies of all parts, which holds a part back by the copies of clients that
never use it. `ghn-server` is ours. A single gradient step as in pFedHN hardly learns there: layers of one type share
constants and have similar latents, so generation is ill-conditioned and the weights move elsewhere than the deltas.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from hyperbloom.common.config import Positive, Rate
from hyperbloom.common.errors import ConfigError, ModelError, RefusedError, WireError
from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, LayerType, Settings, part_of
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import OWN, ModelSpec
from hyperbloom.common.wire.orders import Introduction, Refinement
from hyperbloom.strategies.algorithm import LARGEST_NETWORK, Algorithm, Recipe, Setting
from hyperbloom.strategies.exchange import Client, Update
from hyperbloom.strategies.fedavg import average
from hyperbloom.strategies.hypernetworks.graph import Target, average_parts, follow, split_parts

MOST_TYPES = 512
"""Most layer types of one client; ResNet-152 has about 40."""
KEPT_GRAPHS = 256
"""Number of parsed graphs in the cache; others are parsed again. Clients of one architecture share the object."""

_parsed = lru_cache(KEPT_GRAPHS)(Graph.from_json)


class GHNOptions(Settings):
    """Options of both placements, beside the settings of the hypernetwork."""

    refine_epochs: Annotated[int, Field(ge=0, le=100)] = Field(
        1, description="passes over the client's examples for the head alone before each evaluation"
    )
    max_parameters: Annotated[int, Field(gt=0)] = Field(
        300_000_000, description="parameters of the hypernetwork beyond which a client with new layer types is refused"
    )


class _GraphStrategy(Algorithm):
    """The part that both placements share: the hypernetwork, and its growth with the clients."""

    options: GHNOptions
    own_models = "must"
    hypernetwork: GraphHypernetwork

    def check(self) -> None:
        """Separate the settings of the hypernetwork, which travel, from the other options."""
        self.settings = Settings.model_validate(self.options.model_dump(include=set(Settings.model_fields)))

    def settle(self, about: Introduction) -> Setting:
        """Return a setting without layouts, as every client has a network of its own."""
        return Setting(ModelSpec(OWN, about.size, about.input_shape, about.num_classes), {})

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse layer types that would make the hypernetwork too large, before it takes memory for them."""
        types = self.types_of(about)
        models = models_of(others, but=about)
        if models is None:
            return
        for told in models:
            types |= self.types_of(told)
        try:
            GraphHypernetwork.sketch(types | self.known_types, self.settings, self.options.max_parameters)
        except ModelError as error:
            raise RefusedError(f"with its layer types: {error}; raise options.max_parameters to allow it") from None

    known_types: Set[LayerType] = frozenset()
    """The layer types of the hypernetwork: all that any client has ever disclosed."""

    def types_of(self, about: Introduction) -> set[LayerType]:
        """Return the layer types that a client discloses; a RefusedError if it discloses none or they do not exist."""
        if about.graph is not None:
            return set(disclosed_graph(about).types)
        if about.types is None:
            raise RefusedError("this run trains every client's own model; join with --model")
        if len(about.types) > MOST_TYPES:
            raise RefusedError(f"expected at most {MOST_TYPES} layer types, found {len(about.types)}")
        try:
            return {LayerType.parse(text) for text in about.types}
        except WireError as error:
            raise RefusedError(str(error)) from None

    def build(self, setting: Setting) -> None:
        """Make the hypernetwork from the run's seed; layer types come with the clients."""
        super().build(setting)
        self.hypernetwork = GraphHypernetwork((), self.settings, self.config.seed).to(self.device)

    def join(self, client: Client, first: bool) -> None:
        """Add the parts that this client is the first to need."""
        super().join(client, first)
        self._grow(self.types_of(client.about))

    def _grow(self, types: Set[LayerType]) -> None:
        self.known_types |= types
        self.hypernetwork.grow(types)
        self.hypernetwork.to(self.device)

    def recipe(self, number: int) -> Recipe:
        """Refine the head before an evaluation, as the paper does at inference, at the mean rate of local training."""
        epochs, local = self.options.refine_epochs, self.config.local
        refinement = Refinement(epochs, local.mean_rate, local.batch_size) if epochs else None
        return replace(super().recipe(number), refinement=refinement)

    def state(self) -> dict[str, Tensor]:
        """Return each part of the hypernetwork as one vector, by the name of its layer type."""
        return {part: self.hypernetwork.read_part(part) for part in self.hypernetwork.parts()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore all parts."""
        self.start_from(tensors)

    def check_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are not the parts of a graph hypernetwork."""
        self._types_in(tensors)

    def _types_in(self, tensors: Mapping[str, Tensor]) -> set[LayerType]:
        try:
            types = {LayerType.parse(name) for name in tensors if name != SHARED}
        except WireError:
            types = set()
        if SHARED not in tensors or not types:
            raise ConfigError(f"init_from: expected a run of ghn or ghn-server, found tensors {sorted(tensors)[:3]}")
        return types

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from another run's hypernetwork; new layer types start afresh."""
        self._grow(self._types_in(tensors))
        try:
            for part in tensors:
                self.hypernetwork.load_part(part, tensors[part])
        except ModelError as error:
            raise ConfigError(f"init_from: its hypernetwork has other options than this run's: {error}") from None


def models_of(others: Iterable[Introduction], but: Introduction) -> list[Introduction] | None:
    """Return one introduction for each model that `others` disclose, or None if one discloses the same as `but`.

    It stops at the first that does, so that a thousand clients of a few architectures join quickly.
    """
    models: dict[object, Introduction] = {}
    for other in others:
        if (other.types, other.graph) == (but.types, but.graph):
            return None
        models.setdefault((other.types, other.graph), other)
    return list(models.values())


def disclosed_graph(about: Introduction) -> Graph:
    """Return the graph that a client discloses; a RefusedError if there is none or it is invalid."""
    if about.graph is None:
        raise RefusedError("this run reads the graphs of clients' own models; join with --model and --disclose graph")
    try:
        return _parsed(about.graph, LARGEST_NETWORK)
    except WireError as error:
        raise RefusedError(str(error)) from None


class GHN(_GraphStrategy):
    """HAFL-GHN: a graph hypernetwork travels and writes each client's own model there; no graph leaves a client."""

    reply = "weights"
    asks = "types"
    noise_at = ("client",)
    sums = True

    def recipe(self, number: int) -> Recipe:
        """Let the client's hypernetwork write its weights."""
        return replace(super().recipe(number), hypernetwork=self.settings.model_dump_json())

    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        """Return for each client the parts that it needs; clients with equal needs share a vector."""
        layouts, made = [self.layout(client) for client in clients], dict[Layout, Weights]()
        for layout in dict.fromkeys(layouts):
            parts = dict.fromkeys(part_of(name) for name, _ in layout.shapes)
            made[layout] = Weights(layout, torch.cat([self.hypernetwork.read_part(part) for part in parts]))
        return [made[layout] for layout in layouts]

    def layout(self, client: Client) -> Layout:
        """Return the layout of the shared part and of the client's layer types."""
        return self.hypernetwork.layout(self.types_of(client.about))

    def learn(self, updates: Sequence[Update]) -> None:
        """Average each part over the clients that trained it, by number of training examples."""
        replies = []
        for update in updates:
            assert update.layout is not None and update.returned is not None
            replies.append((float(update.examples), split_parts(update.layout, update.returned)))
        for part, values in average_parts(replies).items():
            self.hypernetwork.load_part(part, values)


class GHNServerOptions(GHNOptions):
    """Options of the placement where the hypernetwork stays on the server."""

    learning_rate: Rate = Field(1.0, description="share of the least-squares step that is taken")
    fit_steps: Positive = Field(30, description="steps of conjugate gradients towards what the clients returned")


class GHNServer(_GraphStrategy):
    """HAFL-GHN for clients that disclose their graphs: the hypernetwork stays here, weights and deltas travel."""

    options: GHNServerOptions
    keeps_sent = False
    asks = "graph"
    noise_at = ("client",)

    def types_of(self, about: Introduction) -> set[LayerType]:
        """Return the layer types of the client's graph; a RefusedError if `mode: linear` has too few places for it."""
        graph = disclosed_graph(about)
        most, found = self.settings.latent, max(map(len, graph.groups.values()))
        if found > most and self.settings.mode == "linear":
            raise RefusedError(f"expected at most {most} layers of one type (options.latent), found {found}")
        return set(graph.types)

    @torch.no_grad()
    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        """Generate the weights once for each architecture."""
        graphs = [disclosed_graph(client.about) for client in clients]
        made = {graph.digest: graph for graph in graphs}
        weights = {digest: Weights(graph.layout, self.hypernetwork(graph).cpu()) for digest, graph in made.items()}
        return [weights[graph.digest] for graph in graphs]

    def layout(self, client: Client) -> Layout:
        """Return the layout of the generated parameters of the client's model."""
        return disclosed_graph(client.about).layout

    def learn(self, updates: Sequence[Update]) -> None:
        """Move the hypernetwork so that, for each architecture, it writes the mean of its clients' weights."""
        cohorts: dict[Graph, list[Update]] = {}
        for update in updates:
            cohorts.setdefault(disclosed_graph(update.client.about), []).append(update)
        targets = [
            Target(graph, float(sum(update.examples for update in cohort)), average(cohort).to(self.device))
            for graph, cohort in cohorts.items()
        ]
        if targets:
            follow(self.hypernetwork, targets, self.options.fit_steps, self.options.learning_rate)
