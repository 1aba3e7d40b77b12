"""The graph hypernetwork of HAFL-GHN, which generates all parameters of a network from its computation graph.

It is that of the paper's section 4.2 and appendix C (strategies/ghn.py).

    x_i   = one-hot of the type of node i                                                  (T,)
    x_i' <- norm(relu(W1 x_i + W2 sum_{j in N(i)} x_j + b))   GraphConv, `layers` times    (d,)
    h_i   = norm(leaky_relu(U_t x_i + c_t)) / sqrt(m)                                      (m,)
    w_i   = (S_t h_i + s_t) * (V_t h_i + v_t)             t: type of node i; separate scale and weight

`N(i)` are the neighbours in both directions, because a layer's task also depends on the layers after it. `norm`
centres a vector and scales it to unit variance. Every operation except the sum over `N(i)` reads one node only. A
layer's weights therefore depend only on its neighbourhood of `layers` hops, which carries over to unseen architectures.

The paper does not give all factors and sizes. This version departs from it in three points:

* The two norms. Without the first, sums after ReLU point all nodes in nearly one direction. Layers of one type then
  start with nearly the same weights and move together, because only their neighbours distinguish them. `W2` starts
  three times as large as `W1` for the same reason. (Mean cosine between the inner layers of a plain CNN of 4 layers
  under 4 GraphConvs: 0.98 with neither, 0.75 with both.) With the second norm, `|h_i| = 1`, and `V_t` drawn from
  `N(0, 2 / fan_in)` with zero `v_t` gives weights of Kaiming variance for every graph. Without it, the norm of a narrow
  random layer varies by tens of percent between nodes. A gradient step on `V_t` then also moves the weights of a single
  node of its type like the same step on the weights, so learning rates of the target network keep their meaning.
  No ReLU follows the linear maps of attention and recurrent cells: their variance is `1 / fan_in`.
* The scale has one factor per row of the weight and starts at one. Biases start at zero, weights of norms and
  factors at one, other parameters outside a layer with the deviation 0.02 of published transformers' tables.
* `tile`: as in GHN-2 (Knyazev et al., 2021, https://arxiv.org/abs/2110.13100) a block of at most `tile` x `tile`
  channels is generated and repeated. The scale has one factor per row and block of columns, with random initial signs,
  because repeated rows would otherwise stay equal forever.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hyperbloom.common.config import Section
from hyperbloom.common.errors import ModelError
from hyperbloom.common.graphs.graph import Graph
from hyperbloom.common.graphs.layer import CELLS, SHAPED, LayerType
from hyperbloom.common.layout import Layout
from hyperbloom.common.seeds import derive

Mode = Literal["graph", "no-graph", "linear"]
SHARED = "gnn"
"""Name of the part that every architecture needs. The text of a layer type names every other part."""

LARGEST_SETTING = 4096
Size = Annotated[int, Field(ge=1, le=LARGEST_SETTING)]
Width = Annotated[int, Field(ge=2, le=LARGEST_SETTING)]  # a norm needs two numbers

_STARTS = {"prelu": (0.0, 0.25), "parameter": (0.02, 0.0)}  # deviation and mean; other shaped kinds are constantly one
NORM_EPSILON = 1e-8  # far below the variance after leaky ReLU of a narrow, all-negative layer
NEIGHBOURS = 3.0
"""Initial size of `W2` relative to `W1`."""


class Settings(Section):
    """The settings that determine the shapes of a graph hypernetwork; `latent` is d, and `hidden` is m.

    Without messages (`no-graph`) all layers of one type have the same weights. `linear` replaces message passing by the
    one-hot place of a layer among those of its type, and the MLPs by linear maps `V_t x_i`. If all have equally many
    layers of a type, averaging hypernetworks averages weights. The authors searched layers 1-8, d 16-128, m 16-64.
    """

    mode: Mode = Field("graph", description="graph; no-graph: without messages (ablation); linear: FedAvg by type")
    layers: Size = Field(4, description="GraphConv layers of the hypernetwork")
    latent: Width = Field(64, description="width of a node's latent vector; linear: most layers of one type")
    hidden: Width = Field(16, description="width between the two layers of a decoder; traffic of ghn grows with it")
    tile: Size | None = Field(None, description="generate blocks of so many channels and repeat them (GHN-2)")


def part_of(parameter: str) -> str:
    """Return the part of the `GraphHypernetwork` parameter with this name."""
    first, _, rest = parameter.partition(".")
    return first if first == SHARED else rest.rpartition(".")[0]


class GraphHypernetwork(nn.Module):
    """One message-passing network, and one decoder for each layer type.

    Each parameter belongs to one part: `gnn`, or the part of a layer type, which holds the type's rows of the first
    layer's `W1` and `W2`, and its decoder. Only the seed and the name of a part determine its initial values, so server
    and clients initialise a new type alike.

    Args:
        types: layer types to serve; `grow` adds more.
        seed: seed of the initial values; None gives zeros, for a copy that loads values next.

    Shape:
        a graph to `(graph.layout.numel,)`.
    """

    def __init__(self, types: Iterable[LayerType], settings: Settings, seed: int | None = 0) -> None:
        super().__init__()
        self.settings, self.seed = settings, seed
        self.gnn = _MessagePassing(settings, _generator(seed, SHARED))
        self.types = nn.ModuleDict()
        self.grow(types)

    def grow(self, types: Iterable[LayerType]) -> None:
        """Add parts for the layer types that have none yet."""
        for layer in sorted(set(types), key=str):
            if str(layer) not in self.types:
                self.types[str(layer)] = _TypePart(layer, self.settings, _generator(self.seed, str(layer)))

    @staticmethod
    def sketch(types: Iterable[LayerType], settings: Settings, most: int) -> "GraphHypernetwork":
        """Return a hypernetwork without values, on torch's meta device; ModelError for over `most` parameters."""
        types = list(types)
        # Count what it writes first, in Python, because products of the lengths may overflow torch's integers. `tile`
        # makes the hypernetwork smaller than that, the other settings at most 4096 times larger.
        numel = sum(layer.numel for layer in types)
        if numel <= 2**40:
            with torch.device("meta"):
                made = GraphHypernetwork(types, settings, seed=None)
            numel = sum(parameter.numel() for parameter in made.parameters())
        if numel > most:
            raise ModelError(f"graph hypernetwork: expected at most {most:,} parameters, found {numel:,}")
        return made

    def forward(self, graph: Graph) -> Tensor:
        """Return all parameters `(graph.layout.numel,)` of the network; ModelError if a type has no part."""
        if missing := [str(layer) for layer in graph.types if str(layer) not in self.types]:
            raise ModelError(f"graph hypernetwork: expected a part for each layer type, found none for {missing[0]!r}")
        latents = self._latents(graph)
        made: dict[str, Tensor] = {}
        for layer, nodes in graph.groups.items():
            part: _TypePart = self.types[str(layer)]  # type: ignore[assignment]
            # One product for all layers of a type. `unbind`, because each single row that is indexed adds a mostly
            # empty matrix to the gradient.
            rows = {role: values.unbind() for role, values in part(latents[list(nodes)]).items()}
            for row, node in enumerate(nodes):
                made |= {name: rows[role][row] for role, name in graph.nodes[node].parameters}
        return torch.cat([made[name].reshape(-1) for name in graph.order])

    def _latents(self, graph: Graph) -> Tensor:
        if self.settings.mode == "linear":
            return self._places(graph)
        parts: list[_TypePart] = [self.types[str(layer)] for layer in graph.types]  # type: ignore[misc]
        rows = torch.stack([part.features for part in parts])  # (T, 2, d)
        return self.gnn(rows, graph.one_hot.to(rows), graph.adjacency.to(rows))

    def _places(self, graph: Graph) -> Tensor:
        latents = next(self.types.parameters()).new_zeros(len(graph.nodes), self.settings.latent)
        for layer, nodes in graph.groups.items():
            if len(nodes) > self.settings.latent:
                found = f"{len(nodes)} of {layer}"
                raise ModelError(f"latent: expected at least as many as layers of one type, found {found}")
            latents[list(nodes), range(len(nodes))] = 1
        return latents

    def layout(self, types: Iterable[LayerType]) -> Layout:
        """Return the layout of a copy with the shared part and the parts of `types`; ModelError if one has no part."""
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for part in (SHARED, *sorted(map(str, set(types)))):
            prefix = SHARED if part == SHARED else f"types.{part}"
            shapes += [(f"{prefix}.{name}", shape) for name, shape in Layout.of(self._part(part)).shapes]
        return Layout(tuple(shapes))

    def parts(self) -> tuple[str, ...]:
        """Return the names of all parts: the shared one, then the types sorted by their text."""
        return (SHARED, *sorted(self.types))

    def read_part(self, part: str) -> Tensor:
        """Return a copy of a part's parameters `(P,)` on the CPU; ModelError if there is no such part."""
        module = self._part(part)
        parameters = dict(module.named_parameters())
        return Layout.of(module).flatten(parameters).cpu() if parameters else torch.empty(0)

    def load_part(self, part: str, values: Tensor) -> None:
        """Load the values of a part `(P,)`; ModelError if it has another length, or there is no part."""
        module = self._part(part)
        layout = Layout.of(module)
        if tuple(values.shape) != (layout.numel,):
            raise ModelError(f"part {part!r}: expected {layout.numel} values, found shape {tuple(values.shape)}")
        module.load_state_dict(layout.views(values))

    def _part(self, part: str) -> nn.Module:
        if part == SHARED:
            return self.gnn
        if part not in self.types:
            raise ModelError(f"part: expected one of {', '.join(self.parts())}, found {part!r}")
        return self.types[part]


class _MessagePassing(nn.Module):
    """GraphConv layers over latents. The first one reads one-hot types, and its weights belong to the types' parts."""

    def __init__(self, settings: Settings, generator: torch.Generator | None) -> None:
        super().__init__()
        d, self.messages = settings.latent, settings.mode == "graph"
        count = 0 if settings.mode == "linear" else settings.layers
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(d)) for _ in range(count))
        self.roots = nn.ParameterList(_normal((d, d), d**-0.5, generator) for _ in range(count - 1))
        neighbours = count - 1 if self.messages else 0
        self.neighbours = nn.ParameterList(_normal((d, d), NEIGHBOURS * d**-0.5, generator) for _ in range(neighbours))

    def forward(self, rows: Tensor, one_hot: Tensor, adjacency: Tensor) -> Tensor:
        """Return latents `(n, d)` from type features `(T, 2, d)`, one-hot types `(n, T)` and adjacency `(n, n)`."""
        own, others = one_hot @ rows[:, 0], one_hot @ rows[:, -1]  # (n, d)
        for layer, bias in enumerate(self.biases):
            sums = own + adjacency @ others if self.messages else own
            latents = F.layer_norm((sums + bias).relu(), bias.shape, eps=NORM_EPSILON)
            if layer < len(self.roots):
                own = latents @ self.roots[layer]
            if layer < len(self.neighbours):
                others = latents @ self.neighbours[layer]
        return latents


class _TypePart(nn.Module):
    """The part of one layer type: its features, and if it has parameters, a decoder to `(N, *layer.shape(role))`."""

    def __init__(self, layer: LayerType, settings: Settings, generator: torch.Generator | None) -> None:
        super().__init__()
        self.layer, self.linear = layer, settings.mode == "linear"
        self.blocks = _blocks(layer, settings)
        d, m = settings.latent, settings.latent if self.linear else settings.hidden
        if not self.linear:
            # The type's columns of the first layer's W1 (its own message) and W2 (its message to neighbours).
            self.features = _normal((2 if settings.mode == "graph" else 1, d), 1.0, generator)
            with torch.no_grad():
                self.features[1:] *= NEIGHBOURS
        if not self.blocks:
            return
        if not self.linear:
            self.hidden_weight = _normal((m, d), d**-0.5, generator)
            self.hidden_bias = nn.Parameter(torch.zeros(m))
        # Stack the heads of weight, scale and bias, so that one product generates a whole layer.
        self.weight = _normal((sum(math.prod(block.shape) for block in self.blocks), m), 1.0, generator)
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if not self.linear else None
        self._start(generator)

    @torch.no_grad()
    def _start(self, generator: torch.Generator | None) -> None:
        """Scale the heads so that generated tensors start with the variances and constants of their blocks."""
        if generator is None:
            return
        heads = zip(self.blocks, self.weight.split([math.prod(block.shape) for block in self.blocks]), strict=True)
        start = 0
        for block, head in heads:
            head *= block.deviation
            constant = torch.full((len(head),), block.start)
            if block.signs:
                constant *= torch.randint(2, constant.shape, generator=generator) * 2 - 1
            if self.bias is None:
                head += constant[:, None]
            else:
                self.bias[start : start + len(head)] = constant
            start += len(head)

    def forward(self, latents: Tensor) -> dict[str, Tensor]:
        """Return the parameters of `N` layers of this type by role, from latents `(N, d)`."""
        if self.bias is None:
            out = latents @ self.weight.T  # (N, all)
        else:
            hidden = F.leaky_relu(F.linear(latents, self.hidden_weight, self.hidden_bias))
            hidden = F.layer_norm(hidden, self.hidden_bias.shape, eps=NORM_EPSILON) * len(self.hidden_bias) ** -0.5
            out = F.linear(hidden, self.weight, self.bias)
        pieces = out.split([math.prod(block.shape) for block in self.blocks], dim=1)
        made = {block.name: p.reshape(len(p), *block.shape) for block, p in zip(self.blocks, pieces, strict=True)}
        if "scale" in made:
            made["weight"] = _assemble(made["weight"], made.pop("scale"), self.layer.shape("weight"))
        return made


@dataclass(frozen=True)
class _Block:
    """A block of a decoder's outputs: its name, its shape and its initial values."""

    name: str
    shape: tuple[int, ...]
    deviation: float = 0.0
    start: float = 0.0
    signs: bool = False


def _blocks(layer: LayerType, settings: Settings) -> tuple[_Block, ...]:
    blocks = []
    for role in layer.roles:
        shape = layer.shape(role)
        if role == "bias":
            blocks.append(_Block(role, shape))
        elif layer.kind in SHAPED:
            blocks.append(_Block(role, shape, *_STARTS.get(layer.kind, (0.0, 1.0))))
        elif settings.mode == "linear":
            blocks.append(_Block(role, shape, _deviation(layer)))
        else:
            block = (*(min(side, settings.tile or side) for side in shape[:2]), *shape[2:])
            rows, columns = (-(-whole // part) for whole, part in zip(shape[:2], block[:2], strict=True))
            blocks.append(_Block(role, block, _deviation(layer)))
            blocks.append(_Block("scale", (rows * block[0], columns), start=1.0, signs=block != shape))
    return tuple(blocks)


def _deviation(layer: LayerType) -> float:
    return math.sqrt((1 if layer.kind in CELLS else 2) / layer.fan_in)


def _assemble(block: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Tile blocks `(N, r, c, ...)`, scaled by `(N, R r, C)`, to `(N, *shape)`: `R` rows and `C` columns of blocks."""
    count, side, *_ = block.shape
    tiled = block[:, None, :, None] * scale.view(count, -1, side, scale.shape[2], 1, *(1 for _ in shape[2:]))
    return tiled.flatten(3, 4).flatten(1, 2)[:, : shape[0], : shape[1]]


def _generator(seed: int | None, part: str) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(derive(seed, "graph hypernetwork", part))


def _normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator | None) -> nn.Parameter:
    """Draw a parameter on the CPU, so that it is the same on every device; zeros without a generator."""
    if generator is None:
        return nn.Parameter(torch.zeros(shape))
    return nn.Parameter(torch.randn(shape, generator=generator).mul_(deviation))
