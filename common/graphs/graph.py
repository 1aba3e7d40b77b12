"""The computation graph of a network: typed nodes, edges, and the owner of each parameter.

A graph hypernetwork reads nothing else of an architecture. The graph holds no weights and no data. In strategy `ghn` it
never leaves the client; in `ghn-server` it travels once, as the text that `to_json` writes.
"""

import graphlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import one_hot

from hyperbloom.common.config import Section
from hyperbloom.common.errors import ModelError, WireError
from hyperbloom.common.graphs.layer import LayerType
from hyperbloom.common.layout import Layout

# Bounds for what arrives over the wire; the deepest networks of torchvision have some 600 nodes.
MAX_NODES = 2048
MAX_EDGES = 8192
MAX_NAME = 200
MAX_TEXT = 4_000_000


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("expected printable characters")
    return name


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_printable)]


class _Told(Section):
    """A graph as `to_json` writes it: the text of each node's type and its parameters' names by role, edges, order."""

    nodes: Annotated[
        tuple[tuple[str, Annotated[dict[str, Name], Field(max_length=2)]], ...], Field(max_length=MAX_NODES)
    ]
    edges: Annotated[tuple[tuple[int, int], ...], Field(max_length=MAX_EDGES)]
    order: Annotated[tuple[Name, ...], Field(max_length=2 * MAX_NODES)]


@dataclass(frozen=True)
class Node:
    """A node: its type, and pairs of role and name for the parameters that it owns.

    A layer that is called twice has two nodes. The first one owns the parameters.
    """

    type: LayerType
    parameters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Graph:
    """A directed acyclic graph of `Node`s.

    Args:
        nodes: in any order.
        edges: pairs of indices into `nodes`. The output of the first is an input of the second. A pair may repeat.
        order: names of all parameters in the order of the flat vector.

    Raises:
        ModelError: an edge has no node, there is a cycle, a parameter has not exactly one owner, there is not one input
            and one output, or the graph is too large.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    order: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.nodes) <= MAX_NODES or len(self.edges) > MAX_EDGES:
            found = f"{len(self.nodes)} nodes and {len(self.edges)} edges"
            raise ModelError(f"graph: expected up to {MAX_NODES} nodes and {MAX_EDGES} edges, found {found}")
        for kind in ("input", "output"):
            count = sum(node.type.kind == kind for node in self.nodes)
            if count != 1:
                raise ModelError(f"graph: expected one {kind} node, found {count}")
        if not self.order:
            raise ModelError("graph: expected a network with parameters, found none")
        for edge in self.edges:
            if not 0 <= min(edge) <= max(edge) < len(self.nodes):
                raise ModelError(f"graph: edge {edge} leads to no node of {len(self.nodes)}")
        try:
            graphlib.TopologicalSorter(self.inputs).prepare()
        except graphlib.CycleError as error:
            raise ModelError(f"graph: expected no circle, found nodes {error.args[1][:6]}") from None
        owned = [(name, role, node.type) for node in self.nodes for role, name in node.parameters]
        names = [name for name, _, _ in owned]
        for name, role, layer in owned:
            if role not in layer.roles:
                raise ModelError(f"graph: parameter {name[:60]!r}: a {layer} has no {role[:20]!r}")
        if sorted(names) != sorted(self.order) or len(set(names)) != len(names):
            odd = sorted(set(names) ^ set(self.order)) or sorted(n for n in set(names) if names.count(n) > 1)
            raise ModelError(f"graph: expected one owner and one place for every parameter, found {odd[:1]} without")

    @cached_property
    def inputs(self) -> Mapping[int, list[int]]:
        """The nodes whose outputs each node reads, by index."""
        inputs: dict[int, list[int]] = {index: [] for index in range(len(self.nodes))}
        for source, target in self.edges:
            inputs[target].append(source)
        return inputs

    @classmethod
    def from_json(cls, text: str, max_parameters: int) -> "Graph":
        """Read the JSON of `to_json` from an untrusted sender, for layers of at most `max_parameters`.

        Raises:
            WireError: the text is no JSON of a graph, or the graph is invalid or too large.
        """
        if len(text) > MAX_TEXT:
            raise WireError(f"graph: expected at most {MAX_TEXT} characters, found {len(text)}")
        told = _Told.from_wire(text, "graph")
        try:
            nodes = tuple(Node(LayerType.parse(layer), tuple(named.items())) for layer, named in told.nodes)
            graph = cls(nodes, told.edges, told.order)
        except ModelError as error:
            raise WireError(str(error)) from None
        total = sum(node.type.numel for node in graph.nodes)
        if total > max_parameters:
            raise WireError(f"graph: expected at most {max_parameters} parameters, found {total}")
        if graph.to_json() != text:  # it is kept, and one graph must be one text
            raise WireError("graph: expected the text that to_json writes")
        return graph

    def to_json(self) -> str:
        """Return the graph as one line of JSON; equal graphs give equal text."""
        nodes = [[str(node.type), dict(node.parameters)] for node in self.nodes]
        return json.dumps({"nodes": nodes, "edges": self.edges, "order": self.order}, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Short hash. Clients with equal hashes can share one pass through the hypernetwork."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of all parameters, in order."""
        shapes = {name: node.type.shape(role) for node in self.nodes for role, name in node.parameters}
        return Layout(tuple((name, shapes[name]) for name in self.order))

    @cached_property
    def head(self) -> tuple[str, ...]:
        """Names of the parameters nearest to the output, which form the prediction head."""
        near = [index for index, node in enumerate(self.nodes) if node.type.kind == "output"]
        while not (found := sorted(name for index in near for _, name in self.nodes[index].parameters)):
            near = sorted({source for index in near for source in self.inputs[index]})
            if not near:
                raise ModelError("graph: expected parameters on the way to the output, found none")
        return tuple(found)

    @cached_property
    def types(self) -> tuple[LayerType, ...]:
        """The distinct types of the nodes, sorted by their text."""
        return tuple(sorted({node.type for node in self.nodes}, key=str))

    @cached_property
    def groups(self) -> Mapping[LayerType, tuple[int, ...]]:
        """Nodes that own parameters, by type, in the order of their parameters."""
        place = {name: index for index, name in enumerate(self.order)}
        owners = [index for index, node in enumerate(self.nodes) if node.parameters]
        owners.sort(key=lambda index: min(place[name] for _, name in self.nodes[index].parameters))
        members: dict[LayerType, list[int]] = {}
        for index in owners:
            members.setdefault(self.nodes[index].type, []).append(index)
        return {layer: tuple(members[layer]) for layer in sorted(members, key=str)}

    @cached_property
    def one_hot(self) -> Tensor:
        """One-hot types of the nodes, `(n, T)`: row `i` marks the type of node `i` among `types`."""
        place = {layer: index for index, layer in enumerate(self.types)}
        return one_hot(torch.tensor([place[node.type] for node in self.nodes]), len(self.types)).float()

    @cached_property
    def adjacency(self) -> Tensor:
        """Numbers of edges between two nodes in both directions, `(n, n)`, symmetric."""
        counts = torch.zeros(len(self.nodes), len(self.nodes))
        for source, target in self.edges:
            counts[source, target] += 1
            counts[target, source] += 1
        return counts

    def render(self) -> str:
        """Return the graph as a table with a line for each node: its type, its inputs and its parameters."""
        rows = [("node", "type", "inputs", "parameters")]
        for index, node in enumerate(self.nodes):
            owned = [f"{name} ({'x'.join(map(str, node.type.shape(role)))})" for role, name in node.parameters]
            rows.append((str(index), str(node.type), ",".join(map(str, self.inputs[index])), ", ".join(owned)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        summary = f"{len(self.nodes)} nodes, {len(self.edges)} edges, {len(self.types)} types"
        return "\n".join([*(line.rstrip() for line in lines), f"{summary}, {self.layout.numel:,} parameters"])
