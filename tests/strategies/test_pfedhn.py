"""pFedHN in whole federations of one process: the authors' loop, sizes, repeats, restarts, novel clients."""

import copy
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.client.work.client import client_for
from hyperbloom.common import models
from hyperbloom.common.config import LocalConfig, PrivacyConfig
from hyperbloom.common.data import ClientData, load_client_data
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, TrainOrder, TrainResult
from hyperbloom.server.loop.roster import Roster
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client, Update, draw
from hyperbloom.strategies.hypernetworks import MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import Reply, UpdateRule
from hyperbloom.strategies.pfedhn import PFedHNOptions, PFedHNPCOptions, shrunk_mean
from tests.strategies.conftest import (
    BRIEF,
    RUN_ID,
    History,
    Inline,
    assert_same,
    digits_config,
    digits_federation,
    digits_grid,
    digits_settings,
    introduction,
    joined,
    play,
    turn,
)
from tests.strategies.reference import LocalSGD, PlainHypernetwork, PlainPFedHN, local_loop, seed_of

from ..scores import count_right

BODY = {"fc1.weight": (50, 64), "fc1.bias": (50,)}
HEAD = {"head.weight": (10, 50), "head.bias": (10,)}
BODY_LENGTH, HEAD_LENGTH = 50 * 64 + 50, 10 * 50 + 10
DIGITS = introduction("a", input_shape=(1, 8, 8), num_classes=10)


def plain_net() -> nn.Sequential:
    """Return the target network of size S on the digits, made of torch's own parts."""
    layers = OrderedDict(flat=nn.Flatten(), fc1=nn.Linear(64, 50), act=nn.ReLU(), head=nn.Linear(50, 10))
    return nn.Sequential(layers)


def data_of(federation: Inline, folder: Path) -> dict[str, ClientData]:
    settings = digits_settings(federation.config, folder)
    return {each.client_id: load_client_data(each.data) for each in settings}


def scores_of(history: History) -> dict[str, EvaluateResult]:
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    return dict(evaluation.scores)


# ---------------------------------------------------------------------- against the authors' loop


@pytest.mark.parametrize("rule", get_args(UpdateRule))
def test_one_client_a_round_is_the_authors_loop_through_the_whole_stack(rule: str, tmp_path: Path) -> None:
    local = LocalSGD(5, 16, 0.1, 0.8, 5e-3, 1.0)
    server = {
        "learning_rate": 0.05,
        "embedding_learning_rate": 0.2,
        "momentum": 0.8,
        "weight_decay": 1e-2,
        "clip": 1.35,
    }
    config = digits_config(
        clients=4,
        rounds=8,
        eval_every=8,
        seed=3,
        local=LocalConfig(**vars(local), schedule="constant"),
        options={"hidden_dim": 16, "hidden_layers": 2, "update": rule, "start": "hypernetwork", **server},
    )
    federation = digits_federation(config, tmp_path)
    data, start = data_of(federation, tmp_path), federation.state()
    history, _ = federation.run()
    found = federation.state()

    exact, rounded = (
        _authors_state(start, history, data, local, server, dtype) for dtype in (torch.float64, torch.float32)
    )
    assert sorted(found) == sorted(exact)
    assert len({name for (name,) in history.cohorts}) > 1
    for name, expected in exact.items():
        # The same sums in another order: as far from the exact result as the plain loop in single precision is. The
        # factor is for luck in that one sample of rounding errors, the floor for tensors with hardly any.
        noise = float((rounded[name].double() - expected).abs().max())
        error = float((found[name].double() - expected).abs().max())
        assert error <= 10 * noise + 1e-7, name
        assert 10 * noise + 1e-7 < 1e-5, name
        before = start[name] if name in start else torch.zeros_like(expected)
        assert float((expected - before).abs().max()) > 1e-3, name


def _authors_state(
    start: Mapping[str, Tensor],
    history: History,
    data: Mapping[str, ClientData],
    local: LocalSGD,
    server: dict[str, float],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    hypernetwork = PlainHypernetwork(4, list((BODY | HEAD).items()), 2, 16, 2).to(dtype)
    hypernetwork.copy_from(start, "S")
    authors, net = PlainPFedHN(hypernetwork, **server), plain_net().to(dtype)
    for number, (name,) in enumerate(history.cohorts, start=1):
        examples = data[name].train
        row, seed = int(name.removeprefix("client-")), seed_of(3, name, number)
        authors.round(row, net, examples.inputs.to(dtype), examples.labels, local, seed)
    assert min(authors.norms) < server["clip"] < max(authors.norms)  # the clip binds in some rounds and not in others
    return authors.state("S")


@pytest.mark.parametrize("personal", ["written", "trained"])
def test_a_score_is_that_of_the_clients_personal_network_on_its_own_examples(personal: str, tmp_path: Path) -> None:
    federation = digits_federation(digits_config(rounds=2, options={"personal": personal}), tmp_path)
    history, selection = federation.run()
    data, net = data_of(federation, tmp_path), plain_net()
    trained = {name for names in history.cohorts for name in names} if personal == "trained" else set()
    for client in federation.roster:
        (weights,) = federation.algorithm.personal([client])
        written = torch.equal(weights.values, federation.algorithm.weights([client])[0].values)
        assert written == (client.client_id not in trained)
        net.load_state_dict(weights.layout.views(weights.values))
        result, own = scores_of(history)[client.client_id], data[client.client_id]
        for score, part in ((result.val, own.val), (result.test, own.test)):
            logits = net(part.inputs).detach()
            assert count_right(score) == int((logits.argmax(1) == part.labels).sum())
            assert score.total == len(part)
            loss = float(nn.functional.cross_entropy(logits, part.labels))
            assert score.loss == pytest.approx(loss, rel=1e-5)
    assert selection.metrics["test_pooled"] == pytest.approx(
        100 * sum(count_right(s.test) for s in scores_of(history).values()) / sum(len(d.test) for d in data.values())
    )


# ---------------------------------------------------------------------- options


def test_the_defaults_are_the_numbers_of_the_authors_code() -> None:
    options, local = PFedHNOptions(), LocalConfig()
    assert (options.learning_rate, options.momentum, options.weight_decay) == (1e-2, 0.9, 1e-3)
    assert (options.hidden_dim, options.hidden_layers, options.embeddings) == (100, 3, "dense")
    assert options.embedding_learning_rate is None
    assert PFedHNPCOptions().learning_rate == 5e-2
    assert PFedHNPCOptions().model_dump(exclude={"learning_rate"}) == options.model_dump(exclude={"learning_rate"})
    assert (local.steps, local.batch_size, local.learning_rate / 2) == (50, 64, 5e-3)  # half on average, as it decays
    assert (local.momentum, local.weight_decay, local.clip) == (0.9, 5e-5, 50.0)


def built(**changes: Any) -> Any:
    """Return an algorithm that a first client has joined."""
    return joined(digits_config(**changes), DIGITS)


@pytest.mark.parametrize(("clients", "dim"), [(3, 1), (4, 2), (7, 2), (50, 13)])
def test_the_dimension_of_an_embedding_is_int_of_1_plus_a_quarter_of_the_clients(clients: int, dim: int) -> None:
    learner = built(clients=clients).learner
    assert learner.table.dim == dim
    assert learner.hypernetwork.trunk[0].weight.shape == (16, dim)


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"learning_rate": 0.002}, 10.0),
        ({"learning_rate": 0.05}, 2.0),
        ({"learning_rate": 0.05, "start": "hypernetwork"}, 50.0),
        ({"clip": 3.0}, 3.0),
    ],
)
def test_the_gradient_is_clipped_as_the_option_says(options: dict[str, Any], clip: float) -> None:
    assert built(options=options).learner.clip == pytest.approx(clip)


def test_options_reach_the_hypernetwork_and_its_optimiser() -> None:
    options = {"embedding_dim": 7, "hidden_dim": 9, "hidden_layers": 1, "embedding_learning_rate": 0.3}
    learner = built(options=options).learner
    network = learner.hypernetwork
    assert isinstance(network, MLPHypernetwork)
    assert [tuple(p.shape) for p in network.trunk.parameters()] == [(9, 7), (9,), (9, 9), (9,)]
    assert [group["lr"] for group in learner.optimizer.param_groups] == [1e-2, 0.3]
    assert built(options={"embeddings": "sparse"}).learner.sparse and not learner.sparse


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"freeze": True}, "options.freeze: expected init_from to name the run"),
        ({"freeze": True, "descriptor": "class-shares"}, "options.freeze: expected descriptor: learned"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], text: str) -> None:
    init_from = "elsewhere" if len(options) == 2 else None
    with pytest.raises(ConfigError, match=text):
        make_algorithm(digits_config(options=options, init_from=init_from))


# ---------------------------------------------------------------------- one network for all


def reply_of(algorithm: Any, client: Client, delta: Tensor) -> Update:
    sent = algorithm.weights([client])[0].values
    return Update(client, TrainResult(0.1), sent, delta, algorithm.layout(client), client.about.train_examples)


def test_a_client_that_joined_after_a_restored_state_has_no_part_in_its_network_for_all() -> None:
    algorithm = built(clients=2, options={"hidden_dim": 8})
    first = algorithm.clients[0]
    kept = {name: tensor.clone() for name, tensor in algorithm.checkpoint().items()}
    algorithm.join(Client("b", 1, DIGITS), first=True)
    algorithm.restore(kept)
    torch.testing.assert_close(algorithm.common(first).values, algorithm.learner.average([0], "S"))
    before = algorithm.learner.hypernetwork.start("S").clone()
    algorithm.learn([reply_of(algorithm, first, torch.ones_like(before))])
    torch.testing.assert_close(algorithm.learner.hypernetwork.start("S"), before + 1)


@pytest.mark.parametrize("clients", [4, 5, 40])
def test_the_mean_change_is_shrunk_the_more_the_smaller_the_cohort_is(clients: int) -> None:
    deltas = torch.randn(clients, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(shrunk_mean(deltas, clients), deltas.mean(0))
    torch.testing.assert_close(shrunk_mean(deltas[:1], clients), deltas[0] / clients)
    between = shrunk_mean(deltas[:3], clients)
    torch.testing.assert_close(between, (2 / 3 + 1 / clients) * deltas[:3].mean(0))


@pytest.mark.parametrize("cohort", [2, 5, 9, 10])
def test_the_mean_change_is_shrunk_as_james_and_stein_do_if_clients_differ_by_as_much_as_they_move(cohort: int) -> None:
    own = torch.randn(cohort, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own -= own.mean(0)
    spread = own.square().sum() / (cohort - 1)  # the variance of a client's change
    mean = torch.ones(50, dtype=torch.float64) * (spread / 50).sqrt()  # as long as a deviation
    variance = (1 - cohort / 10) * spread / cohort  # of the mean of a cohort drawn from 10 without replacement
    torch.testing.assert_close(shrunk_mean(own + mean, 10), mean * (1 - variance / mean.square().sum()))


@pytest.mark.parametrize("personal", ["trained", "written"])
def test_the_network_for_all_moves_by_the_shrunk_mean_change_and_the_rest_is_learned(personal: str) -> None:
    clients = [Client(name, row, DIGITS) for row, name in enumerate("abcd")]
    found = {}
    for start in ("common", "hypernetwork"):
        options = {"hidden_dim": 8, "start": start, "embedding_dim": 3, "personal": personal}
        algorithm = built(clients=4, options=options)
        for client in clients[1:]:
            algorithm.join(client, first=True)
        deltas = torch.randn(2, algorithm.layout(clients[0]).numel, generator=torch.Generator().manual_seed(0)) + 0.5
        if start == "hypernetwork":  # a learner in the same state, which gets what should be left
            algorithm.learner = copy.deepcopy(found["before"])
            deltas = deltas - found["step"]
        else:
            found["before"] = copy.deepcopy(algorithm.learner)
            found["first"] = algorithm.common(clients[0]).values
            found["step"] = shrunk_mean(deltas, 4) if personal == "trained" else deltas.sum(0) / 4
        algorithm.learn([reply_of(algorithm, c, delta) for c, delta in zip(clients[1:3], deltas, strict=True)])
        found[start] = algorithm.state()
    same = [name for name in found["common"] if not name.startswith(("hypernetwork.start_", "trained."))]
    for name in same:  # what is left is computed in another order
        torch.testing.assert_close(found["common"][name], found["hypernetwork"][name], rtol=1e-4, atol=1e-6)
    moved = found["common"]["hypernetwork.start_S"] - found["hypernetwork"]["hypernetwork.start_S"]
    torch.testing.assert_close(moved, found["step"])
    torch.testing.assert_close(found["first"], found["hypernetwork"]["hypernetwork.start_S"])


@pytest.mark.parametrize("strategy", ["pfedhn", "pfedhn-pc"])
def test_the_hypernetwork_learns_what_a_client_has_from_where_it_is(strategy: str) -> None:
    """Training began elsewhere, so the change that it made is not what the hypernetwork lacks."""
    algorithm = built(strategy=strategy, clients=2, options={"hidden_dim": 8})
    client, other = (Client(name, row, replace(DIGITS, train_examples=4000)) for row, name in enumerate("ab"))
    algorithm.join(other, first=True)
    numel = algorithm.layout(client).numel
    first, second = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    algorithm.learn([reply_of(algorithm, client, first), reply_of(algorithm, other, torch.zeros(numel))])
    algorithm._rate = 0.3
    sent, learner = algorithm.weights([client])[0].values, copy.deepcopy(algorithm.learner)
    algorithm.learn([reply_of(algorithm, client, second)])
    learner.hypernetwork.move_start("S", second / 2)
    wanted = sent + second - learner.generate([0], "S")[0]
    assert not torch.allclose(wanted, second / 2), "as if training had begun at what is written"
    learner.update([Reply(0, "S", wanted)], algorithm.options.update)
    assert_same(learner.state(), algorithm.learner.state())


def test_a_reply_keeps_its_own_change_in_whatever_order_replies_come() -> None:
    clients = [Client(name, row, DIGITS) for row, name in enumerate("abc")]
    states = []
    for order in ((0, 1, 2), (2, 0, 1)):
        algorithm = built(clients=3, options={"hidden_dim": 8})
        for client in clients[1:]:
            algorithm.join(client, first=True)
        changes = torch.randn(3, algorithm.layout(clients[0]).numel, generator=torch.Generator().manual_seed(0))
        algorithm.learn([reply_of(algorithm, clients[row], changes[row]) for row in order])
        states.append(algorithm.state())
    for name, values in states[0].items():
        torch.testing.assert_close(values, states[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("examples", [400, 4000])
def test_what_is_written_comes_nearer_to_what_clients_train_and_does_not_drift_away(examples: int) -> None:
    """Each training comes half the way to a fixed place, at a rate that falls to 0. Newcomers get what is written."""
    algorithm = built(clients=6, options={"hidden_dim": 8})
    clients = [Client(name, row, replace(DIGITS, train_examples=examples)) for row, name in enumerate("abcdef")]
    for client in clients[1:]:
        algorithm.join(client, first=True)
    ends = 0.1 * torch.randn(6, algorithm.layout(clients[0]).numel, generator=torch.Generator().manual_seed(0))
    gaps = [float((algorithm.learner.generate([*range(6)], "S") - ends).norm())]
    for step in range(360):
        algorithm._rate = 1 - step / 360
        client, end = clients[step % 6], ends[step % 6]
        algorithm.learn([reply_of(algorithm, client, (end - algorithm.weights([client])[0].values) / 2)])
        gaps.append(float((algorithm.learner.generate([*range(6)], "S") - ends).norm()))
    assert max(gaps[60:]) < 0.8 * gaps[0]


def test_clients_that_never_train_have_no_part_in_the_network_for_all() -> None:
    algorithm = built(clients=4, novel=50, options={"hidden_dim": 8})
    clients = [Client(name, row, DIGITS) for row, name in enumerate("abcd")]
    for client in clients[1:]:
        algorithm.join(client, first=True)
    trained = [row for row in range(4) if not algorithm.config.is_novel(row)]
    assert len(trained) == 2
    delta = torch.randn(algorithm.layout(clients[0]).numel, generator=torch.Generator().manual_seed(0))
    algorithm.learn([reply_of(algorithm, clients[trained[1]], -delta)])  # now no two embeddings give the same
    before = algorithm.learner.hypernetwork.start("S").clone()
    for client in clients:
        torch.testing.assert_close(algorithm.common(client).values, algorithm.learner.average(trained, "S"))
    algorithm.learn([reply_of(algorithm, clients[trained[0]], delta)])
    torch.testing.assert_close(algorithm.learner.hypernetwork.start("S"), before + delta / 2)


def test_a_client_uses_what_it_trained_last_moved_by_what_has_moved_for_all_since() -> None:
    algorithm = built(clients=3, options={"hidden_dim": 8})
    a, b, c = (Client(name, row, DIGITS) for row, name in enumerate("abc"))
    for client in (b, c):
        algorithm.join(client, first=True)
    numel = algorithm.layout(a).numel
    first, second, third = torch.randn(3, numel, generator=torch.Generator().manual_seed(0))
    algorithm.learn([reply_of(algorithm, a, torch.zeros(numel)), reply_of(algorithm, b, first)])  # now h is not zero
    sent = algorithm.weights([a])[0].values
    algorithm.learn([reply_of(algorithm, a, second)])
    torch.testing.assert_close(algorithm.personal([a])[0].values, sent + second)
    algorithm.learn([reply_of(algorithm, c, third)])
    found = [weights.values for weights in algorithm.personal([c, a])]
    torch.testing.assert_close(found[1], sent + second + third / 3)

    another = built(clients=3, options={"hidden_dim": 8})
    another.start_from(algorithm.state())
    for client in (b, c):
        another.join(client, first=False)
    assert_same({str(i): x.values for i, x in enumerate(another.personal([c, a]))}, dict(zip("01", found, strict=True)))


def between(algorithm: Any, client: Client, own: Tensor, rate: float, few: float) -> Tensor:
    """Return what a client trains at, from the formulas of the module's page."""
    start = algorithm.learner.hypernetwork.start(algorithm.head_of(client))
    written = algorithm.learner.generate([client.row], algorithm.head_of(client))[0] - start
    assert not torch.allclose(own - start, written)
    body = start + few * (rate * written + (1 - rate) * (own - start))
    head = start + rate * few * written + (1 - rate * few) * (own - start)
    last = models.head_layout(algorithm.setting.spec).numel if algorithm.private == "none" else 0
    return torch.cat(
        [body[: len(own) - last], head[len(own) - last :]]
    )  # the head's parameters are this network's last


@pytest.mark.parametrize("strategy", ["pfedhn", "pfedhn-pc"])
@pytest.mark.parametrize(("examples", "few"), [(400, 1.0), (1000, 1.0), (1250, 0.8), (4000, 0.25)])
def test_with_many_examples_the_head_begins_near_to_a_clients_last_training_and_the_body_near_to_that_for_all(
    strategy: str, examples: int, few: float
) -> None:
    algorithm = built(strategy=strategy, clients=2, options={"hidden_dim": 8})
    client, other = (Client(name, row, replace(DIGITS, train_examples=examples)) for row, name in enumerate("ab"))
    algorithm.join(other, first=True)
    numel = algorithm.layout(client).numel
    first, second = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    sent_values = algorithm.weights([client])[0].values
    algorithm.learn([reply_of(algorithm, client, first), reply_of(algorithm, other, torch.zeros(numel))])
    own = sent_values + first
    expected = between(algorithm, client, own, 1.0, few)
    torch.testing.assert_close(algorithm.personal([client])[0].values, between(algorithm, client, own, 0.0, few))
    for sent in (algorithm.weights([other, client])[1], algorithm.weights([client])[0]):
        torch.testing.assert_close(sent.values, expected)
    sent_values = algorithm.weights([client])[0].values
    algorithm.learn([reply_of(algorithm, client, second)])
    used = algorithm.personal([client])[0].values
    torch.testing.assert_close(used, between(algorithm, client, sent_values + second, 0.0, few))


def test_a_client_that_uses_its_own_weights_needs_nothing_written() -> None:
    """They stay sound if the hypernetwork has diverged, and it takes no time."""
    algorithm = built(clients=2, options={"hidden_dim": 8})
    client = Client("a", 0, DIGITS)
    algorithm.learn([reply_of(algorithm, client, torch.ones(algorithm.layout(client).numel))])
    (before,) = algorithm.personal([client])
    algorithm.learner.table.weight.data.fill_(torch.inf)
    (after,) = algorithm.personal([client])
    assert torch.equal(before.values, after.values) and not algorithm.weights([client])[0].values.isfinite().all()


def test_without_a_network_for_all_a_body_is_not_drawn_to_it() -> None:
    about = replace(DIGITS, train_examples=4000)
    algorithm = built(clients=1, options={"hidden_dim": 8, "start": "hypernetwork", "personal": "trained"})
    client = Client("a", 0, about)
    sent, change = algorithm.weights([client])[0].values, torch.ones(algorithm.layout(client).numel)
    algorithm.learn([reply_of(algorithm, client, change)])
    torch.testing.assert_close(algorithm.personal([client])[0].values, sent + change)


@pytest.mark.parametrize(
    ("schedule", "examples", "rate", "few"),
    [("constant", 400, 1, 1), ("constant", 4000, 1, 0.25), ("cosine", 400, 0.5, 1), ("cosine", 4000, 0.5, 0.25)],
)
def test_training_begins_the_nearer_to_a_clients_last_training_the_lower_the_rate_is(
    schedule: str, examples: int, rate: float, few: float
) -> None:
    config = digits_config(rounds=4, local=BRIEF.model_copy(update={"schedule": schedule}))
    about = replace(DIGITS, train_examples=examples)
    algorithm = joined(config, about, replace(about, client_id="other"))
    client, changes = algorithm.clients[0], torch.Generator().manual_seed(0)
    sent, own = list[Tensor](), list[Tensor]()

    def train(name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None
        change = torch.randn(order.weights.values.shape, generator=changes)
        if name == client.client_id:
            sent.append(order.weights.values)
            own.append(order.weights.values + change)
        return TrainResult(0.1, replace(order.weights, values=change))

    for number in (1, 2):
        play(algorithm.round(turn(algorithm, number)), train)
    expected = between(algorithm, client, own[-1], rate, few)
    play(algorithm.round(turn(algorithm, 3)), train)  # in the middle of the cosine: half of the rate
    torch.testing.assert_close(sent[2], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"personal": "written"}},
        {"options": {"start": "hypernetwork"}},
        {"privacy": PrivacyConfig(where="client", clip=1.0, noise=1.0, delta=1e-5)},
    ],
)
def test_a_client_uses_what_is_written_if_asked_or_where_noise_would_cover_its_training(
    changes: dict[str, Any],
) -> None:
    algorithm = built(**changes)
    client = Client("a", 0, replace(DIGITS, train_examples=4000))
    change = torch.ones(algorithm.layout(client).numel)
    algorithm.learn([reply_of(algorithm, client, change)])
    for _ in range(2):
        assert torch.equal(algorithm.personal([client])[0].values, algorithm.weights([client])[0].values)
        assert not [name for name in algorithm.state() if name.startswith("trained.")]
        algorithm.start_from(algorithm.state() | {"trained.0": change})  # of a run in which it used what it trained


def test_a_client_that_comes_back_with_another_size_uses_what_is_written_until_it_trains() -> None:
    algorithm = built(clients=1, sizes=("S", "M"), options={"hidden_dim": 8})
    client = Client("a", 0, replace(DIGITS, train_examples=4000))
    larger = Client("a", 0, replace(client.about, size="M"))
    algorithm.learn([reply_of(algorithm, client, torch.ones(algorithm.layout(client).numel))])
    algorithm.join(larger, first=False)
    written = algorithm.learner.generate([0], "M")[0]
    assert torch.equal(algorithm.personal([larger])[0].values, written)
    assert torch.equal(algorithm.weights([larger])[0].values, written)
    algorithm.learn([reply_of(algorithm, larger, torch.ones(len(written)))])
    torch.testing.assert_close(algorithm.personal([larger])[0].values, written + 1)


@pytest.mark.parametrize("rule", get_args(UpdateRule))
def test_what_all_clients_change_alike_is_averaged_as_in_fedavg_and_no_deviation_is_learned(rule: str) -> None:
    clients = [Client(name, row, DIGITS) for row, name in enumerate("abc")]
    options = {"hidden_dim": 8, "update": rule, "weight_decay": 0.0}
    personal, one = built(clients=3, options=options), built(strategy="fedavg", clients=3, options={})
    for client in clients[1:]:
        personal.join(client, first=True)
    for number in range(3):
        delta = torch.randn(personal.layout(clients[0]).numel, generator=torch.Generator().manual_seed(number))
        personal.learn([reply_of(personal, client, delta) for client in clients])
        one.learn([reply_of(one, client, one.global_weights + delta) for client in clients])
        for client, weights in zip(clients, personal.weights(clients), strict=True):
            torch.testing.assert_close(weights.values, one.global_weights)
            torch.testing.assert_close(personal.common(client).values, one.global_weights)


def test_each_size_has_a_network_for_all_of_its_own_clients() -> None:
    algorithm = built(clients=3, sizes=("S", "M"), options={"hidden_dim": 8})
    clients = [
        Client(name, row, replace(DIGITS, size=size))
        for row, (name, size) in enumerate([("a", "S"), ("b", "M"), ("c", "M")])
    ]
    for client in clients:
        algorithm.join(client, first=client.row > 0)
    before = {size: algorithm.learner.hypernetwork.start(size).clone() for size in "SM"}
    deltas = [torch.full((algorithm.layout(client).numel,), 1.0 + client.row) for client in clients]
    algorithm.learn([reply_of(algorithm, c, delta) for c, delta in zip(clients[:2], deltas, strict=False)])
    for size, step in (("S", 1.0), ("M", 2.0 / 2)):
        torch.testing.assert_close(algorithm.learner.hypernetwork.start(size), before[size] + step)
    for client, rows in zip(clients, ([0], [1, 2], [1, 2]), strict=True):
        expected = algorithm.learner.average(rows, client.about.size)
        torch.testing.assert_close(algorithm.common(client).values, expected)


def test_a_reply_counts_for_the_size_it_was_ordered_for_though_its_client_has_another_now() -> None:
    """It was the only client of its size: a mean over none would make the whole hypernetwork useless."""
    algorithm = built(clients=2, sizes=("S", "M"), options={"hidden_dim": 8})
    small, large = Client("a", 0, DIGITS), Client("b", 1, replace(DIGITS, size="M"))
    small = replace(small, about=replace(DIGITS, size="S"))
    algorithm.join(small, first=False)
    algorithm.join(large, first=True)
    before, delta = algorithm.learner.hypernetwork.start("M").clone(), torch.ones(algorithm.layout(large).numel)
    reply = reply_of(algorithm, large, delta)
    algorithm.join(replace(large, about=small.about), first=False)
    algorithm.learn([reply])
    torch.testing.assert_close(algorithm.learner.hypernetwork.start("M"), before + 1)
    assert all(bool(values.isfinite().all()) for values in algorithm.state().values())


def test_clients_that_keep_their_heads_have_no_network_for_all() -> None:
    algorithm = built(strategy="pfedhn-pc", options={"hidden_dim": 8})
    assert algorithm.common(Client("a", 0, DIGITS)) is None


# ---------------------------------------------------------------------- sizes


def test_a_round_moves_the_shared_trunk_and_the_heads_of_the_sizes_in_it(tmp_path: Path) -> None:
    options = {"hidden_dim": 8, "momentum": 0.9, "weight_decay": 0.1}
    config = digits_config(clients=6, rounds=1, eval_every=1, cohort=6, sizes=("S", "M", "L"), options=options)
    federation = digits_federation(config, tmp_path)
    clients = list(federation.roster)
    assert [client.about.size for client in clients] == list("SMLSML")
    federation.run()  # a first round of everybody builds up momentum in all heads
    later = config.model_copy(update={"cohort": 1, "rounds": 8, "eval_every": 8})
    federation.algorithm.config = federation.config = later
    before = federation.state()
    history, _ = federation.run()
    drawn = [draw(config.seed, number, 1, clients)[0] for number in range(1, 9)]
    assert {client.about.size for client in drawn} == set("SML")
    for names, client, after in zip(history.cohorts, drawn, history.states, strict=True):
        assert names == [client.client_id]
        for tensor in before:
            found = re.search(r"(?:heads\.|start_|trained\.)(\w)", tensor)
            moves = found is None or found[1] in (client.about.size, str(client.row))
            assert torch.equal(before[tensor], after[tensor]) != moves, tensor
        before = after


def test_weights_of_mixed_sizes_come_back_in_the_order_of_the_clients(tmp_path: Path) -> None:
    config = digits_config(clients=6, sizes=("S", "M", "L"))
    federation = digits_federation(config, tmp_path)
    algorithm, clients = federation.algorithm, list(federation.roster)
    for chosen in (clients, clients[::-1], [clients[i] for i in (4, 0, 3, 1)]):
        for client, found in zip(chosen, algorithm.weights(chosen), strict=True):
            expected = algorithm.learner.generate([client.row], client.about.size)[0]
            torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-6)
            assert found.layout == algorithm.layout(client)
    lengths = {size: layout.numel for size, layout in algorithm.setting.layouts.items()}
    assert lengths == {"S": 3760, "M": 7510, "L": 15010}


# ---------------------------------------------------------------------- repeats


@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 10.0), ({"learning_rate": 0.05}, 2.0), ({"start": "hypernetwork"}, 50.0), ({"clip": 7.0}, 7.0)],
)
def test_large_changes_do_not_make_the_deviations_diverge(options: dict[str, Any], limit: float) -> None:
    """As of numbers in their own units. The network for all follows them in full."""
    plain = {"hidden_dim": 8, "embedding_dim": 3, "momentum": 0.0, "weight_decay": 0.0}
    algorithm = built(clients=2, cohort=1, options=plain | options)
    client = Client("a", 0, DIGITS)
    algorithm.join(Client("b", 1, DIGITS), first=True)
    before = {name: value.clone() for name, value in algorithm.state().items()}
    delta = 1e4 * torch.randn(algorithm.layout(client).numel, generator=torch.Generator().manual_seed(0))
    algorithm.learn([reply_of(algorithm, client, delta)])
    learned = [name for name in before if not name.startswith(("hypernetwork.start_", "momentum", "trained"))]
    step = torch.cat([(algorithm.state()[name] - before[name]).flatten() for name in learned]).norm()
    assert float(step) == pytest.approx(algorithm.options.learning_rate * limit, rel=1e-5)


def test_a_run_repeats_to_the_bit_whoever_joins_first(tmp_path: Path) -> None:
    config = digits_config(strategy="pfedhn-pc", clients=4, cohort=2, sizes=("S", "M"))
    starts, ends, runs = {}, {}, {}
    for name, seed, order in (("one", 0, 1), ("again", 0, 1), ("reversed", 0, -1), ("seed", 1, 1)):
        settings = digits_settings(config, tmp_path / name)
        grid = digits_grid(settings[::order])
        federation = Inline(config.model_copy(update={"seed": seed}), grid)
        federation.join()
        nodes = [federation.roster.node_of(client) for client in federation.roster]
        assert nodes == [2, 3, 4, 5][::order]
        assert [client.client_id for client in federation.roster] == [each.client_id for each in settings]
        starts[name] = federation.state()
        history, selection = federation.run()
        ends[name] = federation.state()
        runs[name] = ([outcome.evaluation for outcome in history.rounds], history.cohorts, selection)
    for other in ("again", "reversed"):
        assert_same(starts["one"], starts[other])
        assert_same(ends["one"], ends[other])
        assert runs["one"] == runs[other]
    for states in (starts, ends):
        drawn = {name: value for name, value in states["one"].items() if value.any()}  # deviations are zero at first
        assert all(not torch.equal(drawn[name], states["seed"][name]) for name in drawn.keys() & states["seed"].keys())
        assert {name.partition(".")[0] for name in drawn} >= {"hypernetwork", "embeddings"}
    assert runs["one"][0] != runs["seed"][0]


@pytest.mark.parametrize("strategy", ["pfedhn", "figures.spectral_norm:PFedHNSpectral"])
def test_looking_more_often_does_not_change_what_is_learned(strategy: str, tmp_path: Path) -> None:
    states = []
    for every in (1, 4):
        config = digits_config(strategy=strategy, eval_every=every, options={"hidden_dim": 8})
        federation = digits_federation(config, tmp_path / str(every))
        federation.run()
        states.append(federation.state())
    assert_same(*states)


# ---------------------------------------------------------------------- the personal classifier


def personal_file(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / name / "personal" / f"{RUN_ID}.safetensors")


def test_the_head_never_travels(tmp_path: Path) -> None:
    federation = digits_federation(digits_config(strategy="pfedhn-pc", cohort=2), tmp_path)
    assert dict(federation.algorithm.setting.layouts["S"].shapes) == BODY
    assert federation.algorithm.learner.hypernetwork.heads["S"].weight.shape == (BODY_LENGTH, 16)
    heads: list[Tensor] = []

    def keep(number: int) -> None:
        for client in federation.roster:
            path = tmp_path / client.client_id / "personal" / f"{RUN_ID}.safetensors"
            stored = load_file(path) if path.exists() else {}
            heads.extend(values for name, values in stored.items() if name != "moment")

    federation.run(keep)
    assert len(heads) >= 8 and all(head.shape == (HEAD_LENGTH,) for head in heads)
    grid = federation.grid
    orders = [*grid.sent(TrainOrder), *grid.sent(EvaluateOrder)]
    answers = grid.answers(TrainOrder)
    assert (len(orders), len(answers)) == (2 * 4 + 3 * 2, 2 * 4)
    for weights in (each.weights for each in (*orders, *answers)):
        assert dict(weights.layout.shapes) == BODY and weights.values.shape == (BODY_LENGTH,)
    passed = b"".join(grid.everything())
    windows = {head[i : i + 4].numpy().tobytes() for head in heads for i in range(0, HEAD_LENGTH - 4)}
    assert not [window for window in windows if window in passed]
    # The search does find what travels: every client's body, four numbers at a time.
    bodies = [weights.values for weights in federation.algorithm.personal(list(federation.roster))]
    assert all(body[i : i + 4].numpy().tobytes() in passed for body in bodies for i in range(0, BODY_LENGTH - 4, 100))


def test_without_a_personal_classifier_the_head_travels(tmp_path: Path) -> None:
    federation = digits_federation(digits_config(rounds=1, eval_every=1), tmp_path)
    federation.run()
    passed = [*federation.grid.sent(TrainOrder), *federation.grid.answers(TrainOrder)]
    assert [dict(each.weights.layout.shapes) for each in passed] == [BODY | HEAD] * 2
    assert not list(tmp_path.glob("*/personal"))


def test_the_head_and_its_momentum_survive_a_restart_of_the_clients(tmp_path: Path) -> None:
    config = digits_config(strategy="pfedhn-pc", rounds=6, cohort=2)
    outcomes = {}
    for name in ("whole", "restarted"):
        federation = digits_federation(config, tmp_path / name)

        def restart(number: int, name: str = name) -> None:
            if name == "restarted":
                client_for.cache_clear()

        history, selection = federation.run(restart)
        stored = {client.client_id: personal_file(tmp_path / name, client.client_id) for client in federation.roster}
        outcomes[name] = (history.states, stored, scores_of(history), selection)
    whole, restarted = outcomes["whole"], outcomes["restarted"]
    for one, other in zip(whole[0], restarted[0], strict=True):
        assert_same(one, other)
    for client, tensors in whole[1].items():
        assert sorted(tensors) == ["moment", "momentum", "values"]
        assert float(tensors["momentum"].abs().max()) > 1e-3
        assert_same(tensors, restarted[1][client])
    assert whole[2:] == restarted[2:]


def test_a_head_is_trained_with_the_body_by_an_optimiser_of_its_own_that_lasts(tmp_path: Path) -> None:
    settings = LocalSGD(5, 16, 0.1, 0.8, 5e-3, 0.5)
    local = LocalConfig(**vars(settings), schedule="constant")
    config = digits_config(strategy="pfedhn-pc", clients=1, rounds=4, eval_every=4, local=local)
    federation = digits_federation(config, tmp_path)
    (data,) = data_of(federation, tmp_path).values()
    history, _ = federation.run()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(0, "client-0", "head."))
        net = plain_net()
    parameters = dict(net.named_parameters())

    def optimizer_of(names: Mapping[str, Any]) -> torch.optim.SGD:
        return torch.optim.SGD([parameters[name] for name in names], lr=0.1, momentum=0.8, weight_decay=5e-3)

    lasting = optimizer_of(HEAD)
    for number, order in enumerate(federation.grid.sent(TrainOrder), start=1):
        assert order.weights is not None
        net.load_state_dict(order.weights.layout.views(order.weights.values), strict=False)
        seed = seed_of(0, "client-0", number)
        fresh = optimizer_of(BODY)
        loss = local_loop(net, data.train.inputs, data.train.labels, settings, seed, fresh, lasting)
        assert history.rounds[number - 1].results["client-0"].loss == pytest.approx(loss, rel=1e-5)
    stored = personal_file(tmp_path, "client-0")["values"]
    expected = torch.cat([parameters[name].detach().flatten() for name in HEAD])
    # 20 steps of single precision on numbers below one: rounding errors of about 1e-7 each, that do not grow.
    torch.testing.assert_close(stored, expected, rtol=0, atol=2e-6)


# ---------------------------------------------------------------------- novel clients and given descriptors


def trained_run(folder: Path, **changes: Any) -> tuple[dict[str, Tensor], Roster]:
    """Return state and roster of a finished run of three clients, as they are stored."""
    federation = digits_federation(digits_config(rounds=3, eval_every=3, **changes), folder)
    federation.run()
    return federation.state(), Roster.from_json(json.loads(json.dumps(federation.roster.to_json())))


def test_novel_clients_move_their_own_rows_and_nothing_else(tmp_path: Path) -> None:
    stored, roster = trained_run(tmp_path)
    options = {"hidden_dim": 16, "freeze": True, "learning_rate": 0.1, "weight_decay": 0.1}
    config = digits_config(rounds=6, cohort=2, options=options, init_from="the run above")
    # one of the old clients is back; the names of the new ones come first in the alphabet
    settings = digits_settings(config, tmp_path, ["client-0", "a-novel", "b-novel"])
    federation = Inline(config, digits_grid(settings), roster, stored).join()
    assert [(c.client_id, c.row) for c in federation.roster.live] == [("client-0", 0), ("a-novel", 3), ("b-novel", 4)]
    start = federation.state()
    assert torch.equal(start["embeddings"][:3], stored["embeddings"])
    history, _ = federation.run()
    end = federation.state()
    hypernetwork = [name for name in stored if name.startswith("hypernetwork.")]
    assert_same({name: end[name] for name in hypernetwork}, {name: stored[name] for name in hypernetwork})
    assert torch.equal(end["embeddings"][:3], stored["embeddings"])
    assert float((end["embeddings"][3:] - start["embeddings"][3:]).abs().min()) > 1e-4
    assert history.cohorts == [[], *[["a-novel", "b-novel"]] * 6]
    assert sorted(scores_of(history)) == ["a-novel", "b-novel", "client-0"]
    kept = {name for name in end if name.startswith("trained.")}
    assert set(end) - kept == {*hypernetwork, "embeddings", "momentum.embeddings"}
    assert torch.equal(end["momentum.embeddings"][:3], torch.zeros(3, 1))


def test_without_freezing_a_run_goes_on_from_another_ones_state_with_fresh_momentum(tmp_path: Path) -> None:
    stored, roster = trained_run(tmp_path)
    config = digits_config(rounds=2, cohort=3, init_from="the run above")
    settings = digits_settings(config, tmp_path)
    federation = Inline(config, digits_grid(settings), roster, stored).join()
    assert_same(federation.state(), {name: value for name, value in stored.items() if "momentum" not in name})
    history, _ = federation.run()
    assert history.cohorts == [[], *[["client-0", "client-1", "client-2"]] * 2]
    assert all(not torch.equal(federation.state()[name], stored[name]) for name in stored)


def test_there_may_be_fewer_novel_clients_than_there_were_clients(tmp_path: Path) -> None:
    stored, roster = trained_run(tmp_path, clients=4)
    assert stored["embeddings"].shape == (4, 2)
    config = digits_config(clients=2, options={"hidden_dim": 16, "freeze": True}, init_from="the run above")
    settings = digits_settings(config, tmp_path, ["a-novel", "b-novel"])
    federation = Inline(config, digits_grid(settings), roster, stored).join()
    assert federation.state()["embeddings"].shape == (6, 2)  # and not int(1 + 2 / 4)
    federation.run()
    assert torch.equal(federation.state()["embeddings"][:4], stored["embeddings"])


def test_a_run_of_novel_clients_goes_on_from_its_checkpoint_with_the_same_rows_fixed() -> None:
    """Its embeddings have the dimension of the first run, which a new algorithm does not know."""
    options = {"hidden_dim": 16, "freeze": True}
    config = digits_config(clients=2, options=options, init_from="the run above")
    made = joined(config, DIGITS)
    made.start_from(built(clients=4, options={"hidden_dim": 16}).state())
    made.join(Client("b", 1, DIGITS), True)
    kept = {name: tensor.clone() for name, tensor in made.checkpoint().items()}
    other = joined(config, DIGITS, DIGITS, checkpoint=kept)
    assert_same(other.checkpoint(), kept)
    for algorithm in (made, other):
        assert [algorithm.trains(client) for client in other.clients.values()] == [False, True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hidden_dim": 16, "embedding_dim": 3}, "options.embedding_dim: expected 1 of init_from, found 3"),
        (
            {"hidden_dim": 16, "descriptor": "class-shares"},
            "options.descriptor: expected 1 numbers each, as in init_from, found the shares of 10 classes",
        ),
        ({"hidden_dim": 17}, r"init_from: its hypernetwork is of another shape .*\[3760, 16\]"),
        ({"hidden_dim": 16, "hidden_layers": 2}, "init_from: its hypernetwork is of another shape"),
    ],
)
def test_a_hypernetwork_that_does_not_fit_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    stored = built(clients=3, options={"hidden_dim": 16}).state()
    algorithm = make_algorithm(digits_config(options=options, init_from="the run above"))
    with pytest.raises(ConfigError, match=text):
        algorithm.check_start(stored)
        algorithm.build(algorithm.settle(DIGITS))
        algorithm.start_from(stored)


def test_only_runs_with_embeddings_can_be_started_from() -> None:
    algorithm = make_algorithm(digits_config(init_from="a run of fedavg"))
    with pytest.raises(ConfigError, match=r"expected a run of pfedhn or pfedhn-pc, found tensors .'fc1.weight'"):
        algorithm.check_start({"fc1.weight": torch.zeros(2, 2)})


def test_given_descriptors_are_what_the_clients_sent_times_a_factor_and_stay_so(tmp_path: Path) -> None:
    options = {"hidden_dim": 16, "descriptor": "class-shares"}
    federation = digits_federation(digits_config(cohort=2, options=options), tmp_path)
    shares = torch.stack([each.class_shares for each in data_of(federation, tmp_path).values()])
    start = federation.state()
    torch.testing.assert_close(start["embeddings"], shares * 10**0.5)
    assert shares.shape == (3, 10)
    assert bool((shares.gt(0).sum(dim=1) == 3).all())
    federation.run()
    end = federation.state()
    assert torch.equal(end["embeddings"], start["embeddings"])
    assert "momentum.embeddings" not in end
    assert not torch.equal(end["hypernetwork.trunk.0.weight"], start["hypernetwork.trunk.0.weight"])


def test_a_client_that_comes_back_with_other_shares_has_another_given_descriptor() -> None:
    algorithm, about = make_algorithm(digits_config(options={"descriptor": "class-shares"})), introduction("a")
    algorithm.build(algorithm.settle(about))
    for first, shares in ((True, (1.0, 0.0, 0.0)), (False, (0.0, 0.0, 1.0))):
        algorithm.join(Client("a", 0, replace(about, class_shares=shares)), first)
        torch.testing.assert_close(algorithm.learner.table.weight[0], torch.tensor(shares) * 3**0.5)


def test_class_shares_are_not_sent_unless_the_run_asks_and_are_demanded_if_it_does(tmp_path: Path) -> None:
    federation = digits_federation(digits_config(), tmp_path)
    assert [client.about.class_shares for client in federation.roster] == [(), (), ()]
    asking = make_algorithm(digits_config(options={"descriptor": "class-shares"}))
    for about in (federation.roster.live[0].about, introduction("a", num_classes=3, class_shares=(0.5, 0.5))):
        with pytest.raises(RefusedError, match="--disclose-class-shares"):
            asking.serves(about, [])
    asking.serves(introduction("a", num_classes=2, class_shares=(0.5, 0.5)), [])


def test_a_client_that_joins_during_the_run_gets_a_row_and_leaves_the_others_theirs(tmp_path: Path) -> None:
    config = digits_config(clients=4, rounds=2, eval_every=2, cohort=4)
    settings = digits_settings(config, tmp_path)
    federation = Inline(config, digits_grid(settings[:3])).join(wanted=3)
    federation.run()
    before = federation.state()
    client, _ = federation.roster.admit(99, introduction("late", input_shape=(1, 8, 8), num_classes=10))
    federation.federation.admission.join(client, True)
    after = federation.state()
    assert client.row == 3 and after["embeddings"].shape == (4, 2)
    for name in before:
        rows = 3 if "embeddings" in name else None
        assert torch.equal(after[name][:rows], before[name]), name
    assert torch.equal(after["momentum.embeddings"][3], torch.zeros(2))
