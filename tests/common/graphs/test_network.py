"""The graph hypernetwork against a slow reading of its formulas, and the properties that it must have."""

import hashlib
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from hyperbloom.common.errors import ModelError, WireError
from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, LayerType, Node, Settings, part_of, trace
from hyperbloom.common.graphs.layer import CELLS, NORMS
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build

BOTH = ("weight", "bias")
SMALL = Settings(layers=3, latent=8, hidden=6)


class Net(nn.Module):
    """Three convolutions of one type, a norm, and perhaps a skip around the second one."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.conv3 = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv1(x)).relu()
        y = self.conv2(x)
        y = self.conv3(y + x if self.skip else y)
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


SKIP, CHAIN = trace(Net(True), (4, 6, 6)), trace(Net(False), (4, 6, 6))


def ghn(graph: Graph, settings: Settings = SMALL, seed: int = 0) -> GraphHypernetwork:
    """Return a hypernetwork in double precision for the types of one graph, none of its parameters at zero."""
    network = GraphHypernetwork(graph.types, settings, seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    return network


# ---------------------------------------------------------------------- the formulas, node by node


def norm(x: Tensor) -> Tensor:
    x = x - x.mean()
    return x / torch.sqrt((x * x).mean() + 1e-8)


def slowly(network: GraphHypernetwork, graph: Graph) -> Tensor:
    """Return the flat parameters: formulas of the module's docstring, one node, edge and weight at a time."""
    gnn, part = network.gnn, {str(layer): network.types[str(layer)] for layer in graph.types}
    near: list[list[int]] = [[] for _ in graph.nodes]
    for a, b in graph.edges:
        near[a].append(b)
        near[b].append(a)
    zero = torch.zeros(network.settings.latent, dtype=torch.float64)
    feature = [part[str(node.type)].features for node in graph.nodes]
    x = [  # layer 1
        norm((feature[i][0] + sum((feature[j][1] for j in near[i]), zero) + gnn.biases[0]).relu())
        for i in range(len(near))
    ]
    for layer in range(1, network.settings.layers):
        w1, w2, b = gnn.roots[layer - 1], gnn.neighbours[layer - 1], gnn.biases[layer]
        x = [norm((x[i] @ w1 + sum((x[j] @ w2 for j in near[i]), zero) + b).relu()) for i in range(len(near))]
    made: dict[str, Tensor] = {}
    for i, node in enumerate(graph.nodes):
        if not node.parameters:
            continue
        p = part[str(node.type)]
        h = norm(F.leaky_relu(p.hidden_weight @ x[i] + p.hidden_bias)) / math.sqrt(network.settings.hidden)
        numbers = iter(p.weight @ h + p.bias)
        for role in node.type.roles:
            shape = node.type.shape(role)
            if role == "bias" or node.type.kind in NORMS:
                value = torch.stack([next(numbers) for _ in range(shape[0])])
            else:
                value = one_weight(numbers, shape, network.settings.tile)
            made[dict(node.parameters)[role]] = value
    return torch.cat([made[name].reshape(-1) for name in graph.order])


def one_weight(numbers: Iterator[Tensor], shape: tuple[int, ...], tile: int | None) -> Tensor:
    """Read a block and its scales, and put the weight together channel by channel."""
    r, c = (min(side, tile or side) for side in shape[:2])
    rows, columns = math.ceil(shape[0] / r), math.ceil(shape[1] / c)
    count = r * c * math.prod(shape[2:])
    block = torch.stack(list(itertools.islice(numbers, count))).view(r, c, *shape[2:])
    scale = torch.stack(list(itertools.islice(numbers, rows * r * columns))).view(rows * r, columns)
    out = torch.empty(shape, dtype=torch.float64)
    for o, i in itertools.product(range(shape[0]), range(shape[1])):
        out[o, i] = block[o % r, i % c] * scale[o, i // c]
    return out


@pytest.mark.parametrize("tile", [None, 2, 3, 100])
@pytest.mark.parametrize("graph", [SKIP, CHAIN], ids=["skip", "chain"])
def test_it_computes_the_formulas(graph: Graph, tile: int | None) -> None:
    network = ghn(graph, Settings(layers=3, latent=8, hidden=6, tile=tile))
    assert torch.allclose(network(graph), slowly(network, graph), rtol=0, atol=1e-12)


def test_a_bias_norm_and_weight_have_their_places() -> None:
    network = GraphHypernetwork(SKIP.types, SMALL)
    made = SKIP.layout.views(network(SKIP).detach())
    assert made["norm.weight"].tolist() == [1] * 4
    for name in ("norm.bias", "conv1.bias", "head.bias"):
        assert not made[name].any()
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        name: tuple(value.shape) for name, value in Net(True).named_parameters()
    }


# ---------------------------------------------------------------------- listing, edges, reach


def shuffled(graph: Graph, seed: int) -> Graph:
    """Return the same graph with nodes and edges listed in another order."""
    rng = random.Random(seed)
    order = rng.sample(range(len(graph.nodes)), len(graph.nodes))
    place = {old: new for new, old in enumerate(order)}
    edges = [(place[a], place[b]) for a, b in graph.edges]
    rng.shuffle(edges)
    return Graph(tuple(graph.nodes[old] for old in order), tuple(edges), graph.order)


@pytest.mark.parametrize("mode", ["graph", "no-graph", "linear"])
def test_weights_do_not_depend_on_the_order_in_which_nodes_are_listed(mode: str) -> None:
    network = ghn(SKIP, Settings(mode=mode, layers=3, latent=8, hidden=6))  # type: ignore[arg-type]
    expected = network(SKIP)
    for seed in range(5):
        other = shuffled(SKIP, seed)
        assert other != SKIP
        assert torch.allclose(network(other), expected, rtol=0, atol=1e-12)


def test_layers_of_one_type_get_weights_of_their_own() -> None:
    # Without this, the test above would pass for a network that ignores the graph.
    made = SKIP.layout.views(ghn(SKIP)(SKIP))
    assert (made["conv1.weight"] - made["conv2.weight"]).abs().max() > 0.01
    assert (made["conv2.weight"] - made["conv3.weight"]).abs().max() > 0.01


def one_skip() -> tuple[Graph, Graph]:
    """Return two graphs of the same nodes: the second one has one edge more."""
    base = Graph(CHAIN.nodes, CHAIN.edges, CHAIN.order)
    kinds = [node.type.kind for node in base.nodes]
    return base, Graph(base.nodes, (*base.edges, (kinds.index("batchnorm"), len(kinds) - 3)), base.order)


def test_one_skip_connection_gives_other_weights() -> None:
    base, skip = one_skip()
    network = ghn(base)
    before, after = (base.layout.views(network(graph)) for graph in (base, skip))
    for name in ("conv1.weight", "conv2.weight", "conv3.weight"):
        assert (before[name] - after[name]).abs().max() > 1e-3, name


def test_a_traced_skip_gives_other_weights_and_without_messages_it_does_not() -> None:
    layers = sorted({*SKIP.types, *CHAIN.types}, key=str)
    for mode, differs in (("graph", True), ("no-graph", False)):
        settings = Settings(mode=mode, layers=3, latent=8, hidden=6)  # type: ignore[arg-type]
        network = GraphHypernetwork(layers, settings).double()
        chain, skip = (graph.layout.views(network(graph)) for graph in (CHAIN, SKIP))
        assert bool((chain["conv2.weight"] != skip["conv2.weight"]).any()) == differs


def test_a_change_is_felt_as_many_hops_away_as_there_are_layers() -> None:
    conv, relu = LayerType("conv1d", (2, 2), (1,), roles=("weight",)), LayerType("act", activation="relu")
    nodes = [
        Node(LayerType("input")),
        *(Node(conv, (("weight", f"{i}"),)) for i in range(6)),
        Node(LayerType("output")),
    ]
    changed = [*nodes[:-1], Node(relu), nodes[-1]]  # an activation behind the last convolution
    graphs = [
        Graph(tuple(each), tuple((i, i + 1) for i in range(len(each) - 1)), tuple(map(str, range(6))))
        for each in (nodes, changed)
    ]
    network = ghn(graphs[1], Settings(layers=3, latent=16, hidden=16))
    before, after = (graph.layout.views(network(graph)) for graph in graphs)
    felt = [bool((before[str(i)] - after[str(i)]).abs().max() > 1e-9) for i in range(6)]
    assert felt == [False, False, False, True, True, True]


def test_without_messages_one_type_has_one_set_of_weights() -> None:
    network = ghn(SKIP, Settings(mode="no-graph", layers=3, latent=8, hidden=6))
    made = SKIP.layout.views(network(SKIP))
    assert torch.equal(made["conv1.weight"], made["conv2.weight"])
    assert made["conv1.weight"].std() > 0


# ---------------------------------------------------------------------- Kaiming variance

LAYERS = [
    LayerType("linear", (60, 50), roles=BOTH),
    LayerType("linear", (50, 40), roles=("weight",), activation="relu"),
    LayerType("conv1d", (40, 30), (5,), roles=BOTH),
    LayerType("conv2d", (30, 48), (3, 3), (2, 2), (2, 2), roles=BOTH),
    LayerType("conv2d", (48, 40), (1, 1), roles=BOTH, activation="silu"),
    LayerType("conv2d", (40, 40), (7, 7), groups=40, roles=BOTH),
    LayerType("conv2d", (40, 20), (5, 5), groups=4, roles=("weight",)),
    LayerType("conv3d", (20, 16), (2, 3, 3), roles=BOTH),
    LayerType("convtranspose1d", (16, 40), (4,), (2,), roles=BOTH),
    LayerType("convtranspose2d", (40, 16), (4, 4), (2, 2), roles=BOTH),
    LayerType("convtranspose3d", (16, 10), (2, 2, 2), (2, 2, 2), roles=BOTH),
    *[LayerType(kind, (48, 96), roles=BOTH) for kind in sorted(CELLS)],
    LayerType("parameter", (1, 50, 60), roles=("weight",)),
]


def test_a_factor_starts_at_one_and_queries_with_the_variance_of_their_inputs() -> None:
    factor, query = LayerType("factor", (4, 1), roles=("weight",)), LayerType("attentionin", (256, 768), roles=BOTH)
    nodes = Node(LayerType("input")), Node(factor, (("weight", "f"),)), Node(query, (("weight", "q"), ("bias", "b")))
    graph = Graph((*nodes, Node(LayerType("output"))), ((0, 1), (1, 2), (2, 3)), ("f", "q", "b"))
    made = graph.layout.views(GraphHypernetwork(graph.types, Settings())(graph).detach())
    assert made["f"].tolist() == [[1.0]] * 4
    outputs = F.linear(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), made["q"], made["b"])
    assert outputs.var().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("settings", [Settings(), Settings(layers=2, latent=128)], ids=str)
def test_what_neighbours_say_starts_three_times_as_large_as_what_a_node_says(settings: Settings) -> None:
    """In the first layer, whose rows belong to the types, and in all others."""
    network: Any = GraphHypernetwork(LAYERS, settings)
    own, others = torch.stack([network.types[str(layer)].features.detach() for layer in LAYERS]).unbind(1)
    pairs = [(own, others), *zip(network.gnn.roots, network.gnn.neighbours, strict=True)]
    assert len(pairs) == settings.layers
    for root, neighbour in pairs:
        says = float(root.detach().std())
        assert says == pytest.approx(1 if root is own else settings.latent**-0.5, rel=0.1)  # of 1,344 numbers or more
        assert float(neighbour.detach().std()) == pytest.approx(3 * says, rel=0.1)


def kaiming(network: GraphHypernetwork, graph: Graph) -> dict[str, float]:
    """Return the deviation of each generated weight over the wanted one; refuse anything but zero in a bias.

    It is `sqrt(2 / fan_in)`, without the 2 in attention and recurrent cells, and 0.02 outside a layer.
    """
    made = graph.layout.views(network(graph).detach())
    ratios = {}
    for node in graph.nodes:
        for role, name in node.parameters:
            if role == "bias":
                assert not made[name].any(), name
            elif node.type.kind in {*NORMS, "factor"}:
                assert bool((made[name] == 1).all()), name
            elif node.type.kind == "parameter":
                assert abs(made[name].mean().item()) < 0.002, name
                ratios[name] = made[name].std().item() / 0.02
            elif made[name].numel() > 900:
                ratios[name] = made[name].square().mean().sqrt().item() / math.sqrt(
                    (1 if node.type.kind in CELLS else 2) / node.type.fan_in
                )
    return ratios


@pytest.mark.parametrize("settings", [
    Settings(), Settings(hidden=64), Settings(layers=1, latent=16), Settings(layers=8, latent=128), Settings(tile=16),
    Settings(mode="no-graph"), Settings(mode="linear", latent=2),
], ids=str)  # fmt: skip
def test_generated_weights_of_every_type_have_kaiming_variance(settings: Settings) -> None:
    chain = [Node(LayerType("input"))]
    for i, layer in enumerate(LAYERS):
        chain += [Node(layer, tuple((role, f"{i}.{copy}.{role}") for role in layer.roles)) for copy in (0, 1)]
    chain.append(Node(LayerType("output")))
    names = tuple(name for node in chain for _, name in node.parameters)
    graph = Graph(tuple(chain), tuple((i, i + 1) for i in range(len(chain) - 1)), names)
    for seed in range(3):
        ratios = kaiming(GraphHypernetwork(graph.types, settings, seed), graph)
        assert len(ratios) == 2 * len(LAYERS)
        # The error of a standard deviation of 900 numbers is 2.4%; tiled weights hold fewer different ones.
        assert all(ratio == pytest.approx(1, abs=0.1) for ratio in ratios.values()), ratios


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", pytest.param("vgg11", marks=pytest.mark.slow)])
def test_torchvisions_networks_get_kaiming_weights_and_run(name: str, torchvision: Any) -> None:
    network = getattr(torchvision.models, name)(num_classes=7, **({"dropout": 0.0} if name != "resnet18" else {}))
    graph = trace(network, (3, 48, 48))
    hyper = GraphHypernetwork(graph.types, Settings(hidden=4, tile=32))
    ratios = kaiming(hyper, graph)
    assert len(ratios) == {"resnet18": 21, "mobilenet_v2": 49, "vgg11": 11}[name]
    assert all(ratio == pytest.approx(1, abs=0.1) for ratio in ratios.values()), ratios
    with torch.no_grad():
        logits = torch.func.functional_call(network, graph.layout.views(hyper(graph)), (torch.randn(4, 3, 48, 48),))
    assert logits.shape == (4, 7)
    # The activations neither vanish nor explode on the way, which is what the variance is for.
    assert 0.02 < logits.std().item() < 50


def test_a_tiled_weight_has_more_rank_than_its_block() -> None:
    layer = LayerType("linear", (64, 64), roles=("weight",))
    graph = Graph(
        (Node(LayerType("input")), Node(layer, (("weight", "w"),)), Node(LayerType("output"))), ((0, 1), (1, 2)), ("w",)
    )
    weight = GraphHypernetwork(graph.types, Settings(tile=8))(graph).view(64, 64)
    assert int(torch.linalg.matrix_rank(weight)) > 32
    assert len({tuple(row) for row in weight.abs().tolist()}) == 8  # and yet it is eight rows and their signs


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        Settings(mode="no-graph", layers=2, latent=8, hidden=6),
        Settings(layers=3, latent=8, hidden=6, tile=3),
        Settings(mode="linear", latent=4),
    ],
    ids=str,
)
def test_the_gradient_is_the_derivative(settings: Settings) -> None:
    network = ghn(SKIP, settings)
    torch.manual_seed(5)
    weights = torch.randn(SKIP.layout.numel, dtype=torch.float64)
    network(SKIP).backward(weights)
    step = 1e-5
    for name, parameter in network.named_parameters():
        direction = torch.randn_like(parameter)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * step)
                values.append(float(weights @ network(SKIP)))
                parameter.sub_(direction, alpha=sign * step)
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        expected = (values[0] - values[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_gradients_flow_through_the_network_that_uses_the_weights() -> None:
    hyper, net = GraphHypernetwork(SKIP.types, SMALL), Net(True)
    out = torch.func.functional_call(net, SKIP.layout.views(hyper(SKIP)), (torch.randn(5, 4, 6, 6),))
    F.cross_entropy(out, torch.zeros(5, dtype=torch.long)).backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    touched = {name.split(".")[0] for name, p in hyper.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {"gnn", "types"}


# ---------------------------------------------------------------------- the linear special case


def test_with_identity_and_linear_maps_generation_is_linear_and_layers_are_apart() -> None:
    settings = Settings(mode="linear", latent=3)
    networks = [ghn(SKIP, settings, seed) for seed in range(3)]
    for part in networks[0].parts():
        networks[2].load_part(part, 2 * networks[0].read_part(part) - 3 * networks[1].read_part(part))
    made = [network(SKIP) for network in networks]
    assert torch.allclose(made[2], 2 * made[0] - 3 * made[1], rtol=0, atol=1e-12)
    # Each weight is one number of the hypernetwork, used once: the squares of the Jacobian's entries are all 1.
    networks[0](SKIP).backward(torch.ones_like(made[0]))
    gradients = torch.cat([p.grad.flatten() for p in networks[0].parameters() if p.grad is not None])
    assert sorted(set(gradients.tolist())) == [0.0, 1.0]
    assert gradients.sum() == SKIP.layout.numel


def test_more_layers_of_a_type_than_latents_are_refused() -> None:
    network = GraphHypernetwork(SKIP.types, Settings(mode="linear", latent=2))
    with pytest.raises(
        ModelError, match=r"^latent: expected at least as many as layers of one type, found 3 of conv2d"
    ):
        network(SKIP)


# ---------------------------------------------------------------------- parts and states


def test_a_client_needs_the_shared_part_and_its_types() -> None:
    server = GraphHypernetwork(
        {*SKIP.types, *trace(build(ModelSpec("hafl-0", "S", (3, 8, 8), 2)), (3, 8, 8)).types}, SMALL
    )
    needed = (SHARED, *map(str, SKIP.types))
    assert needed == ("gnn", *(str(layer) for layer in SKIP.types))
    assert set(needed) < set(server.parts())
    client = GraphHypernetwork(SKIP.types, SMALL, seed=None)
    assert client.parts() == needed
    for part in needed:
        assert client.read_part(part).shape == server.read_part(part).shape
        client.load_part(part, server.read_part(part))
    assert torch.equal(client(SKIP), server(SKIP))


def test_parts_hold_every_parameter_once() -> None:
    network = GraphHypernetwork(SKIP.types, SMALL)
    parts = sum(network.read_part(part).numel() for part in network.parts())
    assert parts == sum(p.numel() for p in network.parameters())


def test_a_part_that_a_graph_lacks_gets_no_gradient() -> None:
    other = LayerType("linear", (9, 9), roles=BOTH)
    network = GraphHypernetwork([*SKIP.types, other], SMALL)
    network(SKIP).backward(torch.ones(SKIP.layout.numel))
    without = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in network.named_parameters() if name.startswith(f"types.{other}.")}


def test_a_copy_without_a_seed_is_zero() -> None:
    assert not any(p.any() for p in GraphHypernetwork(SKIP.types, SMALL, seed=None).parameters())


def test_a_type_starts_the_same_whenever_it_comes() -> None:
    at_once = GraphHypernetwork(SKIP.types, SMALL, seed=7)
    later = GraphHypernetwork(SKIP.types[:2], SMALL, seed=7)
    values = later.read_part("gnn")
    later.grow(reversed(SKIP.types))
    assert torch.equal(later.read_part("gnn"), values)
    assert torch.equal(later(SKIP), at_once(SKIP))
    assert not torch.equal(GraphHypernetwork(SKIP.types, SMALL, seed=8)(SKIP), at_once(SKIP))


def test_growing_keeps_what_was_learnt() -> None:
    network = GraphHypernetwork(SKIP.types, SMALL)
    part = str(SKIP.types[1])
    network.load_part(part, torch.full_like(network.read_part(part), 0.5))
    network.grow(SKIP.types)
    assert bool((network.read_part(part) == 0.5).all())


CODE = """
import hashlib, torch
from hyperbloom.common.graphs import GraphHypernetwork, Settings, trace
from hyperbloom.common.models import ModelSpec, build
torch.set_num_threads(1)
graph = trace(build(ModelSpec("hafl-2", "S", (3, 16, 16), 5)), (3, 16, 16))
network = GraphHypernetwork(graph.types, Settings(layers=3, latent=8, hidden=6), seed=11)
print(hashlib.sha256(network(graph).detach().numpy().tobytes()).hexdigest())
"""


def test_two_processes_generate_the_same_bits() -> None:
    graph = trace(build(ModelSpec("hafl-2", "S", (3, 16, 16), 5)), (3, 16, 16))
    network = GraphHypernetwork(graph.types, SMALL, seed=11)
    here = hashlib.sha256(network(graph).detach().numpy().tobytes()).hexdigest()
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == here
    # The graph as it arrives over the wire, and the state part by part, make no difference either.
    arrived = Graph.from_json(graph.to_json(), 2**28)
    copy = GraphHypernetwork(arrived.types, SMALL, seed=None)
    for part in network.parts():
        copy.load_part(part, network.read_part(part))
    assert hashlib.sha256(copy(arrived).detach().numpy().tobytes()).hexdigest() == here


def test_evaluation_and_training_mode_generate_the_same() -> None:
    network = GraphHypernetwork(SKIP.types, SMALL)
    assert torch.equal(network.train()(SKIP), network.eval()(SKIP))


def test_what_does_not_fit_is_refused() -> None:
    network = GraphHypernetwork(SKIP.types, SMALL)
    with pytest.raises(
        ModelError, match=r"^graph hypernetwork: expected a part for each layer type, found none for 'batch"
    ):
        GraphHypernetwork([LayerType("input"), LayerType("add")], SMALL)(SKIP)
    with pytest.raises(ModelError, match=r"^part: expected one of gnn, add, .*, found 'nothing'$"):
        network.read_part("nothing")
    with pytest.raises(ModelError, match=r"^part 'gnn': expected 280 values, found shape \(3,\)$"):
        network.load_part("gnn", torch.zeros(3))
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        Settings(hidden=1)


# ---------------------------------------------------------------------- what travels


@pytest.mark.parametrize("mode", ["graph", "no-graph", "linear"])
def test_a_copy_for_some_types_has_the_layout_that_the_server_says(mode: str) -> None:
    settings = Settings(mode=mode, layers=2, latent=6, hidden=3)  # type: ignore[arg-type]
    server = GraphHypernetwork(SKIP.types, settings, seed=1)
    server.grow([LayerType.parse("linear 9,9 wb"), LayerType.parse("conv2d 1,2 k3x3 w")])  # out of order
    layout = server.layout(CHAIN.types)
    copy = GraphHypernetwork(CHAIN.types, settings, seed=None)
    assert layout == Layout.of(copy)
    parts = list(dict.fromkeys(part_of(name) for name, _ in layout.shapes))
    values = torch.cat([server.read_part(part) for part in parts])
    for name, view in layout.views(values).items():
        dict(copy.named_parameters())[name].data = view
    assert torch.equal(copy(CHAIN), server(CHAIN))
    for part in parts:
        assert torch.equal(copy.read_part(part), server.read_part(part))


def test_settings_come_back_from_their_text() -> None:
    for settings in (SMALL, Settings(mode="no-graph", layers=1, latent=2, hidden=3, tile=4)):
        assert Settings.from_wire(settings.model_dump_json(), "order") == settings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"graph"', '"tree"', "order.mode: Input should be 'graph', 'no-graph' or 'linear'"),
        ('"layers"', '"more"', "order.more: Extra inputs are not permitted"),
        ('"layers":3', '"layers":null', "order.layers: Input should be a valid integer"),
        ('"layers":3', '"layers":true', "order.layers: Input should be a valid integer"),
        ('"hidden":6', '"hidden":1', "order.hidden: Input should be greater than or equal to 2"),
        ('"latent":8', '"latent":1e9', "order.latent: Input should be a valid integer"),
        ('"latent":8', '"latent":4097', "order.latent: Input should be less than or equal to 4096"),
        ("{", "[" * 10_000, "order: Invalid JSON: recursion limit exceeded"),
        ("{", "{{", "order: Invalid JSON"),
    ],
)
def test_hostile_settings_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(WireError, match=message):
        Settings.from_wire(SMALL.model_dump_json().replace(old, new, 1), "order")


def test_a_hypernetwork_that_would_be_too_large_is_refused_before_memory_is_taken() -> None:
    numel = sum(parameter.numel() for parameter in GraphHypernetwork(SKIP.types, SMALL).parameters())
    sketch = GraphHypernetwork.sketch(SKIP.types, SMALL, numel)
    assert {parameter.device.type for parameter in sketch.parameters()} == {"meta"}
    assert Layout.of(sketch) == Layout.of(GraphHypernetwork(SKIP.types, SMALL))
    with pytest.raises(ModelError, match=f"expected at most {numel - 1:,} parameters, found {numel:,}"):
        GraphHypernetwork.sketch(SKIP.types, SMALL, numel - 1)
    side = 2**24
    huge = LayerType("conv3d", (side, side), (side, side, side), roles=BOTH)
    with pytest.raises(ModelError, match="graph hypernetwork: expected at most 100 parameters"):
        GraphHypernetwork.sketch([huge], SMALL, 100)
