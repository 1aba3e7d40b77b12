"""Layer types: one text each, the shapes of torch's own layers, and what is refused."""

import pytest
import torch
from torch import nn

from hyperbloom.common.errors import ModelError, WireError
from hyperbloom.common.graphs.layer import KINDS, MAX_LENGTH, LayerType

BOTH = ("weight", "bias")

TEXTS = [
    (LayerType("input"), "input"),
    (LayerType("act", activation="relu"), "act +relu"),
    (LayerType("add", activation="relu6"), "add +relu6"),
    (LayerType("linear", (512, 10), roles=BOTH), "linear 512,10 wb"),
    (LayerType("conv2d", (3, 64), (7, 7), (2, 2), roles=("weight",)), "conv2d 3,64 k7x7 s2x2 w"),
    (
        LayerType("conv2d", (32, 32), (3, 5), (1, 2), (2, 2), 32, BOTH, "silu"),
        "conv2d 32,32 k3x5 s1x2 d2x2 g32 wb +silu",
    ),
    (LayerType("batchnorm", (64,), roles=("bias",)), "batchnorm 64 b"),
    (LayerType("attentionin", (64, 192), roles=BOTH), "attentionin 64,192 wb"),
    (LayerType("parameter", (1, 1, 64), roles=("weight",)), "parameter 1,1,64 w"),
    (LayerType("factor", roles=("weight",)), "factor w"),
    (LayerType("groupnorm", (64,), groups=8), "groupnorm 64 g8"),
    (LayerType("maxpool2d", kernel=(3, 3), stride=(2, 2)), "maxpool2d k3x3 s2x2"),
]


@pytest.mark.parametrize(("layer", "text"), TEXTS)
def test_a_type_is_one_text(layer: LayerType, text: str) -> None:
    assert str(layer) == text
    assert LayerType.parse(text) == layer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected text such as"),
        ("conv2d  3,64 k3x3 w", "expected text such as"),
        ("conv2d 3,64 k3x3 w\n", "expected text such as"),
        ("conv2d 3,64 kx w", "expected text such as"),
        ("conv2d 3,64 k3x3 bw", "expected text such as"),
        ("conv2d 3,64 k3x3 w " + "+" * 200, "expected text such as"),
        ("conv2d ٣,64 k3x3 w", "expected text such as"),
        ("conv9d 3,64 k3x3 w", "expected one of act, adaptiveavgpool1d"),
        ("add +explode", "expected one of celu, clamp"),
        ("act", "expected an activation, found none"),
        ("conv2d 3,64 k03x3 w", "expected 'conv2d 3,64 k3x3 w', found 'conv2d 3,64 k03x3 w'"),
        ("conv2d 3,64 k3x3 g1 w", "expected 'conv2d 3,64 k3x3 w', found"),
        ("conv2d 3,64 k3x3 s1x1 w", "the stride do not fit a layer of kind conv2d"),
        ("conv2d 3,64 k3 w", "the kernel do not fit"),
        ("conv2d 3 k3x3 w", "the channels do not fit"),
        ("conv2d 0,64 k3x3 w", f"expected lengths from 1 to {MAX_LENGTH}"),
        (f"linear 3,{MAX_LENGTH + 1} w", f"expected lengths from 1 to {MAX_LENGTH}"),
        ("linear 3,99999999999999999999999 w", "expected lengths from 1"),
        ("conv2d 6,64 k3x3 g4 w", "expected channels that 4 groups divide"),
        ("linear 4,4 k3 w", "the kernel do not fit"),
        ("gruhh 4 w", "the channels do not fit"),
        ("parameter 1,1,1,1,1 w", "the channels do not fit"),
        ("linear 4,4 g2 w", "the groups do not fit"),
        ("add wb", "the parameters do not fit"),
        ("add 3,3", "the channels do not fit"),
        ("batchnorm wb", "the channels do not fit"),
        ("batchnorm 1,1,1,1,1 wb", "the channels do not fit"),
    ],
)
def test_hostile_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(WireError) as caught:
        LayerType.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_layer_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="the stride do not fit a layer of kind linear"):
        LayerType("linear", (2, 2), stride=(2,))


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        (LayerType("linear", (7, 5), roles=BOTH), nn.Linear(7, 5)),
        (LayerType("conv1d", (6, 4), (3,), groups=2, roles=BOTH), nn.Conv1d(6, 4, 3, groups=2)),
        (LayerType("conv2d", (3, 8), (3, 5), roles=BOTH), nn.Conv2d(3, 8, (3, 5))),
        (LayerType("conv2d", (8, 16), (3, 3), groups=8, roles=BOTH), nn.Conv2d(8, 16, 3, groups=8)),
        (LayerType("conv3d", (3, 8), (1, 2, 3), roles=BOTH), nn.Conv3d(3, 8, (1, 2, 3))),
        (
            LayerType("convtranspose2d", (6, 8), (2, 2), (2, 2), groups=2, roles=BOTH),
            nn.ConvTranspose2d(6, 8, 2, 2, groups=2),
        ),
        (LayerType("layernorm", (4, 5), roles=BOTH), nn.LayerNorm((4, 5))),
        (LayerType("batchnorm", (6,), roles=BOTH), nn.BatchNorm2d(6)),
        (LayerType("prelu", (6,), roles=("weight",)), nn.PReLU(6)),
    ],
)
def test_shapes_are_those_of_torch(layer: LayerType, module: nn.Module) -> None:
    assert {role: layer.shape(role) for role in layer.roles} == {
        n: tuple(p.shape) for n, p in module.named_parameters()
    }
    assert layer.numel == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("layer", "module", "inputs"),
    [
        (LayerType("linear", (50, 4000), roles=("weight",)), nn.Linear(50, 4000, False), (1, 50)),
        (
            LayerType("conv2d", (8, 400), (3, 3), groups=4, roles=("weight",)),
            nn.Conv2d(8, 400, 3, groups=4, bias=False),
            (1, 8, 9, 9),
        ),
        (
            LayerType("convtranspose2d", (12, 40), (4, 4), (2, 2), roles=("weight",)),
            nn.ConvTranspose2d(12, 40, 4, 2, bias=False),
            (1, 12, 40, 40),
        ),
    ],
)
def test_fan_in_keeps_the_variance(layer: LayerType, module: nn.Module, inputs: tuple[int, ...]) -> None:
    # The definition of fan-in: weights of variance 1 / fan_in give outputs of the inputs' variance.
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=layer.fan_in**-0.5)
    out = torch.stack([module(torch.randn(inputs)) for _ in range(8)])
    assert out.var().item() == pytest.approx(1, rel=0.1)


def test_no_kind_hides_a_method_of_the_container_that_holds_its_part() -> None:
    assert not [kind for kind in KINDS if hasattr(nn.ModuleDict, kind)]
