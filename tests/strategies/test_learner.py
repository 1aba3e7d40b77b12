"""The server's learner against autograd, finite differences, closed forms, and a plain loop of pFedHN."""

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from figures.linear import LinearHypernetwork
from figures.spectral_norm import SpectralHypernetwork
from hyperbloom.client.work.sgd import FlatPart, Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import SGD
from hyperbloom.strategies.hypernetworks import ChunkedHypernetwork, EmbeddingTable, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply, UpdateRule
from tests.strategies.conftest import assert_same
from tests.strategies.reference import LocalSGD, PlainHypernetwork, PlainPFedHN

RULES: tuple[UpdateRule, ...] = get_args(UpdateRule)  # with one client a round both are the paper's
DIM, HIDDEN = 3, 8
NUMBERS: dict[str, Any] = {
    "learning_rate": 0.2,
    "embedding_learning_rate": 0.5,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "clip": 50.0,
}
STILL: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "clip": 1e9}


def target(width: int = 4) -> nn.Module:
    """Return a network of three inputs and two classes."""
    layers = OrderedDict(fc1=nn.Linear(3, width), act=nn.ReLU(), head=nn.Linear(width, 2))
    return nn.Sequential(layers).double()


LAYOUTS = {"S": Layout.of(target(2)), "M": Layout.of(target(4)), "L": Layout.of(target(6))}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def learner(
    clients: int = 3,
    layouts: Mapping[str, Layout] = LAYOUTS,
    network: Callable[..., nn.Module] = MLPHypernetwork,
    seed: int = 0,
    spectral_norm: bool = False,
    dim: int = DIM,
    **options: Any,
) -> HypernetworkLearner:
    """Return a learner in double precision."""
    network = SpectralHypernetwork if spectral_norm else network
    sized = {} if network is LinearHypernetwork else {"hidden_dim": HIDDEN}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hypernetwork: Any = network(layouts, dim, **sized).double()
    made = HypernetworkLearner(hypernetwork, EmbeddingTable(dim, seed).double(), **options)
    if spectral_norm:
        made.optimizer.register_step_post_hook(hypernetwork.iterate)
    for client in range(clients):
        made.grow(f"client-{client}")
    return made


def snapshot(of: HypernetworkLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.state().items()}


def reply(of: HypernetworkLearner, row: int, size: str = "M", scale: float = 0.1, seed: int = 0) -> Reply:
    """Return a random change of what the learner generates for a client."""
    sent = of.generate([row], size)[0]
    return Reply(row, size, scale * normal(len(sent), seed=100 * seed + row))


def replies_to(of: HypernetworkLearner, rows: Sequence[int], sizes: Sequence[str], seed: int = 0) -> list[Reply]:
    return [reply(of, row, size, seed=seed) for row, size in zip(rows, sizes, strict=True)]


def task_loss(theta: Tensor, client: int) -> Tensor:
    """Return the loss of a client's network on data of its own."""
    inputs, labels = normal(12, 3, seed=client), torch.arange(12) % 2
    return F.cross_entropy(functional_call(target(), LAYOUTS["M"].views(theta), inputs), labels)


@dataclass
class Formula:
    """The learner's step written out: product with the Jacobian by autograd, clip, decay, momentum, step."""

    learner: HypernetworkLearner  # a copy, whose values are the ones that move
    learning_rate: float
    embedding_learning_rate: float
    momentum: float
    weight_decay: float
    clip: float
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        own = {f"hypernetwork.{name}": p for name, p in self.learner.hypernetwork.named_parameters()}
        return own | {"embeddings": self.learner.table.weight}

    def weights(self, row: int, size: str) -> Tensor:
        """Return h(v; phi) `(P,)`, differentiable."""
        generated: Tensor = self.learner.hypernetwork(self.learner.table.weight[row][None], size)[0]
        return generated

    def gradient(self, row: int, size: str, of_weights: Tensor) -> dict[str, Tensor | None]:
        """Return J(phi, v)^T g."""
        found = torch.autograd.grad(
            self.weights(row, size), list(self.parameters.values()), grad_outputs=of_weights, allow_unused=True
        )
        return dict(zip(self.parameters, found, strict=True))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        felt = {name: g for name, g in gradients.items() if g is not None}
        norm = math.sqrt(sum(float((g * g).sum()) for g in felt.values()))
        for name, gradient in felt.items():
            parameter = self.parameters[name]
            whole = min(1.0, self.clip / (norm + 1e-6)) * gradient + self.weight_decay * parameter
            self.buffers[name] = self.momentum * self.buffers[name] + whole if name in self.buffers else whole
            rate = self.embedding_learning_rate if name == "embeddings" else self.learning_rate
            parameter.sub_(rate * self.buffers[name])

    def apply(self, replies: Sequence[Reply]) -> None:
        """Take one step on the mean gradient."""
        total: dict[str, Tensor | None] = dict.fromkeys(self.parameters)
        for each in replies:
            for name, part in self.gradient(each.row, each.size, -each.delta).items():
                if part is not None:
                    so_far = total[name]
                    total[name] = part if so_far is None else so_far + part
        self.step({name: g if g is None else g / len(replies) for name, g in total.items()})

    def state(self) -> dict[str, Tensor]:
        """Return parameters and momentum under the learner's names."""
        values = {name: p.detach() for name, p in self.parameters.items()}
        if not self.momentum:
            return values
        return values | {f"momentum.{name.removeprefix('hypernetwork.')}": b for name, b in self.buffers.items()}


def formula_of(made: HypernetworkLearner, **options: Any) -> Formula:
    return Formula(copy.deepcopy(made), **options)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float) -> None:
    assert sorted(found) == sorted(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol, msg=partial("{}: {}".format, name))


# ---------------------------------------------------------------------- one step is one gradient step of the whole


@pytest.mark.parametrize("rule", RULES)
def test_one_step_is_autograd_through_client_and_hypernetwork(rule: UpdateRule) -> None:
    eta, rate, embedding_rate = 0.05, 0.3, 0.7
    made = learner(learning_rate=rate, embedding_learning_rate=embedding_rate, **STILL)
    whole = formula_of(
        made, learning_rate=0, embedding_learning_rate=0, momentum=0, weight_decay=0, clip=1
    )  # only its autograd graph is used
    parameters = whole.parameters
    expected = torch.autograd.grad(
        task_loss(whole.weights(1, "M"), 1), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    theta = made.generate([1], "M")[0].requires_grad_()
    (gradient,) = torch.autograd.grad(task_loss(theta, 1), theta)
    made.update([Reply(1, "M", -eta * gradient)], rule)
    after = made.state()
    for (name, before), slope in zip(parameters.items(), expected, strict=True):
        moved = before.detach() - after[name]
        scale = (embedding_rate if name == "embeddings" else rate) * eta
        torch.testing.assert_close(moved, scale * slope, rtol=0, atol=1e-12)
    assert max(float(slope.abs().max()) for slope in expected) > 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_one_step_is_the_slope_by_finite_differences(rule: UpdateRule) -> None:
    eta, rate, h = 0.05, 0.3, 1e-5
    made = learner(learning_rate=rate, **STILL)
    probe = copy.deepcopy(made)

    def loss() -> float:
        return float(task_loss(probe.generate([1], "M")[0], 1))

    theta = made.generate([1], "M")[0].requires_grad_()
    (gradient,) = torch.autograd.grad(task_loss(theta, 1), theta)
    before = snapshot(made)
    made.update([Reply(1, "M", -eta * gradient)], rule)
    after, live, slopes = made.state(), probe.state(), []
    coordinates = [(name, index) for name in before for index in (0, 7, -1)]
    for name, index in coordinates:
        entries = live[name].view(-1)
        index = index % len(entries)
        centre = float(entries[index])
        entries[index] = centre + h
        above = loss()
        entries[index] = centre - h
        slopes.append((above - loss()) / (2 * h))
        entries[index] = centre
        moved = float(before[name].view(-1)[index] - after[name].view(-1)[index])
        # Central differences err by h^2 times the third derivative and by rounding over h: both about 1e-10.
        assert moved / (rate * eta) == pytest.approx(slopes[-1], abs=1e-8), (name, index)
    assert sum(abs(slope) > 1e-4 for slope in slopes) >= 8  # most of what was compared is not zero


# ---------------------------------------------------------------------- the sign


@pytest.mark.parametrize("sizes", ["MMM", "SML"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_moves_what_is_generated_towards_what_was_trained(rule: UpdateRule, sizes: str) -> None:
    made = learner(learning_rate=1e-2, **STILL)
    replies = replies_to(made, range(len(sizes)), sizes)
    trained = [made.generate([each.row], each.size)[0] + each.delta for each in replies]

    def left() -> list[Tensor]:
        return [there - made.generate([each.row], each.size)[0] for each, there in zip(replies, trained, strict=True)]

    def distances() -> Tensor:
        return torch.stack([delta.square().sum() for delta in left()])

    before = distances()
    torch.testing.assert_close(before, torch.stack([each.delta.square().sum() for each in replies]))
    made.update(replies, rule)
    assert float(distances().sum()) < 0.995 * float(before.sum())
    for _ in range(50):
        made.update([replace(each, delta=delta) for each, delta in zip(replies, left(), strict=True)], rule)
    assert float(distances().sum()) < 0.75 * float(before.sum())


# ---------------------------------------------------------------------- section 4.1: PCA


def test_a_linear_hypernetwork_finds_the_principal_subspace_of_the_local_solutions() -> None:
    clients, features, dim, eta = 12, 5, 2, 0.1
    inputs = [torch.linalg.qr(normal(8, features, seed=client))[0] for client in range(clients)]
    # Solutions near a plane that does not pass through the origin: centring would change the answer.
    solutions = 2 * normal(clients, 2, seed=50) @ normal(2, features, seed=51) + normal(1, features, seed=52)
    solutions += 0.3 * normal(clients, features, seed=53)
    labels = [
        x @ theta + 0.1 * normal(8, seed=60 + i) for i, (x, theta) in enumerate(zip(inputs, solutions, strict=True))
    ]
    optima = torch.stack(
        [torch.linalg.lstsq(x, y[:, None]).solution[:, 0] for x, y in zip(inputs, labels, strict=True)]
    )
    for x in inputs:
        torch.testing.assert_close(x.T @ x, torch.eye(features, dtype=torch.float64))

    def local(theta: Tensor, client: int) -> Tensor:
        """Return the change that three full-batch gradient steps of 1/2 |X theta - y|^2 make."""
        start = theta
        for _ in range(3):
            theta = theta - eta * inputs[client].T @ (inputs[client] @ theta - labels[client])
        return theta - start

    layouts = {"M": Layout((("weight", (1, features)),))}
    made = learner(
        clients, layouts, LinearHypernetwork, dim=dim, learning_rate=0.1, embedding_learning_rate=0.5, weight_decay=0.0
    )
    everyone = list(range(clients))
    for _ in range(500):
        sent = made.generate(everyone, "M")
        made.update([Reply(i, "M", local(sent[i], i)) for i in everyone], "mean")

    basis = torch.linalg.svd(optima, full_matrices=False).Vh[:dim]
    torch.testing.assert_close(made.generate(everyone, "M"), optima @ basis.T @ basis, rtol=0, atol=1e-9)
    # The answer is neither the local solutions themselves nor what centred PCA would give.
    centred = optima - optima.mean(0)
    other = torch.linalg.svd(centred, full_matrices=False).Vh[:dim]
    assert float((optima - optima @ basis.T @ basis).abs().max()) > 0.05
    assert float((centred @ other.T @ other + optima.mean(0) - optima @ basis.T @ basis).abs().max()) > 0.05


# ---------------------------------------------------------------------- the authors' loop


class DoubleExamples(Examples):
    """Examples in double precision, which no real client has."""

    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("server_clip", "local_clip", "embedding_rate"), [(50.0, 50.0, None), (0.02, 0.3, None), (50.0, 50.0, 0.2)]
)
@pytest.mark.parametrize("rule", RULES)
def test_one_client_a_round_is_the_authors_loop(
    rule: UpdateRule, server_clip: float, local_clip: float, embedding_rate: float | None
) -> None:
    clients, layout = 3, LAYOUTS["M"]
    data = [DoubleExamples(normal(10, 3, seed=c) + c, (torch.arange(10) + c) % 2) for c in range(clients)]
    local, sgd = LocalSGD(5, 4, 0.1, 0.9, 5e-3, local_clip), SGD(5, 4, 0.1, 0.9, 5e-3, local_clip)
    server: dict[str, Any] = {
        "learning_rate": 0.05,
        "embedding_learning_rate": embedding_rate,
        "momentum": 0.9,
        "weight_decay": 1e-2,
        "clip": server_clip,
    }
    made = learner(clients, {"M": layout}, **server)
    plain = PlainHypernetwork(clients, layout.shapes, DIM, HIDDEN, 3).double()
    plain.copy_from(made.state(), "M")
    authors, start = PlainPFedHN(plain, **server), snapshot(made)
    module, theirs = target(), target()
    network = Network(module, FlatPart(module, layout), FlatPart(module, Layout(())))
    for number, client in enumerate(torch.randint(clients, (20,), generator=torch.Generator().manual_seed(4)).tolist()):
        sent = made.generate([client], "M")[0]
        network.shared.load(sent)
        train(network, data[client], sgd, number)
        made.update([Reply(client, "M", network.shared.values - sent)], rule)
        authors.round(client, theirs, data[client].inputs, data[client].labels, local, number)
    expected = authors.state("M")
    assert_near(made.state(), expected, 1e-11)
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-2


def test_the_clips_of_the_comparison_bind() -> None:
    # Without this the cases above would prove nothing about clipping.
    made = learner(clip=0.02)
    made.update([reply(made, 0)], "mean")
    momentum = [value - 1e-3 * before for value, before in _momentum_and_start(made)]
    norm = math.sqrt(sum(float(m.square().sum()) for m in momentum))
    assert norm == pytest.approx(0.02, rel=1e-4)


def _momentum_and_start(made: HypernetworkLearner) -> list[tuple[Tensor, Tensor]]:
    """Return the momentum after one step, and the parameter before it: p' = p - lr b, lr = 1e-2."""
    state = made.state()
    pairs = []
    for name in [name for name in state if name.startswith("momentum.")]:
        own = name.removeprefix("momentum.")
        parameter = state[own if own == "embeddings" else f"hypernetwork.{own}"]
        pairs.append((state[name], parameter + 1e-2 * state[name]))
    return pairs


# ---------------------------------------------------------------------- cohorts


@pytest.mark.parametrize("clip", [50.0, 0.05])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("sizes", ["MMM", "SMS"])
def test_cohorts_follow_the_formula_of_the_mean(sizes: str, momentum: float, clip: float) -> None:
    numbers = NUMBERS | {"momentum": momentum, "clip": clip}
    made = learner(4, **numbers)
    formula = formula_of(made, **numbers)
    for number, rows in enumerate([(0, 1, 3), (1, 2, 3), (0, 2, 3)]):
        replies = replies_to(made, rows, sizes, seed=number)
        made.update(replies, "mean")
        formula.apply(replies)
    assert_near(made.state(), formula.state(), 1e-12)


def test_the_rules_differ_on_a_cohort_and_agree_on_one_client() -> None:
    states: dict[int, list[dict[str, Tensor]]] = {1: [], 3: []}
    for rule in RULES:
        for cohort, collected in states.items():
            made = learner(learning_rate=0.2)
            made.update(replies_to(made, range(cohort), "MMM"[:cohort]), rule)
            collected.append(snapshot(made))
    for other in states[1][1:]:
        assert_near(states[1][0], other, 1e-12)
    for one, two in itertools.combinations(states[3], 2):
        assert float((one["embeddings"] - two["embeddings"]).abs().max()) > 1e-4


def test_mean_does_not_depend_on_the_order_of_replies() -> None:
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        made = learner(learning_rate=0.2)
        replies = replies_to(made, range(3), "MMM")
        made.update([replies[i] for i in order], "mean")
        found.append(made.table.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-14)


def test_an_empty_cohort_changes_nothing() -> None:
    made = learner()
    made.update([reply(made, 0)], "mean")
    before = snapshot(made)
    for rule in RULES:
        made.update([], rule)
    assert_same(before, made.state())


# ---------------------------------------------------------------------- sizes


def test_clients_of_one_size_leave_the_other_heads_and_their_momentum_alone() -> None:
    made = learner(weight_decay=0.1)
    for number in range(3):
        made.update(replies_to(made, range(3), "SML", seed=number), "mean")
    before = snapshot(made)
    for number, rule in enumerate(RULES):
        made.update([reply(made, 0, "S", seed=number)], rule)
    after = made.state()
    assert list(after) == list(before)
    for name in before:
        untouched = ".M." in name or ".L." in name
        assert torch.equal(after[name], before[name]) == untouched, name
    assert sum(".M." in name and name.startswith("momentum.") for name in before) == 2


@pytest.mark.parametrize("rule", RULES)
def test_sizes_may_meet_one_at_a_time(rule: UpdateRule) -> None:
    made = learner(**NUMBERS)
    formula = formula_of(made, **NUMBERS)
    for row, size in ((0, "S"), (1, "M"), (0, "S"), (2, "L"), (1, "M")):
        replies = [reply(made, row, size)]
        made.update(replies, rule)
        formula.apply(replies)
    assert_near(made.state(), formula.state(), 1e-12)


# ---------------------------------------------------------------------- rows of absent clients


def closed_form(row: Tensor, buffer: Tensor, steps: int, rate: float, momentum: float, decay: float) -> Tensor:
    """Return a row after steps that feel nothing but decay: b <- m b + d r; r <- r - lr b."""
    matrix = torch.tensor([[1 - rate * decay, -rate * momentum], [decay, momentum]], dtype=torch.float64)
    power: Tensor = torch.linalg.matrix_power(matrix, steps)
    moved: Tensor = power[0, 0] * row + power[0, 1] * buffer
    return moved


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dense_embeddings_move_absent_rows_by_decay_and_momentum(momentum: float) -> None:
    rate, decay, steps = 0.3, 0.05, 40
    made = learner(learning_rate=0.01, embedding_learning_rate=rate, momentum=momentum, weight_decay=decay)
    never = made.table.weight[2].detach().clone()
    made.update([reply(made, 1)], "mean")
    once, zero = made.table.weight[1].detach().clone(), torch.zeros(DIM, dtype=torch.float64)
    buffer = made.state()["momentum.embeddings"][1].clone() if momentum else zero
    for number in range(steps):
        made.update([reply(made, 0, seed=number)], RULES[number % 2])
    rows = made.table.weight.detach()
    torch.testing.assert_close(rows[1], closed_form(once, buffer, steps, rate, momentum, decay), rtol=0, atol=1e-13)
    torch.testing.assert_close(rows[2], closed_form(never, zero, steps + 1, rate, momentum, decay), rtol=0, atol=1e-13)
    if not momentum:
        torch.testing.assert_close(rows[2], never * (1 - rate * decay) ** (steps + 1), rtol=0, atol=1e-13)


def test_the_papers_decay_shrinks_a_client_that_is_never_sampled_to_0_607() -> None:
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert float(closed_form(one, zero, 5000, 1e-2, 0.9, 1e-3)) == pytest.approx(0.607, abs=5e-4)
    # The defaults are the paper's numbers: 50 real steps follow the same form.
    made = learner()
    never = made.table.weight[2].detach().clone()
    for _ in range(50):
        made.update([reply(made, 0)], "mean")
    expected = closed_form(never, torch.zeros(DIM, dtype=torch.float64), 50, 1e-2, 0.9, 1e-3)
    torch.testing.assert_close(made.table.weight[2].detach(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_sparse_embeddings_leave_absent_rows_and_their_momentum_alone(rule: UpdateRule) -> None:
    made = learner(4, sparse=True, weight_decay=0.05)
    made.update(replies_to(made, (0, 1, 2), "MMM"), rule)
    before = snapshot(made)
    assert float(before["momentum.embeddings"][:3].abs().min()) > 0
    assert torch.equal(before["momentum.embeddings"][3], torch.zeros(DIM, dtype=torch.float64))
    made.update(replies_to(made, (0, 2), "MM", seed=1), rule)
    after = made.state()
    for name in ("embeddings", "momentum.embeddings"):
        moved = (after[name] != before[name]).any(dim=1).tolist()
        assert moved == [True, False, True, False], name


def test_sparse_and_dense_move_a_row_that_is_always_there_in_the_same_way() -> None:
    both = []
    for sparse in (False, True):
        made = learner(1, sparse=sparse, weight_decay=0.05)
        for number in range(5):
            made.update([reply(made, 0, seed=number)], "mean")
        both.append(snapshot(made))
    assert_same(*both)


# ---------------------------------------------------------------------- spectral norm


def normalised_weights(of: HypernetworkLearner, row: int, size: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return parameters, embedding row and h(v), with each matrix divided by u^T W v, u and v as they are stored."""
    state = {name.removeprefix("hypernetwork."): value.clone() for name, value in of.state().items()}
    leaves = {name: value.requires_grad_() for name, value in state.items() if name.endswith(("bias", "original"))}
    v = state["embeddings"][row].requires_grad_()

    def linear(prefix: str, x: Tensor) -> Tensor:
        inner = f"{prefix}.parametrizations.weight"
        matrix = leaves[f"{inner}.original"]
        sigma = state[f"{inner}.0._u"] @ matrix @ state[f"{inner}.0._v"]
        bias = leaves[f"{prefix}.bias"]
        return x @ (matrix / sigma).T + bias

    x = linear("trunk.0", v)
    for layer in (2, 4, 6):
        x = linear(f"trunk.{layer}", x.relu())
    parts = [linear(f"heads.{size}.parts.{part}", x) for part in range(len(LAYOUTS[size].shapes))]
    return leaves, v, torch.cat(parts)


@pytest.mark.parametrize("rule", RULES)
def test_spectral_norm_differentiates_the_weights_that_were_sent(rule: UpdateRule) -> None:
    made = learner(spectral_norm=True, learning_rate=0.3, **STILL)
    for number in range(3):  # so that power iterations lag behind the weights
        made.update([reply(made, 0, scale=3.0, seed=number)], rule)
    sent = made.generate([0], "M")[0]
    leaves, v, weights = normalised_weights(made, 0, "M")
    torch.testing.assert_close(sent, weights.detach(), rtol=0, atol=1e-13)
    delta = normal(len(sent), seed=5)
    slopes = torch.autograd.grad(weights, [*leaves.values(), v], grad_outputs=-delta, allow_unused=True)
    before = snapshot(made)
    made.update([Reply(0, "M", delta)], rule)
    after = made.state()
    for name, slope in zip(leaves, slopes, strict=False):
        moved = before[f"hypernetwork.{name}"] - after[f"hypernetwork.{name}"]
        torch.testing.assert_close(moved, torch.zeros_like(moved) if slope is None else 0.3 * slope, rtol=0, atol=1e-12)
    assert slopes[-1] is not None
    torch.testing.assert_close(before["embeddings"][0] - after["embeddings"][0], 0.3 * slopes[-1], rtol=0, atol=1e-12)
    # A further iteration would have been noticed: it changes what is generated.
    here = made.generate([0], "M")
    made.hypernetwork.train()
    with torch.no_grad():
        made.hypernetwork(made.table(torch.tensor([0])), "M")
    assert float((made.generate([0], "M") - here).abs().max()) > 1e-9


def test_spectral_norm_differentiates_the_weights_that_were_sent_to_two_sizes() -> None:
    made = learner(spectral_norm=True, learning_rate=0.3, **STILL)
    for number in range(3):
        made.update([reply(made, 0, scale=3.0, seed=number)], "mean")
    sent = {row: made.generate([row], size)[0] for row, size in ((0, "S"), (1, "M"))}
    for row, size in ((0, "S"), (1, "M")):
        _, _, weights = normalised_weights(made, row, size)
        torch.testing.assert_close(sent[row], weights.detach(), rtol=0, atol=1e-13)


def test_spectral_norm_follows_each_step_by_one_power_iteration() -> None:
    made = learner(layouts={"M": LAYOUTS["M"]}, spectral_norm=True, learning_rate=0.3)
    old = snapshot(made)
    made.update([reply(made, 0, scale=3.0)], "mean")
    new = made.state()
    prefixes = [name.removesuffix(".original") for name in new if name.endswith(".original") and "momentum" not in name]
    assert len(prefixes) == 4 + 4
    for prefix in prefixes:
        matrix = new[f"{prefix}.original"]
        assert not torch.equal(matrix, old[f"{prefix}.original"])
        u = F.normalize(matrix @ old[f"{prefix}.0._v"], dim=0)
        v = F.normalize(matrix.T @ u, dim=0)
        torch.testing.assert_close(new[f"{prefix}.0._u"], u, rtol=0, atol=1e-14)
        torch.testing.assert_close(new[f"{prefix}.0._v"], v, rtol=0, atol=1e-14)


def test_spectral_norms_stay_near_one_while_training() -> None:
    made = learner(spectral_norm=True, learning_rate=0.05)
    start = snapshot(made)
    for number in range(60):
        made.update(replies_to(made, range(3), "SML", seed=number % 3), "mean")
    network: Any = made.hypernetwork
    layers = [x for x in network.trunk if isinstance(x, nn.Linear)]
    layers += [part for size in LAYOUTS for part in network.heads[size].parts]
    for layer in layers:
        assert float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2)) == pytest.approx(1, abs=0.02)
    # Divided by the norms that they had at the start, these matrices would be another size.
    drift = []
    for name, before in start.items():
        if name.endswith(".original"):
            now = made.state()[name]
            drift.append(float(torch.linalg.matrix_norm(now, ord=2) / torch.linalg.matrix_norm(before, ord=2)) - 1)
    assert max(abs(each) for each in drift) > 0.1


# ---------------------------------------------------------------------- novel clients, given descriptors


@pytest.mark.parametrize("rule", RULES)
def test_a_frozen_hypernetwork_moves_only_the_rows_of_the_cohort(rule: UpdateRule) -> None:
    base = learner()
    for number in range(3):
        base.update(replies_to(base, range(3), "MMM", seed=number), "mean")
    made = learner(0, freeze=True, seed=5, learning_rate=0.2, weight_decay=0.1)
    made.load(base.state(), with_momentum=False)
    made.grow("novel-0")
    made.grow("novel-1")
    before, start = snapshot(made), made.generate([3], "M")[0]
    assert_same({name: before[name] for name in before if name != "embeddings"}, _hypernetwork(base))
    for number in range(3):
        made.update([reply(made, 3, seed=number)], rule)
    after = snapshot(made)
    assert_same(_hypernetwork(made), _hypernetwork(base))
    assert (after["embeddings"] != before["embeddings"]).any(dim=1).tolist() == [False, False, False, True, False]
    assert [name for name in after if name.startswith("momentum.")] == ["momentum.embeddings"]
    assert float((made.generate([3], "M")[0] - start).abs().max()) > 1e-3


def _hypernetwork(of: HypernetworkLearner) -> dict[str, Tensor]:
    return {name: value for name, value in snapshot(of).items() if name.startswith("hypernetwork.")}


def test_a_frozen_hypernetwork_with_spectral_norm_writes_the_same_for_the_others() -> None:
    made = learner(spectral_norm=True, freeze=True, learning_rate=0.2)
    before, known, novel = _hypernetwork(made), made.generate([0], "M"), made.generate([2], "M")
    for rule in RULES:
        made.update([reply(made, 2)], rule)
    assert_same(_hypernetwork(made), before)  # the vectors of the power iterations are among it
    assert torch.equal(made.generate([0], "M"), known)
    assert not torch.equal(made.generate([2], "M"), novel)


def test_a_new_row_learns_by_the_formula_under_a_frozen_hypernetwork() -> None:
    made = learner(freeze=True, learning_rate=0.2, weight_decay=0.0, momentum=0.9)
    row, buffer = made.table.weight[0].detach().clone(), torch.zeros(DIM, dtype=torch.float64)
    for number in range(4):
        given = reply(made, 0, seed=number)
        v = row.clone().requires_grad_()
        (slope,) = torch.autograd.grad(made.hypernetwork(v[None], "M")[0], v, grad_outputs=-given.delta)
        buffer = 0.9 * buffer + slope
        row = row - 0.2 * buffer
        made.update([given], "mean")
    torch.testing.assert_close(made.table.weight[0].detach(), row, rtol=0, atol=1e-13)


def test_given_descriptors_stay_and_the_hypernetwork_learns_from_them() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MLPHypernetwork(LAYOUTS, 2, HIDDEN).double()
    made = HypernetworkLearner(network, EmbeddingTable(2, 0, trainable=False).double(), learning_rate=0.1)
    shares = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    for client, row in enumerate(shares):
        made.grow(f"client-{client}", row)
    before = snapshot(made)
    for number in range(3):
        made.update(replies_to(made, (0, 1), "MM", seed=number), "mean")
    after = made.state()
    assert torch.equal(after["embeddings"], shares)
    assert "momentum.embeddings" not in after
    assert all(not torch.equal(after[n], before[n]) for n in before if "trunk" in n or ".M." in n)


# ---------------------------------------------------------------------- joining late, stopping and going on


def test_a_late_client_changes_nobodys_row_or_momentum() -> None:
    made = learner(**NUMBERS)
    made.update(replies_to(made, range(3), "MMM"), "mean")
    before = snapshot(made)
    made.grow("late")
    after = snapshot(made)
    assert list(after) == list(before)
    for name in before:
        rows = len(before[name]) if "embeddings" in name else None
        assert torch.equal(after[name][:rows], before[name]), name
    fresh = EmbeddingTable(DIM, 0).double()
    fresh.grow("late")
    assert torch.equal(after["embeddings"][3:], fresh.weight)
    assert torch.equal(after["momentum.embeddings"][3:], torch.zeros(1, DIM, dtype=torch.float64))
    # And all four learn on as if the row had been there with no momentum of its own.
    formula = formula_of(made, **NUMBERS)
    formula.buffers = {_full(name): value for name, value in after.items() if name.startswith("momentum.")}
    for number in range(2):
        replies = replies_to(made, (1, 3), "MM", seed=number)
        made.update(replies, "mean")
        formula.apply(replies)
    assert_near(made.state(), formula.state(), 1e-12)


def _full(name: str) -> str:
    own = name.removeprefix("momentum.")
    return own if own == "embeddings" else f"hypernetwork.{own}"


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"spectral_norm": True}])
def test_going_on_from_a_stored_state_is_going_on_to_the_bit(options: dict[str, Any]) -> None:
    made = learner(**options)
    for number in range(3):
        made.update(replies_to(made, range(3), "SML", seed=number), "mean")
    stored = snapshot(made)
    kept = {name: tensor.clone() for name, tensor in stored.items()}
    again = learner(0, seed=9, **options)
    again.load(stored)
    assert_same(stored, again.state())
    for one in (made, again):
        one.table.seed = 0
        one.grow("late")
        for number in range(3):
            one.update([reply(one, 3, "M", seed=number), reply(one, 0, "S", seed=number)], "mean")
    assert_same(made.state(), again.state())
    assert_same(stored, kept)  # what was loaded is still what was stored
    assert float((again.state()["embeddings"][:3] - stored["embeddings"]).abs().max()) > 1e-5


def test_going_on_without_momentum_is_a_fresh_optimiser() -> None:
    base = learner()
    base.update(replies_to(base, range(3), "SML"), "mean")
    made = learner(0, seed=9)
    made.load(base.state(), with_momentum=False)
    assert not [name for name in made.state() if name.startswith("momentum.")]
    start, given = snapshot(made), reply(made, 0, seed=1)
    made.update([given], "mean")
    # The gradient of the head's bias is that of the weights: the first step shows it without any momentum.
    moved = start["hypernetwork.heads.M.bias"] - made.state()["hypernetwork.heads.M.bias"]
    expected = 1e-2 * (-given.delta + 1e-3 * start["hypernetwork.heads.M.bias"])
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("with_momentum", [True, False])
def test_loading_replaces_the_momentum_of_a_learner_that_has_some(with_momentum: bool) -> None:
    fresh, made = learner(), learner()
    made.update(replies_to(made, range(3), "SML"), "mean")
    made.load(fresh.state(), with_momentum)
    assert_same(fresh.state(), made.state())


@pytest.mark.parametrize("network", [MLPHypernetwork, LinearHypernetwork])
def test_a_heads_gradient_takes_the_memory_of_the_last_one_and_none_of_its_values(
    network: Callable[..., nn.Module],
) -> None:
    whole, again = learner(network=network, **NUMBERS), learner(network=network, **NUMBERS)
    replies = [[reply(whole, row, seed=seed) for row in range(3)] for seed in range(2)]
    for each in replies:
        whole.update(each, "mean")
    again.update(replies[0], "mean")
    weight: Any = again.hypernetwork.heads["M"].weight
    kept = again._spare[weight].fill_(torch.nan)
    again.update(replies[1], "mean")
    assert again._spare[weight].data_ptr() == kept.data_ptr()
    for name, value in whole.state().items():
        assert torch.equal(again.state()[name], value), name


@pytest.mark.parametrize("kind", [MLPHypernetwork, ChunkedHypernetwork])
def test_the_mean_of_clients_weights_takes_one_pass_of_their_mean_features(kind: type[Any]) -> None:
    layouts = {"M": Layout((("a", (3, 4)), ("b", (5,))))}
    table = EmbeddingTable(2, seed=1)
    for name in "abc":
        table.grow(name)
    learner = HypernetworkLearner(kind(layouts, 2, 8, 1), table)
    torch.testing.assert_close(learner.average([0, 2], "M"), learner.generate([0, 2], "M").mean(0))
