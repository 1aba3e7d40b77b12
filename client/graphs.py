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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client.settings import Disclosure
from hyperbloom.client.training import EVALUATION_BATCH, FlatPart, evaluate, settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ModelError, RefusedError, WireError
from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, LayerType, Norms, Settings, part_of, trace
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import ASKS, REFINED, EvaluateOrder, RepresentOrder, TrainOrder
from hyperbloom.common.models import ModelSpec, build_own
from hyperbloom.common.seeds import derive

__all__ = ["ALL_TYPES", "Fixed", "Generated", "OwnNetwork", "describe", "own_graph", "refine", "tensors_of"]

ALL_TYPES = ("all",)
"""Stands for the layer types of a client that wants all parts of the hypernetwork, not to show which it uses."""

MOST_EPOCHS = 100


@cache
def own_graph(spec: ModelSpec, norms: Norms = "generated") -> Graph:
    """Return the graph of a client's own model; ModelError if it cannot be built or represented."""
    with torch.random.fork_rng(devices=[]):
        return trace(build_own(spec), spec.input_shape, norms)


def describe(
    spec: ModelSpec | None, disclosure: Disclosure, asks: str | None, norms: str | None
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the layer types and the graph that an introduction tells of a client's own model.

    Args:
        spec: of the own model, or None if there is none.
        disclosure: what may be told at most.
        asks: what the server's strategy asks for.
        norms: how it treats the parameters of norms.

    Raises:
        RefusedError: the server chooses the model of all clients, and this one has its own.
        WireError: the server asks for something unknown.
    """
    if asks is not None and asks not in ASKS:
        raise WireError(f"greeting: expected asks to be one of {ASKS}, found {asks!r}")
    if spec is None:
        return None, None
    if asks is None:
        raise RefusedError("in this run the server chooses the model of all clients; join without --model")
    if asks == "own":
        return (), None  # there is one
    graph = own_graph(spec, _norms(norms))
    if asks == "graph":
        return None, graph.to_json() if disclosure == "graph" else None
    return ALL_TYPES if disclosure == "all-types" else tuple(map(str, graph.types)), None


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
    def ordered(cls, spec: ModelSpec, order: TrainOrder | EvaluateOrder | RepresentOrder) -> "OwnNetwork":
        """Read an order for the client's own model.

        Raises:
            WireError: it does not fit the model.
        """
        wanted = cls(spec, _norms(order.norms))
        if order.hypernetwork is None:
            return wanted
        if order.weights is None:
            raise WireError("order: expected parts of the hypernetwork, found none")
        parts = {part_of(name) for name, _ in order.weights.layout.shapes} - {SHARED}
        arrived = {LayerType.parse(part) for part in parts}
        settings = Settings.from_json(order.hypernetwork)
        # In mode `linear` types without parameters do not travel, and have nothing to lack.
        needed = set(own_graph(spec, wanted.norms).types)
        missing = [str(layer) for layer in needed - arrived if layer.roles or settings.mode != "linear"]
        if missing:
            raise WireError("order: the server has no part of the hypernetwork for a layer type of this client's model")
        types = tuple(sorted(needed | arrived, key=str))
        # Before memory is taken for what the order describes, compare it with what has arrived.
        try:
            sketch = GraphHypernetwork.sketch(types, settings, order.weights.layout.numel)
        except ModelError as error:
            raise WireError(f"order: {error}") from None
        order.weights.check(Layout.of(sketch), torch.float32)
        return replace(wanted, hypernetwork=settings, types=types)

    def make(self, device: torch.device) -> tuple[nn.Module, FlatPart, FlatPart]:
        """Return the module to train, what the server sends, and what stays on the client."""
        graph = own_graph(self.spec, self.norms)
        with torch.random.fork_rng(devices=[]):
            network = build_own(self.spec).to(device)
        kept = Layout(tuple(item for item in Layout.of(network).shapes if item[0] not in graph.order))
        if self.hypernetwork is None:
            return network, FlatPart(network, graph.layout), FlatPart(network, kept)
        hypernetwork = GraphHypernetwork(self.types, self.hypernetwork, seed=None).to(device)
        shared = _UsedPart(hypernetwork, {SHARED, *map(str, graph.types)})
        return Generated(hypernetwork, graph, network), shared, FlatPart(network, kept)

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
    def step(self, order: TrainOrder) -> None:
        before = [self.values[place].clone() for place in self._unused]
        super().step(order)
        for place, values in zip(self._unused, before, strict=True):
            self.values[place] = values


def refine(module: nn.Module, head: tuple[str, ...], data: Examples, order: EvaluateOrder, client_id: str) -> nn.Module:
    """Return the network after `refine_epochs` passes of plain SGD over the client's own examples.

    For HAFL-GHN the step at inference of the paper's section 4.2, on the last layer; for FedAvg with fine-tuning and
    Per-FedAvg the adaptation of all weights. What is not refined is as it was sent or generated, norms as in
    evaluation. Nothing of it stays, and if the loss on those examples has grown, nothing has changed.

    Args:
        module: as `OwnNetwork.make` returned it, or an ordinary network.
        head: names of the parameters of the prediction head.
        data: training examples.
        order: which part, epochs, learning rate, batch size and seed.
        client_id: mixed into the seed.

    Raises:
        WireError: the order's numbers are impossible.
    """
    epochs, rate, batch = order.refine_epochs or 0, order.refine_rate or 0.0, order.refine_batch or 0
    if order.refine_part not in (None, *REFINED):
        raise WireError(f"order: expected refine_part to be one of {REFINED}, found {order.refine_part!r}")
    if not 0 <= epochs <= MOST_EPOCHS or rate <= 0 or batch < 1:
        raise WireError(f"order: expected up to {MOST_EPOCHS} epochs with a rate and batches, found {epochs}")
    network, weights = module, dict(module.named_parameters())
    if isinstance(module, Generated):
        with torch.no_grad():
            network, weights = module.network, module.weights()  # type: ignore[assignment]
    weights = {name: values.detach() for name, values in weights.items()}  # type: ignore[misc]
    chosen = tuple(weights) if order.refine_part == "all" else head
    refined = {name: weights[name].clone().requires_grad_() for name in chosen if name in weights}
    generator = torch.Generator().manual_seed(derive(order.seed, client_id, order.round, "refine"))
    sent = Fixed(network, weights)
    loss_as_sent = evaluate(sent, data).loss
    network.eval()
    for _ in range(epochs if refined else 0):
        for rows in torch.randperm(len(data), generator=generator).split(batch):
            gradients = [torch.zeros_like(values) for values in refined.values()]
            # A batch may be all that a client has: what memory holds, one after the other.
            for some in rows.to(data.labels.device).split(EVALUATION_BATCH):
                logits = functional_call(network, {**weights, **refined}, (data.inputs[some],))
                loss = F.cross_entropy(logits, data.labels[some]) * (len(some) / len(rows))
                for total, gradient in zip(gradients, torch.autograd.grad(loss, list(refined.values())), strict=True):
                    total.add_(gradient)
            with torch.no_grad():
                for values, gradient in zip(refined.values(), gradients, strict=True):
                    values.sub_(gradient, alpha=rate)
    after = Fixed(network, {**weights, **{name: values.detach() for name, values in refined.items()}})
    if order.refine_part == "all":
        settle_norms(after, data)  # their statistics belong to other weights
    # A rate that is too large must not cost what was there before; false for NaN.
    if evaluate(after, data).loss <= loss_as_sent:
        return after
    settle_norms(sent, data)
    return sent


def _norms(text: str | None) -> Norms:
    if text == "generated":
        return "generated"
    if text == "local":
        return "local"
    raise WireError(f"norms: expected one of {', '.join(get_args(Norms))}, found {text!r}")
