"""A trained pFedHN for novel clients: the mean over all models, all at once, and the nearest client's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn

from figures.pfl import a_distance, discriminant
from figures.pfl_client import ErrorsOrder, ErrorsResult, MomentsOrder, MomentsResult, domain_errors, moments_of
from hyperbloom.client.app import HANDLERS
from hyperbloom.client.work.client import Client, client_for
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.common.models.parts import features
from hyperbloom.common.wire.orders import EvaluateResult, Order
from hyperbloom.server.loop.roster import Roster
from hyperbloom.strategies import make_algorithm
from tests.scores import count_right
from tests.strategies.conftest import Inline, digits_config, digits_federation, digits_settings, play, turn

SPEC = ModelSpec("mlp", "S", (1, 8, 8), 10)


@dataclass(frozen=True)
class Trained:
    """A federation of three that trained a little and one novel client, client-3.

    Attributes:
        scores: of the last round, by name.
        distances: of the novel client from the others; empty if the strategy has none.
    """

    made: Inline
    folder: Path
    scores: Mapping[str, EvaluateResult]
    distances: Mapping[str, float]

    @property
    def clients(self) -> dict[str, Client]:
        """Return the real clients by name."""
        return {each.client_id: client_for(each) for each in digits_settings(self.made.config, self.folder)}

    def networks(self) -> list[nn.Module]:
        """Return the networks of those who trained."""
        networks = []
        for values in self.made.algorithm.models().values():
            network = build(SPEC)
            network.load_state_dict(full_layout(SPEC).views(values))
            networks.append(network.eval())
        return networks

    def evaluate(self, lie: Callable[[str, Any], Any]) -> tuple[dict[str, float], dict[str, str]]:
        """Evaluate once more, with clients that say what `lie` makes of their answers.

        Returns:
            the novel client's distances, and why clients were left out.
        """
        made, clients, refused = self.made, self.clients, dict[str, str]()

        def answer(name: str, order: Order) -> Any:
            return lie(name, HANDLERS[type(order)](clients[name], order))

        play(made.algorithm.evaluate(turn(made.algorithm), list(made.roster)), answer, refused)
        return made.algorithm.distances["client-3"], refused


def trained(folder: Path, strategy: str) -> Trained:
    config = digits_config(strategy=strategy, clients=4, cohort=2, rounds=4, eval_every=4, novel=25)
    made = digits_federation(config, folder)
    history, _ = made.run()
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    distances = getattr(made.algorithm, "distances", {}).get("client-3", {})
    return Trained(made, folder, evaluation.scores, distances)


@pytest.fixture(scope="module")
def nearest(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("nearest"), "pfl-nearest")


def test_sampled_is_the_mean_of_all_models(tmp_path: Path) -> None:
    run = trained(tmp_path, "pfl-sampled")
    found, novel = run.scores["client-3"].test, run.clients["client-3"]
    each = [evaluate(network, novel.test_data) for network in run.networks()]
    assert len(each) == 3
    assert found.values[0] == pytest.approx(sum(one.values[0] for one in each) / 3)
    assert found.loss == pytest.approx(sum(one.loss for one in each) / 3, rel=1e-5)


def test_ensemble_is_the_mean_of_the_logits(tmp_path: Path) -> None:
    run = trained(tmp_path, "pfl-ensemble")
    found, novel = run.scores["client-3"].test, run.clients["client-3"]
    with torch.no_grad():
        logits = sum(network(novel.test_data.inputs) for network in run.networks()) / 3
    assert count_right(found) == int((logits.argmax(1) == novel.test_data.labels).sum())
    assert found.total == len(novel.test_data)


def test_those_who_trained_are_scored_as_in_pfedhn(nearest: Trained, tmp_path: Path) -> None:
    plain = trained(tmp_path, "pfedhn")
    for name in ("client-0", "client-1", "client-2"):
        one, other = nearest.scores[name], plain.scores[name]
        # In cohorts of other sizes a product of matrices is rounded otherwise.
        for mine, same in ((one.val, other.val), (one.test, other.test)):
            assert (mine.total, mine.metrics) == (same.total, same.metrics)
            assert (mine.loss, *mine.values) == pytest.approx((same.loss, *same.values), rel=1e-5)


def test_nearest_serves_the_model_of_the_client_at_the_smallest_distance(nearest: Trained) -> None:
    clients, distances = nearest.clients, nearest.distances
    novel = clients["client-3"]
    assert set(distances) == {"client-0", "client-1", "client-2"}
    served = nearest.networks()[int(min(distances, key=distances.__getitem__)[-1])]
    assert count_right(nearest.scores["client-3"].test) == count_right(evaluate(served, novel.test_data))
    # The distances by hand, from the clients' own inputs.
    network = build(SPEC)
    network.load_state_dict(full_layout(SPEC).views(nearest.made.algorithm._network().values))
    seen = {name: moments_of(features(network, client.train_data.inputs)) for name, client in clients.items()}
    for name, distance in distances.items():
        classifier = discriminant(seen["client-3"], seen[name])[None]
        ours = domain_errors(features(network, novel.val_data.inputs), classifier, 1)
        theirs = domain_errors(features(network, clients[name].val_data.inputs), classifier, -1)
        assert distance == pytest.approx(2 * abs(1 - ours[0] - theirs[0]), abs=0.05)


def test_models_are_those_that_clients_use(nearest: Trained) -> None:
    assert not nearest.made.config.init_from
    for (name, client), network in zip(nearest.clients.items(), nearest.networks(), strict=False):
        assert evaluate(network, client.test_data).loss == pytest.approx(nearest.scores[name].test.loss, rel=1e-4)


def test_clients_with_the_same_data_are_at_distance_0(nearest: Trained) -> None:
    """Also where the classifier says the same of nearly all examples, so that it is right on one side only."""

    def lie(name: str, told: Any) -> Any:
        if name not in ("client-1", "client-3") or not isinstance(told, ErrorsResult):
            return told
        return ErrorsResult(tuple(0.9 if name == "client-3" else 0.1 for _ in told.errors))

    found, _ = nearest.evaluate(lie)
    assert found["client-1"] == pytest.approx(0)


def test_what_a_client_claims_moves_no_other(nearest: Trained) -> None:
    def lie(name: str, told: Any) -> Any:
        lies = name == "client-1" and isinstance(told, ErrorsResult)
        return ErrorsResult(tuple(0.0 for _ in told.errors)) if lies else told

    found, _ = nearest.evaluate(lie)
    assert [found[name] for name in ("client-0", "client-2")] == [
        nearest.distances[name] for name in ("client-0", "client-2")
    ]


@pytest.mark.parametrize(
    ("factor", "text"), [(1e30, "expected a norm of at most"), (-1, "expected moments with no variance below 0")]
)
def test_moments_that_cannot_be_are_refused(nearest: Trained, factor: float, text: str) -> None:
    def lie(name: str, told: Any) -> Any:
        if name != "client-1" or not isinstance(told, MomentsResult):
            return told
        return MomentsResult(Weights(told.weights.layout, told.weights.values * factor))

    found, refused = nearest.evaluate(lie)
    assert list(refused) == ["client-1"] and text in refused["client-1"]
    assert set(found) == {"client-0", "client-2"}


def test_no_input_leaves_a_client_for_the_distance(nearest: Trained) -> None:
    grid = nearest.made.grid
    moments = grid.answers(MomentsOrder)
    assert {tuple(vars(each)) for each in moments} == {("weights",)}
    assert {each.weights.values.shape for each in moments} == {(51 * 50,)}
    errors = grid.answers(ErrorsOrder)
    assert {tuple(vars(each)) for each in errors} == {("errors",)}
    assert sorted(len(each.errors) for each in errors) == [1, 1, 1, 3]
    # Names of other clients are in nobody's orders.
    passed = [*grid.fields(MomentsOrder), *grid.fields(ErrorsOrder)]
    assert not [value for fields in passed for value in fields.values() if "client-" in str(value)]


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


def test_moments_without_a_solution_give_a_classifier_all_the_same() -> None:
    assert not torch.isnan(discriminant(torch.zeros(4, 3), torch.zeros(4, 3))).any()


def test_a_trained_run_is_used_as_it_is(tmp_path: Path) -> None:
    first = trained(tmp_path, "pfedhn").made
    state = first.state()
    config = digits_config(
        strategy="pfl-ensemble", clients=4, cohort=2, rounds=1, eval_every=1, novel=25, init_from="run"
    )
    made = Inline(config, first.grid, Roster.from_json(first.roster.to_json()), state).join()
    history, selection = made.run()
    assert history.cohorts == [[], []]
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
