"""Baselines with a local method or part: what travels, what stays, special cases, evaluation after adaptation."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from figures.per_fedavg import Adapted
from hyperbloom.client.work.client import client_for
from hyperbloom.client.work.networks import _network
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.methods import FedProx, Method
from hyperbloom.common.wire.orders import EvaluateOrder, Order, TrainOrder
from hyperbloom.strategies import STRATEGIES, make_algorithm
from tests.strategies.conftest import RUN_ID, History, Inline, assert_same, digits_federation
from tests.strategies.reference import seed_of
from tests.strategies.test_baselines import LOCAL, config, data_of, flat, plain_net

BODY, HEAD = ["fc1.weight", "fc1.bias"], ["head.weight", "head.bias"]
PERSONAL = ["ditto", "fedper", "fedrep", "hyperfl", "lg-fedavg", "pfedme"]
AVERAGED = [
    "ditto",
    "fedavg-ft",
    "fedma",
    "fedper",
    "fedprox",
    "fedrep",
    "hyperfl",
    "lg-fedavg",
    "per-fedavg",
    "pfedme",
]


def run(strategy: str, folder: Path, **changes: Any) -> tuple[Inline, History]:
    federation = digits_federation(config(strategy, **({"cohort": 2} | changes)), folder)
    return federation, federation.run()[0]


def tensors(federation: Inline, kind: type[Order], orders: bool) -> list[list[str]]:
    """Return the names of the tensors in every order of a kind, or in every answer to one."""
    found = []
    for fields in federation.grid.fields(kind, orders):
        shapes = json.loads(fields["tensors"]) if "tensors" in fields else []
        assert len(fields.get("values", b"")) == 4 * sum(torch.Size(shape).numel() for _, shape in shapes)
        found.append([name for name, _ in shapes])
    return found


# ---------------------------------------------------------------------- the wire


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("fedper", BODY),
        ("fedrep", BODY),
        ("hyperfl", [f"hypernetwork.{layer}.{leaf}" for layer in (0, 2) for leaf in ("weight", "bias")]),
        ("fedprox", BODY + HEAD),
        ("fedavg-ft", BODY + HEAD),
        ("per-fedavg", BODY + HEAD),
        ("pfedme", BODY + HEAD),
        ("fedma", BODY + HEAD),
    ],
)
def test_what_travels(strategy: str, names: list[str], tmp_path: Path) -> None:
    federation, _ = run(strategy, tmp_path)
    assert tensors(federation, TrainOrder, orders=True) == [names] * 2 * 4
    assert tensors(federation, TrainOrder, orders=False) == [names] * 2 * 4
    assert tensors(federation, EvaluateOrder, orders=True) == [names] * 3 * 2
    assert tensors(federation, EvaluateOrder, orders=False) == [[]] * 3 * 2


@pytest.mark.parametrize("strategy", PERSONAL)
def test_what_is_personal_never_leaves(strategy: str, tmp_path: Path) -> None:
    stored: list[bytes] = []

    def remember(number: int) -> None:
        for path in tmp_path.glob("*/personal/*.safetensors"):
            stored.append(load_file(path)["values"].numpy().tobytes())

    federation = digits_federation(config(strategy, cohort=2), tmp_path)
    federation.run(remember)
    sent = [
        fields["values"]
        for kind in (TrainOrder, EvaluateOrder)
        for fields in federation.grid.fields(kind)
        if "values" in fields
    ]
    assert stored
    # lg-fedavg hands out one body to start from, which then is trained.
    assert not any(values in message for values in stored for message in sent)


@pytest.mark.parametrize("strategy", PERSONAL)
def test_personal_state_survives_a_restart(strategy: str, tmp_path: Path) -> None:
    def restart(number: int) -> None:
        client_for.cache_clear()
        _network.cache_clear()

    steady = digits_federation(config(strategy, cohort=2, rounds=6), tmp_path / "steady")
    history, _ = steady.run()
    restarted = digits_federation(config(strategy, cohort=2, rounds=6), tmp_path / "restarted")
    again, _ = restarted.run(restart)
    assert_same(steady.state(), restarted.state())
    assert history.rounds[-1].evaluation == again.rounds[-1].evaluation
    for one in tmp_path.glob("steady/*/personal/*.safetensors"):
        assert_same(load_file(one), load_file(tmp_path / "restarted" / one.relative_to(tmp_path / "steady")))


# ---------------------------------------------------------------------- special cases


@pytest.mark.parametrize(
    ("strategy", "options", "spent"),
    [
        ("fedprox", {"mu": 0.0}, 1),
        ("fedavg-ft", {}, 1),
        ("per-fedavg", {"alpha": 0.0}, 2),
        ("per-fedavg", {"alpha": 0.0, "variant": "hessian-free"}, 4),
    ],
)
def test_fedavg_as_a_special_case_to_the_bit(
    strategy: str, options: dict[str, Any], spent: int, tmp_path: Path
) -> None:
    local = LOCAL.model_copy(update={"steps": LOCAL.steps * spent})
    federation, history = run(strategy, tmp_path / "one", options=options, local=local)
    plain, expected = run("fedavg", tmp_path / "other")
    assert_same(federation.state(), plain.state())
    assert [each.results.keys() for each in history.rounds] == [each.results.keys() for each in expected.rounds]
    if strategy != "fedavg-ft":
        assert history.rounds[-1].evaluation == expected.rounds[-1].evaluation


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 0.2), ("cosine", 0.1)])
def test_fine_tuning_has_the_mean_rate_of_local_training(schedule: Literal["constant", "cosine"], rate: float) -> None:
    """Plain SGD at `rate / (1 - momentum)` moves as far as SGD with momentum."""
    local = LOCAL.model_copy(update={"learning_rate": 0.02, "momentum": 0.9, "schedule": schedule})
    refinement = make_algorithm(config("fedavg-ft", local=local)).recipe(1).refinement
    assert refinement is not None and refinement.rate == pytest.approx(rate)


def test_hyperfl_averages_what_its_clients_send(tmp_path: Path) -> None:
    federation, _ = run("hyperfl", tmp_path, rounds=1, eval_every=1, cohort=3, options={"hidden_dim": 8})
    answers = federation.grid.answers(TrainOrder)
    total = sum(client.about.train_examples for client in federation.roster)
    rows = {client.client_id: client.about.train_examples / total for client in federation.roster}
    assert len(answers) == len(rows) == 3
    found = torch.cat([values.flatten() for values in federation.state().values()])
    sent = torch.stack([answer.weights.values for answer in answers]).double()
    expected = torch.tensor(list(rows.values()), dtype=torch.float64) @ sent
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    heads = [load_file(path)["values"] for path in tmp_path.glob("*/personal/*.safetensors")]
    assert len(heads) == 3 and all(len(each) == 64 + 510 for each in heads)
    assert not torch.equal(heads[0][:64], heads[1][:64])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"options": {"embedding_dim": 1000}}, "embedding_dim: expected less than or equal to 999, found 1000"),
        ({"adapt": "head"}, "adapt: expected all, and no backbone, with hyperfl; it writes whole networks"),
        ({"local": LOCAL.model_copy(update={"steps": 1})}, "local.steps: hyperfl needs at least 2"),
    ],
)
def test_what_hyperfl_refuses(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_algorithm(config("hyperfl", **changes))


@pytest.mark.parametrize("strategy", ["fedprox", "per-fedavg", "pfedme", "fedrep"])
def test_the_method_makes_a_difference(strategy: str, tmp_path: Path) -> None:
    federation, _ = run(strategy, tmp_path / "one")
    plain, _ = run({"fedrep": "fedper"}.get(strategy, "fedavg"), tmp_path / "other")
    assert not torch.allclose(federation.state()["fc1.weight"], plain.state()["fc1.weight"], atol=1e-4)


# ---------------------------------------------------------------------- evaluation after adaptation


def adapted_losses(
    federation: Inline, folder: Path, epochs: int, rate: float, batch: int | None, number: int = 4
) -> dict[str, float]:
    """Return each client's test loss after plain SGD on a copy of the global model."""
    losses = {}
    for name, data in data_of(federation, folder).items():
        net = plain_net(0)
        torch.nn.utils.vector_to_parameters(
            torch.cat([t.flatten() for t in federation.state().values()]), net.parameters()
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        generator = torch.Generator().manual_seed(seed_of(0, name, number, "refine"))
        for _ in range(epochs):
            for rows in torch.randperm(len(data.train), generator=generator).split(batch or len(data.train)):
                optimizer.zero_grad()
                F.cross_entropy(net(data.train.inputs[rows]), data.train.labels[rows]).backward()
                optimizer.step()
        losses[name] = F.cross_entropy(net(data.test.inputs), data.test.labels).item()
    return losses


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("fedavg-ft", {"epochs": 2, "rate": 0.05}, (2, 0.05, 16)),
        ("fedavg-ft", {}, (5, 0.5, 16)),  # 0.1 / (1 - 0.8)
        ("per-fedavg", {"alpha": 0.2}, (1, 0.2, None)),
        ("figures.per_fedavg:FedAvgTwoSteps", {}, (2, 0.1, None)),
    ],
)
def test_clients_adapt_the_global_model_before_an_evaluation(
    strategy: str, options: dict[str, Any], expected: tuple[int, float, int | None], tmp_path: Path
) -> None:
    federation, history = run(strategy, tmp_path, options=options)
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    losses = adapted_losses(federation, tmp_path, *expected)
    plain = adapted_losses(federation, tmp_path, 0, 1.0, 1)
    for name, score in evaluation.scores.items():
        assert score.test.loss == pytest.approx(losses[name], rel=1e-4)
        assert score.test.loss != pytest.approx(plain[name], rel=1e-2)


def test_a_batch_larger_than_memory_holds_is_one_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, at_once = run("per-fedavg", tmp_path / "one")
    monkeypatch.setattr("hyperbloom.client.work.refinement.EVALUATION_BATCH", 50)
    _, piecewise = run("per-fedavg", tmp_path / "other")
    for one, other in zip(at_once.rounds, piecewise.rounds, strict=True):
        assert (one.evaluation is None) == (other.evaluation is None)
        if one.evaluation and other.evaluation:
            for name, score in one.evaluation.scores.items():
                assert other.evaluation.scores[name].test.loss == pytest.approx(score.test.loss, rel=1e-5)


# ---------------------------------------------------------------------- pfedme


def test_pfedme_evaluates_the_personal_model_of_who_has_one(tmp_path: Path) -> None:
    federation, history = run("pfedme", tmp_path, cohort=1, rounds=1, eval_every=1)
    evaluation, (trained,) = history.rounds[-1].evaluation, history.rounds[-1].results
    assert evaluation is not None
    for name, data in data_of(federation, tmp_path).items():
        net = plain_net(0)
        values = torch.cat([tensor.flatten() for tensor in federation.state().values()])
        if name == trained:
            stored = load_file(tmp_path / name / "personal" / f"{RUN_ID}.safetensors")
            assert stored.keys() == {"moment", "values"}  # no momentum
            assert not torch.allclose(stored["values"], values, atol=1e-3)
            values = stored["values"]
        torch.nn.utils.vector_to_parameters(values, net.parameters())
        loss = F.cross_entropy(net(data.test.inputs), data.test.labels).item()
        assert evaluation.scores[name].test.loss == pytest.approx(loss, rel=1e-5)


def test_who_never_trained_evaluates_each_new_global_model(tmp_path: Path) -> None:
    federation, history = run("pfedme", tmp_path, cohort=1, clients=6, rounds=2, eval_every=1)
    (absent, *_) = {f"client-{i}" for i in range(6)} - {name for cohort in history.cohorts for name in cohort}
    losses = [each.evaluation.scores[absent].test.loss for each in history.rounds if each.evaluation]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    net = plain_net(0)
    torch.nn.utils.vector_to_parameters(torch.cat([t.flatten() for t in federation.state().values()]), net.parameters())
    data: Examples = data_of(federation, tmp_path)[absent].test
    assert losses[1] == pytest.approx(F.cross_entropy(net(data.inputs), data.labels).item(), rel=1e-5)


def test_beta_goes_a_part_of_the_way_to_the_average(tmp_path: Path) -> None:
    states = {}
    for beta in (1.0, 0.25, 2.0):
        federation, _ = run("pfedme", tmp_path / str(beta), rounds=1, eval_every=1, options={"beta": beta})
        states[beta] = torch.cat([tensor.flatten() for tensor in federation.state().values()])
    start = flat(plain_net(seed_of(0, "model")))
    for beta in (0.25, 2.0):
        torch.testing.assert_close(states[beta], start + beta * (states[1.0] - start), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": "fedrep", "local": LOCAL.model_copy(update={"steps": 1})},
            "local.steps: fedrep needs at least 2",
        ),
        (
            {
                "strategy": "per-fedavg",
                "options": {"variant": "hessian-free"},
                "local": LOCAL.model_copy(update={"steps": 3}),
            },
            "local.steps: per-fedavg needs at least 4, found 3",
        ),
        ({"strategy": "fedper", "sizes": ("S", "M")}, "sizes: fedper averages one architecture, found S, M"),
        ({"strategy": "pfedme", "options": {"lamda": 20.0}}, "options.inner_rate: expected less than 2 / lamda = 0.1"),
        ({"strategy": "fedprox", "options": {"mu": -1.0}}, "mu: expected greater than or equal to 0, found -1"),
        ({"strategy": "fedavg-ft", "options": {"epochs": 101}}, "epochs: expected less than or equal to 100"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm(config(**changes))


@pytest.mark.parametrize("name", AVERAGED)
def test_every_option_is_explained_and_every_docstring_names_its_source(name: str) -> None:
    import sys

    kind = STRATEGIES[name]
    assert all(field.description for field in kind.options_type.model_fields.values())
    text = sys.modules[kind.__module__].__doc__ or ""
    assert "https://arxiv.org/abs/" in text
    assert "`local.steps`" in text


@pytest.mark.parametrize(
    ("strategy", "options", "method"),
    [
        (
            "per-fedavg",
            {"alpha": 0.2, "variant": "hessian-free", "delta": 0.01},
            Adapted(alpha=0.2, variant="hessian-free", delta=0.01),
        ),
        ("fedprox", {"mu": 0.25}, FedProx(mu=0.25)),
    ],
)
def test_the_recipe_carries_the_options(strategy: str, options: dict[str, Any], method: Method) -> None:
    assert make_algorithm(config(strategy, options=options)).recipe(1).method == method
