"""The plug-in whose hypernetwork starts each tensor as torch would."""

import math

import pytest
import torch

from figures.scaled import start_like
from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks import ChunkedHypernetwork, MLPHypernetwork
from tests.strategies.conftest import digits_config, introduction, joined


@pytest.mark.parametrize("hypernetwork", ["mlp", "chunked"])
@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("strategy", ["PFedHNScaled", "ODPFLScaled"])
def test_a_scaled_start_has_torchs_deviation_in_each_tensor(hypernetwork: str, model: str, strategy: str) -> None:
    """A layer with n inputs has weights and biases between -1 / sqrt(n) and 1 / sqrt(n), of deviation 1 / sqrt(3 n)."""
    shape, options = (3, 16, 16), {"hypernetwork": hypernetwork, "chunk": 2048, "hidden_layers": 1}
    config = digits_config(
        strategy=f"figures.scaled:{strategy}", model=model, sizes=("S", "M"), options=options, clients=40
    )
    algorithm = joined(config, *(introduction(size, size=size, input_shape=shape, num_classes=10) for size in "SM"))
    clients = torch.randn(300, 11, generator=torch.Generator().manual_seed(1))  # as rows of an embedding table
    for size, layout in algorithm.setting.layouts.items():
        values = algorithm.learner.write(clients, size)
        fan_in = 0
        for (name, shape), part in zip(layout.shapes, values.split(layout.sizes, dim=1), strict=True):
            fan_in = math.prod(shape[1:]) if name.endswith("weight") else fan_in
            torchs = 1 / math.sqrt(3 * fan_in)
            # In chunks, most of a tensor is one network of torch's own, whose short biases deviate from the rule.
            within = 0.1 if hypernetwork == "mlp" or part.shape[1] > 100 else 0.5
            assert abs(float(part.std()) / torchs - 1) < within, name
            assert float(part.std(0).max()) > 0, name  # clients differ


def test_what_torch_sets_to_a_constant_starts_as_it() -> None:
    """Norms have weights of one and biases of zero."""
    layout = Layout((("norm.weight", (3,)), ("fc.weight", (4, 3))))
    for kind in (MLPHypernetwork, ChunkedHypernetwork):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = kind({"S": layout}, 2)
            draws = torch.cat([torch.ones(5, 3), 0.01 * torch.randn(5, 12)], dim=1)
            start_like(network, {"S": draws}, {"S": layout}, torch.randn(20, 2))
            written = network(torch.randn(20, 2), "S").detach()[:, :3]
        assert float((written - 1).abs().max()) < (1e-7 if kind is MLPHypernetwork else 0.02)
