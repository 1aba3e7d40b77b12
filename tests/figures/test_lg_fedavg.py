"""LG-FedAvg: FedAvg first, to the bit; then personal bodies from there under an averaged head."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import TrainOrder, TrainResult
from hyperbloom.strategies import make_algorithm
from tests.strategies.conftest import (
    RUN_ID,
    assert_same,
    digits_federation,
    digits_settings,
    introduction,
    joined,
    play,
    turn,
)
from tests.strategies.reference import local_loop, seed_of
from tests.strategies.test_baselines import LOCAL, ROUNDING, config, data_of, flat, plain_net, plain_settings

from ..scores import count_right

ALL = ["fc1.weight", "fc1.bias", "head.weight", "head.bias"]
HEAD = ALL[2:]
BODY_LENGTH = 64 * 50 + 50


def vector(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in state.values()])


def test_it_begins_as_fedavg_to_the_bit(tmp_path: Path) -> None:
    history, _ = digits_federation(config("lg-fedavg", cohort=2), tmp_path / "one").run()
    expected, _ = digits_federation(config("fedavg", cohort=2), tmp_path / "other").run()
    for number in (0, 1):  # two of four rounds
        assert_same(history.states[number], expected.states[number])
    assert history.rounds[1].evaluation == expected.rounds[1].evaluation
    assert not torch.equal(history.states[2]["head.weight"], expected.states[2]["head.weight"])


def test_bodies_part_from_fedavgs_and_heads_are_averaged(tmp_path: Path) -> None:
    """Two rounds of each kind against loops with one optimiser for the head, fresh, and one for the body, lasting."""
    federation = digits_federation(config("lg-fedavg", clients=3, cohort=2, rounds=5, eval_every=5,
                                          options={"fedavg_rounds": 2}), tmp_path)  # fmt: skip
    history, _ = federation.run()
    data = data_of(federation, tmp_path)
    start = vector(history.states[1])
    head, settings = start[BODY_LENGTH:], plain_settings(LOCAL.clip)
    nets = {}
    lasting = {}
    for name in data:
        nets[name] = plain_net(0)
        torch.nn.utils.vector_to_parameters(start.clone(), nets[name].parameters())
        lasting[name] = settings.optimizer(nets[name].fc1)  # type: ignore[arg-type]
    for number in (3, 4, 5):
        cohort = history.cohorts[number - 1]
        total = sum(len(data[name].train) for name in cohort)
        mean = torch.zeros_like(head)
        for name in cohort:
            net, train = nets[name], data[name].train
            torch.nn.utils.vector_to_parameters(head.clone(), net.head.parameters())  # type: ignore[union-attr]
            fresh = settings.optimizer(net.head)  # type: ignore[arg-type]
            local_loop(net, train.inputs, train.labels, settings, seed_of(0, name, number), fresh, lasting[name])
            mean += flat(net)[BODY_LENGTH:] * len(train) / total
        head = mean
        found = vector(history.states[number - 1])
        torch.testing.assert_close(found[BODY_LENGTH:], head, rtol=0, atol=ROUNDING)
        assert torch.equal(found[:BODY_LENGTH], start[:BODY_LENGTH])
    evaluation = history.rounds[-1].evaluation
    assert evaluation is not None
    trained = {name for cohort in history.cohorts[2:] for name in cohort}
    for name, each in data.items():
        torch.nn.utils.vector_to_parameters(head.clone(), nets[name].head.parameters())  # type: ignore[union-attr]
        correct = int((nets[name](each.test.inputs).argmax(1) == each.test.labels).sum())
        assert count_right(evaluation.scores[name].test) == correct
        if name in trained:
            stored = load_file(tmp_path / name / "personal" / f"{RUN_ID}.safetensors")["values"]
            torch.testing.assert_close(stored, flat(nets[name])[:BODY_LENGTH], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_only_heads_travel_once_a_client_has_its_body(compression: str, tmp_path: Path) -> None:
    run = config("lg-fedavg", cohort=2, rounds=8, eval_every=4, compression=compression)
    federation = digits_federation(run, tmp_path)
    history, _ = federation.run()
    orders, replies = (federation.grid.fields(TrainOrder, orders=asked) for asked in (True, False))
    names = [name for cohort in history.cohorts for name in cohort]
    seen: set[str] = set()
    for index, (name, order, reply) in enumerate(zip(names, orders, replies, strict=True)):
        apart = index >= 2 * 4  # two clients in each of four rounds of FedAvg
        expected = HEAD if apart and name in seen else ALL
        assert [tensor for tensor, _ in json.loads(order["tensors"])] == expected
        assert len(order["values"]) == (4 * 510 if expected == HEAD else 4 * (BODY_LENGTH + 510))
        if compression == "none":
            assert [tensor for tensor, _ in json.loads(reply["tensors"])] == (HEAD if apart else ALL)
        else:
            assert ("values" in reply, len(reply["encoded"]) < 4 * 510) == (False, apart)
        seen |= {name} if apart else set()
    assert len(seen) == 3 and any(len(order["values"]) == 4 * 510 for order in orders)


def test_a_body_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    """As after a lost reply, or a restart of the server: it sends all weights again."""
    federation = digits_federation(config("lg-fedavg", cohort=3, options={"fedavg_rounds": 1}), tmp_path / "one")
    forgetful = digits_federation(config("lg-fedavg", cohort=3, options={"fedavg_rounds": 1}), tmp_path / "other")
    federation.run()

    def forget(number: int) -> None:
        forgetful.algorithm._have_body.clear()

    forgetful.run(forget)
    assert_same(federation.state(), forgetful.state())


@pytest.mark.parametrize("lost", [True, False])
def test_a_client_that_has_lost_its_body_comes_back_to_fedavgs(lost: bool, tmp_path: Path) -> None:
    tiny = LOCAL.model_copy(update={"learning_rate": 1e-9})  # a body stays where it starts
    run = config("lg-fedavg", cohort=3, local=tiny, options={"fedavg_rounds": 1})
    federation = digits_federation(run, tmp_path)
    mine = torch.arange(BODY_LENGTH) / BODY_LENGTH
    path = tmp_path / "client-1" / "personal" / f"{RUN_ID}.safetensors"

    def come_back(number: int) -> None:
        if number != 3:
            return
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
        save_file(load_file(path) | {"values": mine}, path, about)
        if lost:
            path.unlink()
        federation.come_back(digits_settings(run, tmp_path))

    history, _ = federation.run(come_back)
    body = vector(history.states[0])[:BODY_LENGTH] if lost else mine
    torch.testing.assert_close(load_file(path)["values"], body, rtol=0, atol=1e-5)
    assert history.cohorts[3] == ["client-0", "client-1", "client-2"]


def test_one_that_comes_back_behind_its_reply_has_no_body_either() -> None:
    made = joined(config("lg-fedavg", options={"fedavg_rounds": 1}), introduction("a"))
    (client,) = made.clients.values()
    whole = made.whole.numel

    def train(name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None
        sent.append(order.weights.values.numel())
        if order.scope.round == 2:
            made.join(client, False)
        layout = made.layout(client)
        return TrainResult(0.0, Weights(layout, torch.zeros(layout.numel)))

    sent: list[int] = []
    for number in (1, 2, 3, 4):
        play(made.round(turn(made, number)), train)
    assert sent == [whole, whole, whole, whole - (4 * 50 + 50)]


def test_there_must_be_rounds_for_it() -> None:
    with pytest.raises(ConfigError, match="expected less than rounds = 4, found 4"):
        make_algorithm(config("lg-fedavg", options={"fedavg_rounds": 4}))
