"""A client's own model: its graph, which stays on the client, and its weights from a graph hypernetwork (HAFL-GHN).

    strategy ghn          the parts of the hypernetwork that the graph needs arrive; the client generates w = GHN(graph)
                          at every step, and SGD updates the hypernetwork's parameters
    strategy ghn-server   w arrives, and SGD updates w

In both cases the parameters are in `FlatPart`s, so training is the same as in every other strategy.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client.work.sgd import FlatPart, Network
from hyperbloom.common.errors import ModelError, WireError
from hyperbloom.common.graphs import Graph, GraphHypernetwork, Settings, trace
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import ModelSpec, build_own, own_tensors
from hyperbloom.common.wire.orders import Target


@cache
def own_graph(spec: ModelSpec) -> Graph:
    """Return the graph of a client's own model; ModelError if it cannot be built or represented."""
    with torch.random.fork_rng(devices=[]):
        return trace(build_own(spec), spec.input_shape)


def ordered_settings(spec: ModelSpec, target: Target, weights: Weights | None) -> Settings | None:
    """Return what an order says of the hypernetwork for an own model, None without one; WireError if it is unfit."""
    if target.hypernetwork is None:
        return None
    if weights is None:
        raise WireError("order: expected parts of the hypernetwork, found none")
    settings = Settings.from_wire(target.hypernetwork, "order: hypernetwork")
    # Compare the order with the weights that arrived before allocating memory for what it describes.
    try:
        sketch = GraphHypernetwork.sketch(own_graph(spec).types, settings, weights.layout.numel)
    except ModelError as error:
        raise WireError(f"order: {error}") from None
    weights.check(Layout.of(sketch), torch.float32)
    return settings


def make_network(spec: ModelSpec, settings: Settings | None, device: torch.device) -> Network:
    """Build a client's own model on a device, with weights that arrive or that a hypernetwork of `settings` writes."""
    graph, nothing = own_graph(spec), Layout(())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random buffers alike at every start
        network = build_own(spec).to(device)
    if settings is None:
        return Network(network, FlatPart(network, graph.layout), FlatPart(network, nothing))
    hypernetwork = GraphHypernetwork(graph.types, settings, seed=None).to(device)
    shared = FlatPart(hypernetwork, Layout.of(hypernetwork))
    return Network(Generated(hypernetwork, graph, network), shared, FlatPart(network, nothing))


class Fixed(nn.Module):
    """A network that computes with given weights in place of its own."""

    def __init__(self, network: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.network, self._weights = network, weights

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return self._weights

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch, `(B, K)` or `(B, K, H, W)`."""
        return functional_call(self.network, self.weights(), (inputs,))


class Generated(Fixed):
    """A network whose weights a hypernetwork generates in every forward pass, so that gradients reach it."""

    def __init__(self, hypernetwork: GraphHypernetwork, graph: Graph, network: nn.Module) -> None:
        super().__init__(network, {})
        self.hypernetwork, self.graph = hypernetwork, graph

    def weights(self) -> dict[str, Tensor]:
        """Return the generated weights by name."""
        return self.graph.layout.views(self.hypernetwork(self.graph))


@torch.no_grad()
def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in the client's ordinary network, without those of a backbone."""
    if not isinstance(module, Fixed):
        return own_tensors(module)
    made, network = module.weights(), module.network
    first = {id(parameter): name for name, parameter in network.named_parameters()}
    # A shared parameter is generated under its first name, but the result needs all of its names.
    every = {n: made.get(first[id(p)], p) for n, p in network.named_parameters(remove_duplicate=False)}
    return {**own_tensors(network), **every}
