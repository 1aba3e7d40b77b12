"""FedHeNN against plain loops with `n x n` kernel matrices, against what it is without alignment, and on the wire."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.common.alignment import check_factor, draw_rows
from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import load_client_data
from hyperbloom.common.errors import CohortError, ConfigError, RefusedError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.exchanges import ReferenceOrder, ReferenceResult, RepresentOrder, RepresentResult
from hyperbloom.common.wire.orders import Order, TrainOrder, TrainResult
from hyperbloom.server.loop.admission import check_introduction
from hyperbloom.server.loop.listener import Listener, RoundReport
from hyperbloom.server.loop.rounds import run_rounds
from hyperbloom.server.loop.session import check_run
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client
from tests.common.test_cka import naive_cka, naive_rbf
from tests.strategies.conftest import (
    RUN_ID,
    History,
    assert_same,
    digits_config,
    digits_federation,
    digits_settings,
    introduction,
    joined,
    play,
    texts,
    turn,
)
from tests.strategies.reference import batches, seed_of
from tests.strategies.test_baselines import plain_settings

from ..scores import count_right

LOCAL = LocalConfig(
    steps=4, batch_size=16, learning_rate=0.05, momentum=0.8, weight_decay=5e-3, clip=0.7, schedule="constant"
)
INPUTS = 40
HOMOGENEOUS = "fedhenn-homogeneous"
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

    def make(strategy: str = "fedhenn", **changes: Any) -> RunConfig:
        keys = {key: changes.pop(key) for key in list(changes) if key in RunConfig.model_fields}
        options = {"rad": str(public), "rows": 20, "eta": 0.5} | changes
        return digits_config(**({"strategy": strategy, "options": options, "cohort": 3, "local": LOCAL} | keys))

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
        "none": run(HOMOGENEOUS, eta=0.0, score="global"),
        "some": run(HOMOGENEOUS, eta=0.5, score="global"),
        "personal": run(HOMOGENEOUS, eta=0.0),
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
    algorithm: Any = make_algorithm(config)
    inputs = algorithm.inputs.values.float().view(INPUTS, 1, 8, 8)
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
    settings = plain_settings(clip, LOCAL)
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
    return plain_settings(None, LOCAL).optimizer(net)


def test_heterogeneous_is_a_plain_loop(run: Make, public: Path, tmp_path: Path) -> None:
    models = (f"{HERE}:narrow", f"{HERE}:wide")
    config = run(models=models, clients=2, cohort=2, rounds=2, seed=5)
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
        grams = {name: h @ kernel_of(net, x, "linear").detach() @ h for name, net in nets.items()}
        mean = torch.stack([k / k.norm() for k in grams.values()]).sum(0)
        for name, net in nets.items():
            seed = seed_of(5, name, number)
            loss = plain_loop(net, data[name], mean, x, 0.5 * number, "linear", seed, optimizers[name], None)
            assert history.rounds[number - 1].results[name].loss == pytest.approx(loss, rel=1e-4)
    for name, net in nets.items():
        wanted = torch.cat([p.detach().flatten() for p in net.parameters()])
        # Eight steps in single precision, and eigenvectors on the way.
        torch.testing.assert_close(stored(tmp_path, name), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_homogeneous_is_a_plain_loop_and_an_average(run: Make, public: Path, tmp_path: Path, kernel: str) -> None:
    strategy = HOMOGENEOUS if kernel == "linear" else "figures.fedhenn_rbf:FedHeNNRBF"
    config = run(strategy, clients=2, cohort=2, rounds=2, growth="sqrt", eta=3.0)
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


def test_the_homogeneous_one_scores_what_it_is_told_to(run: Make, tmp_path: Path) -> None:
    found = {}
    for score in ("personal", "global"):
        config = run(HOMOGENEOUS, score=score, cohort=1, rounds=2, eval_every=1)
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
            assert count_right(evaluation.scores[each.client_id].test) == correct
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


@pytest.mark.parametrize("strategy", ["fedhenn", HOMOGENEOUS])
def test_the_reference_set_is_sent_once_to_each_client_and_kept(run: Make, tmp_path: Path, strategy: str) -> None:
    config = run(strategy)
    first = digits_federation(config, tmp_path)
    first.run()
    assert len(first.grid.sent(ReferenceOrder)) == 3
    again = digits_federation(config, tmp_path)  # another run; clients say what they have
    history, _ = again.run()
    assert again.grid.sent(ReferenceOrder) == [] and history.rounds[0].refused == {}
    (tmp_path / "client-1" / "reference.safetensors").unlink()
    third = digits_federation(config, tmp_path)
    third.run()
    assert len(third.grid.sent(ReferenceOrder)) == 1


def test_another_reference_set_takes_the_place_of_the_first(run: Make, tmp_path: Path) -> None:
    digits_federation(run(), tmp_path).run()
    other = digits_federation(run(rad_size=30), tmp_path)
    other.run()
    assert len(other.grid.sent(ReferenceOrder)) == 3
    assert load_file(tmp_path / "client-0" / "reference.safetensors")["inputs"].shape == (30, 1, 8, 8)


@pytest.mark.parametrize("strategy", ["fedhenn", HOMOGENEOUS])
def test_a_client_that_loses_it_misses_a_round_and_gets_it_again(run: Make, tmp_path: Path, strategy: str) -> None:
    federation = digits_federation(run(strategy, rounds=3), tmp_path)

    def lose(number: int) -> None:
        if number == 1:
            (tmp_path / "client-1" / "reference.safetensors").write_bytes(b"no")

    history, _ = federation.run(lose)
    assert history.cohorts[0] == history.cohorts[2] == ["client-0", "client-1", "client-2"]
    assert history.cohorts[1] == ["client-0", "client-2"]
    assert "expected the reference set" in texts(history.rounds[1])["client-1"]
    assert len(federation.grid.sent(ReferenceOrder)) == 4


def test_a_client_that_comes_back_without_it_gets_it_again(run: Make) -> None:
    about = introduction("a", input_shape=(1, 8, 8), num_classes=10)
    made = joined(run(), about)
    for has, sent in ((None, 1), (False, 1), (True, 0)):
        if has is not None:
            made.join(Client("a", 0, replace(about, has_reference=has)), first=False)
        orders: list[Order] = []
        clients = list(made.clients.values())
        assert (
            play(made.send(clients), lambda name, order, to=orders: to.append(order) or ReferenceResult(made.reference))
            == clients
        )
        assert len(orders) == sent


@pytest.mark.parametrize("strategy", ["fedhenn", HOMOGENEOUS])
def test_a_client_that_cannot_keep_it_is_not_ordered_to_train(run: Make, tmp_path: Path, strategy: str) -> None:
    federation = digits_federation(run(strategy, rounds=1), tmp_path)
    (tmp_path / "client-1" / "reference.safetensors").mkdir(parents=True)
    history, _ = federation.run()
    assert history.rounds[0].refused.keys() == {"client-1"} and len(federation.grid.sent(TrainOrder)) == 2


def test_a_client_that_fails_for_another_reason_keeps_it(run: Make) -> None:
    made = joined(run(), introduction("a", input_shape=(1, 8, 8), num_classes=10))
    clients = list(made.clients.values())
    for reason, sent in ((None, True), (Reason.FAILED, False), (Reason.LACKS_REFERENCE, True)):
        if reason is not None:
            made.failed(clients[0], reason)
        answers = [ReferenceResult(made.reference)]
        assert play(made.send(clients), lambda name, order, left=answers: left.pop()) == clients
        assert not answers if sent else answers


def test_a_set_of_fewer_inputs_than_rows_is_taken_whole(run: Make) -> None:
    made: list[Any] = [make_algorithm(run(rows=rows)) for rows in (20, 500)]
    assert [each.method(1).rows for each in made] == [20, INPUTS]


def test_each_round_has_rows_of_its_own(run: Make, tmp_path: Path) -> None:
    federation = digits_federation(run(), tmp_path)
    federation.run()
    draws = [order.draw for order in federation.grid.sent(RepresentOrder)]
    assert len(draws) == 3 * 4 and len(set(draws)) == 4


class Scripted:
    """Clients that answer in one line; counts who was asked what."""

    def __init__(self, **factors: Tensor) -> None:
        self.factors, self.asked = factors, list[tuple[str, type[Order]]]()
        self.targets = list[Tensor]()

    def __call__(self, name: str, order: Any) -> Any:
        self.asked.append((name, type(order)))
        if isinstance(order, ReferenceOrder):
            return ReferenceResult(order.reference)
        if isinstance(order, RepresentOrder):
            return RepresentResult(factor(self.factors.get(name, torch.eye(20)[:, :2])))
        if order.resemble is not None:
            self.targets.append(check_factor(order.resemble, 20))
        return TrainResult(0.0)


def factor(tensor: Tensor) -> Weights:
    return Weights(Layout((("factor", tuple(tensor.shape)),)), tensor.reshape(-1))


def clients(config: RunConfig) -> Any:
    """Return an algorithm with three clients."""
    names = [f"client-{index}" for index in range(3)]
    return joined(config, *(introduction(name, input_shape=(1, 8, 8), num_classes=10) for name in names))


def test_all_say_how_they_see_the_rows_and_the_cohort_trains(run: Make) -> None:
    made, script = clients(run()), Scripted()
    for number in (1, 2):
        play(made.round(turn(made, number, [made.clients[1]])), script)
    kinds = [kind for _, kind in script.asked]
    assert [kinds.count(kind) for kind in (ReferenceOrder, RepresentOrder, TrainOrder)] == [3, 6, 2]


def test_novel_clients_do_not_teach(run: Make, tmp_path: Path) -> None:
    federation = digits_federation(run().model_copy(update={"novel": 33}), tmp_path)
    federation.run()
    assert len(federation.grid.sent(RepresentOrder)) == 2 * 4


# ---------------------------------------------------------------------- what travels


def test_no_weights_and_no_architecture_leave_a_client(run: Make, tmp_path: Path) -> None:
    models = (f"{HERE}:narrow", "lstm-1", "cnn-3")
    federation = digits_federation(run(models=models, rounds=1, eval_every=1), tmp_path)
    history, _ = federation.run()
    assert history.cohorts == [["client-0", "client-1", "client-2"]]
    tensors = {
        (kind, orders, key)
        for kind, orders, content in federation.grid.passed
        for record in content.values()
        for key, value in dict(record).items()
        if isinstance(value, bytes)
    }
    assert tensors == {
        ("query.reference", True, "values"),
        ("query.represent", False, "factor.values"),
        ("train", True, "resemble.values"),
    }
    shapes = [each["factor.tensors"] for each in federation.grid.fields(RepresentOrder, orders=False)]
    assert shapes == ['[["factor",[20,6]]]', '[["factor",[20,20]]]', '[["factor",[20,20]]]']


def test_what_representations_weigh_is_traffic_of_the_round(run: Make, tmp_path: Path) -> None:
    class Traffic(Listener):
        def round_done(self, report: RoundReport) -> None:
            traffic.append((report.bytes_down, report.bytes_up))

    traffic: list[tuple[int, int]] = []
    federation = digits_federation(run(models=(f"{HERE}:narrow", f"{HERE}:wide", f"{HERE}:narrow")), tmp_path)
    run_rounds(federation.loop(Traffic()))
    factors = 4 * 20 * (6 + 9 + 6)  # rows, and how wide each client's representation is
    target = 3 * 4 * 20 * 20  # of which there are no more directions than rows
    reference = 3 * 2 * INPUTS * 64  # once, in half precision
    little = 3 * 3 * 1000  # that is no tensor: three clients, three orders and answers
    assert [factors < up < factors + little for _, up in traffic] == 4 * [True]
    least = [reference + target, *3 * [target]]
    assert [low < down < low + little for low, (down, _) in zip(least, traffic, strict=True)] == 4 * [True]


# ---------------------------------------------------------------------- clients that are not what they should be


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (torch.full((20, 3), float("inf")), "tensor factor: 60 values are not finite"),
        (torch.ones(19, 3), "factor: expected shape (20, up to 20), found (19, 3)"),
        (1e9 * torch.ones(20, 3), "expected a norm of at most 1e+06, found 7.75e+09"),
    ],
)
def test_unsound_representations_are_refused_and_the_others_go_on(run: Make, said: Tensor, reason: str) -> None:
    made, script, refused = clients(run()), Scripted(**{"client-0": said}), dict[str, str]()
    play(made.round(turn(made)), script, refused)
    assert refused == {"client-0": reason}
    assert [name for name, kind in script.asked if kind is TrainOrder] == ["client-1", "client-2"]


@pytest.mark.parametrize("scale", [0.0, 1e5])
def test_no_client_drowns_the_others(run: Make, scale: float) -> None:
    """Large activations count as much as small ones, and none at all for nothing."""
    kernels = []
    generator = torch.Generator().manual_seed(0)
    others = {name: torch.randn(20, 6, generator=generator) for name in ("client-1", "client-2")}
    for size in (1.0, scale):
        made, script = clients(run()), Scripted(**{"client-0": size * torch.eye(20)[:, :2]}, **others)
        play(made.round(turn(made)), script)
        assert len(script.targets) == 3
        kernels.append(script.targets[0] @ script.targets[0].T)
    assert torch.allclose(*kernels, atol=1e-5) == (scale > 0)


# ---------------------------------------------------------------------- who takes part


def test_clients_too_weak_for_the_full_network_take_part(run: Make, tmp_path: Path) -> None:
    """Figure 1 of the paper: FedAvg must do without them."""
    config = run(sizes=("S", "M", "L"), models=("cnn-1", "cnn-2", "cnn-3"), cohort=3, model="mlp")
    history, _ = digits_federation(config, tmp_path / "own").run()
    assert history.cohorts == [["client-0", "client-1", "client-2"]] * 4
    assert all(not each.refused for each in history.rounds)
    by_size = digits_federation(run(sizes=("S", "M", "L"), cohort=3), tmp_path / "size")
    assert by_size.run()[0].cohorts == [["client-0", "client-1", "client-2"]] * 4
    for config in (run(HOMOGENEOUS), digits_config(strategy="fedavg", options={})):
        config = config.model_copy(update={"sizes": ("L",)})
        weak = introduction("weak", input_shape=(1, 8, 8), num_classes=10, size="S")
        with pytest.raises(RefusedError, match="expected --size to be one of L, found S"):
            check_introduction(weak, config, make_algorithm(config), None)


@pytest.mark.parametrize("strategy", ["fedhenn", HOMOGENEOUS])
def test_a_client_whose_inputs_are_of_another_shape_is_refused(run: Make, strategy: str) -> None:
    algorithm = make_algorithm(run(strategy))
    with pytest.raises(RefusedError, match=r"^expected inputs of shape \(1, 8, 8\), as those on which this run"):
        algorithm.serves(introduction("other", input_shape=(64,), num_classes=10), [])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rad": None}, "options.rad: expected a public or synthetic set of inputs"),
        ({"adapt": "head"}, "adapt: expected more than head, as what the frozen layers see cannot be aligned"),
        ({"rad": "digits"}, "options.rad: digits is what the clients share"),
        ({"score": "global"}, "score: unknown key in options of fedhenn."),
        ({"strategy": HOMOGENEOUS, "sizes": ("S", "M")}, "sizes: fedhenn-homogeneous averages one architecture"),
        ({"strategy": HOMOGENEOUS, "rad": None}, "options.rad: expected a public or synthetic set of inputs"),
        ({"eta": -1.0}, "eta: expected"),
        ({"rows": 1}, "rows: expected greater than or equal to 2"),
        ({"rad_size": 5001}, "rad_size: expected less than or equal to 5000"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(run: Make, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_algorithm(run(**changes))
    assert str(caught.value).startswith(text)


def test_an_empty_reference_set_is_refused(run: Make, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=np.ones((1, 1, 8, 8), dtype=np.float32))
    with pytest.raises(ConfigError, match=r"options.rad: expected at least 2 inputs"):
        check_run(run(rad=str(tmp_path / "one.npz")), uses_data_section=True)


def test_training_that_diverges_is_named_and_nobody_left_is_an_error(run: Make, tmp_path: Path) -> None:
    local = LocalConfig(steps=4, batch_size=16, learning_rate=1e30)
    federation = digits_federation(run(local=local, rounds=20, eval_every=20), tmp_path)
    with pytest.raises(CohortError, match="diverged"):
        federation.run()
