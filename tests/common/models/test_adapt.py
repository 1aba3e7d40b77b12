"""What of a network is adapted: the rest is shared, frozen, and known by its digest."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.common.errors import ConfigError, ModelError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import (
    ModelSpec,
    backbone_digest,
    body_layout,
    build,
    full_layout,
    head_layout,
    merged,
    own_tensors,
)
from hyperbloom.common.models.adapt import Adapt, adapted, digest_of

LENET = ModelSpec("lenet", "S", (1, 28, 28), 3)
SPECS = {
    "lenet": LENET,
    "residual": ModelSpec("hafl-1", "S", (3, 16, 16), 3),
    "recurrent": ModelSpec("lstm-1", "S", (1, 5, 4), 3),
}
KINDS = ("head", "norms", "bias", "lora:r=2", "lora:r=2,alpha=3,targets=fc*")


def names(spec: ModelSpec) -> set[str]:
    return {name for name, _ in full_layout(spec).shapes}


def made(spec: ModelSpec, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build(spec)


def inputs(spec: ModelSpec) -> Tensor:
    return torch.randn(4, *spec.input_shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", Adapt("all")),
        ("norms", Adapt("norms")),
        ("lora:r=8", Adapt("lora", 8, 16)),
        ("lora:r=4,alpha=1.5", Adapt("lora", 4, 1.5)),
        ("lora:r=4,targets=query|value,dense", Adapt("lora", 4, 8, "query|value,dense")),
    ],
)
def test_the_text_form(text: str, expected: Adapt) -> None:
    assert Adapt.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "lora", "lora:r=0", "lora:r=1000", "lora:alpha=2", "everything", "lora:r=4,targets="]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^adapt: expected"):
        Adapt.parse(text)


def test_what_each_kind_adapts() -> None:
    head = {"head.weight", "head.bias"}
    assert names(replace(LENET, adapt="head")) == head
    biases = {name for name in names(LENET) if name.endswith("bias")}
    assert names(replace(LENET, adapt="bias")) == biases | head
    residual = SPECS["residual"]
    norms = {name for name, part in build(residual).named_modules() if isinstance(part, nn.BatchNorm2d)}
    expected = {f"{name}.{leaf}" for name in norms for leaf in ("weight", "bias")} | head
    assert names(replace(residual, adapt="norms")) == expected
    spec = replace(LENET, adapt="lora:r=2,targets=fc1")
    assert names(spec) - head == {"fc1.lora_A.default.weight", "fc1.lora_B.default.weight"}
    several = replace(LENET, adapt="lora:r=2,targets=conv?|fc[1]")
    assert {name.split(".")[0] for name in names(several) - head} == {"conv1", "conv2", "fc1"}
    assert {name for name, _ in head_layout(spec).shapes} == head
    assert {name for name, _ in body_layout(spec).shapes} == names(spec) - head


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", SPECS)
def test_a_network_starts_as_its_backbone_to_the_bit_and_trains_without_touching_it(network: str, kind: str) -> None:
    plain = SPECS[network]
    spec = replace(plain, adapt=kind)
    try:
        module = made(spec).train()
    except ModelError as error:
        assert "found none" in str(error)  # no norm, or no layer of this name
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = build(plain).eval()
    head = {name: value for name, value in module.state_dict().items() if name.startswith("head.")}
    if network != "residual" or kind != "norms":
        expected = functional_call(backbone, head, (inputs(spec),))
        assert torch.equal(copy.deepcopy(module).eval()(inputs(spec)), expected)
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if name in module.frozen}
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        module(inputs(spec)).square().sum().backward()
        optimiser.step()
    assert before and all(torch.equal(module.get_buffer(name), value) for name, value in before.items())
    assert set(own_tensors(module)) >= {name for name, _ in full_layout(spec).shapes}
    assert digest_of(*_parts(plain)) == backbone_digest(spec), "another network of the same backbone was changed"


def _parts(plain: ModelSpec) -> tuple[nn.Module, tuple[str, ...]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(plain), ("head.",)


class Tied(nn.Module):
    """Two layers with one weight, and one layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.decode.weight, self.again = self.encode.weight, self.encode

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.again(self.decode(self.encode(x))))
        return logits


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("all", ["encode.weight", "encode.bias", "decode.bias", "head.weight", "head.bias"]),
        ("bias", ["encode.bias", "decode.bias", "head.weight", "head.bias"]),
        ("head", ["head.weight", "head.bias"]),
    ],
)
def test_what_is_one_in_the_backbone_stays_one(kind: str, wanted: list[str]) -> None:
    backbone, x = Tied(), torch.randn(3, 4)
    module = adapted(backbone, ("head.",), Adapt.parse(kind))
    assert sorted(name for name, _ in module.named_parameters()) == sorted(wanted)
    assert module.encode is module.again and module.encode.weight.data_ptr() == module.decode.weight.data_ptr()
    module.head.load_state_dict(backbone.head.state_dict())
    assert torch.equal(module(x), backbone(x))


def test_two_networks_share_the_backbones_memory() -> None:
    one, other = made(replace(LENET, adapt="head")), made(replace(LENET, adapt="lora:r=2"), 2)
    weight = one.get_buffer("conv1.weight")
    assert weight.data_ptr() == other.get_buffer("conv1.base_layer.weight").data_ptr()
    assert not torch.equal(one.get_parameter("head.weight"), other.get_parameter("head.weight"))


def test_with_the_head_alone_dropout_in_the_backbone_is_off() -> None:
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    backbone = nn.Sequential(body, nn.Linear(8, 3))
    for kind, same in (("head", True), ("bias", False)):
        module = adapted(backbone, ("1.",), Adapt(kind)).train()
        x = torch.randn(16, 4)
        assert torch.equal(module(x), module(x)) == same
    assert backbone[0][1].track_running_stats and backbone[0][2].training


def test_lora_merges_into_weights_that_compute_the_same() -> None:
    spec = replace(LENET, adapt="lora:r=2")
    module = made(spec).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    whole = merged(module)
    assert set(whole.state_dict()) == set(build(LENET).state_dict())
    assert torch.allclose(whole(inputs(spec)), module(inputs(spec)), atol=1e-5)
    low, high = module.get_parameter("fc1.lora_A.default.weight"), module.get_parameter("fc1.lora_B.default.weight")
    change = whole.get_buffer("fc1.weight") - module.get_buffer("fc1.base_layer.weight")
    assert torch.allclose(change, 2 * high @ low, atol=1e-6)  # alpha / r = 2


class Twins(nn.Module):
    """Two layers with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("targets", ["a", "a|b"])
def test_lora_of_one_of_two_tied_layers_merges_into_that_alone(targets: str) -> None:
    module, x = adapted(Twins(), ("head.",), Adapt("lora", 2, 4, targets)).eval(), torch.randn(5, 6)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert torch.allclose(merged(module)(x), module(x), atol=1e-5)


def test_the_digest_knows_names_shapes_and_bytes_outside_the_head() -> None:
    backbone, head = _parts(LENET)
    found = {digest_of(backbone, head)}
    assert backbone_digest(replace(LENET, adapt="bias")) in found
    assert backbone_digest(replace(LENET, num_classes=7)) in found
    permuted = copy.deepcopy(backbone)
    permuted.conv1.weight.data = permuted.conv1.weight.data.flip(0)
    found.add(digest_of(permuted, head))
    renamed = nn.Module()
    renamed.conv = backbone
    found.add(digest_of(renamed, ("conv.head.",)))
    assert len(found) == 3 and all(one.startswith("sha256:") for one in found)


class Attentive(nn.Module):
    """A network with torch's own attention, which reads the weights of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.first(x)[:, None]).squeeze(1))  # type: ignore[no-any-return]


def test_lora_leaves_out_layers_whose_weights_others_read() -> None:
    module = adapted(Attentive(), ("head.",), Adapt("lora", 2, 4)).eval()
    assert {name.partition(".")[0] for name, _ in module.named_parameters()} == {"first", "head"}
    with pytest.raises(ModelError, match="expected layers that match 'linear1', found none among first"):
        adapted(Attentive(), ("head.",), Adapt("lora", 2, 4, "linear1"))


def test_nothing_to_adapt_is_one_clear_line() -> None:
    with pytest.raises(ModelError, match="expected parameters of norms outside the head, found none"):
        build(replace(LENET, adapt="norms"))
    with pytest.raises(ModelError, match="expected layers that match 'query', found none among conv1"):
        build(replace(LENET, adapt="lora:r=2,targets=query"))


def test_a_backbone_that_is_first_asked_for_on_no_device_has_its_values() -> None:
    spec = ModelSpec("lenet", "S", (1, 30, 30), 4, "head")
    with torch.device("meta"):
        build(spec)
    assert backbone_digest(spec) == digest_of(*_parts(replace(spec, adapt="all")))


def test_all_is_the_network_itself() -> None:
    whole = made(LENET)
    assert full_layout(LENET) == Layout.of(whole) and merged(whole) is whole
    assert own_tensors(whole).keys() == whole.state_dict().keys()
