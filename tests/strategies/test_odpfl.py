"""ODPFL-HN: the gradients over the network are those of one program, one encoder a round, and who is served by what."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import encoding
from hyperbloom.client.work.client import Client
from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import Examples
from hyperbloom.common.encoders import build_encoder, descriptor_layout
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.newcomers import SHARES, Expectation
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.exchanges import (
    BackpropOrder,
    BackpropResult,
    DescribeOrder,
    DescribeResult,
    FitOrder,
    FitResult,
)
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, Failed, Order, TrainOrder, TrainResult
from hyperbloom.server.loop.exchange import Outcome
from hyperbloom.server.loop.roster import Roster
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client as RosterClient

from .conftest import (
    BRIEF,
    Inline,
    RecordingGrid,
    assert_same,
    digits_config,
    digits_federation,
    introduction,
    joined,
    play,
    scored,
    scripted_grid,
    texts,
    turn,
)

STEP = 0.1
SMALL = {
    "hidden_dim": 6,
    "hidden_layers": 1,
    "embedding_dim": 3,
    "encoder": "dss",
    "start": "hypernetwork",
    "momentum": 0.0,
    "weight_decay": 0.0,
}
SPEC = ModelSpec("mlp", "S", (4,), 3)
KINDS = (DescribeOrder, TrainOrder, BackpropOrder, FitOrder, EvaluateOrder)


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
        tamper: called with name and answer; what it returns is sent.
        scored: the weights that each client has scored, the last if there were several.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names = names
        self.tamper: Callable[[str, Any], Any] = lambda name, result: result
        generator = torch.Generator().manual_seed(5)
        self.data = {
            name: (
                torch.randn(10, 4, dtype=torch.float64, generator=generator) + index,
                torch.randint(3, (10,), generator=generator),
            )
            for index, name in enumerate(names)
        }
        self.scored: dict[str, Tensor] = {}
        self.encoders = {name: self._with_encoder(name, folder) for name in names}
        torch.manual_seed(0)
        self.module = build(SPEC).double()

    def _with_encoder(self, name: str, folder: Path) -> Client:
        """Return as much of a real client as has to do with encoders."""
        made = Client.__new__(Client)
        made.pretrained = None
        made.settings, made.state = ClientSettings(name), ClientState(folder / name)
        made.releases = Releases(made.settings)
        inputs, labels = self.data[name]
        made.train_data = Examples(inputs.float(), labels)
        object.__setattr__(made.train_data, "inputs", inputs)  # float64 gets past the check for float32 on purpose
        return made

    def loss(self, name: str, weights: Tensor) -> Tensor:
        """Return a client's loss as a function of its weights `(P,)`."""
        inputs, labels = self.data[name]
        return F.cross_entropy(functional_call(self.module, full_layout(SPEC).views(weights), (inputs,)), labels)

    def train(self, name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None
        weights = order.weights.values.clone().requires_grad_()
        loss = self.loss(name, weights)
        (gradient,) = torch.autograd.grad(loss, weights)
        return TrainResult(0.0, Weights(order.weights.layout, -STEP * gradient), loss.item())

    def fit(self, name: str, order: FitOrder) -> FitResult:
        gamma = encoding.fit_encoder(order.fit, self.data[name][0])
        return FitResult(**vars(self.train(name, order)), version=order.fit.version, gamma=gamma)

    def evaluate(self, name: str, order: EvaluateOrder) -> EvaluateResult:
        assert order.weights is not None
        self.scored[name] = order.weights.values
        inputs, labels = self.data[name]
        logits = functional_call(self.module, full_layout(SPEC).views(order.weights.values), (inputs,))
        correct = int((logits.argmax(1) == labels).sum())
        return scored((correct, 10, 1.0), (correct, 10, float(order.weights.values.square().sum())))

    def answer(self, name: str, order: Any) -> Any:
        """Return what a client answers to any order."""
        works: dict[type[Order], Callable[[], Any]] = {
            TrainOrder: lambda: self.train(name, order),
            FitOrder: lambda: self.fit(name, order),
            DescribeOrder: lambda: encoding.describe(self.encoders[name], order),
            BackpropOrder: lambda: encoding.backprop(self.encoders[name], order),
            EvaluateOrder: lambda: self.evaluate(name, order),
        }
        return self.tamper(name, works[type(order)]())

    def grid(self) -> RecordingGrid:
        """Return a grid of these clients."""
        return scripted_grid([introduction(name) for name in self.names], dict.fromkeys(KINDS, self.answer))


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {"strategy": "odpfl", "clients": 3, "cohort": 3, "rounds": 2, "eval_every": 1}
    options = SMALL | changes.pop("options", {})
    return RunConfig(**(values | {"sizes": ("S",), "local": BRIEF, "options": options} | changes))


def federation(folder: Path, **changes: Any) -> tuple[Inline, Clients]:
    """Return a federation whose encoder is scaled, so that a round has its own exchanges alone."""
    wanted = config(**changes)
    clients = Clients([f"c{index}" for index in range(wanted.clients)], folder)
    made = Inline(wanted, clients.grid()).join()
    made.loop().director.play(made.algorithm._calibrate(turn(made.algorithm, 0)), Outcome())
    made.grid.passed.clear()
    return made, clients


def in_one_program(algorithm: Any) -> tuple[nn.Module, nn.Module]:
    """Return copies of encoder and hypernetwork as they are now."""
    encoder = build_encoder(algorithm.encoder.spec)
    nn.utils.vector_to_parameters(algorithm.encoder.gamma.detach().clone(), encoder.parameters())
    return encoder, copy.deepcopy(algorithm.learner.hypernetwork)


def orders(made: Inline) -> dict[type[Order], int]:
    """Return how many orders of each kind clients got since the record was cleared."""
    return {kind: count for kind in KINDS if (count := len(made.grid.sent(kind)))}


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
        encoder, hypernetwork = in_one_program(made.algorithm)
        names = list(made.train(number).results)
        assert len(names) == cohort
        total = torch.zeros(())
        for name in names:
            descriptor = encoder(clients.data[name][0])
            total = total + STEP / cohort * clients.loss(name, hypernetwork(descriptor[None], "S")[0])
        expected = torch.autograd.grad(total, list(encoder.parameters()), retain_graph=True)
        flat = torch.cat([each.reshape(-1) for each in expected])
        assert float(flat.norm()) > 1e-6
        assert torch.allclose(made.algorithm.encoder.gamma.grad, flat, rtol=1e-6, atol=1e-12)
        # And what is learned: Adam's step for the encoder, and one of gradient descent for the hypernetwork.
        mean, square = 0.9 * mean + 0.1 * flat, 0.999 * square + 0.001 * flat**2
        step = mean / (1 - 0.9**number) / ((square / (1 - 0.999**number)).sqrt() + 1e-8)
        before = nn.utils.parameters_to_vector(encoder.parameters())
        now = before - made.algorithm.options.encoder_learning_rate * step
        assert torch.allclose(made.algorithm.encoder.gamma, now, rtol=1e-6, atol=1e-10)
        theta = torch.autograd.grad(total, list(hypernetwork.parameters()))
        after = made.algorithm.learner.hypernetwork.parameters()
        for now, then, gradient in zip(after, hypernetwork.parameters(), theta, strict=True):
            assert torch.allclose(now, then - made.algorithm.options.learning_rate * gradient, rtol=1e-6, atol=1e-12)


def test_rounds_of_steps_make_the_loss_smaller(tmp_path: Path, doubles: None) -> None:
    """The sign: with the hypernetwork still, the encoder alone must come down."""
    made, clients = federation(
        tmp_path, options={"learning_rate": 1e-12, "encoder_learning_rate": 1e-6, "update": "mean"}
    )

    def loss() -> float:
        encoder, hypernetwork = in_one_program(made.algorithm)
        each = [clients.loss(n, hypernetwork(encoder(clients.data[n][0])[None], "S")[0]) for n in clients.names]
        return float(sum(each).detach())

    losses = [loss()]
    for number in range(1, 6):
        made.train(number)
        losses.append(loss())
    assert all(after < before for before, after in pairwise(losses)), losses


def test_a_cohorts_descriptors_get_the_gradient_of_embeddings(tmp_path: Path, doubles: None) -> None:
    """With the proximal rule too: pFedHN on embeddings equal to the descriptors moves these along the same gradient."""
    made, clients = federation(tmp_path, options={"momentum": 0.5})
    encoder, _ = in_one_program(made.algorithm)
    learner = copy.deepcopy(made.algorithm.learner)
    learner.given = False
    gradients: list[Tensor] = []
    learner._step = lambda rows, worth=1: gradients.append(learner.table.weight.grad.clone())
    caught: list[Any] = []
    update = made.algorithm.learner.update
    made.algorithm.learner.update = lambda replies, rule: (caught.append(replies), update(replies, rule))
    made.train()
    with torch.no_grad():
        for client in made.roster:
            learner.table.weight[client.row] = encoder(clients.data[client.client_id][0])
    learner.update(caught[0], "proximal")
    assert torch.allclose(made.algorithm.learner.gradient, gradients[0], rtol=1e-9, atol=1e-12)
    sent = [order.weights.values for order in made.grid.sent(BackpropOrder)]
    assert torch.equal(torch.stack(sent), made.algorithm.learner.gradient)


def test_all_exchanges_of_a_round_share_one_encoder_and_the_next_round_has_another(
    tmp_path: Path, doubles: None
) -> None:
    made, _ = federation(tmp_path)
    seen = []
    for number in (1, 2):
        made.grid.passed.clear()
        made.train(number)
        kinds = [name for name, _, _ in made.grid.passed]
        assert kinds == [name for name in ("train.describe", "train", "train.backprop") for _ in range(6)]
        (version,) = {
            each.version
            for kind in (DescribeOrder, BackpropOrder)
            for each in (*made.grid.sent(kind), *made.grid.answers(kind))
        }
        seen.append(version)
    assert seen[0] != seen[1] != made.algorithm.encoder.version


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (DescribeResult, {DescribeOrder: 3, TrainOrder: 2, BackpropOrder: 2}),
        (BackpropResult, {DescribeOrder: 3, TrainOrder: 3, BackpropOrder: 3}),
    ],
)
def test_what_comes_from_another_encoder_is_refused(
    tmp_path: Path, doubles: None, kind: type, asked: dict[type[Order], int]
) -> None:
    made, clients = federation(tmp_path)
    version = made.algorithm.encoder.version

    def tamper(name: str, result: Any) -> Any:
        return replace(result, version="0" * 16) if name == "c1" and isinstance(result, kind) else result

    clients.tamper = tamper
    outcome = made.train()
    assert texts(outcome) == {
        "c1": f"expected what the encoder {version} makes, found {'0' * 16}; its reply is dropped"
    }
    assert orders(made) == asked
    # What it sent had no part in the step.
    found = [each.weights.values for each in made.grid.answers(BackpropOrder) if each.version == version]
    assert len(found) == 2 and torch.allclose(made.algorithm.encoder.gamma.grad, torch.stack(found).sum(0))


def test_impossible_descriptors_and_gradients_are_refused(tmp_path: Path, doubles: None) -> None:
    made, clients = federation(tmp_path)

    def tamper(name: str, result: Any) -> Any:
        if name == "c1" and isinstance(result, BackpropResult):
            return replace(result, weights=Weights(result.weights.layout, result.weights.values * 1e9))
        return result

    clients.tamper = tamper
    outcome = made.train()
    assert texts(outcome)["c1"].startswith("expected a norm of at most 1e+06, found") and outcome.lied == ["c1"]
    assert torch.isfinite(made.algorithm.encoder.gamma).all()
    describing = next(made.algorithm.round(turn(made.algorithm)))
    for value, why in ((float("nan"), "3 values are not finite"), (101.0, "expected a norm of at most 173, found 175")):
        told = Weights(descriptor_layout(3), torch.full((3,), value))
        with pytest.raises(WireError, match=why):
            describing.check(describing.clients[0], DescribeResult(made.algorithm.encoder.version, told))


@pytest.mark.parametrize("unit", [1e6, float("nan")])
def test_who_describes_inputs_that_are_not_scaled_learns_so_and_is_no_liar(
    tmp_path: Path, doubles: None, unit: float
) -> None:
    made, clients = federation(tmp_path)
    clients.data["c0"][0].mul_(unit)
    outcome = made.train()
    assert outcome.lied == [] and list(outcome.results) == ["c1", "c2"]
    assert re.fullmatch("expected a norm of at most 173, found .*; scale the inputs .*", texts(outcome)["c0"])


def test_nobody_answering_leaves_everything_as_it_was(tmp_path: Path, doubles: None) -> None:
    made, clients = federation(tmp_path, min_replies=1.0)
    before = made.state()

    def tamper(name: str, result: Any) -> Any:
        return replace(result, version="0" * 16) if name == "c1" and isinstance(result, DescribeResult) else result

    clients.tamper = tamper
    outcome = made.train()
    assert outcome.results == {} and orders(made) == {DescribeOrder: 3}
    assert texts(outcome)["c0"] == "dropped: only 2 of 3 answered"
    assert_same(before, made.state())


def test_a_fresh_encoder_is_scaled_once_by_the_descriptors_of_those_who_train(tmp_path: Path, doubles: None) -> None:
    made = joined(config(clients=5, cohort=1, novel=20), *map(introduction, "abcde"))
    clients = Clients("abcde", tmp_path)
    fresh, _ = in_one_program(made)
    exchanges = made.round(turn(made))
    first = next(exchanges)
    assert [client.client_id for client in first.clients] == list("abcd")  # e is novel
    written = zip(first.clients, first.orders(first.clients), strict=True)
    exchanges.send([(client, clients.answer(client.client_id, order)) for client, order in written])
    scaled, _ = in_one_program(made)
    known = [torch.stack([encoder(clients.data[name][0]).detach() for name in "abcd"]) for encoder in (fresh, scaled)]
    assert not torch.allclose(known[0].std(0), torch.ones(3), atol=0.1)
    assert torch.allclose(known[1].mean(0), torch.zeros(3), rtol=0, atol=1e-9)
    assert torch.allclose(known[1].std(0), torch.ones(3), rtol=0, atol=1e-9)
    assert next(made._calibrate(turn(made, 2)), None) is None


def test_a_private_encoder_is_centred_first_and_scaled_by_one_factor(tmp_path: Path, doubles: None) -> None:
    """From the mean direction of those who train; in all dimensions alike, so that the noise is not one's alone."""
    wanted = config(clients=5, cohort=1, novel=20, options={"encoder": "private"})
    made, clients = joined(wanted, *map(introduction, "abcde")), Clients("abcde", tmp_path)
    fresh, _ = in_one_program(made)
    play(made._calibrate(turn(made)), clients.answer)
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
    made.train()
    made.evaluate()
    encoder, _ = in_one_program(made.algorithm)
    kept = made.state()["embeddings"]
    described = [torch.allclose(kept[c.row], encoder(clients.data[c.client_id][0])) for c in made.roster]
    assert described == ([True] * 4 if mode == "end-to-end" else [False, False, False, True])


def asked_of(exchanges: Any, answer: Callable[[str, Any], Any]) -> list[tuple[str, str]]:
    """Play exchanges; return who got which order."""
    asked: list[tuple[str, str]] = []

    def noted(name: str, order: Any) -> Any:
        asked.append((name, order.message_type))
        return answer(name, order)

    play(exchanges, noted)
    return asked


def test_who_comes_back_or_cannot_describe_itself_now_does_not_count_as_described(
    tmp_path: Path, doubles: None
) -> None:
    """It may have other examples, and the client backpropagates through what it has just encoded."""
    made, clients = joined(config(), *map(introduction, "abc")), Clients("abc", tmp_path)
    made.encoder.calibrated = True
    everybody = list(made.clients.values())
    assert len(asked_of(made.evaluate(turn(made), everybody), clients.answer)) == 2 * 3
    assert len(asked_of(made.evaluate(turn(made), everybody), clients.answer)) == 3
    before = made.personal(everybody)
    made.join(everybody[1], False)
    for was, now in zip(before, made.personal(everybody), strict=True):  # an evaluation that goes on
        assert torch.equal(was.values, now.values)
    asked = asked_of(made.evaluate(turn(made), everybody), clients.answer)
    assert [each for each in asked if each[1] == "train.describe"] == [("b", "train.describe")]

    def answer(name: str, order: Any) -> Any:
        silent = name == "c" and isinstance(order, DescribeOrder)
        return Failed(Reason.FAILED, "gone") if silent else clients.answer(name, order)

    asked = asked_of(made.round(turn(made)), answer)
    assert [name for name, kind in asked if kind != "train.describe"] == ["a", "b", "a", "b"]


def test_few_descriptors_calibrate_an_encoder_and_one_does_not(
    tmp_path: Path, doubles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deviation of one is none."""
    monkeypatch.setattr("hyperbloom.strategies.odpfl.CALIBRATION", 2)
    made, clients = joined(config(), *map(introduction, "abc")), Clients("abc", tmp_path)
    assert len(asked_of(made._calibrate(turn(made)), clients.answer)) == 2
    alone = joined(config(clients=1, cohort=1), introduction("a"))
    before = alone.encoder.gamma.detach().clone()
    play(alone._calibrate(turn(alone)), clients.answer)
    assert torch.equal(alone.encoder.gamma, before) and alone.encoder.calibrated


@pytest.mark.parametrize("encoder", ["dss", "private"])
def test_an_encoder_is_calibrated_in_the_next_round_if_nobody_answers_now(
    tmp_path: Path, doubles: None, encoder: str
) -> None:
    made = joined(config(options={"encoder": encoder}), *map(introduction, "abc"))
    clients, fresh = Clients("abc", tmp_path), made.encoder.gamma.detach().clone()
    play(made._calibrate(turn(made)), lambda name, order: Failed(Reason.FAILED, "busy"))
    assert torch.equal(made.encoder.gamma, fresh) and not made.encoder.calibrated
    play(made._calibrate(turn(made, 2)), clients.answer)
    assert not torch.equal(made.encoder.gamma, fresh) and made.encoder.calibrated


def test_an_encoder_whose_second_calibration_nobody_answers_is_scaled_in_the_next_round(
    tmp_path: Path, doubles: None
) -> None:
    """The encoder for privacy takes two exchanges, and its centre must not be set twice."""
    whole, made = (joined(config(options={"encoder": "private"}), *map(introduction, "abc")) for _ in range(2))
    clients, asked = Clients("abc", tmp_path), list[str]()
    play(whole._calibrate(turn(whole)), clients.answer)

    def answer(name: str, order: Any) -> Any:
        asked.append(name)
        return clients.answer(name, order) if len(asked) <= 3 else Failed(Reason.FAILED, "busy")

    play(made._calibrate(turn(made)), answer)
    assert not made.encoder.calibrated and len(asked) == 6
    assert asked_of(made._calibrate(turn(made, 2)), clients.answer) == [(name, "train.describe") for name in "abc"]
    assert made.encoder.calibrated and torch.equal(made.encoder.gamma, whole.encoder.gamma)


# ---------------------------------------------------------------------- two phases


def two_phase(folder: Path, **changes: Any) -> tuple[Inline, Clients]:
    options = {"mode": "two-phase", "tune": 0.5, "update": "mean", "fit_rate": 0.05} | changes.pop("options", {})
    return federation(folder, **({"rounds": 4, "options": options} | changes))


@pytest.mark.parametrize(("rounds", "tune"), [(2, 0.9), (4, 0.1)])
def test_each_phase_has_a_round_however_much_or_little_is_tuned(
    tmp_path: Path, doubles: None, rounds: int, tune: float
) -> None:
    made, _ = two_phase(tmp_path, rounds=rounds, options={"tune": tune})
    made.train(rounds - 1)
    assert orders(made) == {FitOrder: 3}
    made.grid.passed.clear()
    made.train(rounds)
    assert orders(made) == {DescribeOrder: 3, TrainOrder: 3}


def test_phase_one_is_one_trip_and_averages_the_encoders(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path)
    before, embeddings = (
        made.algorithm.encoder.gamma.detach().clone(),
        made.algorithm.learner.table.weight.detach().clone(),
    )
    made.train()
    assert orders(made) == {FitOrder: 3}
    sent = [order.fit.descriptor.values for order in made.grid.sent(FitOrder)]
    assert torch.equal(torch.stack(sent), embeddings)
    changes = torch.stack([answer.gamma.values for answer in made.grid.answers(FitOrder)])
    assert torch.allclose(made.algorithm.encoder.gamma.detach(), before + changes.mean(0), rtol=0, atol=1e-12)
    assert float(changes.norm()) > 0
    assert not torch.equal(made.algorithm.learner.table.weight, embeddings)  # as in pFedHN


def test_phase_one_trains_hypernetwork_and_embeddings_as_pfedhn_does(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path)
    plain = {key: value for key, value in SMALL.items() if key != "encoder"} | {"update": "mean"}
    plain["learning_rate"] = made.algorithm.options.learning_rate
    other = Inline(config(strategy="pfedhn", options={}).model_copy(update={"options": plain}), made.grid).join()
    for number in (1, 2):
        made.train(number)
        other.train(number)
    for name, tensor in other.state().items():
        assert torch.equal(tensor, made.state()[name]), name


def test_a_fitted_encoder_of_another_version_is_refused(tmp_path: Path, doubles: None) -> None:
    made, clients = two_phase(tmp_path)

    def tamper(name: str, result: Any) -> Any:
        return replace(result, version="f" * 16) if name == "c2" and isinstance(result, FitResult) else result

    clients.tamper = tamper
    outcome = made.train()
    assert list(outcome.results) == ["c0", "c1"]
    assert texts(outcome)["c2"].endswith(f"found {'f' * 16}; its reply is dropped")
    assert outcome.lied == ["c2"]


def test_an_encoder_farther_away_than_its_steps_lead_is_refused(tmp_path: Path, doubles: None) -> None:
    made, clients = two_phase(tmp_path, options={"fit_steps": 4})
    most = 4 * 0.05 * 1.0 / (1 - 0.9)  # each step of a gradient of at most 1, with momentum 0.9

    def tamper(name: str, result: Any) -> Any:
        factor = {"c1": 1.0, "c2": 1.01}.get(name)
        if factor is None or not isinstance(result, FitResult):
            return result
        changed = result.gamma.values * (factor * most / result.gamma.values.norm())
        return replace(result, gamma=Weights(result.gamma.layout, changed * (1 - 1e-12)))

    clients.tamper = tamper
    outcome = made.train()
    assert list(outcome.results) == ["c0", "c1"] and outcome.lied == ["c2"]
    assert texts(outcome)["c2"] == "expected a norm of at most 2, found 2.02"


def test_in_phase_two_the_encoder_is_frozen_and_asked_once(tmp_path: Path, doubles: None) -> None:
    made, clients = two_phase(tmp_path)
    for number in (1, 2):
        made.train(number)
    gamma = made.algorithm.encoder.gamma.detach().clone()
    encoder, hypernetwork = in_one_program(made.algorithm)
    asked = []
    for number in (3, 4):
        made.grid.passed.clear()
        made.train(number)
        asked.append(orders(made))
    assert asked == [{DescribeOrder: 3, TrainOrder: 3}, {TrainOrder: 3}]
    assert torch.equal(made.algorithm.encoder.gamma, gamma)
    # f learned on what the encoder says: its first step in phase 2, by autograd.
    total = sum(
        STEP / 3 * clients.loss(n, hypernetwork(encoder(clients.data[n][0])[None].detach(), "S")[0])
        for n in clients.names
    )
    gradient = torch.autograd.grad(total, list(hypernetwork.parameters()))
    fresh, _ = two_phase(tmp_path / "again")
    for number in (1, 2, 3):
        fresh.train(number)
    after = list(fresh.algorithm.learner.hypernetwork.parameters())
    for now, then, slope in zip(after, hypernetwork.parameters(), gradient, strict=True):
        assert torch.allclose(now, then - fresh.algorithm.options.learning_rate * slope, rtol=1e-6, atol=1e-12)


def test_who_trained_keeps_the_model_of_phase_one_and_novel_clients_get_the_tuned_one(
    tmp_path: Path, doubles: None
) -> None:
    made, clients = two_phase(tmp_path, novel=34)  # two of three
    for number in (1, 2):
        made.train(number)
    made.evaluate(2)
    of_phase_one = dict(clients.scored)
    before = in_one_program(made.algorithm)
    for number in (3, 4):
        made.train(number)
    evaluation, now = made.evaluate(4).evaluation, clients.scored
    assert evaluation is not None
    _, tuned = in_one_program(made.algorithm)
    assert torch.allclose(now["c0"], of_phase_one["c0"], rtol=0, atol=1e-12)
    for name in ("c1", "c2"):
        descriptor = before[0](clients.data[name][0])[None]
        assert torch.allclose(of_phase_one[name], before[1](descriptor, "S")[0], rtol=0, atol=1e-12)
        assert torch.allclose(now[name], tuned(descriptor, "S")[0], rtol=0, atol=1e-12)
        assert not torch.allclose(now[name], of_phase_one[name], rtol=0, atol=1e-9)
    assert list(evaluation.scores) == ["c0", "c1", "c2"] and evaluation.novel == {"c1", "c2"}
    assert evaluation.scores["c0"].test.loss == pytest.approx(float(now["c0"].square().sum()))
    # Also with other examples than before: the model has not changed, but its score has. The encoder's path selects.
    right = iter((3, 7))
    clients.tamper = lambda name, result: scored((next(right), 10, 1.0), (7, 10, 2.0)) if name == "c0" else result
    evaluation = made.evaluate(5).evaluation
    assert evaluation is not None and evaluation.scores["c0"].test.loss == 2.0
    assert evaluation.rank == (1, pytest.approx(30.0)) and evaluation.scores["c0"].val.values == (0.7,)


def test_a_client_that_joins_in_phase_two_has_no_model_of_phase_one(tmp_path: Path, doubles: None) -> None:
    options = {"mode": "two-phase", "tune": 0.5}
    made, clients = joined(config(rounds=4, options=options), *map(introduction, "ab")), Clients("abc", tmp_path)
    for number in (1, 3):
        play(made.round(turn(made, number)), clients.answer)
    made.join(RosterClient("c", 2, introduction("c")), True)
    evaluation = play(made.evaluate(turn(made, 3), list(made.clients.values())), clients.answer)
    assert sorted(evaluation.scores) == ["a", "b", "c"]
    encoder, hypernetwork = in_one_program(made)
    written = hypernetwork(encoder(clients.data["c"][0])[None], "S")[0]
    assert torch.allclose(clients.scored["c"], written, rtol=0, atol=1e-12)


def test_a_round_of_phase_two_is_selected_by_the_encoders_path(tmp_path: Path, doubles: None) -> None:
    made, _ = two_phase(tmp_path)
    history, selection = made.run()
    ranks = [outcome.evaluation.rank for outcome in history.rounds if outcome.evaluation]
    assert ranks[:2] == [None, None] and [rank[0] for rank in ranks[2:]] == [1, 1]
    assert selection.round in (3, 4) and selection.rank == max(ranks[2:])
    assert selection.metrics == history.rounds[selection.round - 1].evaluation.metrics()
    assert {"original.embeddings", "encoder.tail.weight"} <= set(history.states[-1])


# ---------------------------------------------------------------------- whole runs, state, settings


@pytest.mark.parametrize("strategy", ["odpfl", "fedavg"])
def test_novel_clients_never_train_and_are_scored_apart(tmp_path: Path, strategy: str) -> None:
    config = digits_config(strategy=strategy, clients=4, cohort=4, novel=30, options={})
    made = digits_federation(config, tmp_path)
    history, selection = made.run()
    assert {name for cohort in history.cohorts for name in cohort} == {"client-0", "client-1"}
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None and set(evaluation.scores) == {f"client-{index}" for index in range(4)}
    shares = {name: 100 * result.test.values[0] for name, result in evaluation.scores.items()}
    metrics = evaluation.metrics()
    assert metrics["test_mean"] == pytest.approx((shares["client-0"] + shares["client-1"]) / 2)
    assert metrics["novel_test_mean"] == pytest.approx((shares["client-2"] + shares["client-3"]) / 2)
    assert not [name for name in metrics if name.startswith("novel_val")]
    assert "novel_test_mean" in selection.metrics
    assert [outcome.refused for outcome in history.rounds] == [{}] * 4


def test_novel_clients_score_the_common_model_the_written_one_and_what_lies_between(
    tmp_path: Path, doubles: None
) -> None:
    made, clients = federation(tmp_path, clients=5, novel=40)
    made.train()
    made.evaluate()
    made.grid.passed.clear()
    right = {"c3": iter([(3, 1), (5, 2), (9, 3), (9, 4), (2, 5)]), "c4": iter([(3, 9)] * 2)}  # c4 then falls silent

    def tamper(name: str, result: Any) -> Any:
        told = next(right[name], None)
        return scored((told[0], 10, 1.0), (told[1], 10, 1.0)) if told else Failed(Reason.FAILED, "gone")

    clients.tamper = tamper
    run = made.loop()
    found = run.director.play(made.algorithm.expectation(run.turn(1), made.federation.idle), Outcome())
    assert found == Expectation(3, 1, 0.5, (10.0, 20.0, 30.0, 40.0, 50.0), 30.0, 30.0, 90.0)
    encoder, hypernetwork = in_one_program(made.algorithm)
    with torch.no_grad():
        written = [hypernetwork(encoder(clients.data[name][0])[None], "S")[0] for name in clients.names]
    common = torch.stack(written[:3]).mean(0)
    sent = [order.weights.values for order in made.grid.sent(EvaluateOrder)]
    expected = [(1 - share) * common + share * written[at] for share in SHARES for at in (3, 4)]
    assert torch.allclose(torch.stack(sent), torch.stack(expected), rtol=1e-9, atol=1e-12)


def test_only_novel_clients_with_all_scores_say_what_to_expect(tmp_path: Path, doubles: None) -> None:
    """Of b nothing was ever encoded, and the metric of c is undefined on its test examples."""
    made, clients = joined(config(clients=4, novel=75), *map(introduction, "abcd")), Clients("abcd", tmp_path)
    play(made.evaluate(turn(made), [made.clients[row] for row in (0, 2, 3)]), clients.answer)

    def answer(name: str, order: Any) -> Any:
        assert name != "b"
        result = scored((3, 10, 1.0), (5, 10, 1.0))
        return replace(result, test=replace(result.test, metrics=(), values=())) if name == "c" else result

    found = play(made.expectation(turn(made), list(made.clients.values())), answer)
    assert (found.held_out, found.test) == (1, (50.0,) * len(SHARES))


@pytest.mark.parametrize("novel", [0, 30])
def test_a_selected_round_says_what_newcomers_may_expect(tmp_path: Path, novel: int) -> None:
    config = digits_config(strategy="odpfl", clients=3, cohort=2, novel=novel, options={"encoder": "private"})
    made = digits_federation(config, tmp_path)
    history, selection = made.run()
    told = selection.newcomers
    assert told is not None and (told.trained, told.held_out) == ((2, 1) if novel else (3, 0))
    if novel:  # the last share is the model with which a novel client is scored
        evaluation = history.rounds[selection.round - 1].evaluation
        assert evaluation is not None
        assert told.test[-1] == pytest.approx(evaluation.metrics()["novel_test_mean"])
    else:
        assert told.share == 0.5


@pytest.mark.parametrize("mode", ["end-to-end", "two-phase"])
def test_a_run_goes_on_from_what_another_left(tmp_path: Path, mode: str) -> None:
    options = {"hidden_dim": 8, "mode": mode, "encoder": "private"}
    first = digits_federation(digits_config(strategy="odpfl", rounds=3, cohort=2, options=options), tmp_path)
    first.run()
    state = first.state()
    again = digits_config(strategy="odpfl", rounds=3, cohort=2, options=options, init_from="run")
    roster = Roster.from_json(first.roster.to_json())
    other = Inline(again, first.grid, roster, state).join()
    for name, tensor in other.state().items():
        assert torch.equal(tensor, state[name]), name
    assert not [name for name in other.state() if name.startswith(("adam.", "momentum."))]
    assert other.algorithm.encoder.version == first.algorithm.encoder.version
    assert next(other.algorithm._calibrate(turn(other.algorithm)), None) is None


@pytest.mark.parametrize("mode", ["end-to-end", "two-phase"])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path, doubles: None, mode: str) -> None:
    changes = {"novel": 30, "cohort": 1, "rounds": 6, "options": {"mode": mode, "tune": 0.5, "momentum": 0.9}}
    made, _ = federation(tmp_path / "one", **changes)
    for number in range(1, 5):
        made.train(number)
        made.evaluate(number)
    kept = {name: tensor.clone() for name, tensor in made.algorithm.checkpoint().items()}
    other, _ = federation(tmp_path / "two", **changes)
    other.algorithm.encoder.calibrated = False
    other.algorithm.restore(kept)
    assert other.algorithm.encoder.calibrated
    ends = []
    for run in (made, other):
        for number in (5, 6):
            run.train(number)
        ends.append((run.state(), run.evaluate(6).evaluation))
    (one, scores), (two, same) = ends
    assert scores is not None and same is not None
    assert list(one) == list(two)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0, atol=1e-12), name
    assert scores.metrics() == pytest.approx(same.metrics()) and scores.rank == same.rank


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"encoder": "mean"}}, "^options.encoder: expected deepset, dss, private, set-transformer,"),
        ({"options": {"embeddings": "sparse"}}, "^options.embeddings: odpfl has no use for 'sparse'; leave it out$"),
        ({"options": {"descriptor": "class-shares"}}, "^options.descriptor: odpfl has no use"),
        (
            {"options": {"mode": "two-phase"}, "patience": 2},
            "^patience: expected none with mode: two-phase",
        ),
        ({"options": {"mode": "two-phase"}, "rounds": 1}, "^rounds: expected at least 2 for mode: two-phase, found 1$"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_told_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm(config(**changes))


def test_a_run_of_pfedhn_is_no_start() -> None:
    with pytest.raises(ConfigError, match=r"^init_from: expected a run of odpfl, found tensors"):
        make_algorithm(config()).check_start({"embeddings": torch.zeros(2, 3)})
