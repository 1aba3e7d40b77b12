"""Spectral normalisation of the hypernetwork: norms are one, and the strategy refuses what has none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from figures.spectral_norm import SpectralHypernetwork
from tests.strategies.test_hypernetworks import LAYOUTS


def normalised_mlp(seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SpectralHypernetwork(LAYOUTS, 3, 8, **options).double()


def test_spectral_norm_leaves_every_layer_and_every_tensors_head_with_norm_one() -> None:
    network = normalised_mlp()
    network.train()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3.0)  # away from where the constructor has iterated already
        for _ in range(300):
            for size in LAYOUTS:
                network(torch.zeros(1, 3, dtype=torch.float64), size)
    network.eval()
    heads = [part for size in LAYOUTS for part in network.heads[size].parts]
    layers = [x for x in network.trunk if isinstance(x, nn.Linear)]
    assert [len(network.heads[size].parts) for size in LAYOUTS] == [3, 2]
    for layer in [*layers, *heads]:
        assert float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2)) == pytest.approx(1, abs=1e-8)
    # Stacking the parts first and normalising then would be another network.
    stacked = torch.cat([part.weight.detach() for part in network.heads["S"].parts])
    assert float(torch.linalg.matrix_norm(stacked, ord=2)) > 1.05


def test_spectral_norm_divides_what_is_generated_by_the_norms() -> None:
    network = normalised_mlp(3, hidden_layers=0)
    network.train()
    for _ in range(300):
        network(torch.zeros(1, 3, dtype=torch.float64), "S")
    network.eval()
    v = torch.randn(1, 3, dtype=torch.float64)

    def normalised(layer: Any, x: Tensor) -> Tensor:
        matrix: Tensor = layer.parametrizations.weight.original.detach()
        bias: Tensor = layer.bias.detach()
        largest: Tensor = torch.linalg.svdvals(matrix)[0]
        return x @ (matrix / largest).T + bias

    features = normalised(network.trunk[0], v)
    expected = torch.cat([normalised(part, features) for part in network.heads["S"].parts], dim=1)
    torch.testing.assert_close(network(v, "S").detach(), expected, rtol=0, atol=1e-9)
