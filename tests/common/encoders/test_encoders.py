"""Encoders: sets have no order, large ones go in batches, and who states a bound keeps to it."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from hyperbloom.common.encoders import (
    ENCODERS,
    EncoderSpec,
    build_encoder,
    encode,
    encode_backward,
    encoder_layout,
    version_of,
)
from hyperbloom.common.errors import ConfigError, HyperbloomError, ModelError
from hyperbloom.common.layout import Layout

IMAGES, FEATURES, SMALL = (3, 16, 18), (12,), (1, 8, 8)
SHAPES = [IMAGES, FEATURES, SMALL]


def made(name: str, shape: tuple[int, ...] = FEATURES, dim: int = 5, seed: int = 0) -> torch.nn.Module:
    """Return an encoder with weights large enough for samples to matter."""
    torch.manual_seed(seed)
    return build_encoder(EncoderSpec(name, shape, dim)).double()


def samples(count: int, shape: tuple[int, ...] = FEATURES, seed: int = 1) -> Tensor:
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_a_set_has_no_order(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(EncoderSpec(name, shape, 5))  # float32, as on clients
    inputs = samples(40, shape).float()
    with torch.no_grad():
        descriptor = encoder(inputs)
        shuffled = encoder(inputs[torch.randperm(40)])
        other = encoder(torch.cat([inputs[1:], 3 * inputs[:1]]))
    assert descriptor.shape == (5,)
    assert torch.allclose(descriptor, shuffled, rtol=0, atol=1e-5)
    assert not torch.allclose(descriptor, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_same_set_has_the_same_descriptor_again(name: str) -> None:
    encoder, inputs = made(name).train(), samples(9)
    assert torch.equal(encode(encoder, inputs), encode(encoder, inputs))


def test_batches_of_a_mean_are_the_whole_set() -> None:
    encoder, inputs = made("private"), samples(10)
    whole = encoder(inputs)
    assert torch.allclose(encode(encoder, inputs, batch=4), whole, rtol=0, atol=1e-12)  # the last has two samples
    assert torch.equal(encode(encoder, inputs), whole)


@pytest.mark.parametrize("name", ["deepset", "dss", "set-transformer"])
def test_batches_of_others_are_averaged_by_their_sizes(name: str) -> None:
    encoder, inputs = made(name), samples(10)
    expected = 0.4 * encoder(inputs[:4]) + 0.4 * encoder(inputs[4:8]) + 0.2 * encoder(inputs[8:])
    assert torch.allclose(encode(encoder, inputs, batch=4), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, encoder(inputs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [FEATURES, IMAGES], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_product_with_the_jacobian_is_autograds_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    encoder, inputs, gradient = made(name, shape), samples(7, shape), samples(1, (5,))[0]
    parameters = list(encoder.parameters())
    expected = torch.autograd.grad(encode(encoder, inputs, batch=3) @ gradient, parameters)
    descriptor = encode_backward(encoder, inputs, gradient, batch=3)
    assert torch.allclose(descriptor, encode(encoder, inputs, batch=3), rtol=0, atol=1e-12)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter.grad, wanted, rtol=1e-9, atol=1e-12)
        assert wanted.abs().max() > 0  # no part of an encoder is dead


def test_deepset_pools_half_by_mean_and_half_by_maximum() -> None:
    encoder, inputs = made("deepset"), samples(6)
    x = (inputs @ encoder.pool1.linear.weight.T + encoder.pool1.linear.bias).relu()
    expected = torch.cat([x[:, :250].mean(0), x.max(0).values[250:]])
    assert torch.allclose(encoder.pool1(inputs), expected)
    assert [encoder.fc2.out_features, encoder.fc3.out_features] == [500, 500]


def test_deepset_for_images_has_the_target_networks_layers() -> None:
    shapes = dict(Layout.of(made("deepset", (3, 32, 32), dim=25)).shapes)
    assert shapes["conv1.weight"] == (16, 3, 5, 5) and shapes["conv2.weight"] == (32, 16, 5, 5)
    assert shapes["pool1.linear.weight"] == (200, 16 * 14 * 14) and shapes["pool2.linear.weight"] == (200, 32 * 25)
    assert (
        shapes["fc2.weight"] == (120, 400) and shapes["fc3.weight"] == (84, 120) and shapes["tail.weight"] == (25, 84)
    )


@pytest.mark.parametrize("shape", [IMAGES, FEATURES], ids=str)
def test_deepset_is_its_formula_sample_by_sample(shape: tuple[int, ...]) -> None:
    """Pooling of images, products and sums written out; torch convolves one image at a time."""
    encoder, inputs = made("deepset", shape), samples(3, shape)

    def linear(name: str, x: Tensor) -> Tensor:
        layer = encoder.get_submodule(name)
        return (layer.weight @ x + layer.bias).detach()

    def convolved(name: str, maps: Tensor) -> Tensor:
        layer = encoder.get_submodule(name)
        found = conv2d(maps[None], layer.weight, layer.bias)[0].detach()
        high, wide = (side // 2 for side in found.shape[1:])
        squares = found[:, : 2 * high, : 2 * wide].reshape(len(found), high, 2, wide, 2)
        return squares.amax((2, 4)).clamp(min=0)

    pooled = []
    first = [convolved("conv1", each) for each in inputs] if shape == IMAGES else list(inputs)
    second = [convolved("conv2", each) for each in first] if shape == IMAGES else []
    for name, maps in (("pool1", first), ("pool2", second)):
        if maps:
            rows = [linear(f"{name}.linear", each.flatten()).clamp(min=0) for each in maps]
            half = len(rows[0]) // 2
            pooled += [sum(rows)[:half] / 3, torch.stack(rows).max(0).values[half:]]
    x = torch.cat(pooled)
    for name in ("fc2", "fc3"):
        x = linear(name, x).clamp(min=0)
    torch.testing.assert_close(encoder(inputs).detach(), linear("tail", x), rtol=1e-9, atol=1e-12)


def test_dss_layers_see_the_mean_of_all() -> None:
    layer, x = made("dss").fc1, samples(4)
    expected = x @ layer.own.weight.T + layer.own.bias + (x.mean(0) @ layer.shared.weight.T)
    assert torch.allclose(layer(x), expected)


# ---------------------------------------------------------------------- sensitivity


def private(shape: tuple[int, ...] = FEATURES) -> torch.nn.Module:
    """Return a private encoder as it is in the course of training: with a centre and a tail that is no identity."""
    encoder = made("private", shape)
    with torch.no_grad():
        encoder.centre.copy_(0.4 * samples(1, (5,), seed=2)[0])
        encoder.tail.weight.copy_(samples(5, (5,), seed=3))
    return encoder


def test_no_exchanged_example_moves_a_private_descriptor_further_than_the_bound() -> None:
    encoder, count = private(), 5
    inputs = samples(count)
    bound = encoder.sensitivity(count)
    assert bound == pytest.approx(2 * float(torch.linalg.svdvals(encoder.tail.weight.detach())[0]) / count, rel=1e-3)
    worst = 0.0
    for seed in range(200):
        changed = inputs.clone()
        changed[0] = 1000 * samples(1, seed=seed)[0]
        worst = max(worst, float((encoder(changed) - encoder(inputs)).detach().norm()))
    assert 0 < worst <= bound


def test_the_bound_is_tight() -> None:
    """Two opposite features along the tail's first singular vector lead as far apart as it says."""
    encoder = private()
    direction = torch.linalg.svd(encoder.tail.weight.detach())[2][0]
    encoder.features = torch.nn.Identity()
    torch.nn.init.zeros_(encoder.centre)  # from any other centre, none are opposite to each other in these directions
    rest = samples(3, (5,))
    one, other = (encoder(torch.cat([rest, sign * direction[None]])) for sign in (1, -1))
    assert float((one - other).detach().norm()) == pytest.approx(encoder.sensitivity(4), rel=1e-3)


@pytest.mark.parametrize("size", [1.0, 2.0**10, 2.0**24])
def test_a_bias_that_rounds_does_not_tell_more_than_the_bound(size: float) -> None:
    """Steps of float32 at the bias are larger than what an example moves; whoever chose it could count them."""
    torch.manual_seed(0)
    encoder = made("private").float()
    encoder.features = torch.nn.Identity()
    encoder.tail.bias.data.fill_(size)
    count, worst = 1000, 0.0
    features = samples(count, (5,)).float()
    for seed in range(50):
        changed = features.clone()
        changed[0] = samples(1, (5,), seed=seed)[0].float()
        worst = max(worst, float((encoder(changed) - encoder(features)).detach().norm()))
    assert worst <= encoder.sensitivity(count)
    if size == 2.0**24:
        largest = float(torch.linalg.svdvals(encoder.tail.weight.detach())[0])
        # Without its share for rounding the bound is broken by one step.
        assert encoder.sensitivity(count) > 2.0 > 100 * 2 * largest / count


def test_features_that_overflow_are_as_good_as_others() -> None:
    encoder = made("private").float()
    encoder.features = torch.nn.Identity()
    huge = torch.full((2, 5), float("inf"))
    assert torch.isfinite(encoder(torch.cat([huge, samples(3, (5,)).float()]))).all()


def test_a_tail_whose_sums_overflow_has_no_bound() -> None:
    encoder = made("private")
    encoder.tail.weight.data.fill_(1e35)
    with pytest.raises(HyperbloomError, match="sums may overflow"):
        encoder.sensitivity(100)


def test_features_of_nothing_do_not_break_the_sphere() -> None:
    encoder = made("private")
    encoder.features = torch.nn.Identity()
    assert torch.isfinite(encoder(torch.zeros(2, 5, dtype=torch.float64))).all()


def test_a_fresh_private_descriptor_is_the_mean_direction_seen_from_the_centre() -> None:
    encoder = made("private", dim=2)
    encoder.features = torch.nn.Identity()
    mean = encoder(torch.tensor([[3.0, 4.0], [0.0, 2.0]]).double())
    assert torch.allclose(mean, torch.tensor([0.3, 0.9]).double())
    torch.nn.init.constant_(encoder.centre, 1.0)  # from (0.6, 0.8) back by (1, 1): (-0.4, -0.2)
    expected = torch.tensor([-0.4, -0.2]).double() / 0.2**0.5
    assert torch.allclose(encoder(torch.tensor([[3.0, 4.0]]).double()), expected)
    assert encoder.sensitivity(7) == pytest.approx(2 / 7, rel=1e-4)


@pytest.mark.parametrize("size", [0.6, 1e15, 1e19, 2e19, 1e38])
def test_no_centre_lets_an_example_move_a_private_descriptor_further(size: float) -> None:
    """It comes from the server, as the tail does: near the features, or where float32 rounds or overflows."""
    encoder, inputs = made("private").float(), samples(6).float()
    torch.nn.init.constant_(encoder.centre, size)
    for seed in range(20):
        changed = torch.cat([samples(1, seed=seed).float(), inputs[1:]])
        assert float((encoder(changed) - encoder(inputs)).detach().norm()) <= encoder.sensitivity(6)


@pytest.mark.parametrize("name", ["deepset", "dss", "set-transformer"])
def test_others_refuse_to_state_a_bound(name: str) -> None:
    with pytest.raises(HyperbloomError, match=r"^options.encoder: expected private, .* found \w+, for which no bound"):
        made(name).sensitivity(100)


def test_a_bound_needs_examples() -> None:
    with pytest.raises(ConfigError, match=r"^sensitivity: expected at least one example, found 0$"):
        made("private").sensitivity(0)


# ---------------------------------------------------------------------- by name


def test_layout_is_that_of_the_module_and_needs_no_memory() -> None:
    spec = EncoderSpec("dss", IMAGES, 4)
    assert encoder_layout(spec) == Layout.of(build_encoder(spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            EncoderSpec("mean", FEATURES, 3),
            r"^encoder: expected one of deepset, dss, private, set-transformer, found 'mean'",
        ),
        (EncoderSpec("dss", FEATURES, 0), "^encoder: expected inputs and a dimension"),
    ],
)
def test_what_cannot_be_built_is_told(spec: EncoderSpec, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_encoder(spec)


def test_a_version_is_the_content() -> None:
    values = torch.arange(4.0)
    assert version_of(values) == version_of(values.clone()) == version_of(torch.nn.Parameter(values))
    assert len({version_of(values), version_of(values + 1e-6), version_of(values.double())}) == 3
