"""Tracing: what becomes a node, what does not, and what is refused by name."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hyperbloom.common.errors import ModelError
from hyperbloom.common.graphs import Graph, GraphHypernetwork, Settings, layer, trace
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import MODELS, ModelSpec, build

IMAGE = (3, 8, 8)


class Apply(nn.Module):
    """Layers by name, and a function of them and the input."""

    def __init__(self, call: Callable[..., object], **layers: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, part in layers.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> object:
        return self.call(self, x)


def types(graph: Graph) -> list[str]:
    """Return the texts of the nodes' types, without input and output."""
    return [str(node.type) for node in graph.nodes[1:-1]]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vgg11"])
def test_torchvisions_networks_trace(name: str, torchvision: Any) -> None:
    with torch.device("meta"):
        expected = Layout.of(getattr(torchvision.models, name)(num_classes=7))
    network = getattr(torchvision.models, name)(num_classes=7)
    graph = trace(network, (3, 64, 64))
    assert graph.layout == expected
    assert Graph.from_json(graph.to_json(), 2**28) == graph


REFUSED = {"googlenet", "inception_v3"}
"""Torchvision's classifiers that cannot be traced, as docs/ghn.md says: heads that only training uses."""


@pytest.mark.parametrize("some", [
    "vit_b_16 swin_t swin_v2_t convnext_tiny maxvit_t inception_v3 googlenet regnet_y_400mf",
    pytest.param("", marks=pytest.mark.slow),
], ids=["some", "all"])  # fmt: skip
def test_all_of_torchvisions_classifiers_trace_but_those_on_the_page(some: str, torchvision: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "ghn.md").read_text()
    assert all(f"`{name}`" in page for name in REFUSED)
    for name in some.split() or torchvision.models.list_models(module=torchvision.models):
        with torch.device("cpu" if name.startswith("regnet") else "meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if name.startswith("regnet") and name != "regnet_y_400mf":  # slow to build, and of the same blocks
                continue
            network = torchvision.models.get_model(name, weights=None, num_classes=7)
        if name in REFUSED:
            with pytest.raises(ModelError, match=r"^[Aa]ux.*: expected every parameter to belong to a layer"):
                trace(network, (3, 299, 299))
        else:
            assert trace(network, (3, 224, 224)).layout == Layout.of(network), name


def test_resnet18_has_the_nodes_that_one_counts_by_hand(torchvision: Any) -> None:
    graph = trace(torchvision.models.resnet18(), (3, 64, 64))
    kinds = [node.type.kind for node in graph.nodes]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    once = ("input", "output", "maxpool2d", "adaptiveavgpool2d", "linear")
    assert counts == {"conv2d": 20, "batchnorm": 20, "add": 8, **dict.fromkeys(once, 1)}
    # A chain has one edge less than nodes; each of 8 skips adds one, and 3 of them run through 2 nodes of their own.
    assert len(graph.edges) == len(graph.nodes) - 1 + 8
    assert [str(node.type) for node in graph.nodes if node.type.kind == "add"] == ["add +relu"] * 8


def test_mobilenets_depthwise_convolutions_are_seen(torchvision: Any) -> None:
    graph = trace(torchvision.models.mobilenet_v2(), (3, 64, 64))
    depthwise = [node for node in graph.nodes if node.type.groups > 1]
    assert len(depthwise) == 17
    assert all(node.type.groups == node.type.channels[0] == node.type.channels[1] for node in depthwise)
    assert "batchnorm 32 wb +relu6" in types(graph)


@pytest.mark.parametrize("name", sorted(name for name in MODELS if not name.startswith("lstm-")))
def test_our_own_models_trace(name: str) -> None:
    network = build(ModelSpec(name, "S", (3, 32, 32), 5))
    graph = trace(network, (3, 32, 32))
    assert graph.layout == Layout.of(network)
    assert graph.order[-2:] == ("head.weight", "head.bias")


def test_modules_functions_and_methods_give_one_graph() -> None:
    layers: dict[str, Callable[[], nn.Module]] = {"a": lambda: nn.Conv2d(3, 4, 3), "b": lambda: nn.Linear(4, 2)}
    modules = nn.Sequential()
    for name, part in [("a", layers["a"]()), ("r", nn.ReLU()), ("p", nn.MaxPool2d(3, 2)), ("d", nn.Dropout(0.5))]:
        modules.add_module(name, part)
    for name, part in [("m", nn.AdaptiveAvgPool2d(1)), ("f", nn.Flatten()), ("b", layers["b"]()), ("s", nn.Sigmoid())]:
        modules.add_module(name, part)

    def functions(m: Apply, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(m.get_submodule("a")(x)), 3, stride=2)
        x = F.adaptive_avg_pool2d(F.dropout(x, 0.5, training=False), 1)
        return torch.sigmoid(m.get_submodule("b")(torch.flatten(x, 1)))

    def methods(m: Apply, x: Tensor) -> Tensor:
        x = torch.nn.functional.max_pool2d(m.get_submodule("a")(x).relu_(), kernel_size=(3, 3), stride=(2, 2))
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return m.get_submodule("b")(x.view(x.size(0), -1)).sigmoid()  # type: ignore[no-any-return]

    graphs = [trace(modules, IMAGE)]
    graphs += [trace(Apply(f, **{n: make() for n, make in layers.items()}), IMAGE) for f in (functions, methods)]
    assert graphs[0] == graphs[1] == graphs[2]
    assert types(graphs[0]) == [
        "conv2d 3,4 k3x3 wb +relu", "maxpool2d k3x3 s2x2", "adaptiveavgpool2d k1x1", "linear 4,2 wb +sigmoid"
    ]  # fmt: skip


def test_stride_dilation_groups_and_dimensions_are_in_the_type() -> None:
    chain = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=(1, 2), dilation=2, groups=3),
        nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False),
        nn.Flatten(2),
        nn.Conv1d(4, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.AvgPool1d(2),
    )
    assert types(trace(chain, (3, 12, 12))) == [
        "conv2d 3,6 k3x3 s1x2 d2x2 g3 wb", "convtranspose2d 6,4 k2x2 s2x2 w", "conv1d 4,4 k3 wb", "groupnorm 4 g2 wb",
        "prelu 4 w", "avgpool1d k2 s2",
    ]  # fmt: skip


def edges(graph: Graph) -> list[tuple[int, int]]:
    return sorted(graph.edges)


def test_joins_have_an_edge_for_each_operand_and_constants_leave_none() -> None:
    def call(m: Apply, x: Tensor) -> Tensor:
        y = m.get_submodule("a")(x) * 0.5 + 1  # scaled and shifted: no node
        z = torch.cat([y, x, y], 1)
        return z - z.mean((2, 3), keepdim=True)

    graph = trace(Apply(call, a=nn.Conv2d(3, 3, 1)), IMAGE)
    assert types(graph) == ["conv2d 3,3 k1x1 wb", "concat", "mean", "sub"]
    assert edges(graph) == [(0, 1), (0, 2), (1, 2), (1, 2), (2, 3), (2, 4), (3, 4), (4, 5)]


def test_an_activation_whose_input_is_read_elsewhere_is_a_node() -> None:
    graph = trace(Apply(lambda m, x: (y := m.get_submodule("a")(x)) * y.sigmoid(), a=nn.Conv2d(3, 3, 1)), IMAGE)
    assert types(graph) == ["conv2d 3,3 k1x1 wb", "act +sigmoid", "mul"]
    assert edges(graph) == [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4)]


def test_an_activation_behind_a_reshape_that_is_read_twice_is_a_node() -> None:
    def call(m: Apply, x: Tensor) -> Tensor:
        y = m.get_submodule("a")(x)
        return y.flatten(1).relu() + y.flatten(1)

    assert types(trace(Apply(call, a=nn.Conv2d(3, 3, 1)), IMAGE)) == ["conv2d 3,3 k1x1 wb", "act +relu", "add"]


def test_an_activation_of_the_input_is_a_node() -> None:
    assert types(trace(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1)), IMAGE)) == ["act +relu", "conv2d 3,3 k1x1 wb"]


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch.fx of 2.6 refuses it (docs/versions.md)")
def test_the_size_of_a_pooling_may_be_computed() -> None:
    graph = trace(Apply(lambda m, x: F.avg_pool2d(m.get_submodule("a")(x), x.shape[2:]), a=nn.Conv2d(3, 3, 1)), IMAGE)
    assert types(graph)[-1] == "avgpool2d k8x8 s8x8"


def test_parts_of_a_split_come_from_one_node() -> None:
    def call(m: Apply, x: Tensor) -> Tensor:
        a, b = m.get_submodule("a")(x).chunk(2, dim=1)
        return a * b[:, :1]

    graph = trace(Apply(call, a=nn.Conv2d(3, 4, 1)), IMAGE)
    assert types(graph) == ["conv2d 3,4 k1x1 wb", "split", "split", "mul"]
    assert edges(graph) == [(0, 1), (1, 2), (2, 3), (2, 4), (3, 4), (4, 5)]


def test_a_layer_that_is_called_twice_is_two_nodes_with_one_owner() -> None:
    graph = trace(Apply(lambda m, x: m.get_submodule("a")(m.get_submodule("a")(x)), a=nn.Conv2d(3, 3, 1)), IMAGE)
    assert types(graph) == ["conv2d 3,3 k1x1 wb"] * 2
    assert [dict(node.parameters) for node in graph.nodes[1:3]] == [{"weight": "a.weight", "bias": "a.bias"}, {}]


def test_a_tied_weight_has_one_owner() -> None:
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    chain[1].weight = chain[0].weight
    graph = trace(chain, (4,))
    assert graph.layout == Layout.of(chain)
    assert [dict(node.parameters) for node in graph.nodes[1:3]] == [
        {"weight": "0.weight", "bias": "0.bias"}, {"bias": "1.bias"}
    ]  # fmt: skip


def test_a_subclass_that_computes_as_torch_does_is_taken_for_it() -> None:
    class Mine(nn.BatchNorm2d):
        pass

    assert types(trace(nn.Sequential(Mine(3)), IMAGE)) == ["batchnorm 3 wb"]


class Optional(nn.Module):
    """Arguments beside the inputs, on which control flow depends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, features: bool = False, times: int = 2, *, name: str = "b"
    ) -> Tensor:
        y = self.a(x) if mask is None else self.a(x) * mask
        for _ in range(times):
            y = self.b(y) if name == "b" else -y
        return x if features else y


def test_arguments_beside_the_inputs_have_their_defaults() -> None:
    network = Optional()
    graph = trace(network, IMAGE)
    assert graph == trace(Apply(lambda m, x: m.b(m.b(m.a(x))), a=network.a, b=network.b), IMAGE)  # type: ignore[operator]
    assert types(graph) == ["conv2d 3,4 k1x1 wb", "conv2d 4,4 k1x1 wb", "conv2d 4,4 k1x1 wb"]


def test_a_default_of_the_inputs_is_none() -> None:
    class Defaulted(Unused):
        def forward(self, x: Tensor | None = None) -> Tensor:
            return self.spare(self.used(x))  # type: ignore[no-any-return]

    assert len(trace(Defaulted(), IMAGE).nodes) == 4


def test_tracing_leaves_the_network_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    network[1].eval()
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.random.get_rng_state()
    trace(network, IMAGE)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [part.training for part in network.modules()] == [True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# ---------------------------------------------------------------------- attention, recurrent cells, free parameters


class Free(nn.Module):
    """Parameters outside a layer: one is added, one multiplies behind a reshape, one is a table that is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.gamma = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.ones(4))
        self.table, self.scalar = nn.Parameter(torch.zeros(9, 4)), nn.Parameter(torch.ones(()))
        self.register_buffer("index", torch.arange(6))
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) * self.gamma.view(1, 1, -1) / self.scalar
        x = torch.einsum("nij,kj->nik", x + self.table[self.index], self.linear.weight) + self.linear.bias
        return F.layer_norm(x, (4,), self.norm.weight, self.norm.bias)


def test_a_parameter_outside_a_layer_is_a_node_and_one_that_multiplies_a_factor() -> None:
    graph = trace(Free(), (5, 4))
    assert types(graph) == [
        "parameter 1,1,4 w", "concat", "factor 4 w", "mul", "factor w", "div", "parameter 9,4 w", "split", "add",
        "linear 4,4 w", "matmul", "linear 4,4 b", "add", "layernorm 4 wb",
    ]  # fmt: skip
    assert Graph.from_json(graph.to_json(), 2**28) == graph
    assert graph.layout == Layout.of(Free())


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_is_a_chain_of_its_maps(cell: type[nn.RNNBase]) -> None:
    layer, name = cell(5, 6, num_layers=2, batch_first=True), cell.__name__.lower()
    graph = trace(Apply(lambda m, x: m.get_submodule("a")(x)[0][:, -1], a=layer), (7, 5))
    gates = len(layer.bias_ih_l0)  # type: ignore[arg-type]
    first, inner = f"{name}ih 5,{gates} wb", [f"{name}{part} 6,{gates} wb" for part in ("hh", "ih", "hh")]
    assert types(graph) == [first, *inner, "split"]
    assert edges(graph) == [(i, i + 1) for i in range(6)]
    assert graph.layout == Layout.of(nn.ModuleDict({"a": layer}))


def test_attention_reads_its_query_key_and_value() -> None:
    call = Apply(lambda m, x: m.get_submodule("a")(y := m.get_submodule("b")(x), y, x)[0], a=nn.MultiheadAttention(4, 2), b=nn.Linear(4, 4))  # fmt: skip  # noqa: E501
    graph = trace(call, (5, 4))
    assert types(graph) == ["linear 4,4 wb", "attentionin 4,12 wb", "attentionout 4,4 wb"]
    assert edges(graph) == [(0, 1), (0, 2), (1, 2), (1, 2), (2, 3), (3, 4)]


def encoder(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_transformer_is_traced_into(norm_first: bool) -> None:
    before = torch.backends.mha.get_fastpath_enabled, nn.modules.transformer._get_seq_len
    graph = trace(encoder(norm_first), (5, 8))
    attention = ["attentionin 8,24 wb", "attentionout 8,8 wb", "add"]
    feed = ["linear 8,16 wb +relu", "linear 16,8 wb", "add"]
    norm = ["layernorm 8 wb"]
    assert types(graph) == 2 * (norm + attention + norm + feed if norm_first else attention + norm + feed + norm)
    assert (torch.backends.mha.get_fastpath_enabled, nn.modules.transformer._get_seq_len) == before


def scaled(m: Apply, x: Tensor) -> Tensor:
    q, k, v = m.get_submodule("a")(x).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v)


def cell_by_cell(m: Apply, x: Tensor) -> Tensor:
    state = torch.zeros(2, 6)
    for step in range(3):
        state = m.get_submodule("a")(x[:, step], state)
    return state


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda _: Free(), (5, 4)),
        (lambda _: Apply(scaled, a=nn.Linear(4, 12)), (5, 4)),
        (lambda _: Apply(cell_by_cell, a=nn.GRUCell(5, 6)), (3, 5)),
        *[
            (lambda _, cell=cell, more=more: Apply(lambda m, x: m.get_submodule("a")(x)[0][:, -1], a=cell(5, 6, batch_first=True, **more)), (7, 5))  # noqa: E501
            for cell, more in ((nn.GRU, {"bidirectional": True}), (nn.LSTM, {"proj_size": 4}), (nn.RNN, {"bias": False}))  # noqa: E501
        ],
        (lambda _: encoder(), (5, 8)),
        (lambda tv: tv.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5), (3, 32, 32)),
        (lambda tv: tv.models.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=5), (3, 32, 32)),
        (
            lambda tv: tv.models.SwinTransformer(
                [4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=5,
                block=tv.models.swin_transformer.SwinTransformerBlockV2,
                downsample_layer=tv.models.swin_transformer.PatchMergingV2,
            ),
            (3, 32, 32),
        ),
    ],
)  # fmt: skip
def test_generated_weights_compute_as_loaded_ones(
    make: Callable[[Any], nn.Module], shape: tuple[int, ...], torchvision: Any
) -> None:
    network = make(torchvision).eval()
    graph = trace(network, shape)
    assert graph.layout == Layout.of(network)
    weights = graph.layout.views(GraphHypernetwork(graph.types, Settings(hidden=4, layers=2, latent=8))(graph))
    inputs = torch.randn(2, *shape)
    outputs = torch.func.functional_call(network, weights, (inputs,))
    outputs.square().sum().backward()  # through the weights into the hypernetwork
    found = network.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False)
    assert not found.unexpected_keys
    assert torch.allclose(outputs, network(inputs), rtol=1e-5, atol=1e-5)
    assert 0.01 < outputs.std().item() < 50


# ---------------------------------------------------------------------- what is refused


class Deep(nn.Module):
    """A block two levels down."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.ReLU(), block))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)  # type: ignore[no-any-return]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Sorting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=1).values


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            Branching(),
            "outer.1.1: cannot be traced by torch.fx: TraceError: symbolically traced variables cannot be used",
        ),
        (Sorting(), "outer.1.1: sort: cannot represent 'sort'; supported: "),
        (Unused(), "outer.1.1.spare.weight: expected every parameter to belong to a layer"),
        (nn.Embedding(4, 8), "outer.1.1: fails on inputs (2, 3, 8, 8): RuntimeError: Expected"),
        (
            weight_norm(nn.Conv2d(3, 3, 1)),
            "outer.1.1: cannot represent ParametrizedConv2d with parameters bias, parametriz",
        ),
        (nn.Linear(9, 9), "outer.1.1: fails on inputs (2, 3, 8, 8): RuntimeError: "),
        (nn.Softmax2d(), "outer.1.1: cannot represent 'softmax2d'"),
    ],
)
def test_what_cannot_be_represented_is_refused_with_the_modules_path(block: nn.Module, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        trace(Deep(block), IMAGE)
    text = str(caught.value)
    assert text.startswith(message), text
    assert "\n" not in text


def test_a_layer_beyond_the_bounds_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MAX_LENGTH", 7)
    with pytest.raises(ModelError, match=r"^outer.1.1: layer type conv2d 3,8 k1x1 wb: expected lengths from 1 to 7$"):
        trace(Deep(nn.Conv2d(3, 8, 1)), IMAGE)


def test_layers_that_have_no_type_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"^a: cannot represent Bilinear with parameters weight, bias; supported: "):
        trace(Apply(lambda m, x: m.get_submodule("a")(x, x), a=nn.Bilinear(3, 3, 3)), (5, 3))
    for others, width in (({"kdim": 3, "vdim": 3}, 3), ({"add_bias_kv": True}, 4)):
        attention = nn.MultiheadAttention(4, 2, **others)  # type: ignore[arg-type]
        network = Apply(lambda m, x, to=width: m.get_submodule("a")(x, x[..., :to], x[..., :to])[0], a=attention)
        with pytest.raises(
            ModelError, match=r"^a: cannot represent MultiheadAttention with parameters .*; supported: "
        ):
            trace(network, (5, 4))


def test_a_frozen_layer_is_refused_for_generated_weights_would_replace_it() -> None:
    chain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    chain[1].requires_grad_(False)
    with pytest.raises(ModelError, match=r"^1.weight: expected a parameter that trains, found requires_grad=False"):
        trace(chain, IMAGE)
    frozen = Raw()
    frozen.gamma.requires_grad_(False)
    with pytest.raises(ModelError, match=r"^gamma: expected a parameter that trains"):
        trace(frozen, IMAGE)
    chain.requires_grad_(True)[2].bias.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"^2.bias: expected a parameter that trains"):
        trace(chain, IMAGE)


def test_what_is_supported_is_listed() -> None:
    with pytest.raises(ModelError, match=r"supported: .*batchnorm2d.*conv2d.*dropout.*gelu.*linear.*relu.*silu"):
        trace(Deep(Sorting()), IMAGE)


def test_one_tensor_of_outputs_is_expected() -> None:
    with pytest.raises(ModelError, match=r"^forward: expected one tensor of outputs, found"):
        trace(Apply(lambda m, x: (m.get_submodule("a")(x), x), a=nn.Conv2d(3, 3, 1)), IMAGE)


def test_a_network_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^ReLU: expected a network with parameters, found none$"):
        trace(nn.ReLU(), IMAGE)
