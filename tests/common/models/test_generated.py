"""Networks that write their weights by a hypernetwork: the product by hand, finite differences, the plain network."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from hyperbloom.common.models import ModelSpec, body_layout, build, build_own, full_layout, head_layout, own_tensors
from hyperbloom.common.models.generated import Generated

WRITES = "generated:k=5,h=7"
SPECS = {
    "lenet": ModelSpec("lenet", "S", (1, 28, 28), 3, WRITES),
    "residual": ModelSpec("hafl-1", "S", (3, 16, 16), 3, WRITES),
    "recurrent": ModelSpec("lstm-1", "S", (1, 5, 4), 3, WRITES),
}


def made(spec: ModelSpec) -> Generated:
    torch.manual_seed(1)
    module = build(spec).eval()
    assert isinstance(module, Generated)
    for values in module.parameters():
        values.data.add_(torch.randn_like(values), alpha=0.05)  # not at the start, where all embeddings write the same
    return module


def plain(spec: ModelSpec) -> ModelSpec:
    return replace(spec, adapt="all")


def inputs(spec: ModelSpec) -> torch.Tensor:
    return torch.randn(4, *spec.input_shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", SPECS)
def test_it_starts_as_the_plain_network_starts(case: str) -> None:
    torch.manual_seed(3)
    module = build(SPECS[case]).eval()
    torch.manual_seed(3)
    assert torch.equal(module(inputs(SPECS[case])), build(plain(SPECS[case])).eval()(inputs(SPECS[case])))


@pytest.mark.parametrize("case", SPECS)
def test_it_computes_what_the_plain_network_computes_with_the_product_as_weights(case: str) -> None:
    spec = SPECS[case]
    module, other = made(spec), build(plain(spec)).eval()
    first, last = module.hypernetwork[0], module.hypernetwork[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    flat = last.weight @ (first.weight @ module.embedding + first.bias).clamp(min=0) + last.bias
    head = dict(module.network.named_parameters())
    assert len(flat) == body_layout(plain(spec)).numel and all(name.startswith("head.") for name in head)
    other.load_state_dict({**body_layout(plain(spec)).views(flat), **head}, strict=False)
    torch.testing.assert_close(module(inputs(spec)), other(inputs(spec)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [100, 900])
def test_an_embedding_starts_with_a_length_near_one(k: int) -> None:
    """Else a step of the hypernetwork would be longer than one of the network itself, the more so the larger k is."""
    torch.manual_seed(0)
    module = build(replace(SPECS["lenet"], adapt=f"generated:k={k},h=3"))
    assert isinstance(module, Generated)
    assert float(module.embedding.detach().norm()) == pytest.approx(1, abs=0.2)


def test_the_gradient_is_that_of_finite_differences() -> None:
    spec = replace(SPECS["lenet"], name="mlp", input_shape=(1, 4, 4))
    module, batch = made(spec).double(), inputs(spec).double()
    gradient = torch.autograd.grad(torch.logsumexp(module(batch), 1).sum(), list(module.parameters()))
    for index, slope in enumerate(gradient):
        direction, ends = torch.randn_like(slope), []
        for sign in (1, -1):
            moved = copy.deepcopy(module)
            with torch.no_grad():
                list(moved.parameters())[index].add_(direction, alpha=sign * 1e-6)
                ends.append(torch.logsumexp(moved(batch), 1).sum())
        assert float((ends[0] - ends[1]) / 2e-6) == pytest.approx(float((slope * direction).sum()), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", SPECS)
def test_parts_and_names(case: str) -> None:
    spec = SPECS[case]
    names = [f"hypernetwork.{layer}.{leaf}" for layer in (0, 2) for leaf in ("weight", "bias")]
    assert [name for name, _ in body_layout(spec).shapes] == names
    assert body_layout(spec).numel == 7 * 6 + body_layout(plain(spec)).numel * 8
    assert head_layout(spec).shapes[0] == ("embedding", (5,)) and spec.is_new
    assert head_layout(spec).numel == 5 + head_layout(plain(spec)).numel
    assert body_layout(spec).numel + head_layout(spec).numel == full_layout(spec).numel


@pytest.mark.parametrize("case", SPECS)
def test_a_stored_network_is_itself_again_and_becomes_the_plain_one(case: str) -> None:
    spec = SPECS[case]
    module, again = made(spec), build_own(spec).eval()
    expected = module(inputs(spec))
    again.load_state_dict(own_tensors(module), strict=False)
    assert torch.equal(again(inputs(spec)), expected)
    assert isinstance(again, Generated)
    released = again.release()
    assert torch.equal(released(inputs(spec)), expected)
    assert released.state_dict().keys() == build(plain(spec)).state_dict().keys()
