"""A trained pFedHN for novel clients: the mean over all models, all at once, and the nearest client's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn

from hyperbloom.client.app import HANDLERS
from hyperbloom.client.work.client import Client, client_for
from hyperbloom.client.work.others import domain_errors, features, moments_of, score_all, try_many
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.wire import (
    ErrorsOrder,
    ErrorsResult,
    EvaluateResult,
    MomentsOrder,
    MomentsResult,
    TryOrder,
    Weights,
)
from hyperbloom.server.loop.roster import Roster
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.pfl import a_distance, discriminant

from .conftest import Inline, digits_config, digits_federation, digits_settings, play, turn

SPEC = ModelSpec("mlp", "S", (1, 8, 8), 10)
NOVEL = "client-3"


@dataclass(frozen=True)
class Trained:
    """Three clients that trained a little and a novel one, and the scores of an evaluation in the end."""

    made: Inline
    folder: Path
    scores: Mapping[str, EvaluateResult]

    def client(self, name: str) -> Client:
        """Return a client as its process has it."""
        return client_for(
            next(each for each in digits_settings(self.made.config, self.folder) if each.client_id == name)
        )

    def networks(self) -> list[nn.Module]:
        """Return the networks of those who trained."""
        networks = []
        for values in self.made.algorithm.models().values():
            network = build(SPEC)
            network.load_state_dict(full_layout(SPEC).views(values))
            networks.append(network.eval())
        return networks

    def distances(self, lie: Callable[[str, Any], Any] = lambda name, answer: answer) -> tuple[Any, dict[str, str]]:
        """Evaluate again; return the novel client's distances, and who was refused. What `lie` returns is answered."""
        made, refused = self.made.algorithm, dict[str, str]()

        def answer(name: str, order: Any) -> Any:
            return lie(name, HANDLERS[type(order)](self.client(name), order))

        play(made.evaluate(turn(made, 3), list(made.clients.values())), answer, refused)
        return made.distances[NOVEL], refused


def train(folder: Path, strategy: str, **changes: Any) -> Trained:
    values = {"clients": 4, "cohort": 2, "rounds": 2, "eval_every": 2, "novel": 25}
    made = digits_federation(digits_config(strategy=strategy, **(values | changes)), folder)
    history, _ = made.run()
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    return Trained(made, folder, evaluation.scores)


@pytest.fixture(scope="module")
def nearest(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("nearest"), "pfl-nearest")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("sampled"), "pfl-sampled")


def test_sampled_is_the_mean_of_all_models(sampled: Trained) -> None:
    found, novel = sampled.scores[NOVEL].test, sampled.client(NOVEL)
    each = [evaluate(network, novel.test_data) for network in sampled.networks()]
    assert len(each) == 3
    assert found.accuracy == pytest.approx(sum(one.accuracy for one in each) / 3)
    assert found.loss == pytest.approx(sum(one.loss for one in each) / 3, rel=1e-5)


def test_ensemble_is_the_mean_of_the_logits(tmp_path: Path) -> None:
    made = train(tmp_path, "pfl-ensemble")
    found, novel = made.scores[NOVEL].test, made.client(NOVEL)
    with torch.no_grad():
        logits = torch.stack([network(novel.test_data.inputs) for network in made.networks()]).mean(0)
    assert found.correct == int((logits.argmax(1) == novel.test_data.labels).sum())
    assert found.total == len(novel.test_data)


def test_those_who_trained_are_scored_as_in_pfedhn(sampled: Trained, tmp_path: Path) -> None:
    plain = train(tmp_path, "pfedhn")
    for index in range(3):
        one, other = (run.scores[f"client-{index}"] for run in (sampled, plain))
        for split in ("val", "test"):
            # In cohorts of other sizes a product of matrices is rounded otherwise.
            assert vars(getattr(one, split)) == pytest.approx(vars(getattr(other, split)), rel=1e-5)


def test_nearest_serves_the_model_of_the_client_at_the_smallest_distance(nearest: Trained) -> None:
    distances, refused = nearest.distances()
    assert refused == {} and set(distances) == {f"client-{index}" for index in range(3)}
    closest = min(distances, key=distances.__getitem__)
    found = nearest.scores[NOVEL].test
    assert found.correct == evaluate(nearest.networks()[int(closest[-1])], nearest.client(NOVEL).test_data).correct
    # The distances by hand, from the clients' own inputs.
    network = build(SPEC)
    network.load_state_dict(full_layout(SPEC).views(nearest.made.algorithm._network().values))
    clients = {name: nearest.client(name) for name in (NOVEL, *distances)}
    seen = {name: moments_of(features(network, client.train_data.inputs)) for name, client in clients.items()}
    for name, distance in distances.items():
        classifier = discriminant(seen[NOVEL], seen[name])[None]
        ours = domain_errors(features(network, clients[NOVEL].val_data.inputs), classifier, 1)
        theirs = domain_errors(features(network, clients[name].val_data.inputs), classifier, -1)
        assert distance == pytest.approx(max(a_distance(ours[0]), a_distance(theirs[0])), abs=0.05)


@pytest.mark.parametrize("claim", [0.0, 0.5, 1.0])
def test_no_claim_makes_a_client_near(nearest: Trained, claim: float) -> None:
    def lie(name: str, answer: Any) -> Any:
        lies = name == "client-1" and isinstance(answer, ErrorsResult)
        return ErrorsResult(tuple(claim for _ in answer.errors)) if lies else answer

    (honest, _), (found, refused) = nearest.distances(), nearest.distances(lie)
    assert refused == {}
    assert all(found[name] == honest[name] for name in ("client-0", "client-2"))
    # No nearer than the novel client itself finds.
    assert found["client-1"] >= min(honest["client-1"], 0.3) and found["client-1"] >= 0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda moments: moments * 1e30, "expected a norm of at most 1e+06"),
        (lambda moments: -moments, "expected moments with no variance below 0"),
        (lambda moments: moments[1:], "tensor moments: expected shape (51, 50), found (50, 50)"),
    ],
)
def test_moments_that_cannot_be_are_refused(nearest: Trained, spoil: Any, text: str) -> None:
    def lie(name: str, answer: Any) -> Any:
        if name != "client-1" or not isinstance(answer, MomentsResult):
            return answer
        rows = spoil(answer.weights.values.view(51, 50))
        return MomentsResult(Weights(Layout((("moments", tuple(rows.shape)),)), rows.flatten()))

    found, refused = nearest.distances(lie)
    assert list(refused) == ["client-1"] and refused["client-1"].startswith(text)
    assert set(found) == {"client-0", "client-2"}


def test_shares_of_errors_that_cannot_be_are_refused(nearest: Trained) -> None:
    def lie(name: str, answer: Any) -> Any:
        return ErrorsResult((1.5,)) if name == "client-1" and isinstance(answer, ErrorsResult) else answer

    found, refused = nearest.distances(lie)
    assert refused == {"client-1": "expected 1 shares of errors, found (1.5,)"}
    assert set(found) == {"client-0", "client-2"}


def test_no_input_leaves_a_client_for_the_distance(nearest: Trained) -> None:
    grid = nearest.made.grid
    answers = grid.fields(MomentsOrder, orders=False)
    assert {tuple(sorted(fields)) for fields in answers} == {("dtype", "tensors", "values")}
    assert {len(fields["values"]) for fields in answers} == {4 * 51 * 50}
    assert {tuple(fields) for fields in grid.fields(ErrorsOrder, orders=False)} == {("errors",)}
    # Names of other clients are in nobody's orders.
    orders = [*grid.fields(MomentsOrder), *grid.fields(ErrorsOrder)]
    assert not [value for fields in orders for value in fields.values() if "client-" in str(value)]


def test_a_novel_client_is_nearest_to_the_one_with_its_classes() -> None:
    """Three clients around two points: the distance is 2 to the far one, and small to the near one."""
    generator = torch.Generator().manual_seed(0)

    def client(centre: float) -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(200, 3, generator=generator) + centre for _ in range(2))  # type: ignore[return-value]

    novel, near, far = client(0.0), client(0.1), client(6.0)
    found = []
    for other in (near, far):
        classifier = discriminant(moments_of(novel[0]), moments_of(other[0]))[None]
        error = (domain_errors(novel[1], classifier, 1)[0] + domain_errors(other[1], classifier, -1)[0]) / 2
        found.append(a_distance(error))
    assert abs(found[0]) < 0.4 and found[1] > 1.99
    assert (a_distance(0.5), a_distance(0.0)) == (0, 2)


def test_the_discriminant_is_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = torch.randn(500, 4, generator=generator), 2 * torch.randn(500, 4, generator=generator) + 1
    found = discriminant(moments_of(one.double()), moments_of(other.double()))
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(torch.cat([one, other]), [1] * 500 + [0] * 500)
    ratio = torch.tensor(theirs.coef_[0]) / found[:4]
    assert torch.allclose(ratio / ratio[0], torch.ones(4).double(), rtol=1e-2)
    assert float(theirs.intercept_[0] / found[4] / ratio[0]) == pytest.approx(1.0, rel=2e-2)


def test_a_client_that_makes_moments_up_disturbs_nobody(tmp_path: Path) -> None:
    assert not torch.isnan(discriminant(torch.zeros(4, 3), torch.zeros(4, 3))).any()
    wild = torch.full((4, 3), 1e30)
    domain_errors(torch.ones(2, 3), discriminant(wild, -wild)[None], 1)


def test_score_of_one_model_is_that_of_evaluate() -> None:
    torch.manual_seed(0)
    network, data = build(SPEC), Examples(torch.randn(30, 1, 8, 8), torch.randint(10, (30,)))
    expected = evaluate(network, data)
    for together in (False, True):
        found = score_all([network], data, together)
        assert (found.correct, found.total) == (expected.correct, expected.total)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_trained_run_is_used_as_it_is(tmp_path: Path) -> None:
    first = train(tmp_path, "pfedhn").made
    state = first.state()
    config = digits_config(strategy="pfl-ensemble", clients=4, cohort=2, rounds=1, novel=25, init_from="run")
    made = Inline(config, first.grid, Roster.from_json(first.roster.to_json()), state).join()
    _, selection = made.run()
    assert "novel_test_mean" in selection.metrics
    for name in ("embeddings", "hypernetwork.trunk.0.weight"):
        assert torch.equal(made.state()[name], state[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"^novel: pfl-nearest is about novel clients; expected a percentage, found 0$"),
        ({"novel": 10, "sizes": ("S", "M")}, r"^sizes: pfl-nearest compares one architecture"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm(digits_config(strategy="pfl-nearest", **changes))


def test_models_of_another_size_are_refused(nearest: Trained) -> None:
    made = nearest.made.algorithm
    weights = Weights(Layout((("models", (2, 7)),)), torch.zeros(14))
    order = TryOrder(turn(made).scope, made.target(1), weights, together=True)
    with pytest.raises(WireError, match=r"^order: expected models of \d+ weights each, found"):
        try_many(nearest.client(NOVEL), order)
