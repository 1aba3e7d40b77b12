"""Strategies over networks of which a part is adapted: what travels, where they start, and what stays."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from hyperbloom.client.work import networks
from hyperbloom.client.work.client import client_for
from hyperbloom.client.work.encoding import describe
from hyperbloom.client.work.networks import loaded_network
from hyperbloom.common import models
from hyperbloom.common.config import make_run_config
from hyperbloom.common.encoders import EncoderSpec, build_encoder
from hyperbloom.common.errors import ConfigError, ModelError
from hyperbloom.common.models import BACKBONE, ModelSpec, build, full_layout
from hyperbloom.common.models.pretrained import Transformer
from hyperbloom.common.wire.exchanges import DescribeOrder
from hyperbloom.common.wire.orders import Target, TrainOrder
from hyperbloom.strategies import make_algorithm
from tests.common.models.backbones import image_folder
from tests.strategies.conftest import (
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

LORA = "lora:r=2"
SPEC = ModelSpec("mlp", "S", (1, 8, 8), 10, LORA)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("pfedhn", {}),
        ("pfedhn", {"options": {"hypernetwork": "chunked", "chunk": 100}}),
        ("figures.linear:PFedHNLinear", {"options": {}}),
        ("pfedhn-pc", {}),
        ("odpfl", {}),
        ("fedavg", {"options": {}}),
        ("fedavg", {"options": {}, "secure_aggregation": True}),
        ("fedavg", {"options": {}, "compression": "int8"}),
        ("fedper", {"options": {}}),
        ("lg-fedavg", {"options": {}}),
        ("fedhenn", {"options": {"rad": "public.npz", "rows": 20}}),
        ("local", {"options": {}}),
        ("local", {"options": {}, "models": ("mlp",)}),
    ],
)
def test_a_run_sends_trains_and_scores_what_is_adapted_alone(
    strategy: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    public = np.random.default_rng(0).random((40, 1, 8, 8), dtype=np.float32)
    np.savez("public.npz", x=public)
    config = digits_config(strategy=strategy, adapt=LORA, rounds=2, cohort=3, **changes)
    federation = digits_federation(config, tmp_path)
    history, selection = federation.run()
    assert not [texts(outcome) for outcome in history.rounds if outcome.refused]
    known = {name for name, _ in full_layout(SPEC).shapes}
    for order in federation.grid.sent(TrainOrder):
        assert order.target.adapt == LORA
        assert order.weights is None or {name for name, _ in order.weights.layout.shapes} <= known
    assert selection.round


def test_the_hypernetworks_first_models_are_the_backbone_to_the_bit(tmp_path: Path) -> None:
    for hypernetwork in ("mlp", "chunked"):
        config = digits_config(strategy="pfedhn", adapt=LORA, options={"hypernetwork": hypernetwork})
        algorithm = joined(config, *(introduction(str(at), input_shape=(1, 8, 8), num_classes=10) for at in range(2)))
        one, other = algorithm.weights(list(algorithm.clients.values()))
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.values, algorithm.setting.first_values("S", algorithm.config.seed))
        views = one.layout.views(one.values)
        assert not views["fc1.lora_B.default.weight"].any() and views["fc1.lora_A.default.weight"].any()


@pytest.mark.parametrize("hypernetwork", ["mlp", "chunked"])
def test_a_common_start_is_torchs_own_and_deviations_are_learned_from_zero(hypernetwork: str) -> None:
    """One step from the start: a linear head moves theta_i by rate * (features_i . features_j + 1) * the rest."""
    options = {"hypernetwork": hypernetwork, "start": "common", "update": "mean", "weight_decay": 0.0}
    options |= {"learning_rate": 0.1}
    config = digits_config(strategy="pfedhn", options=options)
    algorithm = joined(config, *(introduction(str(at), input_shape=(1, 8, 8), num_classes=10) for at in range(2)))
    clients, start = list(algorithm.clients.values()), algorithm.setting.first_values("S", config.seed)
    sent = algorithm.weights(clients)
    assert all(torch.equal(one.values, start) for one in sent)
    network, table = algorithm.learner.hypernetwork, algorithm.learner.table.weight.detach().clone()
    with torch.no_grad():
        gram = network.gram(network.features(table, "S"))
    delta = 0.01 * torch.randn(start.numel(), generator=torch.Generator().manual_seed(0))
    algorithm.learn([update_of(clients[0], delta, layout=sent[0].layout, sent=sent[0].values)])
    moved = [one.values - start for one in algorithm.weights(clients)]
    assert moved[0].dot(delta) > 0 and not torch.equal(moved[0], moved[1])
    if hypernetwork != "chunked":
        for row in range(2):
            # Half of the change is averaged, because one of two clients trained; the rest is learned.
            torch.testing.assert_close(moved[row], (0.5 + 0.05 * gram[row, 0]) * delta, rtol=1e-3, atol=1e-6)


def test_clients_get_models_of_their_own_after_some_rounds(tmp_path: Path) -> None:
    config = digits_config(strategy="pfedhn", adapt=LORA, rounds=3, cohort=3)
    federation = digits_federation(config, tmp_path)
    federation.run()
    one, other, _ = federation.algorithm.weights(list(federation.algorithm.clients.values()))
    assert not torch.equal(one.values, other.values)


def test_the_mean_of_low_rank_changes_is_that_of_their_factors() -> None:
    """FedAvg averages A and B: the merged change of a linear layer is the product of the two means."""
    config = digits_config(strategy="fedavg", adapt=LORA, options={})
    abouts = [
        introduction(str(at), train_examples=10 * (at + 1), input_shape=(1, 8, 8), num_classes=10) for at in (0, 1)
    ]
    algorithm = joined(config, *abouts)
    layout = algorithm.whole
    returned = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(at)) for at in (0, 1)]
    clients = list(algorithm.clients.values())
    algorithm.learn(
        [update_of(client, values, layout=layout) for client, values in zip(clients, returned, strict=True)]
    )
    views = [layout.views(values) for values in returned]
    mean = {name: (views[0][name] + 2 * views[1][name]) / 3 for name in views[0]}
    found = algorithm.state()
    low, high = "fc1.lora_A.default.weight", "fc1.lora_B.default.weight"
    assert torch.allclose(found[high] @ found[low], mean[high] @ mean[low], atol=1e-5)


def test_a_client_with_another_backbone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperbloom.client.work import networks

    config = digits_config(strategy="fedavg", adapt="head", options={}, clients=3, cohort=3)
    federation = digits_federation(config, tmp_path)
    other = SimpleNamespace(**vars(models) | {"backbone_digest": lambda spec: "sha256:another"})
    monkeypatch.setattr(networks, "models", other)  # at the clients alone
    refused = federation.train().refused
    assert len(refused) == 3
    expected = federation.algorithm.setting.backbones[0]
    assert all(f"expected backbone {expected}, found sha256:another" in each.text for each in refused.values())


@pytest.mark.parametrize("strategy", ["ghn", "fedma", "figures.spectral_norm:PFedHNSpectral"])
def test_strategies_that_write_whole_networks_say_so(strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*all"):
        make_algorithm(digits_config(strategy=strategy, adapt="head", options={}))


# ---------------------------------------------------------------------- pretrained networks


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(image_folder(tmp_path_factory.mktemp("backbones") / "vit"))


@pytest.mark.parametrize(
    ("strategy", "adapt"),
    [("pfedhn", LORA), ("pfedhn", "head"), ("pfedhn", "all"), ("fedper", "norms"), ("pfl-nearest", "bias")],
)
def test_clients_train_what_is_adapted_of_their_backbone(
    strategy: str, adapt: str, backbone: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {} if strategy == "fedper" else {"hidden_dim": 8}
    novel = 40 if strategy == "pfl-nearest" else 0
    config = digits_config(
        strategy=strategy,
        adapt=adapt,
        backbone=backbone,
        sizes=("M",),
        rounds=2,
        cohort=3 - (novel > 0),
        novel=novel,
        options=options,
    )
    federation = digits_federation(config, tmp_path)
    history, _ = federation.run()
    assert not [texts(outcome) for outcome in history.rounds if outcome.refused]
    setting, (about, *_) = federation.algorithm.setting, federation.roster
    assert setting.spec.name == BACKBONE and setting.backbones == (about.about.backbone,)
    first, last = federation.grid.sent(TrainOrder)[0].weights, federation.grid.sent(TrainOrder)[-1].weights
    assert first is not None and last is not None and not torch.equal(first.values, last.values)
    if strategy == "pfedhn" and adapt == "all":
        module = build(replace(setting.spec, adapt="head"))
        body = [name for name, _ in first.layout.shapes if "classifier" not in name]
        views = first.layout.views(first.values)
        assert body and all(torch.equal(views[name], module.get_buffer(name)) for name in body)


def test_a_client_is_refused_whose_backbone_is_another_or_none(backbone: str, tmp_path: Path) -> None:
    other = str(image_folder(tmp_path / "other", seed=1))
    config = digits_config(strategy="fedavg", adapt="head", backbone=backbone, sizes=("M",), options={})
    right, wrong, none = digits_settings(config, tmp_path)
    wrong, none = (
        replace(each, data=replace(each.data, backbone=where)) for each, where in ((wrong, other), (none, None))
    )
    grid = digits_grid([right, wrong, none])
    federation = Inline(config, grid).join(1)
    told = " ".join(federation.events)
    expected = federation.algorithm.setting.backbones[0]
    assert f"expected backbone {expected}, found sha256:" in told and "; use the same vit" in told
    assert "expected --backbone as in this federation" in told
    assert [client.client_id for client in federation.roster] == [right.client_id]


def test_virtual_clients_share_one_backbone(backbone: str, tmp_path: Path) -> None:
    config = digits_config(strategy="fedavg", adapt="head", backbone=backbone, sizes=("M",), options={})
    one, other, _ = (client_for(each) for each in digits_settings(config, tmp_path))
    assert one.backbone is not None
    target = Target(BACKBONE, 10, "none", adapt="head", backbones=(one.backbone,))
    assert loaded_network(one, target, None) is loaded_network(other, target, None)


@pytest.mark.parametrize("strategy", ["pfedhn", "lg-fedavg", "fedavg-ft", "fedprox"])
def test_with_the_head_alone_the_backbone_sees_each_example_once(
    strategy: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = Transformer.forward

    def noted(self: Transformer, inputs: Tensor) -> Tensor:
        seen.append(len(inputs) if len(inputs) > 2 else 0)  # two find out whether the head is the last layer
        return real(self, inputs)

    networks._network.cache_clear()
    monkeypatch.setattr(Transformer, "forward", noted)
    options = {"hidden_dim": 8} if strategy == "pfedhn" else {}
    config = digits_config(
        strategy=strategy, adapt="head", backbone=backbone, sizes=("M",), rounds=4, cohort=3, options=options
    )
    after: list[int] = []
    federation = digits_federation(config, tmp_path / "kept")
    _, kept = federation.run(lambda number: after.append(sum(seen)))
    assert after[1] == after[3], "two rounds and an evaluation have shown it all examples"
    networks._network.cache_clear()
    client_for.cache_clear()
    monkeypatch.setattr(networks, "tail_of", lambda *arguments: None)
    other = digits_federation(config, tmp_path / "anew")
    _, anew = other.run()
    assert sum(seen) > 2 * after[3]
    networks._network.cache_clear()
    assert kept.metrics == pytest.approx(anew.metrics, abs=1e-4)
    for name, tensor in federation.state().items():
        torch.testing.assert_close(tensor, other.state()[name], rtol=0, atol=1e-5)


def test_on_demand_the_encoder_reads_the_backbones_features_once(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = Transformer.forward

    def noted(self: Transformer, inputs: Tensor) -> Tensor:
        seen.append(len(inputs) if len(inputs) > 2 else 0)  # two find out whether the head is the last layer
        return real(self, inputs)

    monkeypatch.setattr(Transformer, "forward", noted)
    client_for.cache_clear()
    config = digits_config(
        strategy="odpfl", adapt="head", backbone=backbone, sizes=("M",), rounds=3, cohort=3, options={"hidden_dim": 8}
    )
    after: list[int] = []
    federation = digits_federation(config, tmp_path)
    history, _ = federation.run(lambda number: after.append(sum(seen)))
    assert not [texts(outcome) for outcome in history.rounds if outcome.refused]
    assert after[1] == after[2], "rounds are trained, described and backpropagated on what the first ones have computed"
    for settings in digits_settings(config, tmp_path):
        client = client_for(settings)
        order = federation.grid.sent(DescribeOrder)[-1]
        network = transformers.AutoModelForImageClassification.from_pretrained(backbone)
        encoder = build_encoder(EncoderSpec(order.encoder, (8,), order.dim))
        encoder.load_state_dict(order.weights.layout.views(order.weights.values))
        with torch.no_grad():
            tokens = network.vit(pixel_values=client.train_data.inputs).last_hidden_state
            expected = encoder(tokens[:, 0])
        torch.testing.assert_close(describe(client, order).weights.values, expected, rtol=1e-4, atol=1e-5)


def test_there_is_something_to_send() -> None:
    with pytest.raises(ConfigError, match="expected more than head with fedper, whose clients keep the head"):
        make_algorithm(digits_config(strategy="fedper", adapt="head", options={}))
    algorithm = make_algorithm(digits_config(strategy="fedper", adapt="norms", options={}))
    with pytest.raises(ModelError, match="adapt: expected parameters of norms outside the head, found none"):
        algorithm.settle(introduction("one", input_shape=(1, 8, 8)))


def test_a_backbone_is_the_model(backbone: str) -> None:
    for changes in ({"model": "mlp"}, {"sizes": ["S"]}):
        with pytest.raises(ConfigError, match="as the backbone is the model"):
            make_run_config({"backbone": backbone, **changes}, {}, "a test")
