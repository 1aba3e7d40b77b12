"""The chunked hypernetwork written out chunk by chunk, and cohorts too large to be worked on at once."""

import copy
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks import ChunkedHypernetwork, EmbeddingTable, MLPHypernetwork, learner
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply, UpdateRule
from tests.strategies.conftest import assert_same

LAYOUTS = {"S": Layout((("w", (3, 3)), ("b", (2,)))), "M": Layout((("w", (8, 4)),))}
DIM, CHUNK = 3, 5


def network(chunk: int = CHUNK, layouts: dict[str, Layout] = LAYOUTS) -> ChunkedHypernetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ChunkedHypernetwork(layouts, DIM, hidden_dim=6, hidden_layers=2, chunk=chunk, chunk_dim=4).double()


def descriptors(count: int) -> Tensor:
    return torch.randn(count, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def written_out(made: ChunkedHypernetwork, row: Tensor, size: str) -> tuple[Tensor, Tensor]:
    """Return one client's weights and what the head saw, a chunk at a time: `h([v; e_c])`."""
    features = [made.trunk(torch.cat([row, chunk])) for chunk in made.chunks[size]]
    weights = torch.cat([made.head(each) for each in features])[: LAYOUTS[size].numel]
    return weights, torch.stack(features)


@pytest.mark.parametrize("size", ["S", "M"])
def test_every_chunk_comes_from_the_descriptor_and_the_chunks_embedding(size: str) -> None:
    made, rows = network(), descriptors(4)
    assert made.chunks[size].shape == (math.ceil(LAYOUTS[size].numel / CHUNK), 4)
    generated = made(rows, size)
    assert generated.shape == (4, LAYOUTS[size].numel)
    for index, row in enumerate(rows):
        torch.testing.assert_close(generated[index], written_out(made, row, size)[0], rtol=0, atol=1e-14)


def test_the_gram_matrix_is_the_mean_over_chunks_of_what_the_head_sees() -> None:
    made, rows = network(), descriptors(3)
    features = [written_out(made, row, "M")[1].detach() for row in rows]
    expected = [[float((one * other).sum(1).mean()) + 1 for other in features] for one in features]
    gram = made.gram(made.features(rows, "M")).detach()
    torch.testing.assert_close(gram, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-13)


def test_one_chunk_is_the_ordinary_hypernetwork_with_a_longer_descriptor() -> None:
    layouts = {"M": LAYOUTS["M"]}
    made, rows = network(chunk=LAYOUTS["M"].numel, layouts=layouts), descriptors(4)
    plain = MLPHypernetwork(layouts, DIM + 4, hidden_dim=6, hidden_layers=2).double()
    plain.trunk.load_state_dict(made.trunk.state_dict())
    plain.heads["M"].load_state_dict(made.head.state_dict())
    longer = torch.cat([rows, made.chunks["M"].expand(4, -1)], dim=1)
    torch.testing.assert_close(made(rows, "M"), plain(longer, "M"), rtol=0, atol=1e-14)
    one, other = made.features(rows, "M"), plain.features(longer, "M")
    torch.testing.assert_close(made.gram(one), plain.gram(other), rtol=0, atol=1e-13)


def test_the_gradient_is_that_of_finite_differences() -> None:
    made, rows = network(), descriptors(2).requires_grad_()
    direction = torch.randn(2, LAYOUTS["S"].numel, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def value() -> Tensor:
        total: Tensor = (made(rows, "S") * direction).sum()
        return total

    value().backward()
    step = 1e-6
    for parameter in (rows, made.chunks["S"], made.head.weight, next(made.trunk.parameters())):
        assert parameter.grad is not None
        flat, gradient = parameter.detach().view(-1), parameter.grad.view(-1)
        for index in range(0, len(flat), 7):
            before = float(flat[index])
            flat[index] = before + step
            above = float(value().detach())
            flat[index] = before - step
            below = float(value().detach())
            flat[index] = before
            assert float(gradient[index]) == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_a_resnet_needs_a_thousandth_of_the_parameters_of_a_head_for_all_weights() -> None:
    layout = Layout((("weights", (11_200_000,)),))
    made = ChunkedHypernetwork({"M": layout}, 13)
    assert sum(parameter.numel() for parameter in made.parameters()) < 1.1 * 101 * layout.numel / 600
    with torch.no_grad():
        generated = made(torch.randn(1, 13), "M")
    assert generated.shape == (1, layout.numel)


# ---------------------------------------------------------------------- LoRA


def adapted_layout(layers: int, ranks: int = 2) -> Layout:
    """Return the layout of LoRA in convolutions from 2 to 3 channels, and of a head."""
    names = [f"body.{number}.lora" for number in range(layers)]
    shapes = {"A": (ranks, 2, 3, 3), "B": (3, ranks, 1, 1)}
    parts = [(f"{name}_{leaf}.default.weight", shapes[leaf]) for name in names for leaf in "AB"]
    return Layout((*parts, ("head.weight", (5, 8)), ("head.bias", (5,))))


def test_an_adapter_is_written_by_layer_and_rank() -> None:
    layout = adapted_layout(3)
    made, rows = network(layouts={"M": layout}), descriptors(4)
    generated = made(rows, "M")
    for client, row in enumerate(rows):
        views, rest = layout.views(generated[client]), []
        for layer in range(3):
            a, b = (views[f"body.{layer}.lora_{leaf}.default.weight"] for leaf in "AB")
            for rank in range(2):
                embedding = (made.chunks["M"][layer] + made.ranks["M"][rank]) / math.sqrt(2)
                chunk = made.head(made.trunk(torch.cat([row, embedding])))
                torch.testing.assert_close(torch.cat([a[rank].flatten(), b[:, rank].flatten()]), chunk[:21])
        rest = [made.head(made.trunk(torch.cat([row, embedding]))) for embedding in made.chunks["M"][3:]]
        torch.testing.assert_close(
            torch.cat([views["head.weight"].flatten(), views["head.bias"]]), torch.cat(rest)[:45]
        )
    assert made.head.out_features == 21 and len(made.chunks["M"]) == 3 + math.ceil(45 / 21)


def test_a_deeper_backbone_costs_an_embedding_for_each_layer() -> None:
    few, many = (network(layouts={"M": adapted_layout(layers)}) for layers in (2, 50))
    count = [sum(parameter.numel() for parameter in made.parameters()) for made in (few, many)]
    assert count[1] - count[0] == 48 * 4


# ---------------------------------------------------------------------- cohorts in chunks of clients


def made_learner(kind: str) -> HypernetworkLearner:
    torch.manual_seed(0)
    hypernetwork: Any = network() if kind == "chunked" else MLPHypernetwork(LAYOUTS, DIM, 6, 2).double()
    made = HypernetworkLearner(hypernetwork, EmbeddingTable(DIM, 0).double(), learning_rate=0.05)
    for client in range(7):
        made.grow(f"client-{client}")
    return made


def cohort(of: HypernetworkLearner, seed: int) -> list[Reply]:
    generator = torch.Generator().manual_seed(seed)
    replies = []
    for row, size in enumerate("MSMMSMM"):
        sent = of.generate([row], size)[0]
        delta = torch.randn(sent.shape, generator=generator, dtype=torch.float64)
        replies.append(Reply(row, size, 0.1 * delta))
    return replies


@pytest.mark.parametrize("kind", ["mlp", "chunked"])
@pytest.mark.parametrize("rule", get_args(UpdateRule))
@pytest.mark.parametrize("clients_at_once", [1, 2, 3])
def test_a_cohort_in_chunks_learns_what_it_learns_at_once(
    kind: str, rule: UpdateRule, clients_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = made_learner(kind), made_learner(kind)
    at_once: list[int] = []
    backward = parts._backward_heads

    def counted(features: Tensor, *more: Any) -> None:
        at_once.append(len(features))
        backward(features, *more)

    monkeypatch.setattr(parts, "_backward_heads", counted)
    for seed in range(3):
        replies = cohort(whole, seed)
        monkeypatch.setattr(learner, "BYTES_AT_ONCE", 2**30)
        whole.update(copy.deepcopy(replies), rule)
        monkeypatch.setattr(learner, "BYTES_AT_ONCE", clients_at_once * 8 * LAYOUTS["M"].numel)
        parts.update(replies, rule)
        for name, value in whole.state().items():
            torch.testing.assert_close(parts.state()[name], value, rtol=0, atol=1e-12)
    # Clients of size S are a third as large: three of them fit where one of M does.
    pieces = {1: [1, 1, 1, 1, 1, 2], 2: [2, 2, 1, 2], 3: [3, 2, 2]}[clients_at_once]
    assert at_once == 3 * pieces


def test_the_state_of_a_chunked_hypernetwork_is_all_there_is_to_it() -> None:
    one, other = made_learner("chunked"), made_learner("chunked")
    one.update(cohort(one, 0), "proximal")
    other.load(one.state())
    replies = cohort(one, 1)
    for made in (one, other):
        made.update(replies, "proximal")
    assert_same(one.state(), other.state())
