"""ODPFL-HN: the gradients over the network are those of one program, one encoder a round, and who is served by what."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client import encoding
from hyperbloom.client.keep.state import ClientState
from hyperbloom.common.config import RunConfig
from hyperbloom.common.encoders import build_encoder
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.messages import (
    BackpropOrder,
    BackpropResult,
    DescribeOrder,
    DescribeResult,
    EvaluateOrder,
    EvaluateResult,
    FitOrder,
    FitResult,
    TrainOrder,
    TrainResult,
    Weights,
)
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.odpfl import without_outliers
from hyperbloom.strategies.personalised import Leg
from hyperbloom.strategies.roster import Roster

from .conftest import BRIEF, Inline, RecordingGrid, digits_config, digits_federation, introduction

STEP = 0.1
SMALL = {
    "hidden_dim": 6,
    "hidden_layers": 1,
    "embedding_dim": 3,
    "encoder": "dss",
    "momentum": 0.0,
    "weight_decay": 0.0,
}
SPEC = ModelSpec("mlp", "S", (4,), 3)


@pytest.fixture
def doubles() -> Iterator[None]:
    """Compute in float64, on both sides."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Clients:
    """Clients that take one step of gradient descent over all their examples, in float64.

    Attributes:
        data: inputs `(10, 4)` and labels `(10,)`, by name.
        tamper: called with name and result of every leg; what it returns is sent.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names, self.folder = names, folder
        self.tamper: Callable[[str, Any], Any] = lambda name, result: result
        generator = torch.Generator().manual_seed(5)
        self.data = {
            name: (
                torch.randn(10, 4, dtype=torch.float64, generator=generator) + index,
                torch.randint(3, (10,), generator=generator),
            )
            for index, name in enumerate(names)
        }
        torch.manual_seed(0)
        self.module = build(SPEC).double()

    def loss(self, name: str, weights: Tensor) -> Tensor:
        """Return a client's loss as a function of its weights `(P,)`."""
        inputs, labels = self.data[name]
        return F.cross_entropy(functional_call(self.module, full_layout(SPEC).views(weights), (inputs,)), labels)

    def train(self, name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None
        weights = order.weights.values.clone().requires_grad_()
        loss = self.loss(name, weights)
        (gradient,) = torch.autograd.grad(loss, weights)
        return TrainResult(loss.item(), 0.0, Weights(order.weights.layout, -STEP * gradient))

    def fit(self, name: str, order: FitOrder) -> FitResult:
        gamma, distance = encoding.fit(order, self.data[name][0])
        trained = vars(self.train(name, order))
        return FitResult(**trained, version=order.version, distance=distance, gamma=gamma)

    def evaluate(self, name: str, order: EvaluateOrder) -> EvaluateResult:
        assert order.weights is not None
        inputs, labels = self.data[name]
        logits = functional_call(self.module, full_layout(SPEC).views(order.weights.values), (inputs,))
        correct = int((logits.argmax(1) == labels).sum())
        return EvaluateResult(correct, 10, 1.0, correct, 10, float(order.weights.values.square().sum()))

    def grid(self) -> RecordingGrid:
        """Return a grid of these clients."""
        app = ClientApp()

        def reply(message: Message, context: Context, kind: Any, work: Callable[[str, Any], Any]) -> Message:
            name = str(context.node_config["client-id"])
            return Message(self.tamper(name, work(name, kind.unpack(message.content))).pack(), reply_to=message)

        def state(name: str) -> ClientState:
            return ClientState(self.folder / name)

        works: list[tuple[Any, Any, Callable[[str, Any], Any]]] = [
            (app.query("greet"), None, lambda name, order: introduction(name)),
            (app.train(), TrainOrder, self.train),
            (app.train("fit"), FitOrder, self.fit),
            (app.train("describe"), DescribeOrder, lambda n, o: encoding.describe(o, self.data[n][0], state(n))),
            (app.train("backprop"), BackpropOrder, lambda n, o: encoding.backprop(o, self.data[n][0], state(n))),
            (app.evaluate(), EvaluateOrder, self.evaluate),
        ]
        for register, kind, work in works[1:]:
            register(lambda message, context, kind=kind, work=work: reply(message, context, kind, work))
        works[0][0](
            lambda message, context: Message(
                introduction(str(context.node_config["client-id"])).pack(), reply_to=message
            )
        )
        return RecordingGrid(app, [{"client-id": name} for name in self.names])


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {"strategy": "odpfl", "clients": 3, "cohort": 3, "rounds": 2, "eval_every": 1}
    options = SMALL | changes.pop("options", {})
    return RunConfig(**(values | {"sizes": ("S",), "local": BRIEF, "options": options} | changes))


def federation(folder: Path, **changes: Any) -> tuple[Inline, Clients]:
    made = config(**changes)
    clients = Clients([f"c{index}" for index in range(made.clients)], folder)
    joined = Inline(made, clients.grid()).join()
    exchange(joined, joined.strategy.calibration(0))
    joined.grid.passed.clear()
    return joined, clients


def exchange(made: Inline, legs: Iterator[Leg]) -> None:
    """Let legs take place."""
    for leg in legs:
        leg.take(made.federation.exchange([leg.orders(leg.clients)], 10.0))


def train(made: Inline, number: int = 1) -> None:
    """Run the training of one round."""
    exchange(made, made.strategy.legs(number, made.strategy.begin_round(number)))


def served(made: Inline, number: int = 1) -> dict[str, Tensor]:
    """Run an evaluation; return the weights that each client was asked to score, the last where there were two."""
    names = {client.node_id: client.client_id for client in made.roster}
    sent: dict[str, Tensor] = {}
    for leg in made.strategy.evaluation_legs(number, made.roster.idle):
        orders = leg.orders(leg.clients)
        for order in orders:
            if order.metadata.message_type == "evaluate":
                weights = EvaluateOrder.unpack(order.content).weights
                assert weights is not None
                sent[names[order.metadata.dst_node_id]] = weights.values
        leg.take(made.federation.exchange([orders], 10.0))
    return sent


def in_one_program(made: Inline) -> tuple[nn.Module, nn.Module]:
    """Return copies of encoder and hypernetwork as they are now."""
    strategy = made.strategy
    encoder = build_encoder(strategy.spec_of_encoder)
    nn.utils.vector_to_parameters(strategy.gamma.detach().clone(), encoder.parameters())
    return encoder, copy.deepcopy(strategy.learner.hypernetwork)


def orders_of(made: Inline, kind: str) -> list[dict[str, Any]]:
    """Return the orders of a type, without the replies."""
    return [fields for fields in made.grid.fields(kind) if "run_id" in fields]


# ---------------------------------------------------------------------- end to end


@pytest.mark.parametrize(("cohort", "update"), [(1, "proximal"), (3, "mean")])
def test_the_gradient_over_the_network_is_autograds_in_one_program(
    tmp_path: Path, doubles: None, cohort: int, update: str
) -> None:
    """A client's step of gradient descent returns `-STEP dL/dw`: the encoder's gradient is that of `STEP L(f(g(x)))`.

    In the second round also: both networks have moved then, and each round's gradients are taken where it began.
    """
    made, clients = federation(tmp_path, cohort=cohort, options={"update": update})
    mean = square = torch.zeros(())  # of the encoder's gradients, by Adam's own formulas
    for number in (1, 2):
        encoder, hypernetwork = in_one_program(made)
        train(made, number)
        names = list(made.strategy.round.results)
        assert len(names) == cohort
        total = torch.zeros(())
        for name in names:
            descriptor = encoder(clients.data[name][0])
            total = total + STEP / cohort * clients.loss(name, hypernetwork(descriptor[None], "S")[0])
        expected = torch.autograd.grad(total, list(encoder.parameters()), retain_graph=True)
        flat = torch.cat([each.reshape(-1) for each in expected])
        assert float(flat.norm()) > 1e-6
        assert torch.allclose(made.strategy.gamma.grad, flat, rtol=1e-6, atol=1e-12)
        # And what is learned: Adam's step for the encoder, and one of gradient descent for the hypernetwork.
        mean, square = 0.9 * mean + 0.1 * flat, 0.999 * square + 0.001 * flat**2
        step = mean / (1 - 0.9**number) / ((square / (1 - 0.999**number)).sqrt() + 1e-8)
        before = nn.utils.parameters_to_vector(encoder.parameters())
        now = before - made.strategy.options.encoder_learning_rate * step
        assert torch.allclose(made.strategy.gamma, now, rtol=1e-6, atol=1e-10)
        theta = torch.autograd.grad(total, list(hypernetwork.parameters()))
        after = made.strategy.learner.hypernetwork.parameters()
        for now, then, gradient in zip(after, hypernetwork.parameters(), theta, strict=True):
            assert torch.allclose(now, then - made.strategy.options.learning_rate * gradient, rtol=1e-6, atol=1e-12)


def test_rounds_of_steps_make_the_loss_smaller(tmp_path: Path, doubles: None) -> None:
    """The sign: with the hypernetwork still, the encoder alone must come down."""
    made, clients = federation(
        tmp_path, options={"learning_rate": 1e-12, "encoder_learning_rate": 1e-6, "update": "mean"}
    )

    def loss() -> float:
        encoder, hypernetwork = in_one_program(made)
        each = [clients.loss(n, hypernetwork(encoder(clients.data[n][0])[None], "S")[0]) for n in clients.names]
        return float(sum(each).detach())

    losses = [loss()]
    for number in range(1, 6):
        train(made, number)
        losses.append(loss())
    assert all(after < before for before, after in pairwise(losses)), losses


def test_a_cohorts_descriptors_get_the_gradient_of_embeddings(tmp_path: Path, doubles: None) -> None:
    """With the proximal rule too: pFedHN on embeddings equal to the descriptors moves these along the same gradient."""
    made, clients = federation(tmp_path, options={"momentum": 0.5})
    encoder, _ = in_one_program(made)
    learner = copy.deepcopy(made.strategy.learner)
    learner.given = False
    gradients: list[Tensor] = []
    learner._step = lambda rows, worth=1: gradients.append(learner.table.weight.grad.clone())
    caught: list[Any] = []
    update = made.strategy.learner.update
    made.strategy.learner.update = lambda replies, rule: (caught.append(replies), update(replies, rule))
    train(made)
    with torch.no_grad():
        for client in made.roster:
            learner.table.weight[client.row] = encoder(clients.data[client.client_id][0])
    learner.update(caught[0], "proximal")
    assert torch.allclose(made.strategy.learner.gradient, gradients[0], rtol=1e-9, atol=1e-12)
    sent = {f["values"] for f in orders_of(made, "train.backprop")}
    assert sent == {row.numpy().tobytes() for row in made.strategy.learner.gradient}


def test_all_legs_of_a_round_share_one_encoder_and_the_next_round_has_another(tmp_path: Path, doubles: None) -> None:
    made, _ = federation(tmp_path)
    seen = []
    for number in (1, 2):
        made.grid.passed.clear()
        train(made, number)
        kinds = [kind for kind, _ in made.grid.passed]
        assert kinds == [kind for kind in ("train.describe", "train", "train.backprop") for _ in range(6)]
        versions = {f["version"] for kind in ("train.describe", "train.backprop") for f in made.grid.fields(kind)}
        assert len(versions) == 1
        seen += versions
    assert seen[0] != seen[1] != made.strategy.version


def test_one_far_descriptor_does_not_decide_the_calibration() -> None:
    honest = torch.randn(63, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01
    lie = torch.full((1, 4), 50.0, dtype=torch.float64)
    found = without_outliers(torch.cat([honest, lie]))
    assert torch.equal(found[:-1], honest)
    assert float(found.std(0).max()) < 1.3 * float(honest.std(0).max())
    few = torch.cat([honest[:6], lie])
    assert torch.equal(without_outliers(few), few)


@pytest.mark.parametrize("leg", [DescribeResult, BackpropResult])
def test_what_comes_from_another_encoder_is_refused(tmp_path: Path, doubles: None, leg: type) -> None:
    made, clients = federation(tmp_path)
    other, _ = federation(tmp_path / "other")

    def tamper(name: str, result: Any) -> Any:
        if name == "c1" and isinstance(result, leg):
            return leg(version="0" * 16, weights=result.weights)
        return result

    clients.tamper = tamper
    train(made)
    assert made.strategy.round.refused == {
        "c1": f"expected what the encoder {other.strategy.version} makes, found {'0' * 16}; its reply is dropped"
    }
    asked = {kind: len(orders_of(made, kind)) for kind in ("train.describe", "train", "train.backprop")}
    described = leg is DescribeResult
    assert list(asked.values()) == ([3, 2, 2] if described else [3, 3, 3])
    # What it sent had no part in the step.
    if not described:
        left = [
            f["values"] for f in made.grid.fields("train.backprop") if "run_id" not in f and f["version"] != "0" * 16
        ]
        gradients = [torch.frombuffer(bytearray(values), dtype=torch.float64) for values in left]
        assert len(gradients) == 2 and torch.allclose(made.strategy.gamma.grad, torch.stack(gradients).sum(0))


def test_impossible_descriptors_and_gradients_are_refused(tmp_path: Path, doubles: None) -> None:
    made, clients = federation(tmp_path)

    def tamper(name: str, result: Any) -> Any:
        if isinstance(result, (DescribeResult, BackpropResult)) and name != "c2":
            factor = float("nan") if name == "c0" else 1e9
            if (name == "c0") == isinstance(result, DescribeResult):
                weights = Weights(result.weights.layout, result.weights.values * factor)
                return type(result)(version=result.version, weights=weights)
        return result

    clients.tamper = tamper
    train(made)
    assert made.strategy.round.refused["c0"] == "tensor descriptor: 3 values are not finite"
    assert made.strategy.round.refused["c1"].startswith("expected a norm of at most 1e+06, found")
    assert torch.isfinite(made.strategy.gamma).all()


def test_a_descriptor_that_is_far_from_all_sound_ones_is_refused(tmp_path: Path, doubles: None) -> None:
    made, clients = federation(tmp_path)

    def tamper(name: str, result: Any) -> Any:
        if name == "c1" and isinstance(result, DescribeResult):
            values = torch.full_like(result.weights.values, 101.0)
            return DescribeResult(result.version, Weights(result.weights.layout, values))
        return result

    clients.tamper = tamper
    train(made)
    assert made.strategy.round.refused["c1"].startswith("expected a norm of at most ")
    assert torch.isfinite(made.strategy.gamma).all()


def test_nobody_answering_leaves_everything_as_it_was(tmp_path: Path, doubles: None) -> None:
    made, clients = federation(tmp_path, min_replies=1.0)
    before = made.state()

    def tamper(name: str, result: Any) -> Any:
        if name == "c1" and isinstance(result, DescribeResult):
            return DescribeResult("0" * 16, result.weights)
        return result

    clients.tamper = tamper
    train(made)
    assert made.strategy.round.results == {} and orders_of(made, "train") == []
    assert made.strategy.round.refused["c0"] == "dropped: only 2 of 3 answered"
    for name, tensor in made.state().items():
        assert torch.equal(tensor, before[name]), name


def test_a_fresh_encoder_is_scaled_once_by_the_descriptors_of_those_who_train(tmp_path: Path, doubles: None) -> None:
    options = {"update": "mean"}
    made = Inline(config(clients=5, cohort=1, novel=20, options=options), Clients("abcde", tmp_path).grid()).join()
    clients = Clients("abcde", tmp_path)
    fresh, _ = in_one_program(made)
    caught: list[dict[str, Tensor]] = []
    legs = made.strategy.legs(1, made.strategy.begin_round(1))
    first = next(legs)
    first.take(made.federation.exchange([first.orders(first.clients)], 10.0))
    next(legs)
    scaled, _ = in_one_program(made)
    for encoder in (fresh, scaled):
        caught.append({name: encoder(clients.data[name][0]).detach() for name in "abcde"})
    known = [torch.stack([each[name] for name in "abcd"]) for each in caught]  # e is novel
    assert not torch.allclose(known[0].std(0), torch.ones(3), atol=0.1)
    assert torch.allclose(known[1].mean(0), torch.zeros(3), rtol=0, atol=1e-9)
    assert torch.allclose(known[1].std(0), torch.ones(3), rtol=0, atol=1e-9)
    assert next(made.strategy.calibration(2), None) is None


def test_a_private_encoder_is_centred_first_and_scaled_by_one_factor(tmp_path: Path, doubles: None) -> None:
    """From the mean direction of those who train; in all dimensions alike, so that the noise is not one's alone."""
    options = {"encoder": "private"}
    made = Inline(config(clients=5, cohort=1, novel=20, options=options), Clients("abcde", tmp_path).grid()).join()
    clients = Clients("abcde", tmp_path)
    fresh, _ = in_one_program(made)
    exchange(made, made.strategy.calibration(1))
    scaled, _ = in_one_program(made)
    directions = [F.normalize(fresh.features(clients.data[name][0]), dim=1) for name in "abcd"]  # e is novel
    centre = torch.stack([each.mean(0) for each in directions]).mean(0)
    means = torch.stack([F.normalize(each - centre, dim=1).mean(0) for each in directions])
    factor = means.std(0).square().mean().sqrt().detach()
    assert torch.allclose(scaled.centre, centre)
    assert torch.allclose(scaled.tail.weight, torch.eye(3) / factor)
    assert scaled.sensitivity(10) == pytest.approx(0.2 / float(factor), rel=1e-4)
    known = torch.stack([scaled(clients.data[name][0]) for name in "abcd"])
    assert torch.allclose(known, (means - means.mean(0)) / factor)


@pytest.mark.parametrize("mode", ["end-to-end", "two-phase"])
def test_the_state_after_an_evaluation_holds_all_descriptors_of_its_encoder(
    tmp_path: Path, doubles: None, mode: str
) -> None:
    """Also of novel clients and of those who did not train lately; in phase 1 only novel clients have a descriptor."""
    made, clients = federation(tmp_path, clients=4, cohort=1, novel=25, rounds=4, options={"mode": mode})
    train(made)
    served(made)
    encoder, _ = in_one_program(made)
    kept = made.state()["embeddings"]
    described = [torch.allclose(kept[c.row], encoder(clients.data[c.client_id][0])) for c in made.roster]
    assert described == ([True] * 4 if mode == "end-to-end" else [False, False, False, True])


# ---------------------------------------------------------------------- two phases


def two_phase(folder: Path, **changes: Any) -> tuple[Inline, Clients]:
    options = {"mode": "two-phase", "tune": 0.5, "update": "mean", "fit_rate": 0.05} | changes.pop("options", {})
    return federation(folder, **({"rounds": 4, "options": options} | changes))


def test_phase_one_has_a_round_however_much_is_tuned(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path, rounds=2, options={"tune": 0.9})
    train(made, 1)
    assert [kind for kind, _ in made.grid.passed[-6:]] == ["train.fit"] * 6
    train(made, 2)
    assert "train.fit" not in [kind for kind, _ in made.grid.passed[-6:]]


def test_phase_one_is_one_trip_and_averages_the_encoders(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path)
    before, embeddings = made.strategy.gamma.detach().clone(), made.strategy.learner.table.weight.detach().clone()
    train(made)
    assert [kind for kind, _ in made.grid.passed[-6:]] == ["train.fit"] * 6
    orders, replies = made.grid.fields("train.fit")[:3], made.grid.fields("train.fit")[3:]
    sent = [torch.frombuffer(bytearray(f["descriptor.values"]), dtype=torch.float64) for f in orders]
    assert torch.equal(torch.stack(sent), embeddings)
    changes = [torch.frombuffer(bytearray(f["gamma.values"]), dtype=torch.float64) for f in replies]
    assert torch.allclose(made.strategy.gamma.detach(), before + torch.stack(changes).mean(0), rtol=0, atol=1e-12)
    assert float(torch.stack(changes).norm()) > 0
    assert not torch.equal(made.strategy.learner.table.weight, embeddings)  # as in pFedHN


def test_phase_one_trains_hypernetwork_and_embeddings_as_pfedhn_does(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path)
    plain = {key: value for key, value in SMALL.items() if key != "encoder"} | {"update": "mean"}
    other = Inline(config(strategy="pfedhn", options={}).model_copy(update={"options": plain}), made.grid).join()
    for number in (1, 2):
        train(made, number)
        train(other, number)
    for name, tensor in other.state().items():
        assert torch.equal(tensor, made.state()[name]), name


def test_a_fitted_encoder_of_another_version_is_refused(tmp_path: Path, doubles: None) -> None:
    made, clients = two_phase(tmp_path)

    def tamper(name: str, result: Any) -> Any:
        if name == "c2" and isinstance(result, FitResult):
            return FitResult(**(vars(result) | {"version": "f" * 16}))
        return result

    clients.tamper = tamper
    train(made)
    assert list(made.strategy.round.results) == ["c0", "c1"]
    assert made.strategy.round.refused["c2"].endswith(f"found {'f' * 16}; its reply is dropped")
    assert made.strategy.round.lied == ["c2"]


def test_in_phase_two_the_encoder_is_frozen_and_asked_once(tmp_path: Path, doubles: None) -> None:
    made, clients = two_phase(tmp_path)
    for number in (1, 2):
        train(made, number)
    gamma = made.strategy.gamma.detach().clone()
    encoder, hypernetwork = in_one_program(made)
    asked = []
    for number in (3, 4):
        made.grid.passed.clear()
        train(made, number)
        asked.append(
            [len(orders_of(made, kind)) for kind in ("train.describe", "train", "train.backprop", "train.fit")]
        )
    assert asked == [[3, 3, 0, 0], [0, 3, 0, 0]]
    assert torch.equal(made.strategy.gamma, gamma)
    # f learned on what the encoder says: its first step in phase 2, by autograd.
    total = sum(
        STEP / 3 * clients.loss(n, hypernetwork(encoder(clients.data[n][0])[None].detach(), "S")[0])
        for n in clients.names
    )
    gradient = torch.autograd.grad(total, list(hypernetwork.parameters()))
    fresh, _ = two_phase(tmp_path / "again")
    for number in (1, 2, 3):
        train(fresh, number)
    after = list(fresh.strategy.learner.hypernetwork.parameters())
    for now, then, slope in zip(after, hypernetwork.parameters(), gradient, strict=True):
        assert torch.allclose(now, then - fresh.strategy.options.learning_rate * slope, rtol=1e-6, atol=1e-12)


def test_who_trained_keeps_the_model_of_phase_one_and_novel_clients_get_the_tuned_one(
    tmp_path: Path, doubles: None
) -> None:
    made, clients = two_phase(tmp_path, novel=34)  # two of three
    for number in (1, 2):
        train(made, number)
    of_phase_one = served(made, 2)
    before = in_one_program(made)
    for number in (3, 4):
        train(made, number)
    now = served(made, 4)
    _, tuned = in_one_program(made)
    assert torch.allclose(now["c0"], of_phase_one["c0"], rtol=0, atol=1e-12)
    for name in ("c1", "c2"):
        descriptor = before[0](clients.data[name][0])[None]
        assert torch.allclose(of_phase_one[name], before[1](descriptor, "S")[0], rtol=0, atol=1e-12)
        assert torch.allclose(now[name], tuned(descriptor, "S")[0], rtol=0, atol=1e-12)
        assert not torch.allclose(now[name], of_phase_one[name], rtol=0, atol=1e-9)
    evaluation = made.strategy.round.evaluation
    assert list(evaluation.scores) == ["c0", "c1", "c2"] and evaluation.novel == {"c1", "c2"}
    assert evaluation.scores["c0"].test_loss == pytest.approx(float(now["c0"].square().sum()))
    made.grid.passed.clear()
    served(made, 5)  # what serves those who trained has not changed: one evaluation of each is left
    assert len(orders_of(made, "evaluate")) == 3 and orders_of(made, "train.describe") == []


def test_a_round_of_phase_two_is_selected_by_the_encoders_path(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path)
    history, selection = made.run()
    ranks = [outcome.evaluation.rank for outcome in history.rounds if outcome.evaluation]
    assert ranks[:2] == [None, None] and [rank[0] for rank in ranks[2:]] == [1, 1]
    assert selection.round in (3, 4) and selection.rank == max(ranks[2:])
    assert selection.metrics == history.rounds[selection.round - 1].evaluation.metrics()
    assert {"original.embeddings", "encoder.tail.weight"} <= set(history.states[-1])


# ---------------------------------------------------------------------- whole runs, state, settings


@pytest.mark.parametrize("strategy", ["odpfl", "pfedhn", "fedavg"])
def test_novel_clients_never_train_and_are_scored_apart(tmp_path: Path, strategy: str) -> None:
    config = digits_config(strategy=strategy, clients=4, cohort=4, novel=30, options={})
    made = digits_federation(config, tmp_path)
    history, selection = made.run()
    assert {name for cohort in history.cohorts for name in cohort} == {"client-0", "client-1"}
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None and set(evaluation.scores) == {f"client-{index}" for index in range(4)}
    shares = {name: 100 * result.score("test").accuracy for name, result in evaluation.scores.items()}
    metrics = evaluation.metrics()
    assert metrics["test_mean"] == pytest.approx((shares["client-0"] + shares["client-1"]) / 2)
    assert metrics["novel_test_mean"] == pytest.approx((shares["client-2"] + shares["client-3"]) / 2)
    assert not [name for name in metrics if name.startswith("novel_val")]
    assert "novel_test_mean" in selection.metrics
    if strategy == "odpfl":
        novel = {client.node_id for client in made.roster if made.strategy.is_novel(client)}
        assert len(novel) == 2 and made.strategy.round.refused == {}


@pytest.mark.parametrize("mode", ["end-to-end", "two-phase"])
def test_a_run_goes_on_from_what_another_left(tmp_path: Path, mode: str) -> None:
    options = {"hidden_dim": 8, "mode": mode, "encoder": "private"}
    first = digits_federation(digits_config(strategy="odpfl", rounds=3, cohort=2, options=options), tmp_path)
    first.run()
    state = first.state()
    again = digits_config(strategy="odpfl", rounds=3, cohort=2, options=options, init_from="run")
    roster = Roster.from_json(first.roster.to_json())
    other = Inline(again, first.grid, roster)
    other.strategy.check_initial(state)
    other.federation.gather(other.strategy, 3, 10.0)
    other.strategy.load(state)
    for name, tensor in other.state().items():
        assert torch.equal(tensor, state[name]), name
    assert other.strategy.version == first.strategy.version


@pytest.mark.parametrize("mode", ["end-to-end", "two-phase"])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path, doubles: None, mode: str) -> None:
    changes = {"novel": 30, "cohort": 1, "rounds": 6, "options": {"mode": mode, "tune": 0.5, "momentum": 0.9}}
    made, _ = federation(tmp_path / "one", **changes)
    for number in range(1, 5):
        train(made, number)
        served(made, number)
    kept = {name: tensor.clone() for name, tensor in made.strategy.checkpoint().items()}
    other, _ = federation(tmp_path / "two", **changes)
    other.strategy.restore(kept)
    ends = []
    for run in (made, other):
        for number in (5, 6):
            train(run, number)
        served(run, 6)
        evaluation = run.strategy.round.evaluation
        ends.append((run.state(), evaluation))
    (one, scored), (two, scored_again) = ends
    assert list(one) == list(two)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0, atol=1e-12), name
    assert scored.metrics() == pytest.approx(scored_again.metrics()) and scored.rank == scored_again.rank


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"encoder": "mean"}}, "^options.encoder: expected one of deepset, dss, private, set-transformer,"),
        ({"options": {"update": "target"}}, "^options.update: expected proximal or mean, .* found target$"),
        ({"options": {"embeddings": "sparse"}}, "^options.embeddings: odpfl has no use for 'sparse'; leave it out$"),
        ({"options": {"descriptor": "class-shares"}}, "^options.descriptor: odpfl has no use"),
        ({"options": {"mode": "two-phase"}, "rounds": 1}, "^rounds: expected at least 2 for mode: two-phase, found 1$"),
        ({"asynchronous": True}, "^asynchronous: odpfl learns from whole rounds"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_told_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_strategy(config(**changes), "run", Roster(0))


def test_a_run_of_pfedhn_is_no_start(tmp_path: Path) -> None:
    made, _ = federation(tmp_path)
    with pytest.raises(ConfigError, match=r"^init_from: expected a run of odpfl, found tensors"):
        made.strategy.check_initial({"embeddings": torch.zeros(2, 3)})
