"""Graphs: their text on the wire and on the screen, and what hostile text does."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from hyperbloom.common.errors import ModelError, WireError
from hyperbloom.common.graphs import Graph, LayerType, Node, trace
from hyperbloom.common.graphs import graph as module


class Residual(nn.Module):
    """Two convolutions of one type, the second one with a skip around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = (x + self.conv2(x)).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


GRAPH = trace(Residual(), (3, 4, 4))

TABLE = """\
node  type              inputs  parameters
0     input
1     conv2d 3,3 k3x3 w  0       conv1.weight (3x3x3x3)
2     conv2d 3,3 k3x3 w  1       conv2.weight (3x3x3x3)
3     add +relu          1,2
4     mean               3
5     linear 3,2 wb      4       head.weight (2x3), head.bias (2)
6     output             5
7 nodes, 7 edges, 6 types, 170 parameters"""


def test_the_table_shows_nodes_edges_and_owners() -> None:
    assert GRAPH.render().splitlines()[1:] == TABLE.splitlines()[1:]
    assert GRAPH.render().split()[:4] == ["node", "type", "inputs", "parameters"]
    assert trace(Residual(), (3, 4, 4)).render() == GRAPH.render()


def test_the_text_of_a_graph_comes_back_as_the_graph() -> None:
    text = GRAPH.to_json()
    assert "\n" not in text
    again = Graph.from_json(text, 2**28)
    assert again == GRAPH
    assert again.to_json() == text
    assert again.digest == GRAPH.digest
    assert again.layout == GRAPH.layout


def test_the_head_is_what_is_nearest_to_the_output_however_nodes_are_listed() -> None:
    assert GRAPH.head == ("head.bias", "head.weight")
    last = len(GRAPH.nodes) - 1
    edges = tuple((last - source, last - target) for source, target in GRAPH.edges)
    assert Graph(GRAPH.nodes[::-1], edges, GRAPH.order).head == GRAPH.head
    plain = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Flatten()), (2,))
    assert plain.head == ("2.weight",)
    two = Graph(
        (
            Node(LayerType("input")),
            Node(LayerType.parse("linear 2,2 w"), (("weight", "a"),)),
            Node(LayerType("output")),
        ),
        ((0, 1), (0, 2)),
        ("a",),
    )
    with pytest.raises(ModelError, match="graph: expected parameters on the way to the output, found none"):
        _ = two.head


def test_equal_layers_of_two_networks_have_one_digest_and_another_edge_another() -> None:
    fewer = Graph(GRAPH.nodes, GRAPH.edges[:-1], GRAPH.order)
    assert trace(Residual(), (3, 4, 4)).digest == GRAPH.digest != fewer.digest


def test_types_and_groups() -> None:
    conv, linear = LayerType.parse("conv2d 3,3 k3x3 w"), LayerType.parse("linear 3,2 wb")
    assert [str(layer) for layer in GRAPH.types] == sorted(
        ["input", str(conv), "add +relu", "mean", str(linear), "output"]
    )
    assert GRAPH.groups == {conv: (1, 2), linear: (5,)}


def test_groups_follow_the_parameters_not_the_listing() -> None:
    nodes = (GRAPH.nodes[0], GRAPH.nodes[2], GRAPH.nodes[1], *GRAPH.nodes[3:])
    swapped = Graph(nodes, tuple((_swap(a), _swap(b)) for a, b in GRAPH.edges), GRAPH.order)
    assert swapped.groups[LayerType.parse("conv2d 3,3 k3x3 w")] == (2, 1)


def _swap(index: int) -> int:
    return {1: 2, 2: 1}.get(index, index)


def test_the_matrices() -> None:
    assert GRAPH.one_hot.sum(1).tolist() == [1] * 7
    assert [GRAPH.types[i] for i in GRAPH.one_hot.argmax(1)] == [node.type for node in GRAPH.nodes]
    expected = torch.zeros(7, 7)
    for a, b in [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6)]:
        expected[a, b] = expected[b, a] = 1
    assert torch.equal(GRAPH.adjacency, expected)


def changed(**values: Any) -> str:
    """Return the graph's JSON with some parts replaced."""
    return json.dumps({**json.loads(GRAPH.to_json()), **values})


NODES: list[Any] = json.loads(GRAPH.to_json())["nodes"]
EDGES: list[Any] = json.loads(GRAPH.to_json())["edges"]
ORDER: list[Any] = json.loads(GRAPH.to_json())["order"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph: Invalid JSON: EOF while parsing"),
        ("[" * 100_000, "graph: Invalid JSON: recursion limit exceeded"),
        ("{}", "graph.nodes: Field required"),
        ("[]", "graph: Input should be an object"),
        (changed(more=1), "graph.more: Extra inputs are not permitted"),
        (changed(nodes={}), "graph.nodes: Input should be a valid array"),
        (changed(nodes=[]), "expected up to 2048 nodes"),
        (changed(nodes=[3, *NODES]), "graph.nodes.0: Input should be a valid array"),
        (changed(nodes=[["input"], *NODES]), "graph.nodes.0.1: Field required"),
        (changed(nodes=[["input", []], *NODES]), "graph.nodes.0.1: Input should be an object"),
        (changed(nodes=[["rm -rf", {}], *NODES]), "layer type: expected text such as"),
        (changed(nodes=[["add", {"weight": "w"}], *NODES]), "parameter 'w': a add has no 'weight'"),
        (changed(nodes=[*NODES, ["input", {}]]), "graph: expected one input node, found 2"),
        (changed(nodes=[*NODES[:-1], ["add", {}]]), "graph: expected one output node, found 0"),
        (changed(nodes=[["conv2d 3,3 k3x3 w", {"weight": 7}], *NODES]), "weight: Input should be a valid string"),
        (changed(nodes=[["conv2d 3,3 k3x3 w", {"weight": "a\nb"}], *NODES]), "expected printable"),
        (changed(nodes=[["conv2d 3,3 k3x3 w", {"weight": "a" * 201}], *NODES]), "weight: String should have"),
        (
            changed(nodes=[*NODES, ["conv2d 3,3 k3x3 w", {"weight": "conv1.weight"}]]),
            "expected one owner and one place for every parameter, found ['conv1.weight']",
        ),
        (
            changed(
                nodes=[*NODES, ["conv2d 3,3 k3x3 w", {"weight": "conv1.weight"}]], order=[*ORDER, "conv1.weight"]
            ),
            "expected one owner and one place for every parameter, found ['conv1.weight']",
        ),
        (changed(nodes=[*NODES, ["add", {}]] * 400), "graph.nodes: Tuple should have at most 2048"),
        (changed(edges=[[0, 1]] * 9000), "graph.edges: Tuple should have at most 8192"),
        (changed(edges=[[0, 7]]), "graph: edge (0, 7) leads to no node of 7"),
        (changed(edges=[[-1, 0]]), "graph: edge (-1, 0) leads to no node of 7"),
        (changed(edges=[[0, 1, 2]]), "graph.edges.0: Tuple should have at most 2"),
        (changed(edges=[[0, True]]), "graph.edges.0.1: Input should be a valid integer"),
        (changed(edges=[[0, 1.0]]), "graph.edges.0.1: Input should be a valid integer"),
        (changed(edges=[*EDGES, [3, 1]]), "graph: expected no circle"),
        (changed(edges=[[2, 2]]), "graph: expected no circle"),
        (changed(order=ORDER[1:]), "expected one owner and one place for every parameter, found ['conv1.weight']"),
        (changed(order=[*ORDER, "extra"]), "expected one owner and one place for every parameter, found ['extra']"),
        (changed(order=[*ORDER, ORDER[0]]), "expected one owner and one place for every parameter"),
        (changed(order=[*ORDER, None]), "graph.order.4: Input should be a valid string"),
        (changed(order=["a"] * 5000), "graph.order: Tuple should have at most 4096"),
        (changed(order=[]), "graph: expected a network with parameters, found none"),
        (
            changed(nodes=[*NODES, ["conv3d 65536,65536 k65536x65536x65536 w", {}]]),
            "graph: expected at most 268435456 parameters, found 12089258196146291",
        ),
    ],
)  # fmt: skip
def test_hostile_graphs_are_refused(text: str, message: str) -> None:
    with pytest.raises(WireError) as caught:
        Graph.from_json(text, 2**28)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_long_text_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT", 10)
    with pytest.raises(WireError, match=r"^graph: expected at most 10 characters, found "):
        Graph.from_json(GRAPH.to_json(), 2**28)


def test_one_graph_is_one_text() -> None:
    """The server keeps the text of each client; blanks would fill its memory."""
    with pytest.raises(WireError, match=r"^graph: expected the text that to_json writes$"):
        Graph.from_json(GRAPH.to_json() + " ", 2**28)


def test_the_server_sets_how_many_parameters_it_takes() -> None:
    assert Graph.from_json(GRAPH.to_json(), max_parameters=170) == GRAPH
    with pytest.raises(WireError, match=r"^graph: expected at most 169 parameters, found 170$"):
        Graph.from_json(GRAPH.to_json(), max_parameters=169)


def test_a_graph_that_is_built_wrongly_is_a_model_error() -> None:
    layer = Node(LayerType("linear", (2, 2), roles=("bias",)), (("bias", "b"),))
    nodes = (Node(LayerType("input")), layer, Node(LayerType("output")))
    assert Graph(nodes, ((0, 1), (1, 2)), ("b",)).layout.numel == 2
    with pytest.raises(ModelError, match="expected no circle"):
        Graph(nodes, ((0, 1), (1, 0)), ("b",))
