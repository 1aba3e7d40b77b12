"""What goes around an algorithm's exchanges: what is refused, what clients are told, what the algorithm learns from."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperbloom.client.work import training
from hyperbloom.common.compression import Codec
from hyperbloom.common.config import LocalConfig, PrivacyConfig, RunConfig
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.secrecy import noise as privacy
from hyperbloom.common.wire.orders import Noise, TrainOrder, TrainResult
from hyperbloom.server.loop import exchange, protection
from hyperbloom.server.loop.protection import Protection, check_protection
from hyperbloom.strategies import STRATEGIES, make_algorithm
from tests.strategies.conftest import (
    Inline,
    Spending,
    assert_same,
    digits_config,
    digits_federation,
    introduction,
    joined,
    scripted_grid,
    texts,
    turn,
    update_of,
)

CHANGES_ALONE = {"pfedhn", "pfedhn-heads", "pfedhn-pc", "ghn", "ghn-server", "local"}
SUMS = {
    "ditto",
    "fedavg",
    "fedavg-ft",
    "fedper",
    "fedprox",
    "fedrep",
    "hafl-distillation",
    "hyperfl",
    "lg-fedavg",
    "per-fedavg",
    "pfedme",
}
CODEC = "top-k:0.1+int8"


def config_for(name: str, **changes: Any) -> RunConfig:
    values = {"options": {"hidden_dim": 16} if name.startswith("pfedhn") else {}, "rounds": 1, "eval_every": 1}
    return digits_config(strategy=name, **(values | changes))


# ---------------------------------------------------------------------- what is refused


def refusal(name: str, **changes: Any) -> str:
    """Return why a strategy does not go with the rest of a run; "" if it does."""
    options = {"rad": "nowhere:inputs"} if name.startswith("fedhenn") else {}
    novel = 25 if name.startswith("pfl-") else 0
    config = RunConfig(strategy=name, novel=novel, options=options).model_copy(update={"clients": 600, **changes})
    algorithm = make_algorithm(config)
    try:
        check_protection(config, algorithm)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_what_does_not_go_with_a_strategy_is_refused(name: str) -> None:
    for where, able in (("client", CHANGES_ALONE | SUMS), ("server", SUMS | {"local"})):
        found = refusal(name, privacy=PrivacyConfig.model_validate({"where": where}))
        assert (found == "") == (name in able)
        assert found == "" or found.startswith(f"privacy.where: noise on the {where} cannot hide all that {name} sends")
    summed = refusal(name, secure_aggregation=True, cohort=3)
    assert (summed == "") == (name in SUMS | {"ghn", "local"})
    assert summed.startswith(
        "" if not summed else f"secure_aggregation: it cannot work: {name} needs each single reply"
    )
    single = refusal(name, asynchronous=True)
    assert single == ("" if STRATEGIES[name].asynchronous else _WHOLE.format(name))
    own = refusal(name, models=("mlp",))
    assert own == ("" if STRATEGIES[name].own_models != "no" else _SAME.format(name))


_WHOLE = "asynchronous: {} learns from whole rounds; set it to false"
_SAME = "models: {} sends the same model to all clients; set model instead"


@pytest.mark.parametrize("cohort", [2, 513])
def test_a_sum_is_of_enough_clients_and_not_of_too_many(cohort: int) -> None:
    found = refusal("fedavg", secure_aggregation=True, cohort=cohort)
    assert found.startswith(f"cohort: expected 3 to 512 with secure_aggregation, found {cohort}; a sum")


def test_compression_with_noise_on_the_server_is_refused_and_unknown_codecs_are_named() -> None:
    assert refusal("fedavg", compression="int8", privacy=PrivacyConfig(where="server")).startswith("compression: ")
    assert refusal("fedavg", compression="gzip").startswith("compression: expected none, int8, top-k:SHARE")


# ---------------------------------------------------------------------- orders


def test_orders_say_what_clients_have_to_do_and_whose_noise_is_spent_is_told_before() -> None:
    """Asked in two pieces, as memory may demand; nobody is told of whom no order is written for."""
    spent: list[str] = []
    dp = PrivacyConfig(where="client", clip=2.0, noise=3.0)
    made = joined(config_for("fedavg", privacy=dp, compression=CODEC), *map(introduction, "abc"))
    wanted = Protection(made, [Spending(spent)]).training(turn(made).training(list(made.clients.values())))
    assert spent == [] and wanted.keep_sent
    (order,) = wanted.orders(wanted.clients[1:2])
    assert (spent, order.noise, order.codec, order.quiet) == (["b"], Noise(2.0, 3.0), Codec.parse(CODEC), False)
    wanted.orders(wanted.clients[2:])
    assert spent == ["b", "c"]


@pytest.mark.parametrize(
    ("changes", "quiet"),
    [({}, False), ({"privacy": PrivacyConfig(where="client")}, True), ({"secure_aggregation": True}, True)],
    ids=str,
)
def test_who_sends_nothing_spends_nothing_and_is_quiet_where_others_hide_theirs(
    changes: dict[str, Any], quiet: bool
) -> None:
    spent: list[str] = []
    made = joined(config_for("local", **changes, clients=3, cohort=3), *map(introduction, "abc"))
    wanted = Protection(made, [Spending(spent)]).training(turn(made).training(list(made.clients.values())))
    assert [(o.noise, o.quiet) for o in wanted.orders(wanted.clients)] == [(None, quiet)] * 3
    assert spent == []


# ---------------------------------------------------------------------- noise


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server's noise be zeros: that is what the source makes of random bytes that are all zero."""
    monkeypatch.setattr(protection, "noisy_mean", partial(privacy.noisy_mean, random_bytes=bytes))


@pytest.mark.parametrize("reply", ["weights", "delta"])
def test_noise_on_the_server_hides_each_change_whatever_clients_send_back(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With silence for noise: every update brings the mean of the clipped changes over the cohort as configured."""
    monkeypatch.setattr(
        protection,
        "noisy_mean",
        lambda changes, c, z, m: privacy.noisy_mean(changes, c, z, m, lambda count: bytes(count)),
    )
    dp = PrivacyConfig(where="server", clip=1.0)
    made = joined(config_for("fedavg", privacy=dp, clients=4, cohort=4), *map(introduction, "abc"))
    monkeypatch.setattr(type(made), "reply", reply)
    sent, changes = torch.tensor([5.0, 5.0]), [torch.tensor(row) for row in ([3.0, 4.0], [0.3, 0.4], [0.0, -0.5])]
    expected = torch.tensor([0.6 + 0.3, 0.8 + 0.4 - 0.5]) / 4  # the first is clipped; four were to be asked
    updates = [
        update_of(client, change if reply == "delta" else sent + change, sent=sent)
        for client, change in zip(made.clients.values(), changes, strict=True)
    ]
    found = Protection(made, ()).learned(updates)
    for before, after in zip(updates, found, strict=True):
        assert (after.client, after.examples) == (before.client, before.examples)
        assert after.returned is not None
        torch.testing.assert_close(after.returned, expected if reply == "delta" else sent + expected)


@pytest.mark.parametrize("name", ["pfedhn", "fedavg"])
@pytest.mark.parametrize("silent", [True, False])
def test_clients_send_clipped_changes_with_noise_and_no_loss(
    name: str, silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its noise a change has the norm that it was clipped to; with it, that of the noise."""
    if silent:
        monkeypatch.setattr(training, "release", lambda change, clip, z: privacy.clip_norm(change, clip).float())
    dp = PrivacyConfig(where="client", clip=0.01, noise=10.0)
    federation = digits_federation(config_for(name, privacy=dp), tmp_path)
    history, _ = federation.run()
    (order,), (result,) = federation.grid.sent(TrainOrder), federation.grid.answers(TrainOrder)
    assert order.weights is not None
    assert federation.released == history.cohorts[0]
    change = result.weights.values - (order.weights.values if name == "fedavg" else 0)
    expected = 0.01 if silent else 0.01 * 10 * math.sqrt(change.numel())
    assert float(change.norm()) == pytest.approx(expected, rel=0.05)
    assert result.loss is None


@pytest.mark.parametrize("name", ["fedavg", "fedper", "lg-fedavg"])
def test_an_average_of_equal_clients_without_noise_equals_fedavgs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All asked, equal numbers of examples, a norm that nobody reaches, silence for noise: the mean is the mean."""
    monkeypatch.setattr(
        protection,
        "noisy_mean",
        lambda changes, c, z, m: privacy.noisy_mean(changes, c, z, m, lambda count: bytes(count)),
    )
    monkeypatch.setattr(exchange, "capped_examples", lambda clients, cap: [1] * len(clients))
    plain = config_for(name, rounds=2, eval_every=2, clients=3, cohort=3)
    states = []
    for where in ("none", "server"):
        config = plain.model_copy(update={"privacy": PrivacyConfig(where=where, clip=1e5)})
        federation = digits_federation(config, tmp_path / where)
        federation.run()
        states.append(federation.state())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-6)


def test_one_client_moves_a_private_average_by_its_share_of_the_norm(tmp_path: Path) -> None:
    """Noise aside, the global model moves by clip times answers over cohort at most, however far clients go."""
    dp = PrivacyConfig(where="server", clip=0.01, noise=1e-6)
    federation = digits_federation(config_for("fedavg", clients=3, cohort=3, privacy=dp), tmp_path)
    before = federation.algorithm.global_weights.clone()
    federation.run()
    moved = float((federation.algorithm.global_weights - before).norm())
    assert 0.001 < moved <= 0.01 * 1.001
    assert sorted(federation.released) == ["client-0", "client-1", "client-2"]


def test_noise_on_the_server_does_not_depend_on_whether_a_training_diverges(tmp_path: Path) -> None:
    """Of a cohort of one nothing would be summed: a model that has not moved would tell of this client's data."""
    dp = PrivacyConfig(where="server", clip=0.01, noise=10.0)
    diverging = config_for("fedavg", privacy=dp, local=LocalConfig(steps=2, learning_rate=1e30))
    federation = digits_federation(diverging, tmp_path)
    before = federation.algorithm.global_weights.clone()
    federation.run()
    moved = federation.algorithm.global_weights - before
    assert float(moved.norm()) == pytest.approx(0.01 * 10 * math.sqrt(moved.numel()) / diverging.cohort, rel=0.05)


def test_local_learns_the_same_in_silence(tmp_path: Path) -> None:
    stored, losses = [], []
    for where in ("none", "client"):
        federation = digits_federation(config_for("local", privacy=PrivacyConfig(where=where)), tmp_path / where)
        history, _ = federation.run()
        stored.append(sorted(path.read_bytes() for path in tmp_path.glob(f"{where}/*/personal/*")))
        losses.append([result.loss for result in history.rounds[0].results.values()])
        assert federation.released == []
    assert stored[0] == stored[1] != []
    assert losses[1] == [None] != losses[0]


# ---------------------------------------------------------------------- codecs

Answer = Callable[[str, TrainOrder], TrainResult]


def codec(name: str = CODEC) -> Codec:
    found = Codec.parse(name)
    assert found is not None
    return found


def delta_of(name: str, layout: Layout) -> Tensor:
    return 0.1 * torch.randn(layout.numel, generator=torch.Generator().manual_seed(ord(name)))


def kept(name: str, layout: Layout) -> Tensor:
    """Return what the codec keeps of a client's change."""
    return codec().decode(codec().encode(delta_of(name, layout), layout), layout)


def encoded(name: str, order: TrainOrder) -> TrainResult:
    """Answer as a client does that was told to compress."""
    assert order.weights is not None and order.codec == codec()
    layout = order.weights.layout
    return TrainResult(0.0, None, 1.0, codec().encode(delta_of(name, layout), layout))


def plain(name: str, order: TrainOrder) -> TrainResult:
    """Answer in the clear with what the server is to make of the compressed answer."""
    assert order.weights is not None and order.codec is None
    values = kept(name, order.weights.layout)
    return TrainResult(
        0.0, Weights(order.weights.layout, values + (order.weights.values if order.reply == "weights" else 0))
    )


def play_round(strategy: str, answer: Answer, compression: str, **changes: Any) -> tuple[Inline, dict[str, str]]:
    """Return a federation of scripted clients after a round, and who was left out of it."""
    config = config_for(strategy, clients=3, cohort=3, compression=compression)
    grid = scripted_grid([introduction(name, **changes.get(name, {})) for name in "abc"], {TrainOrder: answer})
    federation = Inline(config, grid).join()
    return federation, texts(federation.train())


@pytest.mark.parametrize("strategy", ["pfedhn", "pfedhn-pc", "fedavg"])
def test_the_server_learns_exactly_what_the_codec_keeps(strategy: str) -> None:
    compressed, refused = play_round(strategy, encoded, CODEC)
    assert refused == {}
    assert_same(compressed.state(), play_round(strategy, plain, "none")[0].state())


def test_an_encoded_average_is_capped_like_any_other() -> None:
    """Three say 10, 20 and 2 ** 62 examples; the last counts for 2,000."""
    said = {name: {"train_examples": count} for name, count in zip("abc", (10, 20, 2**62), strict=True)}
    made, refused = play_round("fedavg", encoded, CODEC, **said)
    assert refused == {}
    start = joined(made.config, introduction("a")).global_weights
    layout = made.algorithm.whole
    counts = zip("abc", (10, 20, 2000), strict=True)
    mean = sum(count * (start + kept(name, layout)).double() for name, count in counts) / 2030
    torch.testing.assert_close(made.algorithm.global_weights.double(), mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["pfedhn", "fedavg"])
def test_real_clients_send_the_codecs_bytes_and_their_server_learns(strategy: str, tmp_path: Path) -> None:
    runs = {}
    for name in ("none", "int8", CODEC):
        config = config_for(strategy, cohort=2, rounds=2, eval_every=2, compression=name)
        federation = digits_federation(config, tmp_path / name)
        history, _ = federation.run()
        assert all(outcome.refused == {} and len(outcome.results) == 2 for outcome in history.rounds)
        results = federation.grid.answers(TrainOrder)
        (layout,) = federation.algorithm.setting.layouts.values()
        if name == "none":
            assert all(each.encoded is None and each.weights.layout == layout for each in results)
        else:
            assert {len(each.encoded) for each in results} == {codec(name).size(layout)}
            assert all(each.weights is None for each in results)
        runs[name] = torch.cat([tensor.flatten() for tensor in federation.state().values()])
        trained = {client for cohort in history.cohorts for client in cohort}
        residuals = {path.parent.name for path in tmp_path.glob(f"{name}/*/residual.safetensors")}
        assert residuals == (set() if name == "none" else trained)
    off = {name: float((values - runs["none"]).norm() / runs["none"].norm()) for name, values in runs.items()}
    assert 0 < off["int8"] < 1e-2 < off[CODEC] < 0.5


def test_where_nothing_is_sent_there_is_nothing_to_compress(tmp_path: Path) -> None:
    federation = digits_federation(config_for("local", compression=CODEC), tmp_path)
    history, _ = federation.run()
    assert history.rounds[0].refused == {} and len(history.rounds[0].results) == 1
    assert not any({"encoded", "values"} & set(fields) for fields in federation.grid.fields(TrainOrder))


def test_weights_in_the_clear_are_no_answer_to_an_order_to_compress_nor_the_other_way() -> None:
    def clear(name: str, order: TrainOrder) -> TrainResult:
        return plain(name, replace(order, codec=None))

    def unasked(name: str, order: TrainOrder) -> TrainResult:
        return encoded(name, replace(order, codec=codec()))

    _, refused = play_round("pfedhn", clear, CODEC)
    assert refused == dict.fromkeys("abc", f"expected a change encoded as {CODEC}, found none")
    _, refused = play_round("pfedhn", unasked, "none")
    assert refused == dict.fromkeys("abc", "expected weights in the reply, found none")
