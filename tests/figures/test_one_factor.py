"""One factor for all dimensions: the proportions of the descriptors stay, their mean square is 1."""

import torch

from figures.one_factor import ODPFLOneFactor, OneFactorEncoder
from hyperbloom.common.encoders import EncoderSpec, build_encoder, encode
from hyperbloom.strategies import find_strategy


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


def test_it_is_a_strategy() -> None:
    assert find_strategy("figures.one_factor:ODPFLOneFactor") is ODPFLOneFactor
