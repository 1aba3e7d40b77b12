"""A client's own model: its graph, which stays here, and its weights, written by a graph hypernetwork.

Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using Graph
HyperNetworks, 2022, https://arxiv.org/abs/2201.08459.

    strategy ghn          the parts of the hypernetwork that the graph needs arrive; w = GHN(graph) is generated here at
                          every step, and the steps of SGD are on the hypernetwork's parameters
    strategy ghn-server   w arrives, and the steps are on w itself

Either way parameters lie in `FlatPart`s, so that training is that of every other strategy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client.work.sgd import FlatPart, Network
from hyperbloom.common.errors import ModelError, WireError
from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, LayerType, Norms, Settings, part_of, trace
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build_own
from hyperbloom.common.wire.orders import SGD, Target
from hyperbloom.common.wire.weights import Weights

__all__ = ["Fixed", "Generated", "OwnNetwork", "own_graph", "parse_norms", "tensors_of"]


@cache
def own_graph(spec: ModelSpec, norms: Norms = "generated") -> Graph:
    """Return the graph of a client's own model; ModelError if it cannot be built or represented."""
    with torch.random.fork_rng(devices=[]):
        return trace(build_own(spec), spec.input_shape, norms)


@dataclass(frozen=True)
class OwnNetwork:
    """What an order makes of a client's own model; equal ones can share a network.

    Args:
        spec: the model.
        norms: what happens to the affine parameters of norms; those that stay local are the personal part.
        hypernetwork: its settings where it writes the weights, or None where they arrive.
        types: layer types whose parts have arrived.
    """

    spec: ModelSpec
    norms: Norms
    hypernetwork: Settings | None = None
    types: tuple[LayerType, ...] = ()

    @classmethod
    def ordered(cls, spec: ModelSpec, target: Target, weights: Weights | None) -> "OwnNetwork":
        """Return what an order asks for that is about the client's own model.

        Raises:
            WireError: it does not fit the model.
        """
        wanted = cls(spec, parse_norms(target.norms))
        if target.hypernetwork is None:
            return wanted
        if weights is None:
            raise WireError("order: expected parts of the hypernetwork, found none")
        parts = {part_of(name) for name, _ in weights.layout.shapes} - {SHARED}
        arrived = {LayerType.parse(part) for part in parts}
        settings = Settings.from_json(target.hypernetwork)
        # In mode `linear` types without parameters do not travel, and have nothing to lack.
        needed = set(own_graph(spec, wanted.norms).types)
        missing = [str(layer) for layer in needed - arrived if layer.roles or settings.mode != "linear"]
        if missing:
            raise WireError("order: the server has no part of the hypernetwork for a layer type of this client's model")
        types = tuple(sorted(needed | arrived, key=str))
        # Before memory is taken for what the order describes, compare it with what has arrived.
        try:
            sketch = GraphHypernetwork.sketch(types, settings, weights.layout.numel)
        except ModelError as error:
            raise WireError(f"order: {error}") from None
        weights.check(Layout.of(sketch), torch.float32)
        return replace(wanted, hypernetwork=settings, types=types)

    def make(self, device: torch.device) -> Network:
        """Return the network, on a device."""
        graph = own_graph(self.spec, self.norms)
        with torch.random.fork_rng(devices=[]):
            network = build_own(self.spec).to(device)
        kept = Layout(tuple(item for item in Layout.of(network).shapes if item[0] not in graph.order))
        if self.hypernetwork is None:
            return Network(network, FlatPart(network, graph.layout), FlatPart(network, kept))
        hypernetwork = GraphHypernetwork(self.types, self.hypernetwork, seed=None).to(device)
        shared = _UsedPart(hypernetwork, {SHARED, *map(str, graph.types)})
        return Network(Generated(hypernetwork, graph, network), shared, FlatPart(network, kept))

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the parameters of the prediction head."""
        return own_graph(self.spec, self.norms).head


class Generated(nn.Module):
    """A network whose weights a hypernetwork writes anew at every forward pass: gradients reach the hypernetwork."""

    def __init__(self, hypernetwork: GraphHypernetwork, graph: Graph, network: nn.Module) -> None:
        """Put them together; the network's own values are not used, but for norms that stay local."""
        super().__init__()
        self.hypernetwork, self.network, self.graph = hypernetwork, network, graph

    def weights(self) -> dict[str, Tensor]:
        """Return the generated weights by name."""
        return self.graph.layout.views(self.hypernetwork(self.graph))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the network makes of a batch."""
        made: Tensor = functional_call(self.network, self.weights(), (inputs,))
        return made


class Fixed(nn.Module):
    """A network with weights that are not its own."""

    def __init__(self, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights aside, as no parameters of this module."""
        super().__init__()
        self.network = network
        self.weights = dict(weights)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the network makes of a batch."""
        made: Tensor = functional_call(self.network, self.weights, (inputs,))
        return made


@torch.no_grad()
def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by the names that they have in the client's ordinary network."""
    if not isinstance(module, Generated | Fixed):
        return module.state_dict()
    made = module.weights() if isinstance(module, Generated) else module.weights
    network = module.network
    first = {id(parameter): name for name, parameter in network.named_parameters()}
    # A parameter of several names is generated under the first, and wanted under all.
    every = {n: made.get(first[id(p)], p) for n, p in network.named_parameters(remove_duplicate=False)}
    return {**network.state_dict(), **every}


class _UsedPart(FlatPart):
    """The parameters of a hypernetwork, of which weight decay leaves alone what the graph does not use."""

    def __init__(self, hypernetwork: GraphHypernetwork, used: set[str]) -> None:
        super().__init__(hypernetwork, Layout.of(hypernetwork))
        self._unused = [place for name, place, _ in self.layout.slices() if part_of(name) not in used]

    @torch.no_grad()
    def step(self, sgd: SGD) -> None:
        before = [self.values[place].clone() for place in self._unused]
        super().step(sgd)
        for place, values in zip(self._unused, before, strict=True):
            self.values[place] = values


def parse_norms(text: str | None) -> Norms:
    """Return how an order treats the affine parameters of norms; WireError if it does not say."""
    if text == "generated":
        return "generated"
    if text == "local":
        return "local"
    raise WireError(f"norms: expected one of {', '.join(get_args(Norms))}, found {text!r}")
