"""What strategies do with clipped and noisy changes, and which of them refuse to promise anything."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperbloom.client import worker as worker_module
from hyperbloom.common import privacy
from hyperbloom.common.config import PrivacyConfig, RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies import STRATEGIES, fedavg, make_strategy
from hyperbloom.strategies.personalised import ClientUpdate
from hyperbloom.strategies.roster import Roster

from .conftest import assert_same, digits_config, digits_federation

CHANGES_ALONE = {"pfedhn", "pfedhn-heads", "pfedhn-pc", "ghn", "ghn-server", "local"}
SUMS = {"fedavg", "fedavg-ft", "fedper", "fedprox", "fedrep", "hafl-distillation", "lg-fedavg", "per-fedavg", "pfedme"}


def config_for(name: str, **changes: Any) -> RunConfig:
    return digits_config(strategy=name, options={"hidden_dim": 16} if name == "pfedhn" else {}, **changes)


def config_of(name: str, **changes: Any) -> RunConfig:
    options = {"rad": "nowhere:inputs"} if name == "fedhenn" else {}
    novel = 25 if name.startswith("pfl-") else 0
    return RunConfig(strategy=name, clients=4, novel=novel, options=options, **changes)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_noise_is_refused_where_it_would_not_cover_all(name: str) -> None:
    for where, able in (("client", CHANGES_ALONE | SUMS), ("server", SUMS | {"local"})):
        config = config_of(name, privacy=PrivacyConfig(where=where))
        if name in able:
            make_strategy(config, "", Roster(0))
        else:
            with pytest.raises(ConfigError, match=rf"privacy.where: noise on the {where} cannot hide all that {name}"):
                make_strategy(config, "", Roster(0))


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_secure_aggregation_is_refused_where_single_replies_are_needed(name: str) -> None:
    config = config_of(name, secure_aggregation=True, cohort=3)
    if name in SUMS | {"ghn", "local"}:
        make_strategy(config, "", Roster(0))
    else:
        with pytest.raises(ConfigError, match=f"secure_aggregation: it cannot work: {name} needs each single reply"):
            make_strategy(config, "", Roster(0))


@pytest.mark.parametrize("cohort", [1, 2, 513])
def test_a_sum_is_of_enough_clients_and_not_of_too_many(cohort: int) -> None:
    config = config_of("fedavg", secure_aggregation=True).model_copy(update={"clients": 600, "cohort": cohort})
    with pytest.raises(ConfigError, match=f"^cohort: expected 3 to 512 with secure_aggregation, found {cohort}; a sum"):
        make_strategy(config, "", Roster(0))


def test_compression_with_noise_on_the_server_is_refused() -> None:
    config = RunConfig(strategy="fedavg", compression="int8", privacy=PrivacyConfig(where="server"))
    with pytest.raises(ConfigError, match="compression"):
        make_strategy(config, "", Roster(0))


@pytest.mark.parametrize("name", ["pfedhn", "fedavg"])
@pytest.mark.parametrize("silent", [True, False])
def test_clients_send_clipped_changes_with_noise_and_no_loss(
    name: str, silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its noise a change has the norm that it was clipped to; with it, that of the noise."""
    if silent:
        monkeypatch.setattr(worker_module, "release", lambda change, clip, z: privacy.clip_norm(change, clip).float())
    dp = PrivacyConfig(where="client", clip=0.01, noise=10.0)
    federation = digits_federation(config_for(name, rounds=1, eval_every=1, privacy=dp), tmp_path)
    asked: list[str] = []
    federation.strategy.on_release = asked.extend
    taken: list[ClientUpdate] = []
    update = federation.strategy.update
    federation.strategy.keeps_sent = True
    federation.strategy.update = lambda updates: (taken.extend(updates), update(updates))
    federation.run()
    assert asked == [each.client.client_id for each in taken] and len(asked) == 1
    for each in taken:
        assert each.result.loss == 0 and each.returned is not None and each.sent is not None
        change = each.returned - (each.sent if name == "fedavg" else 0)
        expected = 0.01 if silent else 0.01 * 10 * math.sqrt(change.numel())
        assert float(change.norm()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "lg-fedavg"])
def test_an_average_of_equal_clients_without_noise_equals_fedavgs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All asked, equal numbers of examples, a norm that nobody reaches, silence for noise: the mean is the mean."""
    monkeypatch.setattr(
        fedavg, "noisy_mean", lambda changes, c, z, m: privacy.noisy_mean(changes, c, z, m, lambda count: bytes(count))
    )
    plain = config_for(name, rounds=3, eval_every=3, clients=3, cohort=3)
    noisy = plain.model_copy(update={"privacy": PrivacyConfig(where="server", clip=1e5, noise=1.0)})
    states = []
    for config in (plain, noisy):
        federation = digits_federation(config, tmp_path / config.privacy.where)
        monkeypatch.setattr(federation.strategy, "counts", lambda updates: [1] * len(updates))
        federation.run()
        states.append(federation.strategy.state())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-6)


def test_one_client_moves_a_private_average_by_its_share_of_the_norm(tmp_path: Path) -> None:
    """Noise aside, the global model moves by clip times answers over cohort at most, however far clients go."""
    config = config_for(
        "fedavg",
        rounds=1,
        eval_every=1,
        clients=3,
        cohort=3,
        privacy=PrivacyConfig(where="server", clip=0.01, noise=1e-9),
    )
    federation = digits_federation(config, tmp_path)
    before = federation.strategy.weights.clone()
    federation.run()
    moved = float((federation.strategy.weights - before).norm())
    assert 0.001 < moved <= 0.01 * 1.001


def test_local_sends_nothing_and_spends_nothing(tmp_path: Path) -> None:
    config = config_for("local", rounds=2, eval_every=2)
    quiet = config.model_copy(update={"privacy": PrivacyConfig(where="client")})
    asked: list[str] = []
    federations = [digits_federation(each, tmp_path / each.privacy.where) for each in (config, quiet)]
    for federation in federations:
        federation.strategy.on_release = asked.extend
        federation.run()
        losses = [fields["loss"] for fields in federation.grid.fields("train") if "loss" in fields]
        hidden = federation.config.privacy.where == "client"
        assert len(losses) == 2 * config.cohort and all((loss == 0) == hidden for loss in losses)
    assert not asked
    assert_same(federations[0].state(), federations[1].state())
