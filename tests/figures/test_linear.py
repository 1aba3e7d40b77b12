"""The linear hypernetwork: a matrix, and a strategy."""

from typing import Any

import torch

from figures.linear import LinearHypernetwork
from tests.strategies.test_hypernetworks import LAYOUTS
from tests.strategies.test_pfedhn import built


def test_a_linear_hypernetwork_is_a_matrix() -> None:
    network: Any = LinearHypernetwork(LAYOUTS, 3)
    descriptors = torch.randn(5, 3)
    for size, layout in LAYOUTS.items():
        matrix = network.heads[size].weight
        assert matrix.shape == (layout.numel, 3)
        torch.testing.assert_close(network(descriptors, size), descriptors @ matrix.T)
    assert len(list(network.parameters())) == len(LAYOUTS)  # no bias: v = 0 gives the zero network


def test_the_strategy_has_such_a_hypernetwork() -> None:
    learner = built(strategy="figures.linear:PFedHNLinear", options={"embeddings": "sparse"}).learner
    assert isinstance(learner.hypernetwork, LinearHypernetwork) and learner.sparse
