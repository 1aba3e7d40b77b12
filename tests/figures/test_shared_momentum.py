"""Momentum of the network for all: clients that change alike are averaged as in FedAvg with momentum on the server."""

import pytest
import torch

from figures.shared_momentum import ODPFLMomentum
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies import find_strategy
from hyperbloom.strategies.exchange import Client
from tests.strategies.conftest import digits_config, introduction, joined, update_of

NAME = "figures.shared_momentum:ODPFLMomentum"
ABOUTS = [introduction(name) for name in "abc"]


@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_what_all_change_alike_moves_the_network_for_all_as_sgd_with_momentum_does(momentum: float) -> None:
    assert find_strategy(NAME) is ODPFLMomentum
    config = digits_config(strategy=NAME, options={"hidden_dim": 8, "momentum": momentum})
    algorithm = joined(config, *ABOUTS)
    clients = [Client(about.client_id, row, about) for row, about in enumerate(ABOUTS)]
    one = torch.nn.Parameter(algorithm.learner.hypernetwork.start("S").clone())
    server = torch.optim.SGD([one], lr=1.0, momentum=momentum)
    for number in range(4):
        if number == 2:  # it goes on from a checkpoint
            algorithm = joined(config, *ABOUTS, checkpoint=algorithm.checkpoint())
        delta = torch.randn(one.shape, generator=torch.Generator().manual_seed(number))
        algorithm.learn([update_of(client, delta, sent=torch.zeros_like(delta)) for client in clients])
        one.grad = -delta
        server.step()
        torch.testing.assert_close(algorithm.learner.hypernetwork.start("S"), one.detach())


def test_the_papers_start_has_no_network_for_all() -> None:
    config = digits_config(strategy=NAME, options={"start": "hypernetwork"})
    with pytest.raises(ConfigError, match=r"options\.start: expected common, found hypernetwork"):
        joined(config, *ABOUTS)
