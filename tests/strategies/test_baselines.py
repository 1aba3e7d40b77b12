"""FedAvg and Local against plain loops and averages by hand."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import ClientData, load_client_data
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Weights
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateOrder, Failed, TrainOrder, TrainResult
from hyperbloom.strategies import make_algorithm
from tests.strategies.conftest import (
    RUN_ID,
    Inline,
    assert_same,
    digits_config,
    digits_federation,
    digits_settings,
    introduction,
    joined,
    play,
    turn,
    update_of,
)
from tests.strategies.reference import LocalSGD, local_loop, seed_of

from ..scores import count_right

LOCAL = LocalConfig(
    steps=5, batch_size=16, learning_rate=0.1, momentum=0.8, weight_decay=5e-3, clip=0.7, schedule="constant"
)
# Some twenty steps of single precision on numbers below one: rounding errors of about 1e-7 each, that do not grow.
ROUNDING = 2e-6


def config(strategy: str, **changes: Any) -> RunConfig:
    return digits_config(**({"strategy": strategy, "options": {}, "local": LOCAL} | changes))


def plain_net(seed: int) -> nn.Sequential:
    """Return the target network of size S on the digits, initialised from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = OrderedDict(flat=nn.Flatten(), fc1=nn.Linear(64, 50), act=nn.ReLU(), head=nn.Linear(50, 10))
    return nn.Sequential(layers)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def data_of(federation: Inline, folder: Path) -> dict[str, ClientData]:
    return {each.client_id: load_client_data(each.data) for each in digits_settings(federation.config, folder)}


def plain_settings(clip: float | None, local: LocalConfig = LOCAL) -> LocalSGD:
    """Return local SGD as the run orders it, with another bound on the gradient."""
    return LocalSGD(local.steps, local.batch_size, local.learning_rate, local.momentum, local.weight_decay, clip)


# ---------------------------------------------------------------------- FedAvg

EXAMPLES = {"a": 10, "b": 30, "c": 61}


def test_fedavg_is_the_average_by_number_of_examples() -> None:
    length = 403
    returned = {n: torch.randn(length, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(EXAMPLES)}
    sent: list[Tensor] = []

    def train(name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None and order.reply == "weights" and order.target.private == "none"
        sent.append(order.weights.values)
        return TrainResult(1.0, Weights(order.weights.layout, returned[name] * order.scope.round))

    made = joined(config("fedavg"), *(introduction(name, train_examples=n) for name, n in EXAMPLES.items()))
    assert list(made.state()) == ["fc1.weight", "fc1.bias", "head.weight", "head.bias"]
    for number in (1, 2):
        play(made.round(turn(made, number)), train)
        mean = sum(n * returned[name].double() for name, n in EXAMPLES.items()) / 101 * number
        found = torch.cat([tensor.flatten() for tensor in made.state().values()])
        # Three products and two sums of numbers of size up to 8 in single precision.
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=2e-6)
        if number == 1:
            average = found
    assert all(torch.equal(weights, average) for weights in sent[3:])  # what was learned is what everyone gets next


def test_fedavgs_average_is_numpys_to_the_bit_and_no_weights_are_serialised(monkeypatch: pytest.MonkeyPatch) -> None:
    made = joined(config("fedavg"), *(introduction(name, train_examples=n) for name, n in EXAMPLES.items()))
    rows = [torch.randn(403, generator=torch.Generator().manual_seed(index)) for index in range(3)]
    updates = [update_of(client, row) for client, row in zip(made.clients.values(), rows, strict=True)]
    expected = np.zeros(403, dtype=np.float32)
    for row, examples in zip(rows, EXAMPLES.values(), strict=True):
        expected += row.numpy() * np.float32(examples / 101)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", None)  # the way of weights into a message
        patch.setattr(torch.Tensor, "tolist", None)
        made.learn(updates)
    assert made.global_weights.numpy().tobytes() == expected.tobytes()


def test_fedavg_without_an_answer_stays_as_it_is() -> None:
    made, refused = joined(config("fedavg"), introduction("a")), dict[str, str]()
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    play(made.round(turn(made)), lambda name, order: Failed(Reason.FAILED, "no"), refused)
    assert_same(before, made.state())
    assert refused == {"a": "no"}


def test_fedavg_of_one_client_is_plain_local_sgd(tmp_path: Path) -> None:
    federation = digits_federation(config("fedavg", clients=1, seed=5), tmp_path)
    (data,) = data_of(federation, tmp_path).values()
    net = plain_net(seed_of(5, "model"))
    start = flat(net)
    assert torch.equal(torch.cat([t.flatten() for t in federation.state().values()]), start)
    history, _ = federation.run()
    settings = plain_settings(LOCAL.clip)
    for number in range(1, 5):
        seed, fresh = seed_of(5, "client-0", number), settings.optimizer(net)
        loss = local_loop(net, data.train.inputs, data.train.labels, settings, seed, fresh)
        assert history.rounds[number - 1].results["client-0"].loss == pytest.approx(loss, rel=1e-5)
    found = torch.cat([t.flatten() for t in federation.state().values()])
    torch.testing.assert_close(found, flat(net), rtol=0, atol=ROUNDING)
    assert float((found - start).abs().max()) > 0.05
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    correct = int((net(data.test.inputs).argmax(1) == data.test.labels).sum())
    assert count_right(evaluation.scores["client-0"].test) == correct


def test_fedavg_of_two_clients_is_two_loops_and_an_average(tmp_path: Path) -> None:
    federation = digits_federation(config("fedavg", clients=2, cohort=2, rounds=2), tmp_path)
    data = data_of(federation, tmp_path)
    sizes = {name: len(each.train) for name, each in data.items()}
    assert len(set(sizes.values())) == 2  # or the weights would not show
    federation.run()
    glob, settings = flat(plain_net(seed_of(0, "model"))), plain_settings(LOCAL.clip)
    for number in (1, 2):
        total = torch.zeros_like(glob)
        for name, each in data.items():
            net = plain_net(0)
            torch.nn.utils.vector_to_parameters(glob.clone(), net.parameters())
            seed = seed_of(0, name, number)
            local_loop(net, each.train.inputs, each.train.labels, settings, seed, settings.optimizer(net))
            total += flat(net) * sizes[name] / sum(sizes.values())
        glob = total
    found = torch.cat([t.flatten() for t in federation.state().values()])
    torch.testing.assert_close(found, glob, rtol=0, atol=ROUNDING)


def test_fedavg_refuses_several_sizes() -> None:
    with pytest.raises(ConfigError, match="sizes: fedavg averages one architecture, found S, M"):
        make_algorithm(config("fedavg", sizes=("S", "M")))


# ---------------------------------------------------------------------- Local


def test_local_is_a_plain_loop_whose_optimiser_lasts(tmp_path: Path) -> None:
    federation = digits_federation(config("local", clients=3, rounds=8, seed=5), tmp_path)
    data = data_of(federation, tmp_path)
    history, _ = federation.run()
    assert federation.state() == {}
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    taken = 0
    for name, each in data.items():
        net, settings = plain_net(seed_of(5, name, "head.")), plain_settings(None)
        lasting = settings.optimizer(net)
        for number, cohort in enumerate(history.cohorts, start=1):
            if name in cohort:
                seed = seed_of(5, name, number)
                loss = local_loop(net, each.train.inputs, each.train.labels, settings, seed, lasting)
                assert history.rounds[number - 1].results[name].loss == pytest.approx(loss, rel=1e-5)
                taken += settings.steps
        logits = net(each.test.inputs)
        assert count_right(evaluation.scores[name].test) == int((logits.argmax(1) == each.test.labels).sum())
        stored = tmp_path / name / "personal" / f"{RUN_ID}.safetensors"
        if stored.exists():
            torch.testing.assert_close(load_file(stored)["values"], flat(net), rtol=0, atol=ROUNDING)
    assert taken == 8 * LOCAL.steps
    assert len({name for (name,) in history.cohorts}) > 1


def test_local_sends_no_weights_and_orders_as_many_steps_as_the_others(tmp_path: Path) -> None:
    cohorts, steps = {}, {}
    for strategy in ("local", "pfedhn", "fedavg"):
        federation = digits_federation(config(strategy, cohort=2, rounds=2), tmp_path / strategy)
        history, _ = federation.run()
        cohorts[strategy] = history.cohorts
        orders = federation.grid.sent(TrainOrder)
        asked = {(order.target.private, order.reply) for order in orders}
        assert asked == {{"local": ("all", "nothing"), "fedavg": ("none", "weights")}.get(strategy, ("none", "delta"))}
        steps[strategy] = sum(order.sgd.steps for order in orders)
        fields = [*federation.grid.fields(TrainOrder), *federation.grid.fields(EvaluateOrder)]
        assert len(fields) == 2 * (2 * 2) + 2 * 3
        with_tensors = sum("values" in each or "tensors" in each for each in fields)
        with_bytes = sum(any(isinstance(value, bytes) for value in each.values()) for each in fields)
        expected = 0 if strategy == "local" else 2 * (2 * 2) + 3
        assert (with_tensors, with_bytes) == (expected, expected)
    assert cohorts["local"] == cohorts["pfedhn"] == cohorts["fedavg"]
    assert steps == dict.fromkeys(steps, 2 * 2 * LOCAL.steps)


def test_local_clients_of_all_sizes_train_side_by_side(tmp_path: Path) -> None:
    federation = digits_federation(config("local", cohort=3, sizes=("S", "M", "L"), rounds=1, eval_every=1), tmp_path)
    federation.run()
    lengths = [len(load_file(path)["values"]) for path in sorted(tmp_path.glob("*/personal/*.safetensors"))]
    assert lengths == [3760, 7510, 15010]


@pytest.mark.parametrize("strategy", ["local", "fedavg"])
def test_baselines_do_not_start_from_another_run(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"init_from: {strategy} has no way"):
        make_algorithm(config(strategy)).check_start({})
