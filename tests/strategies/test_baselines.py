"""FedAvg and Local against plain loops and averages by hand."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hyperbloom.common.config import LocalConfig, RunConfig
from hyperbloom.common.data import ClientData, load_client_data
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.messages import TrainOrder, TrainResult, Weights
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.roster import Roster
from tests.strategies.conftest import (
    RUN_ID,
    Inline,
    assert_same,
    digits_config,
    digits_federation,
    digits_settings,
    introduction,
    scripted_grid,
)
from tests.strategies.reference import LocalSGD, local_loop, seed_of

LOCAL = LocalConfig(steps=5, batch_size=16, learning_rate=0.1, momentum=0.8, weight_decay=5e-3, clip=0.7)
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


def plain_settings(clip: float | None) -> LocalSGD:
    return LocalSGD(**(LOCAL.order(1, 1) | {"clip": clip}))


# ---------------------------------------------------------------------- FedAvg


def test_fedavg_is_the_average_by_number_of_examples() -> None:
    examples, length = {"a": 10, "b": 30, "c": 60}, 403
    returned = {n: torch.randn(length, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(examples)}
    orders: list[tuple[str, Tensor]] = []

    def train(name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None and order.reply == "weights" and order.private == "none"
        orders.append((name, order.weights.values))
        return TrainResult(1.0, 0.0, Weights(order.weights.layout, returned[name] * order.round))

    abouts = [introduction(name, train_examples=n) for name, n in examples.items()]
    run = config("fedavg", clients=3, cohort=3, rounds=1, eval_every=1)
    federation = Inline(run, scripted_grid(abouts, train)).join()
    strategy, federated = federation.strategy, federation.federation
    for number in (1, 2):
        messages = strategy.configure_train(number, None, None, federation.grid)
        strategy.aggregate_train(number, list(federated.exchange([messages], 10.0)))
        mean = sum(n * returned[name].double() for name, n in examples.items()) / 100 * number
        found = torch.cat([tensor.flatten() for tensor in federation.state().values()])
        # Three products and two sums of numbers of size up to 8 in single precision.
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=2e-6)
        assert list(federation.state()) == ["fc1.weight", "fc1.bias", "head.weight", "head.bias"]
        if number == 1:
            average = found
    assert [name for name, _ in orders] == ["a", "b", "c"] * 2
    for _, weights in orders[3:]:
        assert torch.equal(weights, average)  # what was learned is what everyone gets next


def test_fedavg_without_an_answer_stays_as_it_is() -> None:
    def train(name: str, order: TrainOrder) -> TrainResult:
        raise RuntimeError("no")

    run = config("fedavg", clients=1, rounds=1, eval_every=1)
    federation = Inline(run, scripted_grid([introduction("a")], train)).join()
    before = federation.state()
    messages = federation.strategy.configure_train(1, None, None, federation.grid)
    federation.strategy.aggregate_train(1, list(federation.federation.exchange([messages], 10.0)))
    assert_same(before, federation.state())


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
    assert evaluation.scores["client-0"].test_correct == correct


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
        make_strategy(config("fedavg", sizes=("S", "M")), RUN_ID, Roster(0))


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
        assert evaluation.scores[name].test_correct == int((logits.argmax(1) == each.test.labels).sum())
        stored = tmp_path / name / "personal" / f"{RUN_ID}.safetensors"
        if stored.exists():
            torch.testing.assert_close(load_file(stored)["values"], flat(net), rtol=0, atol=ROUNDING)
    assert taken == 8 * LOCAL.steps
    assert len({name for (name,) in history.cohorts}) > 1


def test_local_sends_no_weights_and_orders_as_many_steps_as_the_others(tmp_path: Path) -> None:
    cohorts, steps = {}, {}
    for strategy in ("local", "pfedhn", "fedavg"):
        federation = digits_federation(config(strategy, cohort=2), tmp_path / strategy)
        history, _ = federation.run()
        cohorts[strategy] = history.cohorts
        grid = federation.grid
        asked = {(each["private"], each["reply"]) for each in grid.fields("train") if "reply" in each}
        assert asked == {{"local": ("all", "nothing"), "fedavg": ("none", "weights")}.get(strategy, ("none", "delta"))}
        fields = [*grid.fields("train"), *grid.fields("evaluate")]
        assert len(fields) == 2 * (2 * 4) + 2 * (3 * 2)
        steps[strategy] = sum(each.get("steps", 0) for each in fields)
        with_tensors = sum("values" in each or "tensors" in each for each in fields)
        with_bytes = sum(any(isinstance(value, bytes) for value in each.values()) for each in fields)
        expected = 0 if strategy == "local" else 2 * (2 * 4) + 3 * 2
        assert (with_tensors, with_bytes) == (expected, expected)
    assert cohorts["local"] == cohorts["pfedhn"] == cohorts["fedavg"]
    assert steps == dict.fromkeys(steps, 4 * 2 * LOCAL.steps)


def test_local_clients_of_all_sizes_train_side_by_side(tmp_path: Path) -> None:
    federation = digits_federation(config("local", cohort=3, sizes=("S", "M", "L")), tmp_path)
    federation.run()
    lengths = [len(load_file(path)["values"]) for path in sorted(tmp_path.glob("*/personal/*.safetensors"))]
    assert lengths == [3760, 7510, 15010]


@pytest.mark.parametrize("strategy", ["local", "fedavg"])
def test_baselines_do_not_start_from_another_run(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"init_from: {strategy} has no way"):
        make_strategy(config(strategy), RUN_ID, Roster(0)).load({})
