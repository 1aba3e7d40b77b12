"""Learning from single replies: against a ridge regression, against the paper's step, and against a run by rounds."""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from figures.linear import LinearHypernetwork
from hyperbloom.common.config import RunConfig
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import TrainOrder
from hyperbloom.server.loop.asynchronous import run_asynchronously
from hyperbloom.server.loop.exchange import Evaluated
from hyperbloom.server.loop.listener import Listener, RoundReport, Selection
from hyperbloom.server.loop.rounds import run_rounds
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.hypernetworks import EmbeddingTable, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply
from hyperbloom.strategies.pfedhn import OVERLAP
from tests.strategies.conftest import (
    Inline,
    assert_same,
    digits_config,
    digits_federation,
    introduction,
    joined,
    update_of,
)

LAYOUTS = {"S": Layout((("w", (4,)),)), "M": Layout((("w", (7,)),))}


def mlp(clients: int = 5, **options: Any) -> HypernetworkLearner:
    """Return a learner in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = MLPHypernetwork(LAYOUTS, embedding_dim=3, hidden_dim=6, hidden_layers=1).double()
    made = HypernetworkLearner(network, EmbeddingTable(3, seed=3).double(), **options)
    for index in range(clients):
        made.grow(f"client-{index}")
    return made


def reply(made: HypernetworkLearner, row: int, size: str = "M", seed: int = 0) -> Reply:
    sent = made.generate([row], size)[0]
    generator = torch.Generator().manual_seed(100 * seed + row)
    return Reply(row, size, torch.randn(sent.shape, generator=generator, dtype=torch.float64))


# ---------------------------------------------------------------------- the learner


@pytest.mark.parametrize("overlap", ["", "S", "SS"])
def test_a_reply_that_overlaps_with_none_of_its_size_is_the_papers_step_to_the_bit(overlap: str) -> None:
    made, paper = mlp(), mlp()
    for number in range(3):
        others = [reply(made, row, size, seed=50) for row, size in enumerate(overlap, start=1)]
        one = reply(made, number, seed=number)
        made.update_asynchronously(one, others)
        paper.update([one], "mean")
        assert_same(made.state(), paper.state())


def test_overlap_of_another_size_is_ignored() -> None:
    made, twin, alone = mlp(), mlp(), mlp()
    others = [reply(made, row, size) for row, size in enumerate("MSMS", start=1)]
    one = reply(made, 0)
    made.update_asynchronously(one, others)
    twin.update_asynchronously(one, [other for other in others if other.size == "M"])
    alone.update_asynchronously(one, [])
    assert_same(made.state(), twin.state())
    assert not torch.equal(made.table.weight, alone.table.weight)


@pytest.mark.parametrize("rate", [0.05, 3.0])
def test_a_linear_head_goes_its_replys_part_of_the_implicit_step_of_the_cohort(rate: float) -> None:
    """What W* = argmin_W 1/2 sum |W v_i - target_i|^2 + 1/(2 lr) |W - W_0|^2 leaves of target_i is this reply's part.

    At the optimum W* - W_0 = lr sum_i (target_i - W* v_i) v_i^T: a sum of one part per reply.
    """
    torch.manual_seed(0)
    network = LinearHypernetwork({"M": LAYOUTS["M"]}, embedding_dim=3).double()
    table = EmbeddingTable(3, seed=3, trainable=False).double()
    made = HypernetworkLearner(network, table, learning_rate=rate, momentum=0.0, weight_decay=0.0, clip=math.inf)
    for index in range(5):
        made.grow(f"client-{index}")
    head: Any = network.heads["M"].weight
    before, descriptors = head.detach().clone(), table.weight.detach()
    cohort = [reply(made, row) for row in range(5)]
    targets = made.generate(range(5), "M") + torch.stack([each.delta for each in cohort])
    made.update_asynchronously(cohort[-1], cohort[:-1])

    optimum = ridge(descriptors, targets, before, rate)
    left = targets[-1] - optimum @ descriptors[-1]
    expected = before + rate * torch.outer(left, descriptors[-1])
    torch.testing.assert_close(head.detach(), expected, rtol=0, atol=1e-12)
    assert float((left - cohort[-1].delta).norm()) > 0.01 * float(left.norm())


def ridge(features: Tensor, targets: Tensor, start: Tensor, rate: float) -> Tensor:
    """Return argmin_W 1/2 sum |W f_i - target_i|^2 + 1/(2 rate) |W - start|^2 as one least-squares problem."""
    pull, width = math.sqrt(1 / rate), features.shape[1]
    left = torch.cat([features, pull * torch.eye(width, dtype=torch.float64)])
    solved: Tensor = torch.linalg.lstsq(left, torch.cat([targets, pull * start.T])).solution.T
    return solved


@pytest.mark.parametrize("clip", [50.0, 0.3])
def test_replies_that_were_written_together_are_applied_one_by_one(clip: float) -> None:
    """Ridge regression for the heads from features at the present phi, then one step of torch's SGD with momentum."""
    rate, embedding_rate, momentum, decay = 0.02, 0.3, 0.9, 0.1
    made = mlp(
        learning_rate=rate,
        embedding_learning_rate=embedding_rate,
        momentum=momentum,
        weight_decay=decay,
        clip=clip,
    )
    mine = copy.deepcopy(made)  # for its parameters; what moves them is below
    trunk: Any = mine.hypernetwork.trunk
    head: Any = mine.hypernetwork.heads["M"]
    parameters: list[nn.Parameter] = [*trunk.parameters(), *head.parameters()]
    groups: list[dict[str, Any]] = [{"params": parameters}, {"params": [mine.table.weight], "lr": embedding_rate}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=momentum, weight_decay=decay)
    cohort = [reply(made, row) for row in range(5)]
    for index, one in enumerate(cohort):
        made.update_asynchronously(one, cohort[:index])

        rows = [each.row for each in cohort[: index + 1]]
        features = torch.cat([trunk(mine.table.weight[rows]), torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        weights = head(trunk(mine.table.weight[one.row]))
        # The pull towards delta is measured from zero: how far the head has come since does not count.
        deltas, zero = torch.stack([each.delta for each in cohort[: index + 1]]), torch.zeros(7, 7, dtype=torch.float64)
        moved = ridge(features.detach(), deltas, zero, rate / (1 - momentum)) @ features.detach()[-1]
        optimizer.zero_grad()
        weights.backward(moved - one.delta if index else -one.delta)
        nn.utils.clip_grad_norm_([*parameters, mine.table.weight], clip)
        optimizer.step()
        found = dict(made.hypernetwork.named_parameters()) | {"embeddings": made.table.weight}
        expected = dict(mine.hypernetwork.named_parameters()) | {"embeddings": mine.table.weight}
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- the strategy


def test_the_strategy_gives_the_learner_the_replies_since_the_order_and_the_latest_of_many() -> None:
    options = {"hidden_dim": 8, "learning_rate": 0.1, "start": "hypernetwork"}
    config = RunConfig(clients=4, sizes=("S", "M"), asynchronous=True, options=options)
    made = joined(config, *(introduction(f"client-{index}", size="SM"[index % 2]) for index in range(4)))
    twin: HypernetworkLearner = copy.deepcopy(made.learner)
    generator = torch.Generator().manual_seed(0)
    applied: list[Reply] = []
    for number, staleness in enumerate([0, 1, 2, 3, 0, 2, *range(6, OVERLAP + 4), 3, OVERLAP, OVERLAP + 3]):
        client = made.clients[number % 4]
        sent = made.weights([client])[0].values
        delta = 0.01 * torch.randn(sent.shape, generator=generator)
        made.learn([update_of(client, delta, sent=sent, staleness=staleness)])
        one = Reply(client.row, client.about.size, delta)
        since = applied[number - staleness :] if staleness else []
        twin.update_asynchronously(one, since[-OVERLAP:])
        applied.append(one)
        assert_same(made.state(), twin.state())
    assert len(applied) > OVERLAP + 4


def test_which_strategies_can_be_asynchronous() -> None:
    assert [name for name, kind in sorted(STRATEGIES.items()) if kind.asynchronous] == ["local", "pfedhn", "pfedhn-pc"]


# ---------------------------------------------------------------------- a whole run


@dataclass
class Course(Listener):
    """What a run did, by round."""

    federation: Inline
    losses: dict[int, dict[str, float | None]] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    refused: dict[str, Any] = field(default_factory=dict)
    selected_states: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)

    def round_done(self, report: RoundReport) -> None:
        if report.outcome.results:
            self.losses[report.number] = {name: result.loss for name, result in report.outcome.results.items()}
            self.states[report.number] = self.federation.state()
        if report.outcome.evaluation:
            self.evaluations[report.number] = report.outcome.evaluation
        self.staleness += report.outcome.staleness
        self.refused |= report.outcome.refused

    def selected(self, selection: Selection, state: Any, roster: Any) -> None:
        self.selected_states.append((selection.round, {name: tensor.clone() for name, tensor in state.items()}))


@pytest.mark.parametrize(("strategy", "every"), [("pfedhn", 3), ("pfedhn-pc", 1), ("local", 3)])
def test_one_client_at_a_time_is_one_client_a_round_to_the_bit(strategy: str, every: int, tmp_path: Path) -> None:
    courses, selections = {}, {}
    for mode in (False, True):
        options = {} if strategy == "local" else {"hidden_dim": 16, "learning_rate": 0.2}
        config = digits_config(strategy=strategy, rounds=5, eval_every=every, options=options, asynchronous=mode)
        federation = digits_federation(config, tmp_path / str(mode))
        course = Course(federation)
        run = run_asynchronously if mode else run_rounds
        selections[mode] = run(federation.loop(course))
        courses[mode] = course
    by_rounds, asynchronous = courses[False], courses[True]
    assert by_rounds.losses == asynchronous.losses and len(by_rounds.losses) == 5
    assert len({name for losses in by_rounds.losses.values() for name in losses}) > 1
    assert by_rounds.evaluations == asynchronous.evaluations
    assert sorted(by_rounds.evaluations) == [n for n in range(1, 6) if n % every == 0 or n == 5]
    for number, state in by_rounds.states.items():
        assert_same(state, asynchronous.states[number])
    assert selections[False] == selections[True]
    for (number, state), (other_number, other) in zip(
        by_rounds.selected_states, asynchronous.selected_states, strict=True
    ):
        assert number == other_number
        assert_same(state, other)
    assert (by_rounds.staleness, asynchronous.staleness) == ([], [0] * 5)
    assert (by_rounds.refused, asynchronous.refused) == ({}, {})


def test_what_the_hypernetwork_lacks_when_a_reply_comes_is_learned_as_if_none_overlapped() -> None:
    """Other replies have moved both networks since the order was written; what is lacking then is without them."""
    made = joined(
        digits_config(clients=4, cohort=3, asynchronous=True), *(introduction(f"client-{i}") for i in range(4))
    )
    clients, generator = [made.clients[row] for row in range(4)], torch.Generator().manual_seed(0)
    sent = [weights.values for weights in made.weights(clients)]  # all orders are written before the first reply
    for client, then in zip(clients, sent, strict=True):
        delta = 0.01 * torch.randn(then.shape, generator=generator)
        twin: HypernetworkLearner = copy.deepcopy(made.learner)
        twin.hypernetwork.move_start("S", delta / 4)  # of a cohort of one out of four clients
        lacks = then + delta - twin.generate([client.row], "S")[0]
        made.learn([update_of(client, delta, sent=then, staleness=client.row)])
        twin.update([Reply(client.row, "S", lacks)], "mean")
        assert_same(made.learner.state(), twin.state())


def test_clients_at_the_same_time_are_applied_with_their_overlap(tmp_path: Path) -> None:
    """On the inline grid a cohort of three is written at once, and its replies come in the order of their rows."""
    options = {"hidden_dim": 16, "start": "hypernetwork"}
    config = digits_config(rounds=3, eval_every=3, cohort=3, asynchronous=True, options=options)
    federation, twin = (digits_federation(config, tmp_path / name) for name in ("run", "twin"))
    course = Course(federation)
    run_asynchronously(federation.loop(course))
    assert course.staleness == [0, 1, 2] * 3
    orders, answers = federation.grid.sent(TrainOrder), federation.grid.answers(TrainOrder)
    assert [order.scope.round for order in orders] == [1] * 3 + [2] * 3 + [3] * 3
    for cohort in range(3):
        pairs = list(zip(orders, answers, strict=True))[3 * cohort : 3 * cohort + 3]
        replies = [Reply(row, "S", a.weights.values) for row, (order, a) in enumerate(pairs)]
        for row in range(3):
            twin.algorithm.learner.update_asynchronously(replies[row], replies[:row])
    assert_same(federation.state(), twin.state())
