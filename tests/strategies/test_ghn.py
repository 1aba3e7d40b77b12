"""HAFL-GHN over real clients: against FedAvg and autograd, and who is told, sent and averaged what."""

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.errors import ConfigError, RefusedError, attempt
from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, LayerType, Settings, part_of, trace
from hyperbloom.common.models import ModelSpec
from hyperbloom.common.wire.orders import EvaluateOrder, Greeting, Introduction, Refinement, TrainOrder
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.session import baseline_config, check_run
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Update
from hyperbloom.strategies.hypernetworks.graph import Target, follow, split_parts
from tests.strategies.conftest import (
    RUN_ID,
    Inline,
    digits_config,
    digits_federation,
    digits_grid,
    digits_settings,
    introduction,
    joined,
    texts,
    update_of,
)

SMALL = {"layers": 2, "latent": 8, "hidden": 4}
LINEAR = {"mode": "linear", "latent": 12, "refine_epochs": 0}
MIXED = ("plain-4", "mlp", "plain-7")
PLAIN, MLP, DEEP = (own_graph(ModelSpec(name, "S", (1, 8, 8), 10)) for name in MIXED)


def config(strategy: str = "ghn", **changes: Any) -> RunConfig:
    """Return a small run of three clients with three architectures."""
    values = {"strategy": strategy, "options": SMALL, "models": MIXED, "cohort": 3, "rounds": 1, "eval_every": 1}
    return digits_config(**(values | changes))


def generated(federation: Inline, graph: Graph) -> Tensor:
    """Return what the server's hypernetwork writes for an architecture."""
    weights: Tensor = federation.algorithm.hypernetwork(graph)
    return weights.detach()


def parts_in(tensors: str) -> set[str]:
    """Return the parts whose parameters a message brings, from the names in it."""
    return {part_of(name) for name, _ in json.loads(tensors)}


# ---------------------------------------------------------------------- FedAvg is a special case


@pytest.mark.parametrize(
    ("strategy", "options"), [("ghn", LINEAR), ("ghn-server", LINEAR | {"learning_rate": 1.0})], ids=["ghn", "server"]
)
def test_with_one_architecture_and_linear_maps_it_is_fedavg(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    local = LocalConfig(steps=4, batch_size=16, learning_rate=0.05, momentum=0.9, weight_decay=1e-3, clip=2.0)
    rounds: dict[str, Any] = {"rounds": 10, "eval_every": 10, "local": local}
    ours = digits_federation(config(strategy, options=options, models=("plain-4",), **rounds), tmp_path / "ours")
    theirs = digits_federation(config("fedavg", options={}, models=(), model="plain-4", **rounds), tmp_path / "theirs")
    assert len({client.about.train_examples for client in ours.roster}) > 1  # a plain mean would not do
    theirs.algorithm.global_weights = start = generated(ours, PLAIN)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    ours.run(lambda number: found.append(generated(ours, PLAIN)))
    theirs.run(lambda number: expected.append(theirs.algorithm.global_weights))
    assert len(found) == 10
    assert (expected[-1] - start).abs().max() > 0.05  # it learns at all
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-5


# ---------------------------------------------------------------------- ghn-server


def own(name: str, **said: Any) -> Introduction:
    """Return what a client with a model of its own for the digits says of itself."""
    return introduction(name, input_shape=(1, 8, 8), num_classes=10, **said)


def server(
    graphs: Sequence[Graph], examples: Sequence[int], fit_steps: int = 30, learning_rate: float = 1.0
) -> tuple[Any, list[Update]]:
    """Return an algorithm `ghn-server` with updates from clients of these architectures."""
    generator = torch.Generator().manual_seed(5)
    abouts = [
        own(f"c{row}", train_examples=number, graph=graph.to_json())
        for row, (graph, number) in enumerate(zip(graphs, examples, strict=True))
    ]
    options = SMALL | {"fit_steps": fit_steps, "learning_rate": learning_rate}
    made = joined(config("ghn-server", models=(), options=options), *abouts)
    updates = [
        update_of(client, torch.randn(graph.layout.numel, generator=generator) / 100)
        for client, graph in zip(made.clients.values(), graphs, strict=True)
    ]
    return made, updates


def dense_jacobian(hypernetwork: GraphHypernetwork, graph: Graph) -> Tensor:
    """Return d generated / d parameters, `(P, all parameters)`, by reverse mode, row by row."""
    parameters = dict(hypernetwork.named_parameters())

    def write(values: dict[str, Tensor]) -> Tensor:
        made: Tensor = torch.func.functional_call(hypernetwork, values, (graph,))
        return made

    found = torch.func.jacrev(write)(parameters)
    return torch.cat([found[name].flatten(1) for name in parameters], 1)


def tiny() -> tuple[GraphHypernetwork, list[Target]]:
    """Return a hypernetwork in double precision with targets for two architectures that share some types."""
    deep = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    graphs = [trace(deep, (3,)), trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), (3,))]
    types = {layer for graph in graphs for layer in graph.types}
    network = GraphHypernetwork(types, Settings(layers=2, latent=4, hidden=3), seed=2).double()
    generator = torch.Generator().manual_seed(1)
    deltas = [torch.randn(graph.layout.numel, generator=generator, dtype=torch.float64) / 100 for graph in graphs]
    return network, [Target(*each) for each in zip(graphs, (10.0, 30.0), deltas, strict=True)]


def flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_the_servers_first_step_is_steepest_descent_by_autograd_through_generation() -> None:
    network, targets = tiny()
    before, jacobians = flat(network), [dense_jacobian(network, target.graph) for target in targets]
    users = torch.cat(
        [
            torch.full(
                (parameter.numel(),),
                sum(t.weight for t in targets if part_of(name) in {SHARED, *map(str, t.graph.types)}),
                dtype=torch.float64,
            )
            for name, parameter in network.named_parameters()
        ]
    )
    gradient = sum(t.weight * (j.T @ t.delta) for t, j in zip(targets, jacobians, strict=True))
    scaled = gradient / users
    curvature = sum(t.weight * (j @ scaled).square().sum() for t, j in zip(targets, jacobians, strict=True))
    follow(network, targets, steps=1, rate=0.5)
    expected = 0.5 * (gradient @ scaled) / curvature * scaled
    torch.testing.assert_close(flat(network) - before, expected, rtol=1e-6, atol=1e-12)


def test_many_steps_solve_the_least_squares_problem() -> None:
    network, targets = tiny()
    before, jacobians = flat(network), [dense_jacobian(network, target.graph) for target in targets]
    rows = torch.cat([t.weight**0.5 * j for t, j in zip(targets, jacobians, strict=True)])
    wanted = torch.cat([t.weight**0.5 * t.delta for t in targets])
    best = torch.linalg.lstsq(rows, wanted[:, None], driver="gelsd").solution[:, 0]
    left = (rows @ best - wanted).norm().item()
    losses = []
    for steps in (1, 3, 10, 200):
        network, targets = tiny()
        follow(network, targets, steps, rate=1.0)
        losses.append((rows @ (flat(network) - before) - wanted).norm().item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(left, rel=1e-3, abs=1e-6)
    assert losses[0] > 1.1 * losses[-1]


def test_generation_runs_once_for_each_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    made, updates = server([PLAIN, MLP, PLAIN, DEEP], [10, 40, 30, 20])
    forward, calls = GraphHypernetwork.forward, []
    monkeypatch.setattr(
        GraphHypernetwork, "forward", lambda self, graph: (calls.append(graph.digest), forward(self, graph))[1]
    )
    made.learn(updates)
    assert sorted(calls) == sorted(graph.digest for graph in (PLAIN, MLP, DEEP))
    calls.clear()
    made.weights([update.client for update in updates])
    assert len(calls) == 3


def test_clients_of_one_architecture_count_by_their_examples() -> None:
    # Few steps, as many would magnify what single precision rounds.
    (one, updates), (other, _) = server([PLAIN, PLAIN], [10, 30], fit_steps=2), server([PLAIN], [40], fit_steps=2)
    mean = 0.25 * updates[0].returned + 0.75 * updates[1].returned  # type: ignore[operator]
    one.learn(updates)
    other.learn([replace(updates[0], returned=mean)])
    for part, values in one.state().items():
        torch.testing.assert_close(other.state()[part], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("steps", "rate"), [(1, 1.0), (1, 0.25), (3, 0.25)])
def test_the_options_reach_the_servers_step(steps: int, rate: float) -> None:
    made, updates = server([PLAIN], [10], fit_steps=steps, learning_rate=rate)
    expected, (update,) = copy.deepcopy(made.hypernetwork), updates
    assert update.returned is not None
    follow(expected, [Target(PLAIN, 10.0, update.returned)], steps, rate)
    made.learn(updates)
    torch.testing.assert_close(flat(made.hypernetwork), flat(expected), rtol=1e-4, atol=1e-7)


def test_what_no_client_uses_does_not_move_and_no_change_moves_nothing() -> None:
    made, updates = server([PLAIN, MLP], [10, 10])
    before = made.state()
    made.learn(updates[:1])
    moved = {part for part, values in made.state().items() if not torch.equal(values, before[part])}
    assert moved <= {SHARED, *map(str, PLAIN.types)} and len(moved) > 5
    before = made.state()
    assert updates[1].returned is not None
    made.learn([replace(updates[1], returned=torch.zeros_like(updates[1].returned))])
    made.learn([])
    assert all(torch.equal(values, before[part]) for part, values in made.state().items())


def test_the_servers_step_follows_the_clients() -> None:
    made, updates = server([PLAIN, DEEP], [10, 10])
    before = [made.hypernetwork(graph).detach() for graph in (PLAIN, DEEP)]
    made.learn(updates)
    for graph, old, update in zip((PLAIN, DEEP), before, updates, strict=True):
        assert (made.hypernetwork(graph).detach() - old) @ update.returned > 0


def test_the_server_ships_weights_of_the_clients_own_architectures(tmp_path: Path) -> None:
    federation = digits_federation(config("ghn-server"), tmp_path)
    expected = [generated(federation, graph) for graph in (PLAIN, MLP, DEEP)]
    history, selection = federation.run()
    assert history.cohorts == [["client-0", "client-1", "client-2"]]
    assert set(selection.test_accuracy) == {"client-0", "client-1", "client-2"}
    orders = federation.grid.sent(TrainOrder)
    assert all(order.target.hypernetwork is None for order in orders)
    sent = [order.weights.values for order in orders if order.weights is not None]
    assert all(torch.equal(one, other) for one, other in zip(sent, expected, strict=True))
    for graph, old in zip((PLAIN, MLP, DEEP), expected, strict=True):
        assert not torch.equal(generated(federation, graph), old)


# ---------------------------------------------------------------------- ghn: what travels


def leaving(federation: Inline) -> bytes:
    """Return all that passed between server and clients as one run of bytes."""
    return b"".join(
        f"{key}={value!r};".encode() if not isinstance(value, bytes) else value
        for _, _, content in federation.grid.passed
        for record in content.values()
        for key, value in dict(record).items()
    )


# Five bytes at least: megabytes of weights travel too, and three given bytes do occur in so many by chance.
TELLING = (b"body.", b"head.", b"edges", b"adjacency", b"plain-4", b"plain-7", b"fc1.weight", b"'fc1'", b'"fc1"')


def test_no_graph_and_no_name_of_a_module_leaves_a_client(tmp_path: Path) -> None:
    federation = digits_federation(config(), tmp_path)
    federation.run()
    found = leaving(federation)
    assert b"linear 64,50 wb +relu" in found  # the walk sees what does leave
    assert [word for word in TELLING if word in found] == []
    abouts = federation.grid.fields(Greeting, orders=False)
    assert len(abouts) == 3
    for about, graph in zip(sorted(abouts, key=lambda about: str(about["client_id"])), (PLAIN, MLP, DEEP), strict=True):
        # A set in the order of its texts: nothing of how often a layer occurs, or after which other.
        assert about["types"] == sorted({str(node.type) for node in graph.nodes})
        assert "graph" not in about
    assert PLAIN.types == DEEP.types  # so these two look alike to the server
    assert leaving(federation).count(PLAIN.digest.encode()) == 0


def test_where_the_graph_may_leave_the_same_walk_sees_it(tmp_path: Path) -> None:
    federation = digits_federation(config("ghn-server"), tmp_path)
    found = leaving(federation)
    assert {word for word in TELLING if word in found} >= {b"body.", b"head.", b"edges"}
    assert b"plain-4" not in found


FAILING = """
from torch import nn


def make(input_shape, num_classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    net.register_forward_hook(alarm)
    return net


def alarm(module, args, output):
    if module.training:
        raise RuntimeError("secret_layer is in training")
"""


def test_what_python_says_of_a_failing_model_stays_on_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing_net.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    run = config(models=("mlp", "failing_net:make"), clients=2, cohort=2)
    federation = digits_federation(run, tmp_path)
    history, _ = federation.run()
    assert history.cohorts == [["client-0"]]
    (refused,) = texts(history.rounds[0]).values()
    assert refused.startswith(
        "the client's own model fails; the client's log says how; virtual clients log to server.log"
    )
    assert "secret_layer is in training" in caplog.text
    assert b"secret" not in leaving(federation)


def test_a_client_receives_only_the_parts_that_it_needs(tmp_path: Path) -> None:
    federation = digits_federation(config(), tmp_path)
    federation.run()
    orders, replies = (federation.grid.fields(TrainOrder, orders=asked) for asked in (True, False))
    for graph, order, reply in zip((PLAIN, MLP, DEEP), orders, replies, strict=True):
        needed = {SHARED, *map(str, graph.types)}
        assert parts_in(order["tensors"]) == needed
        assert parts_in(reply["tensors"]) == needed
    everything = set(federation.algorithm.hypernetwork.parts())
    assert everything == {SHARED, *map(str, (*PLAIN.types, *MLP.types))}
    assert all(parts_in(order["tensors"]) < everything for order in orders)


def test_a_part_that_nobody_trained_stays_as_it_was(tmp_path: Path) -> None:
    local = LocalConfig(steps=3, batch_size=16, learning_rate=0.05, weight_decay=0.1)
    federation = digits_federation(config(cohort=1, rounds=3, eval_every=3, local=local), tmp_path)
    states = [federation.state()]
    history, _ = federation.run()
    states += history.states
    graphs = dict(zip(("client-0", "client-1", "client-2"), (PLAIN, MLP, DEEP), strict=True))
    assert {PLAIN.types, MLP.types} == {graphs[name].types for (name,) in history.cohorts}  # both kinds had their turn
    for before, after, (name,) in zip(states, states[1:], history.cohorts, strict=False):
        trained = {SHARED, *map(str, graphs[name].types)}
        assert {part for part in before if torch.equal(before[part], after[part])} == set(before) - trained


def test_clients_of_equal_needs_share_one_vector() -> None:
    abouts = [own(f"c{row}", types=tuple(map(str, graph.types))) for row, graph in enumerate((PLAIN, MLP, DEEP))]
    made = joined(config(models=()), *abouts)
    rows = made.weights([*made.clients.values()])
    assert rows[0] is rows[2] and rows[0] is not rows[1]
    assert rows[1].layout == made.layout(made.clients[1])
    parts = split_parts(rows[1].layout, rows[1].values)
    assert parts.keys() == {SHARED, *map(str, MLP.types)}
    assert all(torch.equal(parts[part], made.hypernetwork.read_part(part)) for part in parts)


@pytest.mark.parametrize("compression", ["int8", "top-k:0.9"])
def test_replies_can_be_compressed(tmp_path: Path, compression: str) -> None:
    exact, lossy = (digits_federation(config(compression=c), tmp_path / c) for c in ("none", compression))
    exact.run()
    lossy.run()
    start = digits_federation(config(), tmp_path / "start").state()
    change, error = (
        sum(float((a.state()[part] - b[part]).square().sum()) for part in start) ** 0.5
        for a, b in ((exact, start), (lossy, exact.state()))
    )
    assert 0 < error < 0.1 * change


# ---------------------------------------------------------------------- who may join


HUGE = "conv2d 16777216,16777216 k3x3 wb"


@pytest.mark.parametrize(
    ("strategy", "said", "message"),
    [
        ("ghn", {}, "this run trains every client's own model; join with --model"),
        ("ghn-server", {}, "reads the graphs of clients' own models; join with --model and --disclose graph"),
        ("ghn-server", {"types": ("input",)}, "join with --model and --disclose graph"),
        ("hafl-distillation", {}, "this run teaches every client's own model; join with --model"),
        ("ghn", {"types": ("conv9d 1,2",)}, "layer type: expected one of"),
        ("ghn", {"types": ("input",) * 513}, "expected at most 512 layer types, found 513"),
        ("ghn", {"types": (HUGE,)}, "expected at most 300,000,000 parameters, found 2,533,274,807"),
        ("ghn-server", {"graph": "[]"}, "graph: Input should be an object"),
        (
            "ghn-server",
            {"graph": MLP.to_json().replace("64,50", "16777216,50")},
            "expected at most 50000000 parameters",
        ),
    ],
)
def test_who_cannot_take_part_is_told_why(strategy: str, said: dict[str, Any], message: str) -> None:
    options = {} if strategy == "hafl-distillation" else SMALL
    with pytest.raises(RefusedError, match=message):
        make_algorithm(config(strategy, models=(), options=options)).serves(own("a", **said), [])


def test_layer_types_that_make_the_hypernetwork_too_large_together_are_refused_when_they_come() -> None:
    first, second = own("a", types=("linear 100,100 wb",)), own("b", types=("linear 100,101 wb",))
    made = make_algorithm(config(models=(), options=SMALL | {"max_parameters": 60_000}))
    made.serves(first, [])
    with pytest.raises(
        RefusedError, match=r"with its layer types: .* at most 60,000 parameters, found .* raise options"
    ):
        made.serves(second, [first])
    made.serves(second, [])


def test_layer_types_that_a_client_has_left_count_as_long_as_the_hypernetwork_has_them() -> None:
    """Else one client that comes back with other types each time would take all memory."""
    made = make_algorithm(config(models=(), options=SMALL | {"max_parameters": 60_000}))
    first, second = own("a", types=("linear 100,100 wb",)), own("a", types=("linear 100,101 wb",))
    roster, admission = Roster(), Admission(made.config, made)
    admission.check(first, roster)
    client, _ = roster.admit(2, first)
    made.build(made.settle(first))
    made.join(client, first=True)
    with pytest.raises(RefusedError, match="at most 60,000 parameters"):
        made.serves(second, [])
    made.serves(first, [])


def test_the_size_is_measured_once_for_each_model_however_many_clients_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    sketch = GraphHypernetwork.sketch

    def counting(types: Any, *rest: Any) -> GraphHypernetwork:
        measured.append(len(types))
        return sketch(types, *rest)

    monkeypatch.setattr(GraphHypernetwork, "sketch", counting)
    abouts = [own(f"c{row}", types=(f"linear 10,{10 + row % 3} wb",)) for row in range(30)]
    made = make_algorithm(config(models=(), options=SMALL))
    admission, roster = Admission(made.config, made), Roster()
    for node, about in enumerate(abouts):
        admission.check(about, roster)
        roster.admit(node, about)
    assert measured == [1, 2, 3]
    admission.begin(roster, 0)
    assert measured == [1, 2, 3] * 2


@pytest.mark.parametrize("strategy", ["ghn", "ghn-server"])
def test_a_hypernetwork_may_be_smaller_than_what_it_writes(strategy: str, tmp_path: Path) -> None:
    """As `tile` makes it; the limits are on the hypernetwork."""
    options = {"tile": 8, "hidden": 2, "latent": 8, "layers": 1, "max_parameters": 14_000}
    disclose = "graph" if strategy == "ghn-server" else "types"
    run = config(strategy, options=options, models=("mlp",) * 3, sizes=("L",), clients=2, cohort=2)
    settings = [replace(each, disclose=disclose) for each in digits_settings(run, tmp_path)]
    federation = Inline(run, digits_grid(settings)).join()
    history, _ = federation.run()
    hypernetwork = federation.algorithm.hypernetwork
    assert (
        sum(each.numel() for each in hypernetwork.parameters())
        < 14_000
        < own_graph(ModelSpec("mlp", "L", (1, 8, 8), 10)).layout.numel
    )
    assert history.cohorts == [["client-0", "client-1"]]


def test_a_graph_with_more_layers_of_a_type_than_linear_has_places_is_refused() -> None:
    """Nobody else has to suffer: `weights` of a cohort would fail."""
    deep = own_graph(ModelSpec("plain-7", "S", (1, 8, 8), 10))
    most = max(map(len, deep.groups.values()))
    for latent in (most, most - 1):
        made = make_algorithm(config("ghn-server", models=(), options=LINEAR | {"latent": latent}))
        refused = attempt(made.serves, own("a", graph=deep.to_json()), [])
        assert str(refused) == (
            "None" if latent == most else f"expected at most {latent} layers of one type (options.latent), found {most}"
        )


def test_a_graph_that_is_not_asked_for_is_not_told(tmp_path: Path) -> None:
    run = config()
    settings = [replace(each, disclose="graph") for each in digits_settings(run, tmp_path)]
    federation = Inline(run, digits_grid(settings)).join()
    assert [client.about.graph for client in federation.roster] == [None] * 3


def test_an_own_model_is_refused_where_the_server_chooses(tmp_path: Path) -> None:
    run = digits_config(clients=2)
    with_model, without = digits_settings(run, tmp_path)
    federation = Inline(run, digits_grid([replace(with_model, model="plain-4"), without])).join(1)
    assert [client.client_id for client in federation.roster] == ["client-1"]
    told = "the server of this run chooses the model; join without --model"
    assert any(event.startswith("refused") and event.endswith(told) for event in federation.events)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"hidden": 1}}, "hidden: expected greater than or equal to 2, found 1 in options of ghn"),
        ({"options": {"mode": "tree"}}, "mode: expected 'graph', 'no-graph' or 'linear'"),
        (
            {"strategy": "pfedhn", "options": {}},
            "models: pfedhn sends the same model to all clients; set model instead",
        ),
        ({"asynchronous": True}, "asynchronous: ghn learns from whole rounds; set it to false"),
        ({"baselines": ("ghn-server",)}, "baselines: ghn-server asks clients for more than ghn; make it the strategy"),
        (
            {"strategy": "local", "options": {}, "baselines": ("ghn",)},
            "baselines: ghn asks clients for more than local",
        ),
        (
            {"strategy": "fedavg", "options": {}, "models": (), "baselines": ("hafl-distillation",)},
            "baselines: hafl-distillation asks clients for more than fedavg; make it the strategy",
        ),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(config(**changes), uses_data_section=True)


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 0.05), ("cosine", 0.025)])
def test_a_head_is_refined_at_the_mean_rate_of_local_training(schedule: str, rate: float) -> None:
    local = LocalConfig(learning_rate=0.05, schedule=schedule)  # type: ignore[arg-type]
    made = make_algorithm(config(options=SMALL | {"refine_epochs": 1}, local=local))
    assert made.recipe(9).refinement == Refinement(1, rate, 64)


@pytest.mark.slow
def test_baselines_run_with_the_same_clients(tmp_path: Path) -> None:
    run = config("ghn-server", baselines=("ghn", "local", "fedavg", "hafl-distillation"), model="plain-4")
    check_run(run, uses_data_section=True)
    federation = digits_federation(run, tmp_path)
    assert federation.run()[0].cohorts == [["client-0", "client-1", "client-2"]]
    for name in run.baselines:
        one = baseline_config(run, name)
        federation.take(make_algorithm(one))
        federation.federation.admission.begin(federation.roster, 0)
        assert federation.run()[0].cohorts == [["client-0", "client-1", "client-2"]], name


def test_hafl_distillation_is_fedavg_with_students(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"options": {}, "model": "plain-4", "rounds": 2, "eval_every": 2}
    plain = digits_federation(config("fedavg", models=(), **changes), tmp_path / "plain")
    taught = digits_federation(
        config("hafl-distillation", **changes | {"options": {"epochs": 20}}), tmp_path / "taught"
    )
    plain.run()
    history, _ = taught.run()
    assert all(torch.equal(values, plain.state()[name]) for name, values in taught.state().items())
    asked = taught.grid.sent(EvaluateOrder)
    assert [order.refinement for order in asked] == [Refinement(20, 0.05, 16, "student")] * 3
    assert [order.weights.layout for order in asked if order.weights] == [
        plain.algorithm.whole
    ] * 3  # the shared network's
    assert history.rounds[-1].evaluation is not None and len(history.rounds[-1].evaluation.scores) == 3


def test_local_trains_the_clients_own_models(tmp_path: Path) -> None:
    federation = digits_federation(config("local", options={}), tmp_path)
    federation.run()
    for index, graph in enumerate((PLAIN, MLP, DEEP)):
        path = tmp_path / f"client-{index}" / "personal" / f"{RUN_ID}.safetensors"
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"layout": graph.layout.digest}
            assert file.get_tensor("values").shape == (graph.layout.numel,)


# ---------------------------------------------------------------------- another run's hypernetwork


def test_a_run_can_start_from_anothers_hypernetwork_and_meet_new_types(tmp_path: Path) -> None:
    first = digits_federation(config(models=("plain-4",)), tmp_path / "first")
    first.run()
    state = first.state()
    run = config("ghn-server", models=("mlp", "plain-7"))
    settings = digits_settings(run, tmp_path / "second")
    second = Inline(run, digits_grid(settings), initial=state).join()
    assert all(torch.equal(second.state()[part], values) for part, values in state.items())
    assert torch.equal(generated(second, DEEP), generated(first, DEEP))  # an architecture that never trained
    assert set(second.state()) == {SHARED, *map(str, (*DEEP.types, *MLP.types))}


@pytest.mark.parametrize("strategy", ["ghn", "ghn-server"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_client_may_come_back_with_another_model(strategy: str, resumed: bool, tmp_path: Path) -> None:
    run = config(strategy, models=("plain-4",), clients=2, cohort=2)
    federation = digits_federation(run, tmp_path)
    federation.run()
    again = run.model_copy(update={"models": ("mlp",)})
    settings = digits_settings(again, tmp_path)  # the same folders, and so the same identities
    if resumed:
        checkpoint = federation.algorithm.checkpoint()
        federation = Inline(again, digits_grid(settings), Roster.from_json(federation.roster.to_json()))
        federation.federation.admission.restore(federation.roster, checkpoint)
        federation.join()
    else:
        federation.come_back(settings)
    (outcome,) = federation.run()[0].rounds
    assert len(outcome.results) == 2 and not outcome.refused
    assert {*map(str, MLP.types)} <= set(federation.state())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embeddings": torch.zeros(2, 2)}, "init_from: expected a run of ghn or ghn-server"),
        ({SHARED: torch.zeros(3)}, "init_from: expected a run of ghn or ghn-server"),
        ({SHARED: torch.zeros(3), "input": torch.zeros(16)}, "init_from: its hypernetwork has other options"),
    ],
)
def test_a_run_of_another_kind_is_no_start(tensors: dict[str, Tensor], message: str) -> None:
    made = joined(config(models=()), own("a", types=tuple(map(str, MLP.types))))
    with pytest.raises(ConfigError, match=message):
        made.start_from(tensors)


def test_the_state_does_not_depend_on_who_joined_first() -> None:
    states = []
    for order in ([PLAIN, MLP], [MLP, PLAIN]):
        abouts = []
        for row, graph in enumerate(order):
            types = [str(layer) for layer in graph.types]
            random.Random(row).shuffle(types)
            abouts.append(own(f"c{row}", types=tuple(types)))
        states.append(joined(config(models=()), *abouts).state())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][part], states[1][part]) for part in states[0])
    assert all(part == SHARED or LayerType.parse(part) for part in states[0])
