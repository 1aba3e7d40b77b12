"""The server's side of the encoder: calibration, learning, state."""

import pytest
import torch

from hyperbloom.common.encoders import EncoderSpec
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.strategies.encoder import ServerEncoder, without_outliers


def encoder(seed: int = 0, dim: int = 3) -> ServerEncoder:
    return ServerEncoder(EncoderSpec("deepset", (1, 8, 8), dim), seed, 1e-4)


def test_one_far_descriptor_does_not_decide_the_calibration() -> None:
    honest = torch.randn(63, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01
    lie = torch.full((1, 4), 50.0, dtype=torch.float64)
    found = without_outliers(torch.cat([honest, lie]))
    assert torch.equal(found[:-1], honest)
    assert float(found.std(0).max()) < 1.3 * float(honest.std(0).max())
    few = torch.cat([honest[:6], lie])
    assert torch.equal(without_outliers(few), few)


def test_each_change_of_the_encoder_has_a_version_and_refuses_replies_of_the_one_before() -> None:
    made = encoder()
    before, change = made.version, torch.ones_like(made.gamma)
    made.add([change])
    assert made.version != before
    made.check_version(made.version)
    with pytest.raises(WireError, match=before):
        made.check_change(before, made.weights)


def test_state_brings_parameters_and_moments_back() -> None:
    first, other = encoder(), encoder(seed=1)
    first.step([torch.ones_like(first.gamma)], 50.0)
    other.load(first.state(), with_optimizer=True)
    assert other.version == first.version
    for each in (first, other):
        each.step([torch.ones_like(each.gamma)], 50.0)
    assert torch.equal(first.gamma, other.gamma)
    with pytest.raises(ConfigError, match="encoder of init_from"):
        encoder(dim=4).load(first.state(), with_optimizer=False)
