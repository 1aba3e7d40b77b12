"""FedHeNN against plain loops with `n x n` kernel matrices, against what it is without alignment, and on the wire."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.common.alignment import check_factor, draw_rows
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import load_client_data
from hyperbloom.common.errors import CohortError, ConfigError, RefusedError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import RepresentOrder, RepresentResult, TrainOrder, Weights
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.rounds import run_rounds
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.roster import Roster
from tests.common.test_cka import naive_cka, naive_rbf
from tests.strategies.conftest import (
    RUN_ID,
    History,
    Inline,
    RecordingGrid,
    assert_same,
    digits_config,
    digits_federation,
    digits_settings,
    introduction,
    real_app,
)
from tests.strategies.reference import LocalSGD, batches, seed_of

LOCAL = LocalConfig(steps=4, batch_size=16, learning_rate=0.05, momentum=0.8, weight_decay=5e-3, clip=0.7)
INPUTS = 40
HERE = "tests.strategies.test_fedhenn"


def linear(width: int) -> nn.Sequential:
    """Return a linear network: its representation is a linear map of the inputs."""
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), body=nn.Linear(64, width), head=nn.Linear(width, 10)))


def narrow(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Make a user's own network."""
    return linear(6)


def wide(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Make another user's."""
    return linear(9)


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Return a public set of inputs that are nobody's."""
    inputs = np.random.default_rng(0).random((INPUTS, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "public.npz", x=inputs.astype(np.float16).astype(np.float32))
    return tmp_path / "public.npz"


Make = Callable[..., RunConfig]


@pytest.fixture
def run(public: Path) -> Make:
    """Return a function that describes a run; other keys than those of a run are options."""

    def make(variant: str = "heterogeneous", **changes: Any) -> RunConfig:
        keys = {key: changes.pop(key) for key in list(changes) if key in RunConfig.model_fields}
        options = {"rad": str(public), "variant": variant, "rows": 20, "eta": 0.5} | changes
        return digits_config(**({"strategy": "fedhenn", "options": options, "cohort": 3, "local": LOCAL} | keys))

    return make


def stored(folder: Path, name: str) -> Tensor:
    """Return what a client keeps."""
    return load_file(folder / name / "personal" / f"{RUN_ID}.safetensors")["values"]


def scores(history: History) -> list[Any]:
    return [vars(each.evaluation) if each.evaluation else None for each in history.rounds]


# ---------------------------------------------------------------------- without alignment


def test_homogeneous_without_alignment_is_fedavg_to_the_bit(run: Make, tmp_path: Path) -> None:
    states: dict[str, Mapping[str, Tensor]] = {}
    found: dict[str, Any] = {}
    for name, config in {
        "fedavg": digits_config(strategy="fedavg", options={}, cohort=3, local=LOCAL),
        "none": run("homogeneous", eta=0.0, score="global"),
        "some": run("homogeneous", eta=0.5, score="global"),
        "personal": run("homogeneous", eta=0.0),
    }.items():
        federation = digits_federation(config, tmp_path / name)
        history, _ = federation.run()
        states[name], found[name] = federation.state(), scores(history)
    assert_same(states["none"], states["fedavg"])
    assert_same(states["personal"], states["fedavg"])
    assert found["none"] == found["fedavg"] != found["personal"]
    assert not torch.equal(states["some"]["fc1.weight"], states["fedavg"]["fc1.weight"])


def test_heterogeneous_without_alignment_is_local_to_the_bit(run: Make, tmp_path: Path) -> None:
    models = ("mlp", "cnn-2", f"{HERE}:narrow")
    found: dict[str, Any] = {}
    for name, config in {
        "local": digits_config(strategy="local", options={}, cohort=3, local=LOCAL, models=models),
        "none": run(eta=0.0, models=models),
        "some": run(eta=0.5, models=models),
    }.items():
        history, _ = digits_federation(config, tmp_path / name).run()
        found[name] = scores(history)
    assert found["none"] == found["local"] and None not in found["none"][1::2]
    for client in ("client-0", "client-1", "client-2"):
        assert torch.equal(stored(tmp_path / "none", client), stored(tmp_path / "local", client))
        assert not torch.equal(stored(tmp_path / "some", client), stored(tmp_path / "local", client))


# ---------------------------------------------------------------------- against plain loops


def reference_rows(public: Path, config: RunConfig, number: int, rows: int = 20) -> Tensor:
    """Return the inputs of a round; the set has no more inputs than are sent, which shuffles them."""
    order = make_strategy(config, RUN_ID, Roster(0)).reference  # type: ignore[attr-defined]
    inputs = order.values.float().view(INPUTS, 1, 8, 8)
    known = {each.tobytes() for each in np.load(public)["x"]}
    assert {each.numpy().tobytes() for each in inputs} == known
    return inputs[draw_rows(INPUTS, rows, seed_of(config.seed, "reference", number))]


def kernel_of(net: nn.Sequential, inputs: Tensor, kernel: str) -> Tensor:
    features = net[:-1](inputs)
    return features @ features.T if kernel == "linear" else naive_rbf(features, 1.0)


def plain_loop(
    net: nn.Sequential, data: Any, target: Tensor, x: Tensor, eta: float, kernel: str, seed: int, optimizer: Any,
    clip: float | None,
) -> float:  # fmt: skip
    """Train on the task and the alignment, with the formula of CKA and torch's own SGD."""
    settings = LocalSGD(**(LOCAL.order(1, 1) | {"clip": clip}))
    losses = []
    for batch in batches(len(data.labels), settings, seed):
        net.zero_grad()
        loss = F.cross_entropy(net(data.inputs[batch]), data.labels[batch])
        loss = loss + eta * (1 - naive_cka(kernel_of(net, x, kernel), target))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def optimizer_of(net: nn.Module) -> torch.optim.SGD:
    return LocalSGD(**LOCAL.order(1, 1)).optimizer(net)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@pytest.mark.parametrize("normalise", [True, False])
def test_heterogeneous_is_a_plain_loop(run: Make, public: Path, tmp_path: Path, kernel: str, normalise: bool) -> None:
    config = run(
        models=(f"{HERE}:narrow", f"{HERE}:wide"), clients=2, cohort=2, rounds=2, kernel=kernel,
        normalise=normalise, weights={"client-1": 3.0}, seed=5,
    )  # fmt: skip
    federation = digits_federation(config, tmp_path)
    history, _ = federation.run()
    nets, data = {}, {}
    for each in digits_settings(config, tmp_path):
        torch.manual_seed(seed_of(5, each.client_id, "head."))
        nets[each.client_id] = linear(6 if each.client_id == "client-0" else 9)
        data[each.client_id] = load_client_data(each.data).train
    optimizers = {name: optimizer_of(net) for name, net in nets.items()}
    h = torch.eye(20) - 1 / 20
    for number in (1, 2):
        x = reference_rows(public, config, number)
        grams = {name: h @ kernel_of(net, x, kernel).detach() @ h for name, net in nets.items()}
        scales = {name: float(k.norm()) if normalise else 1.0 for name, k in grams.items()}
        mean = grams["client-0"] / scales["client-0"] + 3 * grams["client-1"] / scales["client-1"]
        for name, net in nets.items():
            seed = seed_of(5, name, number)
            loss = plain_loop(net, data[name], mean, x, 0.5 * number, kernel, seed, optimizers[name], None)
            assert history.rounds[number - 1].results[name].loss == pytest.approx(loss, rel=1e-4)
    for name, net in nets.items():
        wanted = torch.cat([p.detach().flatten() for p in net.parameters()])
        # Eight steps in single precision, and eigenvectors on the way.
        torch.testing.assert_close(stored(tmp_path, name), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_homogeneous_is_a_plain_loop_and_an_average(run: Make, public: Path, tmp_path: Path, kernel: str) -> None:
    config = run("homogeneous", clients=2, cohort=2, rounds=2, kernel=kernel, growth="sqrt", eta=3.0)
    federation = digits_federation(config, tmp_path)
    initial = federation.state()
    federation.run()
    data = {each.client_id: load_client_data(each.data).train for each in digits_settings(config, tmp_path)}
    layers = OrderedDict(flat=nn.Flatten(), fc1=nn.Linear(64, 50), act=nn.ReLU(), head=nn.Linear(50, 10))
    net = nn.Sequential(layers)
    glob = torch.cat([tensor.flatten() for tensor in initial.values()])
    total = sum(len(each) for each in data.values())
    for number in (1, 2):
        x, mean, trained = reference_rows(public, config, number), torch.zeros_like(glob), {}
        for name, each in data.items():
            nn.utils.vector_to_parameters(glob.clone(), net.parameters())
            target = kernel_of(net, x, kernel).detach()
            seed = seed_of(0, name, number)
            plain_loop(net, each, target, x, 3 * number**0.5, kernel, seed, optimizer_of(net), LOCAL.clip)
            trained[name] = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
            mean += trained[name] * len(each) / total
        glob = mean
    found = torch.cat([tensor.flatten() for tensor in federation.state().values()])
    torch.testing.assert_close(found, glob, rtol=0, atol=5e-6)
    for name in data:  # what is scored as personal
        torch.testing.assert_close(stored(tmp_path, name), trained[name], rtol=0, atol=5e-6)


def test_what_is_scored_in_the_homogeneous_variant(run: Make, tmp_path: Path) -> None:
    found = {}
    for score in ("personal", "global"):
        config = run("homogeneous", score=score, cohort=1, rounds=2, eval_every=1)
        federation = digits_federation(config, tmp_path / score)
        found[score] = federation
        history, _ = federation.run()
        evaluation = history.rounds[-1].evaluation
        assert evaluation is not None
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
        trained = {name for cohort in history.cohorts for name in cohort}
        assert 0 < len(trained) < 3
        for each in digits_settings(config, tmp_path / score):
            weights = torch.cat([tensor.flatten() for tensor in federation.state().values()])
            if score == "personal" and each.client_id in trained:
                weights = stored(tmp_path / score, each.client_id)
            nn.utils.vector_to_parameters(weights, net.parameters())
            test = load_client_data(each.data).test
            correct = int((net(test.inputs).argmax(1) == test.labels).sum())
            assert evaluation.scores[each.client_id].test_correct == correct
    assert_same(found["personal"].state(), found["global"].state())  # it is scored otherwise, and learns the same


# ---------------------------------------------------------------------- the lemma


def test_under_a_huge_eta_linear_networks_see_alike_up_to_rotation_and_scale(
    run: Make, public: Path, tmp_path: Path
) -> None:
    local = LocalConfig(steps=20, batch_size=4, learning_rate=2e-5, momentum=0.9, weight_decay=0.0)
    models = (f"{HERE}:narrow", f"{HERE}:wide")

    def apart(eta: float) -> float:
        """Return what is left of one network's representations after the best rotation and scale of the other's."""
        config = run(models=models, clients=2, cohort=2, rounds=15, eval_every=15, local=local, rows=40,
                     eta=eta, growth="constant")  # fmt: skip
        folder = tmp_path / str(eta)
        digits_federation(config, folder).run()
        x, made = reference_rows(public, config, 1, 40), []
        for name, width in (("client-0", 6), ("client-1", 9)):
            net = linear(width)
            nn.utils.vector_to_parameters(stored(folder, name), net.parameters())
            features = net[:-1](x).detach().double()
            features = features - features.mean(0)
            made.append(features / features.norm())
        # Orthogonal Procrustes: the best rotation reaches the nuclear norm.
        reached = float(torch.linalg.matrix_norm(made[0].T @ made[1], "nuc"))
        return 1 - reached**2

    alone, together = apart(0.0), apart(1e4)
    assert alone > 0.3
    assert together < 0.02


# ---------------------------------------------------------------------- the reference set


def orders(federation: Inline) -> list[dict[str, Any]]:
    return [each for each in federation.grid.fields("query.reference") if "values" in each]


@pytest.mark.parametrize("variant", ["heterogeneous", "homogeneous"])
def test_the_reference_set_is_sent_once_to_each_client_and_kept(run: Make, tmp_path: Path, variant: str) -> None:
    config = run(variant)
    first = digits_federation(config, tmp_path)
    first.run()
    assert len(orders(first)) == 3
    again = digits_federation(config, tmp_path)  # another run; clients say what they have
    history, _ = again.run()
    assert orders(again) == [] and history.rounds[0].refused == {}
    (tmp_path / "client-1" / "reference.safetensors").unlink()
    third = digits_federation(config, tmp_path)
    third.run()
    assert len(orders(third)) == 1


def test_another_reference_set_takes_the_place_of_the_first(run: Make, tmp_path: Path) -> None:
    digits_federation(run(), tmp_path).run()
    other = digits_federation(run(rad_size=30), tmp_path)
    other.run()
    assert len(orders(other)) == 3
    assert load_file(tmp_path / "client-0" / "reference.safetensors")["inputs"].shape == (30, 1, 8, 8)


@pytest.mark.parametrize("variant", ["heterogeneous", "homogeneous"])
def test_a_client_that_loses_it_misses_a_round_and_gets_it_again(run: Make, tmp_path: Path, variant: str) -> None:
    federation = digits_federation(run(variant, rounds=3), tmp_path)

    def lose(number: int) -> None:
        if number == 1:
            (tmp_path / "client-1" / "reference.safetensors").write_bytes(b"no")

    history, _ = federation.run(lose)
    assert history.cohorts[0] == history.cohorts[2] == ["client-0", "client-1", "client-2"]
    assert history.cohorts[1] == ["client-0", "client-2"]
    assert "expected the reference set" in history.rounds[1].refused["client-1"]
    assert len(orders(federation)) == 4


def test_each_round_has_rows_of_its_own(run: Make, tmp_path: Path) -> None:
    federation = digits_federation(run(), tmp_path)
    federation.run()
    draws = [each["draw"] for each in federation.grid.fields("query.represent") if "draw" in each]
    assert len(draws) == 3 * 4 and len(set(draws)) == 4


def test_those_who_share_the_round_or_all(run: Make, tmp_path: Path) -> None:
    for peers, asked in (("all", 3 * 4), ("cohort", 4)):
        federation = digits_federation(run(peers=peers, cohort=1), tmp_path / peers)
        federation.run()
        assert sum("draw" in each for each in federation.grid.fields("query.represent")) == asked


def test_novel_clients_do_not_teach(run: Make, tmp_path: Path) -> None:
    federation = digits_federation(run().model_copy(update={"novel": 33}), tmp_path)
    federation.run()
    asked = [each for each in federation.grid.fields("query.represent") if "draw" in each]
    assert len(asked) == 2 * 4


# ---------------------------------------------------------------------- what travels


def test_no_weights_and_no_architecture_leave_a_client(run: Make, tmp_path: Path) -> None:
    models = (f"{HERE}:narrow", "lstm-1", "cnn-3")
    federation = digits_federation(run(models=models, rounds=1, eval_every=1), tmp_path)
    history, _ = federation.run()
    assert history.cohorts == [["client-0", "client-1", "client-2"]]
    tensors = {
        (kind, key)
        for kind, content in federation.grid.passed
        for record in content.values()
        for key, value in dict(record).items()
        if isinstance(value, bytes)
    }
    factor = ("query.represent", "factor.values")
    assert tensors == {("query.reference", "values"), factor, ("train", "target.values")}
    shapes = [each["factor.tensors"] for each in federation.grid.fields("query.represent") if "factor.tensors" in each]
    assert shapes == ['[["factor",[20,6]]]', '[["factor",[20,20]]]', '[["factor",[20,20]]]']


def test_what_representations_weigh_is_traffic_of_the_round(run: Make, tmp_path: Path) -> None:
    class Traffic(Listener):
        def round_done(self, report: RoundReport) -> None:
            traffic.append((report.bytes_down, report.bytes_up))

    traffic: list[tuple[int, int]] = []
    federation = digits_federation(run(models=(f"{HERE}:narrow", f"{HERE}:wide", f"{HERE}:narrow")), tmp_path)
    run_rounds(federation.strategy, federation.federation, federation.config, [Traffic()])
    factors = 4 * 20 * (6 + 9 + 6)  # rows, and how wide each client's representation is
    target = 3 * 4 * 20 * 20  # of which there are no more directions than rows
    reference = 3 * 2 * INPUTS * 64  # once, in half precision
    little = 3 * 3 * 1000  # that is no tensor: three clients, three orders and answers
    assert [factors < up < factors + little for _, up in traffic] == 4 * [True]
    least = [reference + target, *3 * [target]]
    assert [low < down < low + little for low, (down, _) in zip(least, traffic, strict=True)] == 4 * [True]


def test_a_client_of_weight_zero_learns_without_teaching(run: Make, tmp_path: Path) -> None:
    weights = {"client-0": 0, "client-1": 0}
    config = run(rounds=1, eval_every=1, weights=weights, models=(f"{HERE}:wide", f"{HERE}:narrow"))
    federation = digits_federation(config, tmp_path)
    federation.run()
    factors = [RepresentResult.unpack(content).factor for kind, content in federation.grid.passed
               if kind == "query.represent" and "factor.values" in next(iter(content.values()))]  # fmt: skip
    targets = [TrainOrder.unpack(content).target for kind, content in federation.grid.passed
               if kind == "train" and "target.values" in next(iter(content.values()))]  # fmt: skip
    assert len(factors) == len(targets) == 3
    only = check_factor(factors[2], 20)
    for target in targets:
        made = check_factor(target, 20)
        wanted = only @ only.T
        torch.testing.assert_close(made @ made.T, wanted / wanted.norm(), rtol=0, atol=1e-6)


def test_where_nobody_teaches_all_train_alone(run: Make, tmp_path: Path) -> None:
    names = ("client-0", "client-1", "client-2")
    digits_federation(run(weights=dict.fromkeys(names, 0.0)), tmp_path / "none").run()
    digits_federation(digits_config(strategy="local", options={}, cohort=3, local=LOCAL), tmp_path / "local").run()
    for name in names:
        assert torch.equal(stored(tmp_path / "none", name), stored(tmp_path / "local", name))


# ---------------------------------------------------------------------- clients that are not what they should be


class Hostile(RecordingGrid):
    """A grid on which the first client answers `says` when it is asked for representations."""

    says: RepresentResult
    victim = 2

    def pull_messages(self, message_ids: Any) -> list[Message]:
        waiting = dict(self._waiting)
        replies = list(super().pull_messages(message_ids))
        for index, reply in enumerate(replies):
            asked = waiting[reply.metadata.reply_to_message_id]
            if asked.metadata.message_type == RepresentOrder.type and reply.metadata.src_node_id == self.victim:
                replies[index] = Message(self.says.pack(), reply_to=asked)
        return replies


def factor(tensor: Tensor) -> RepresentResult:
    return RepresentResult(Weights(Layout((("factor", tuple(tensor.shape)),)), tensor.reshape(-1)))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (factor(torch.full((20, 3), float("inf"))), "tensor factor: 60 values are not finite"),
        (factor(torch.ones(19, 3)), "factor: expected shape (20, up to 20), found (19, 3)"),
        (factor(1e9 * torch.ones(20, 3)), "factor: expected a norm of at most 1e+06, found 7.7e+09"),
        (RepresentResult(None), "factor: expected one, found none"),
    ],
)
def test_unsound_representations_are_refused_and_the_others_go_on(
    run: Make, tmp_path: Path, said: RepresentResult, reason: str
) -> None:
    config = run(rounds=1, eval_every=1)
    grid = Hostile(real_app, [each.to_node_config() for each in digits_settings(config, tmp_path)])
    grid.says = said
    history, _ = Inline(config, grid).join().run()
    assert history.rounds[0].refused["client-0"] == reason
    assert history.cohorts == [["client-1", "client-2"]]


@pytest.mark.parametrize("scale", [0.0, 1e5])
def test_no_client_drowns_the_others(run: Make, tmp_path: Path, scale: float) -> None:
    """Large activations count as much as small ones, and none at all for nothing."""
    found = {}
    for name in ("sound", "large"):
        config = run(rounds=1, eval_every=1)
        grid = Hostile(real_app, [each.to_node_config() for each in digits_settings(config, tmp_path / name)])
        said = factor((scale if name == "large" else 1.0) * torch.eye(20)[:, :2])
        grid.says = said
        federation = Inline(config, grid).join()
        history, _ = federation.run()
        assert len(history.cohorts[0]) == 3
        found[name] = federation.strategy.target
    kernels = {name: target @ target.T for name, target in found.items()}
    assert torch.allclose(kernels["sound"], kernels["large"], atol=1e-5) == (scale > 0)


# ---------------------------------------------------------------------- who takes part


def test_clients_too_weak_for_the_full_network_take_part(run: Make, tmp_path: Path) -> None:
    """Figure 1 of the paper: FedAvg must do without them."""
    config = run(sizes=("S", "M", "L"), models=("cnn-1", "cnn-2", "cnn-3"), cohort=3, model="mlp")
    history, _ = digits_federation(config, tmp_path / "own").run()
    assert history.cohorts == [["client-0", "client-1", "client-2"]] * 4
    assert all(not each.refused for each in history.rounds)
    by_size = digits_federation(run(sizes=("S", "M", "L"), cohort=3), tmp_path / "size")
    assert by_size.run()[0].cohorts == [["client-0", "client-1", "client-2"]] * 4
    for name in ("fedavg", "homogeneous"):
        config = run("homogeneous") if name == "homogeneous" else digits_config(strategy="fedavg", options={})
        weak = make_strategy(config.model_copy(update={"sizes": ("L",)}), RUN_ID, Roster(0))
        with pytest.raises(RefusedError, match="expected --size to be one of L, found S"):
            weak.check_newcomer(introduction("weak", input_shape=(1, 8, 8), num_classes=10, size="S"))


def test_a_client_whose_inputs_are_of_another_shape_is_refused(run: Make) -> None:
    strategy = make_strategy(run(), RUN_ID, Roster(0))
    with pytest.raises(RefusedError, match=r"^expected inputs of shape \(1, 8, 8\), as those on which this run"):
        strategy.check_newcomer(introduction("other", input_shape=(64,), num_classes=10))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rad": None}, "options.rad: expected a public or synthetic set of inputs"),
        ({"rad": "digits"}, "options.rad: digits is what the clients share"),
        ({"score": "global"}, "options.score: expected personal with variant=heterogeneous"),
        ({"variant": "homogeneous", "weights": {"a": 1.0}}, "options.weights: expected none with variant=homogeneous"),
        ({"variant": "homogeneous", "sizes": ("S", "M")}, "sizes: fedhenn averages one architecture"),
        ({"variant": "homogeneous", "models": ("mlp",)}, "models: fedhenn sends the same model to all clients"),
        ({"variant": "mixed"}, "variant: expected 'heterogeneous' or 'homogeneous', found 'mixed'"),
        ({"eta": -1.0}, "eta: expected"),
        ({"rows": 1}, "rows: expected greater than or equal to 2"),
        ({"rad_size": 5001}, "rad_size: expected less than or equal to 5000"),
        ({"asynchronous": True}, "asynchronous: fedhenn learns from whole rounds"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(run: Make, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_strategy(run(**changes), RUN_ID, Roster(0))
    assert str(caught.value).startswith(text)


def test_an_empty_reference_set_is_refused(run: Make, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=np.ones((1, 1, 8, 8), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"options.rad: expected at least 2 inputs"):
        make_strategy(run(rad=str(tmp_path / "one.npz")), RUN_ID, Roster(0))


def test_training_that_diverges_is_named_and_nobody_left_is_an_error(run: Make, tmp_path: Path) -> None:
    local = LocalConfig(steps=4, batch_size=16, learning_rate=1e30)
    federation = digits_federation(run(local=local, rounds=20, eval_every=20), tmp_path)
    with pytest.raises(CohortError, match="diverged"):
        federation.run()
