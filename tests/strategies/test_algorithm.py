"""What an author writes: a strategy of twenty lines goes through the whole loop, and checks change nothing."""

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperbloom.client.work import training
from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.compression import Codec
from hyperbloom.common.config import PrivacyConfig, RunConfig
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.graphs import SHARED
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import ModelSpec
from hyperbloom.common.secrecy import noise as privacy
from hyperbloom.common.wire.orders import SGD, EvaluateOrder, EvaluateResult, Introduction, Scope, Target, TrainOrder
from hyperbloom.server.loop import protection
from hyperbloom.server.runs.trained import restored
from hyperbloom.strategies import STRATEGIES, make_algorithm
from hyperbloom.strategies.algorithm import Algorithm, Setting
from hyperbloom.strategies.exchange import Client, Update

from .conftest import (
    RUN_ID,
    Inline,
    RecordingGrid,
    digits_config,
    digits_grid,
    digits_settings,
    introduction,
    joined,
    play,
    scored,
    turn,
)


class OneModel(Algorithm):
    """One model for all; it moves by the plain mean of what clients change."""

    noise_at: ClassVar[tuple[str, ...]] = ("client", "server")

    def build(self, setting: Setting) -> None:
        super().build(setting)
        self.model = torch.linspace(-0.1, 0.1, setting.layouts["S"].numel)

    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        return [Weights(self.layout(client), self.model) for client in clients]

    def learn(self, updates: Sequence[Update]) -> None:
        changes = [update.returned for update in updates if update.returned is not None]
        if changes:
            self.model = self.model + torch.stack(changes).mean(0)

    def state(self) -> dict[str, Tensor]:
        return {"model": self.model}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.model = tensors["model"]


class Forgetful(OneModel):
    """The same, but a resumed run would begin at the start."""

    restore = Algorithm.restore


class SentBack(OneModel):
    """The same, but clients send back what they trained."""

    reply: ClassVar[str] = "weights"

    def learn(self, updates: Sequence[Update]) -> None:
        trained = [update.returned for update in updates if update.returned is not None]
        if trained:
            self.model = torch.stack(trained).mean(0)


class Wrong(OneModel):
    """The same, but `weights` returns what `wrong` makes of the right answer."""

    wrong: Any = None

    def weights(self, clients: Sequence[Client]) -> Any:
        return type(self).wrong(super().weights(clients))


class Trained(Inline):
    """Three real clients after their rounds: where the model started, and what happened."""

    def __init__(self, config: RunConfig, grid: RecordingGrid) -> None:
        super().__init__(config, grid)
        self.join()
        self.start: Tensor = self.algorithm.model.clone()
        self.history, self.selection = self.run()


def one_round(folder: Path, kind: type = OneModel, **changes: Any) -> Trained:
    """Return three real clients after one round, or more."""
    name = f"{__name__}:{kind.__name__}"
    values = {"strategy": name, "options": {}, "cohort": 3, "rounds": 1, "eval_every": 1}
    config = digits_config(**(values | changes))
    return Trained(config, digits_grid(digits_settings(config, folder)))


def changes_of(made: Trained) -> list[Tensor]:
    """Return what each client's training changed, by way of a run without protection."""
    return [each.weights.values for each in made.grid.answers(TrainOrder)]


def clipped(change: Tensor, norm: float) -> np.ndarray[Any, Any]:
    exact = change.double().numpy()
    return exact * min(1.0, norm / float(np.linalg.norm(exact)))


# ---------------------------------------------------------------------- a strategy of twenty lines


def test_a_strategy_that_would_forget_its_state_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"Forgetful: expected a method restore, or --resume would forget its state"):
        make_algorithm(digits_config(strategy=f"{__name__}:Forgetful", options={}))


@pytest.mark.parametrize("wrong", [lambda rows: rows[0], lambda rows: rows[1:], lambda rows: [r.values for r in rows]])
def test_weights_that_are_none_are_refused_in_the_authors_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(Wrong, "wrong", wrong)
    with pytest.raises(ConfigError, match=r"Wrong: expected Wrong\.weights to return 3 Weights, one a client, or None"):
        one_round(tmp_path, Wrong)


@pytest.mark.parametrize(("name", "value"), [("reply", "gradient"), ("private", "classifier")])
def test_attributes_that_no_client_knows_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setattr(OneModel, name, value)
    with pytest.raises(ConfigError, match=rf"OneModel: expected reply in .* and private in .*, found .*{value}"):
        make_algorithm(digits_config(strategy=f"{__name__}:OneModel", options={}))


def test_a_strategy_of_ones_own_goes_back_to_its_state(tmp_path: Path) -> None:
    """As for export, and to compare the selected round's models."""
    made = one_round(tmp_path)
    again: Any = restored(made.config, made.algorithm.state(), made.roster)
    assert torch.equal(again.model, made.algorithm.model) and not torch.equal(again.model, made.start)


class Modest(OneModel):
    """The same, but a new run that starts from it takes nothing over."""

    def check_start(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        pass


def test_it_goes_back_by_restore_also_if_new_runs_take_less(tmp_path: Path) -> None:
    made = one_round(tmp_path, Modest)
    again: Any = restored(made.config, made.algorithm.state(), made.roster)
    assert torch.equal(again.model, made.algorithm.model) and not torch.equal(again.model, made.start)


def test_a_state_that_does_not_fit_is_told(tmp_path: Path) -> None:
    config = digits_config(strategy="pfedhn", options={"hidden_dim": 8})
    made = Inline(config, digits_grid(digits_settings(config, tmp_path)))
    made.join()
    state = made.algorithm.state()
    less = {name: value for name, value in state.items() if name != "embeddings"}
    for wrong in (
        {**state, "hypernetwork.trunk.0.weight": torch.zeros(3, 3)},
        {**state, "embeddings": torch.ones(3)},
        less,
    ):
        with pytest.raises(ConfigError, match=r"^pfedhn: its state does not fit its configuration: "):
            restored(config, wrong, made.roster)


def test_a_strategy_of_twenty_lines_trains_scores_and_is_selected(tmp_path: Path) -> None:
    made = one_round(tmp_path, rounds=8, eval_every=4)
    assert all(outcome.refused == {} for outcome in made.history.rounds)
    assert made.history.cohorts == [["client-0", "client-1", "client-2"]] * 8
    assert set(made.selection.test_accuracy) == {"client-0", "client-1", "client-2"}
    first, last = (made.history.rounds[index].results["client-0"].loss for index in (0, -1))
    assert first is not None and last is not None and last < 0.9 * first
    changes = changes_of(made)
    torch.testing.assert_close(made.algorithm.model, made.start + torch.stack(changes).view(8, 3, -1).mean(1).sum(0))


@pytest.mark.parametrize("kind", [OneModel, SentBack])
def test_noise_on_the_server_is_the_closed_form(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`w + (sum_i clip(delta_i) + N(0, (z C)^2)) / m` for the cohort m that was configured, whatever clients send."""
    drawn = np.random.default_rng(0).bytes
    monkeypatch.setattr(protection, "noisy_mean", partial(privacy.noisy_mean, random_bytes=drawn))
    changes = changes_of(one_round(tmp_path / "plain"))
    made = one_round(tmp_path / "noisy", kind, privacy=PrivacyConfig(where="server", clip=0.2, noise=0.01))
    assert min(float(change.norm()) for change in changes) > 0.2
    noise = 0.01 * 0.2 * privacy.noise(len(made.start), np.random.default_rng(0).bytes)
    expected = made.start.double().numpy() + (sum(clipped(change, 0.2) for change in changes) + noise) / 3
    np.testing.assert_allclose(made.algorithm.model.numpy(), expected, rtol=0, atol=1e-7)
    assert sorted(made.released) == ["client-0", "client-1", "client-2"]


def test_noise_on_the_clients_is_the_closed_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client sends `clip(delta_i) + N(0, (z C)^2)` and no loss; the algorithm learns of it as of any change."""
    monkeypatch.setattr(training, "release", partial(privacy.release, random_bytes=np.random.default_rng(0).bytes))
    changes = changes_of(one_round(tmp_path / "plain"))
    made = one_round(tmp_path / "noisy", privacy=PrivacyConfig(where="client", clip=0.2, noise=0.01))
    source = np.random.default_rng(0).bytes
    sent = [clipped(change, 0.2) + 0.01 * 0.2 * privacy.noise(len(change), source) for change in changes]
    np.testing.assert_allclose(
        made.algorithm.model.numpy(), made.start.double().numpy() + sum(sent) / 3, rtol=0, atol=1e-7
    )
    assert [result.loss for result in made.history.rounds[0].results.values()] == [None] * 3
    assert made.released == ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize("kind", [OneModel, SentBack])
def test_with_a_codec_it_learns_what_the_codec_keeps(kind: type, tmp_path: Path) -> None:
    codec = Codec.parse("top-k:0.1+int8")
    assert codec is not None
    changes = changes_of(one_round(tmp_path / "plain"))
    made = one_round(tmp_path / "coded", kind, compression=codec.name)
    layout = made.algorithm.setting.layouts["S"]
    kept = torch.stack([codec.decode(codec.encode(change, layout), layout) for change in changes])
    torch.testing.assert_close(made.algorithm.model, made.start + kept.mean(0), rtol=0, atol=1e-7)
    assert {len(answer.encoded) for answer in made.grid.answers(TrainOrder)} == {codec.size(layout)}


def test_the_order_says_what_the_configuration_says() -> None:
    made = joined(digits_config(seed=7), introduction("a"), introduction("b"))
    wanted = turn(made, 3).training([made.clients[1]])
    (order,), local = wanted.orders(wanted.clients), made.config.local
    scope, target = Scope(RUN_ID, 3, 7), Target("mlp", 3, "none")
    sgd = SGD(local.steps, local.batch_size, local.learning_rate, local.momentum, local.weight_decay, local.clip)
    assert replace(order, weights=None) == TrainOrder(scope, target, sgd, "delta")
    asked: list[EvaluateOrder] = []

    def evaluate(name: str, order: EvaluateOrder) -> EvaluateResult:
        asked.append(replace(order, weights=None))
        return scored((1, 10, 0.5), (2, 10, 0.5))

    found = play(made.evaluate(turn(made, 3), [made.clients[1]]), evaluate)
    assert asked == [EvaluateOrder(scope, target, metrics=("accuracy",))]
    assert found.scores == {"b": scored((1, 10, 0.5), (2, 10, 0.5))} and found.rank is None


# ---------------------------------------------------------------------- checks


def test_unknown_strategies_and_options_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy: expected one of ditto, fedavg, .*local, .*pfedhn, .*pfedhn-pc, .*found 'fed'"
    ):
        make_algorithm(digits_config(strategy="fed", options={}))
    with pytest.raises(
        ConfigError, match=r"learning_rat: unknown key in options of pfedhn. Did you mean learning_rate"
    ):
        make_algorithm(digits_config(options={"learning_rat": 0.1}))


OWN = own_graph(ModelSpec("plain-4", "S", (1, 8, 8), 10))


def about_of(name: str, client: str) -> Introduction:
    """Return a client that a strategy takes."""
    own = STRATEGIES[name].own_models == "must"
    told = {"types": tuple(map(str, OWN.types))} if STRATEGIES[name].asks == "types" else {"graph": OWN.to_json()}
    return introduction(client, input_shape=(1, 8, 8), num_classes=10, **(told if own else {}))


def config_of(name: str, folder: Path) -> RunConfig:
    options: dict[str, Any] = {}
    if name.startswith("fedhenn"):
        np.savez(folder / "public.npz", x=np.ones((4, 1, 8, 8), dtype=np.float32))
        options = {"rad": str(folder / "public.npz"), "rows": 2}
    return digits_config(strategy=name, novel=30 if name.startswith("pfl-") else 0, options=options)


def remembered(algorithm: Algorithm) -> bytes:
    """Return all that an algorithm holds."""
    return pickle.dumps(dict(sorted(vars(algorithm).items())))


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_checks_change_nothing(name: str, tmp_path: Path) -> None:
    """Called twice, before the networks are built and after; the learned state and all else stay what they were."""
    config, one, other = config_of(name, tmp_path), about_of(name, "a"), about_of(name, "b")
    stored = joined(config, one).state()
    for algorithm in (make_algorithm(config), joined(config, one)):
        state = {key: value.clone() for key, value in algorithm.state().items()} if algorithm.clients else {}
        before = remembered(algorithm)
        for _ in range(2):
            algorithm.serves(other, [one])
            assert algorithm.settle(other) == algorithm.settle(one)
            for tensors in (stored, {}, {SHARED: torch.zeros(3)}):
                with suppress(ConfigError):
                    algorithm.check_start(tensors)
            with suppress(RefusedError):
                algorithm.serves(introduction("c", size="L"), [one, other])
        assert remembered(algorithm) == before
        assert all(torch.equal(value, algorithm.state()[key]) for key, value in state.items())
