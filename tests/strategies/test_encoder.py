"""The server's side of the encoder: calibration, learning, state."""

import pytest
import torch

from hyperbloom.common.encoders import EncoderSpec
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.strategies.encoder import FEWEST, OUTLIER, ServerEncoder, without_outliers


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


def test_outliers_are_clamped_by_hand() -> None:
    """Medians are 1 and 0, and the median distances from them 3 and 0; a tenth of their mean, 0.15, counts at least."""
    one, other = [-3.0, -2.0, -1.0, 0.0, 2.0, 4.0, 6.0, 100.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 9.0]
    assert len(one) == FEWEST
    expected = torch.tensor([[*one[:-1], 1 + 3 * OUTLIER], [*other[:-1], 0.15 * OUTLIER]])
    torch.testing.assert_close(without_outliers(torch.tensor([one, other]).T), expected.T)


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


@pytest.mark.parametrize("name", ["deepset", "private"])
def test_one_lie_decides_neither_the_scale_nor_the_centre(name: str) -> None:
    honest = torch.randn(63, 3, generator=torch.Generator().manual_seed(0)) * 0.01
    found = []
    for descriptors in (honest, torch.cat([honest, torch.full((1, 3), 50.0)])):
        made = ServerEncoder(EncoderSpec(name, (1, 8, 8), 3), 0, 1e-4)
        if "centre" in dict(made.layout.shapes):
            made.centre(descriptors)
        made.scale(descriptors)
        found.append(made.layout.views(made.gamma.detach()))
    for tensor in ("tail.weight", *(["centre"] if name == "private" else [])):
        torch.testing.assert_close(found[1][tensor], found[0][tensor], rtol=0.3, atol=0.01)


def test_a_dimension_in_which_clients_hardly_differ_is_not_blown_up() -> None:
    descriptors = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1.0, 1e-5])
    made, fresh = encoder(), encoder()
    made.scale(descriptors)
    factors = [
        float(one.norm() / other.norm())
        for one, other in zip(
            *(each.layout.views(each.gamma.detach())["tail.weight"] for each in (made, fresh)), strict=True
        )
    ]
    assert factors[2] == pytest.approx(10 / float(descriptors.std(0).mean()), rel=1e-4)


def test_a_change_of_another_form_or_that_is_not_finite_is_refused() -> None:
    made = encoder()
    ones = torch.ones_like(made.gamma)
    for weights, message in (
        (Weights(Layout((("tail.bias", (3,)),)), ones[:3]), "it is missing"),
        (Weights(made.layout, ones.double().detach()), "expected torch.float32"),
        (Weights(made.layout, (ones * float("nan")).detach()), "not finite"),
        (Weights(made.layout, (ones * 1e6).detach()), "expected a norm of at most"),
    ):
        with pytest.raises(WireError, match=message):
            made.check_change(made.version, weights)
    made.check_change(made.version, Weights(made.layout, ones.detach()))


def test_large_gradients_are_clipped_together() -> None:
    """Adam forgets the size of all its gradients, but not of one among others."""
    large, small = encoder(), encoder()
    ones = torch.ones_like(large.gamma).detach()
    for size in (1e6, 1e-3):
        large.step([ones * size, ones * size], 2.0)
        small.step([ones * min(2 * size, 2.0 / float(ones.norm()))], 1e9)
    torch.testing.assert_close(large.gamma, small.gamma)
