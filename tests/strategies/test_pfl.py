"""A trained pFedHN for novel clients: the mean over all models, all at once, and the nearest client's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from hyperbloom.client.work.client import client_for
from hyperbloom.client.work.others import domain_errors, features
from hyperbloom.client.work.scoring import evaluate
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    ErrorsOrder,
    ErrorsResult,
    EvaluateOrder,
    MomentsOrder,
    MomentsResult,
    TryOrder,
    Weights,
)
from hyperbloom.common.models import ModelSpec, build, full_layout
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.pfl import a_distance, discriminant
from hyperbloom.strategies.roster import Roster

from .conftest import Inline, digits_config, digits_federation, digits_settings

SPEC = ModelSpec("mlp", "S", (1, 8, 8), 10)


def trained(folder: Path, strategy: str, **changes: Any) -> Inline:
    """Return a federation of three that trained a little and one novel client."""
    values = {"clients": 4, "cohort": 2, "rounds": 4, "eval_every": 4, "novel": 25}
    made = digits_federation(digits_config(strategy=strategy, **(values | changes)), folder)
    made.run()
    return made


def by_hand(made: Inline, folder: Path) -> tuple[list[torch.nn.Module], Any]:
    """Return the networks of those who trained, and the novel client."""
    networks = []
    for values in made.strategy.models().values():
        network = build(SPEC)
        network.load_state_dict(full_layout(SPEC).views(values))
        networks.append(network.eval())
    (settings,) = [each for each in digits_settings(made.config, folder) if each.client_id == "client-3"]
    return networks, client_for(settings)


def test_sampled_is_the_mean_of_all_models(tmp_path: Path) -> None:
    made = trained(tmp_path, "pfl-sampled")
    networks, novel = by_hand(made, tmp_path)
    found = made.strategy.round.evaluation.scores["client-3"].score("test")
    each = [evaluate(network, novel.test_data) for network in networks]
    assert len(each) == 3
    assert found.accuracy == pytest.approx(sum(one.accuracy for one in each) / 3)
    assert found.loss == pytest.approx(sum(one.loss for one in each) / 3, rel=1e-5)


def test_ensemble_is_the_mean_of_the_logits(tmp_path: Path) -> None:
    made = trained(tmp_path, "pfl-ensemble")
    networks, novel = by_hand(made, tmp_path)
    found = made.strategy.round.evaluation.scores["client-3"].score("test")
    with torch.no_grad():
        logits = sum(network(novel.test_data.inputs) for network in networks) / 3
    assert found.correct == int((logits.argmax(1) == novel.test_data.labels).sum())
    assert found.total == len(novel.test_data)


def test_those_who_trained_are_scored_as_in_pfedhn(tmp_path: Path) -> None:
    made, plain = trained(tmp_path / "a", "pfl-sampled"), trained(tmp_path / "b", "pfedhn")
    for index in range(3):
        name = f"client-{index}"
        one, other = (run.strategy.round.evaluation.scores[name] for run in (made, plain))
        # In cohorts of other sizes a product of matrices is rounded otherwise.
        assert vars(one) == pytest.approx(vars(other), rel=1e-5)


def test_nearest_serves_the_model_of_the_client_at_the_smallest_distance(tmp_path: Path) -> None:
    made = trained(tmp_path, "pfl-nearest")
    distances = made.strategy.distances["client-3"]
    assert set(distances) == {f"client-{index}" for index in range(3)}
    nearest = min(distances, key=distances.__getitem__)
    networks, novel = by_hand(made, tmp_path)
    found = made.strategy.round.evaluation.scores["client-3"].score("test")
    assert found.correct == evaluate(networks[int(nearest[-1])], novel.test_data).correct
    # The distances by hand, from the clients' own inputs.
    network = build(SPEC)
    network.load_state_dict(full_layout(SPEC).views(made.strategy._network().values))
    workers = {each.client_id: client_for(each) for each in digits_settings(made.config, tmp_path)}
    seen = {name: moments_of(features(network, worker.train_data.inputs)) for name, worker in workers.items()}
    for name, distance in distances.items():
        classifier = discriminant(seen["client-3"], seen[name])[None]
        ours = domain_errors(features(network, workers["client-3"].val_data.inputs), classifier, 1)
        theirs = domain_errors(features(network, workers[name].val_data.inputs), classifier, -1)
        assert distance == pytest.approx(max(a_distance(ours[0]), a_distance(theirs[0])), abs=0.05)


@pytest.mark.parametrize("claim", [0.0, 0.5, 1.0])
def test_no_claim_makes_a_client_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: float) -> None:
    honest = trained(tmp_path / "honest", "pfl-nearest").strategy.distances["client-3"]
    errors = Worker.errors

    def lying(worker: Worker, order: ErrorsOrder) -> ErrorsResult:
        result = errors(worker, order)
        mine = worker.settings.client_id == "client-1"
        return ErrorsResult(tuple(claim for _ in result.errors)) if mine else result

    monkeypatch.setattr(Worker, "errors", lying)
    found = trained(tmp_path / "lying", "pfl-nearest").strategy.distances["client-3"]
    assert {name: found[name] for name in ("client-0", "client-2")} == {
        name: honest[name] for name in ("client-0", "client-2")
    }
    # No nearer than the novel client itself finds.
    assert found["client-1"] >= min(honest["client-1"], 0.3) and found["client-1"] >= 0


@pytest.mark.parametrize("spoil", [lambda moments: moments * 1e30, lambda moments: -moments])
def test_moments_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    moments = Worker.moments

    def lying(worker: Worker, order: MomentsOrder) -> MomentsResult:
        result = moments(worker, order)
        if worker.settings.client_id != "client-1":
            return result
        return MomentsResult(Weights(result.weights.layout, spoil(result.weights.values)))

    monkeypatch.setattr(Worker, "moments", lying)
    made = trained(tmp_path, "pfl-nearest")
    assert "expected moments of norm up to" in made.strategy.round.refused["client-1"]
    assert set(made.strategy.distances["client-3"]) == {"client-0", "client-2"}


def test_no_input_leaves_a_client_for_the_distance(tmp_path: Path) -> None:
    made = trained(tmp_path, "pfl-nearest")
    replies = [fields for fields in made.grid.fields("evaluate.moments") if "run_id" not in fields]
    assert {tuple(sorted(fields)) for fields in replies} == {("dtype", "tensors", "values")}
    assert {len(fields["values"]) for fields in replies} == {4 * 51 * 50}
    errors = [fields for fields in made.grid.fields("evaluate.errors") if "run_id" not in fields]
    assert {tuple(fields) for fields in errors} == {("errors",)}
    # Names of other clients are in nobody's orders.
    orders = [fields for kind in ("moments", "errors") for fields in made.grid.fields(f"evaluate.{kind}")]
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
    first = trained(tmp_path, "pfedhn")
    state = first.state()
    config = digits_config(
        strategy="pfl-ensemble", clients=4, cohort=2, rounds=1, eval_every=1, novel=25, init_from="run"
    )
    made = Inline(config, first.grid, Roster.from_json(first.roster.to_json()))
    made.strategy.check_initial(state)
    made.federation.gather(made.strategy, 4, 10.0)
    made.strategy.load(state)
    made.federation.begin(made.strategy, 4)
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
        make_strategy(digits_config(strategy="pfl-nearest", **changes), "run", Roster(0))


def test_models_of_another_size_are_refused(tmp_path: Path) -> None:
    made = trained(tmp_path, "pfl-ensemble")
    fields = next(f for f in made.grid.fields("evaluate.many") if "run_id" in f)
    _, novel = by_hand(made, tmp_path)
    order = TryOrder(
        **{k: v for k, v in fields.items() if k in EvaluateOrder.__dataclass_fields__ and k != "weights"},
        weights=Weights(Layout((("models", (2, 7)),)), torch.zeros(14)),
        together=True,
    )
    with pytest.raises(WireError, match=r"^order: expected models of \d+ weights each, found"):
        novel.try_many(order)
