"""The proximal rule against the problem that it solves, and against its formula written out."""

import math

import pytest
import torch
from torch import Tensor, nn

from figures.linear import LinearHypernetwork
from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork, learner
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply

LAYOUTS = {"S": Layout((("w", (4,)),)), "M": Layout((("w", (7,)),))}


def table(clients: int, dim: int, trainable: bool = True) -> EmbeddingTable:
    made = EmbeddingTable(dim, seed=3, trainable=trainable).double()
    for index in range(clients):
        made.grow(f"client-{index}")
    return made


def replies(made: HypernetworkLearner, sizes: str, seed: int) -> list[Reply]:
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for row, size in enumerate(sizes):
        sent = made.generate([row], size)[0]
        answers.append(Reply(row, size, torch.randn(sent.shape, generator=generator, dtype=torch.float64)))
    return answers


@pytest.mark.parametrize("rate", [0.05, 3.0])
def test_linear_heads_take_the_implicit_step_towards_the_trained_weights(rate: float) -> None:
    """argmin_W 1/2 sum |W v_i - trained_i|^2 + 1/(2 lr) |W - W_0|^2, solved as one least-squares problem."""
    torch.manual_seed(0)
    network = LinearHypernetwork({"M": LAYOUTS["M"]}, embedding_dim=3).double()
    options = {"learning_rate": rate, "momentum": 0.0, "weight_decay": 0.0, "clip": math.inf}
    made = HypernetworkLearner(network, table(5, 3, trainable=False), **options)  # type: ignore[arg-type]
    head = network.heads["M"].weight
    before, descriptors = head.detach().clone(), made.table.weight.detach()
    cohort = replies(made, "MMMMM", seed=1)
    trained = made.generate(range(5), "M") + torch.stack([reply.delta for reply in cohort])
    made.update(cohort, "proximal")

    pull = math.sqrt(1 / rate)
    left = torch.cat([descriptors, pull * torch.eye(3, dtype=torch.float64)])
    right = torch.cat([trained, pull * before.T])
    expected = torch.linalg.lstsq(left, right).solution.T
    torch.testing.assert_close(head.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("at_once", "limit"), [(3, 2), (2, 2), (1, 2), (3, 10)])
@pytest.mark.parametrize("sizes", ["MMM", "MSM"])
def test_a_cohort_follows_the_formula_over_several_rounds(
    sizes: str, at_once: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rate, momentum, decoupling per size and the trunk's limit, with gradients from autograd.

    The weights of so many clients of size M fit into the memory at a time. A cohort below the limit has the whole sum.
    """
    monkeypatch.setattr(learner, "TRUNK_LIMIT", limit)
    monkeypatch.setattr(learner, "BYTES_AT_ONCE", at_once * 7 * 8)
    rate, embedding_rate, momentum, decay, count = 0.02, 0.3, 0.9, 0.1, 3
    torch.manual_seed(1)
    network = MLPHypernetwork(LAYOUTS, embedding_dim=3, hidden_dim=6, hidden_layers=1).double()
    made = HypernetworkLearner(
        network,
        table(4, 3),
        learning_rate=rate,
        embedding_learning_rate=embedding_rate,
        momentum=momentum,
        weight_decay=decay,
    )
    named = {**dict(network.named_parameters()), "embeddings": made.table.weight}
    mine = {name: p.detach().clone() for name, p in named.items()}
    buffers: dict[str, Tensor] = {}
    for number in range(3):
        cohort = replies(made, sizes, seed=number)
        gradients = _sum_of_decoupled(made, cohort, named, rate / (1 - momentum))
        made.update(cohort, "proximal")
        for name, gradient in gradients.items():
            scaled = gradient * (min(limit / count, 1) if name.startswith("trunk.") else 1) + decay * mine[name]
            buffers[name] = momentum**count * buffers[name] + scaled if name in buffers else scaled
            base = embedding_rate if name == "embeddings" else rate
            mine[name] -= base * (1 - momentum**count) / (1 - momentum) * buffers[name]
            torch.testing.assert_close(named[name].detach(), mine[name], rtol=0, atol=1e-12)
    assert buffers.keys() == {name for name in named if sizes == "MSM" or not name.startswith("heads.S")}


def _sum_of_decoupled(
    made: HypernetworkLearner, cohort: list[Reply], named: dict[str, nn.Parameter], eta: float
) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for size in {reply.size for reply in cohort}:
        group = [reply for reply in cohort if reply.size == size]
        features = [made.hypernetwork.trunk(made.table.weight[reply.row]).detach() for reply in group]  # type: ignore[union-attr, operator]
        ones = [torch.cat([f, torch.ones(1, dtype=torch.float64)]) for f in features]
        system = torch.tensor([[eta * float(a @ b) + (a is b) for b in ones] for a in ones], dtype=torch.float64)
        deltas = torch.linalg.inv(system) @ torch.stack([reply.delta for reply in group])
        for reply, delta in zip(group, deltas, strict=True):
            weights = made.hypernetwork(made.table.weight[reply.row][None], size)[0]
            found = torch.autograd.grad(weights, list(named.values()), grad_outputs=-delta, allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                if gradient is not None:
                    total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    return total


def test_replies_that_say_the_same_are_not_added_up() -> None:
    """Forty clients with one descriptor: a sum overshoots what they agree on, the implicit step cannot."""
    torch.manual_seed(2)
    network = LinearHypernetwork({"M": LAYOUTS["M"]}, embedding_dim=2).double()
    made = HypernetworkLearner(network, EmbeddingTable(2, 0, trainable=False).double(), learning_rate=0.5, momentum=0.0)
    for index in range(40):
        made.grow(f"client-{index}", torch.tensor([1.0, 1.0]))
    sent = made.generate([0], "M")[0]
    delta = torch.ones_like(sent)
    made.update([Reply(row, "M", delta) for row in range(40)], "proximal")
    moved = (made.generate([0], "M")[0] - sent) / delta
    assert bool(((moved > 0.9) & (moved <= 1.0)).all()), moved
