"""One factor for all dimensions: the proportions of the descriptors stay, their mean square is 1. Or no factor."""

import pytest
import torch

from figures.one_factor import (
    ODPFLOneFactor,
    ODPFLOneModel,
    ODPFLUncalibrated,
    OneFactorEncoder,
    UncalibratedEncoder,
    ZeroEncoder,
)
from hyperbloom.common.encoders import EncoderSpec, build_encoder, encode
from hyperbloom.strategies import find_strategy
from hyperbloom.strategies.encoder import ServerEncoder
from tests.strategies.conftest import digits_config, introduction, joined


def test_the_descriptors_keep_their_proportions() -> None:
    made = OneFactorEncoder(EncoderSpec("deepset", (1, 8, 8), 5), seed=0, learning_rate=1e-4)
    encoder = build_encoder(made.spec).eval()
    clients = torch.rand(20, 30, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def described() -> torch.Tensor:
        encoder.load_state_dict(made.layout.views(made.gamma.detach()))
        return torch.stack([encode(encoder, inputs) for inputs in clients]).detach()

    before, version = described(), made.version
    made.scale(before)
    after = described()
    assert made.version != version
    torch.testing.assert_close(after.std(0) / after.std(0)[0], before.std(0) / before.std(0)[0], rtol=1e-4, atol=0)
    assert abs(float(after.std(0).square().mean()) - 1) < 1e-4 and after.mean(0).abs().max() < 1e-4
    made.scale(after)  # a second time changes nothing
    torch.testing.assert_close(described(), after, rtol=1e-4, atol=1e-4)


def test_without_a_factor_the_encoder_begins_as_torch_made_it() -> None:
    made = UncalibratedEncoder(EncoderSpec("deepset", (1, 8, 8), 5), seed=0, learning_rate=1e-4)
    before, version = made.gamma.detach().clone(), made.version
    made.scale(torch.randn(20, 5))
    assert torch.equal(made.gamma, before) and made.version == version


def test_with_zeros_clients_are_described_alike_whatever_is_learned() -> None:
    made = ZeroEncoder(EncoderSpec("deepset", (1, 8, 8), 5), seed=0, learning_rate=1e-1)
    made.scale(torch.randn(20, 5))
    made.step([torch.ones_like(made.gamma)], clip=1.0)
    encoder = build_encoder(made.spec).eval()
    encoder.load_state_dict(made.layout.views(made.gamma.detach()))
    assert not encode(encoder, torch.rand(30, 1, 8, 8)).any()


@pytest.mark.parametrize(
    ("strategy", "encoder"),
    [(ODPFLOneFactor, OneFactorEncoder), (ODPFLUncalibrated, UncalibratedEncoder), (ODPFLOneModel, ZeroEncoder)],
)
def test_each_is_a_strategy_with_its_encoder(strategy: type[ODPFLOneFactor], encoder: type[ServerEncoder]) -> None:
    name = f"figures.one_factor:{strategy.__name__}"
    assert find_strategy(name) is strategy
    algorithm = joined(digits_config(strategy=name), introduction("north"))
    assert isinstance(algorithm, strategy) and type(algorithm.encoder) is encoder
