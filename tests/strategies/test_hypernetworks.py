"""The networks that write networks: one fused head is many, rows know no order."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from hyperbloom.common.layout import Layout
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork
from tests.strategies.conftest import digits_config, introduction, joined
from tests.strategies.reference import PlainHypernetwork

LAYOUTS = {
    "S": Layout((("fc1.weight", (4, 3)), ("fc1.bias", (4,)), ("head.weight", (2, 4)))),
    "M": Layout((("fc1.weight", (5, 3)), ("head.weight", (2, 5)))),
}


def mlp(seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLPHypernetwork(LAYOUTS, 3, 8, **options).double()


@pytest.mark.parametrize("hidden_layers", [0, 1, 3])
@pytest.mark.parametrize("size", ["S", "M"])
def test_the_fused_head_is_a_head_per_tensor(size: str, hidden_layers: int) -> None:
    fused, layout = mlp(hidden_layers=hidden_layers), LAYOUTS[size]
    plain = PlainHypernetwork(4, layout.shapes, 3, 8, hidden_layers).double()
    descriptors = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = {f"hypernetwork.{name}": value for name, value in fused.state_dict().items()}
    plain.copy_from(state | {"embeddings": descriptors}, size)
    generated = fused(descriptors, size)
    assert generated.shape == (4, layout.numel)
    for client in range(4):
        for name, tensor in layout.views(generated[client]).items():
            torch.testing.assert_close(tensor, plain(client)[name], rtol=0, atol=1e-14)


def test_the_trunk_has_the_papers_depth_and_nothing_between_it_and_the_heads() -> None:
    network = mlp()
    linear = [tuple(x.weight.shape) for x in network.trunk if isinstance(x, nn.Linear)]
    assert linear == [(8, 3), (8, 8), (8, 8), (8, 8)]
    assert isinstance(network.trunk[-1], nn.Linear)  # no activation before the heads
    assert sum(isinstance(x, nn.ReLU) for x in network.trunk) == 3


def test_a_fused_head_starts_as_separate_heads_do() -> None:
    # The bound of nn.Linear's default initialisation depends on the fan-in alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head: Any = MLPHypernetwork({"S": Layout((("a", (3000,)), ("b", (2,))))}, 2, 25).heads["S"]
    bound = 1 / math.sqrt(25)
    for values in (head.weight, head.bias):
        assert 0.99 * bound < float(values.detach().abs().max()) <= bound


def test_a_row_depends_on_the_seed_and_the_name_and_not_on_who_joined_before() -> None:
    tables = {seed: EmbeddingTable(4, seed) for seed in (0, 1)}
    for name in "abc":
        tables[0].grow(name)
        tables[1].grow(name)
    other = EmbeddingTable(4, 0)
    for name in "cxa":
        other.grow(name)
    a, _, c = tables[0].weight.detach()
    assert torch.equal(other.weight[[2, 0]], torch.stack([a, c]))
    rows = torch.cat([tables[0].weight, tables[1].weight, other.weight[1:2]]).detach()
    assert len({tuple(row.tolist()) for row in rows}) == 7  # all others differ


def test_new_rows_are_standard_normal() -> None:
    table = EmbeddingTable(50, 0)
    for client in range(200):
        table.grow(f"client-{client}")
    # 10,000 values: three standard errors of the mean are 0.03, of the variance 0.043.
    values = table.weight.detach()
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.var()) - 1) < 0.043


def test_growing_leaves_the_other_rows_and_global_randomness_alone() -> None:
    table = EmbeddingTable(3, 0)
    table.grow("a")
    table.grow("given", torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))
    before = table.weight.detach().clone()
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    table.grow("b")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(table.weight[:2], before)
    assert table.weight[1].tolist() == [0.5, 0.25, 0.25]
    assert table.weight.shape == (3, 3)
    assert torch.equal(table(torch.tensor([2, 0])), table.weight[[2, 0]])


def test_a_table_that_grows_is_copied_seldom() -> None:
    table = EmbeddingTable(3, seed=0)
    places = set()
    for client in range(1000):
        table.grow(f"client-{client}")
        places.add(table.weight.data_ptr())
    assert table.weight.shape == (1000, 3)
    assert table.weight.is_contiguous()
    assert len(places) <= 11  # doublings
    for client in (0, 500, 999):
        alone = EmbeddingTable(3, seed=0)
        alone.grow(f"client-{client}")
        assert torch.equal(table.weight[client], alone.weight[0])


def test_given_descriptors_are_not_trainable() -> None:
    assert not EmbeddingTable(3, 0, trainable=False).weight.requires_grad
    assert EmbeddingTable(3, 0).weight.requires_grad


def test_the_authors_start_is_what_torch_draws_for_the_hypernetwork() -> None:
    config = digits_config(strategy="pfedhn", seed=5, options={"hidden_dim": 16, "start": "hypernetwork"})
    algorithm = joined(config, introduction("a", input_shape=(1, 8, 8), num_classes=10))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(5, "hypernetwork"))
        expected = MLPHypernetwork(dict(algorithm.setting.layouts), 1, 16).state_dict()
    found = algorithm.learner.hypernetwork.state_dict()
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
