"""The client's half of ODPFL-HN: encode its examples, take a gradient back through the encoder, fit it to a descriptor.

Labels have no part in it. Between the descriptor and its gradient the client keeps the encoder and the descriptor on
its disk, and computes the forward pass again: it must give the same.
"""

from functools import cache

import torch
from torch import Tensor

from hyperbloom.client.state import ClientState
from hyperbloom.client.training import FlatPart
from hyperbloom.common.encoders import (
    Encoder,
    EncoderSpec,
    build_encoder,
    descriptor_layout,
    encode,
    encode_backward,
    encoder_layout,
    version_of,
)
from hyperbloom.common.errors import HyperbloomError, ModelError, WireError
from hyperbloom.common.messages import (
    BackpropOrder,
    BackpropResult,
    DescribeOrder,
    DescribeResult,
    FitOrder,
    Weights,
)

__all__ = ["backprop", "describe", "fit"]

FIT_MOMENTUM = 0.9
FIT_CLIP = 1.0
"""Norm to which a step's gradient is clipped: a descriptor far off must not throw the encoder out."""


def describe(order: DescribeOrder, inputs: Tensor, state: ClientState) -> DescribeResult:
    """Return the descriptor of `inputs` `(N, ...)`, and keep what a gradient that follows needs.

    Raises:
        WireError: the encoder does not fit the inputs, or is another than the order says.
    """
    spec = _spec(order.encoder, inputs, order.dim)
    module, _ = _loaded(spec, order.weights, order.version, inputs.device)
    with torch.no_grad():
        descriptor = encode(module, inputs.to(order.weights.values.dtype)).cpu()
    if order.keep:
        state.save_encoder(order.run_id, order.version, order.weights.values, descriptor)
    return DescribeResult(order.version, Weights(descriptor_layout(order.dim), descriptor))


def backprop(order: BackpropOrder, inputs: Tensor, state: ClientState) -> BackpropResult:
    """Return the vector-Jacobian product of the descriptor of `inputs` with the order's gradient.

    Raises:
        WireError: the client was described with another encoder, or not at all.
        HyperbloomError: the descriptor has become another, as the examples are no longer the same.
    """
    kept = state.load_encoder(order.run_id, order.version)
    if kept is None:
        raise WireError(f"order: for the encoder {order.version}, which this client does not hold")
    values, before = kept
    spec = _spec(order.encoder, inputs, order.dim)
    module, part = _loaded(spec, Weights(encoder_layout(spec), values), order.version, inputs.device)
    order.weights.check(descriptor_layout(order.dim), values.dtype)
    inputs = inputs.to(values.dtype)
    part.gradient.zero_()
    now = encode_backward(module, inputs, order.weights.values.to(inputs.device)).cpu()
    if not torch.allclose(now, before, rtol=1e-4, atol=1e-5):
        raise HyperbloomError("the examples are no longer those that were described")
    state.forget_encoder()
    return BackpropResult(order.version, Weights(part.layout, part.gradient.cpu().clone()))


def fit(order: FitOrder, inputs: Tensor) -> tuple[Weights, float]:
    """Fit the encoder to the given descriptor; return its change, and the mean squared distance before.

    Full-batch gradient descent on `mean_k (g(inputs) - e)_k^2` (equation 10 of ODPFL-HN, up to a factor).

    Raises:
        WireError: the order lacks encoder or descriptor, or they do not fit this client.
    """
    if order.gamma is None or order.descriptor is None or order.fit_steps < 1:
        raise WireError("order: expected an encoder, a descriptor and steps to fit it")
    dim = order.descriptor.layout.numel
    module, part = _loaded(_spec(order.encoder, inputs, dim), order.gamma, order.version, inputs.device)
    order.descriptor.check(descriptor_layout(dim), order.gamma.values.dtype)
    inputs, wanted = inputs.to(order.gamma.values.dtype), order.descriptor.values.to(inputs.device)
    velocity, first = torch.zeros_like(part.values), None
    for _ in range(order.fit_steps):
        with torch.no_grad():
            error = encode(module, inputs) - wanted
        first = float(error.square().mean()) if first is None else first
        part.gradient.zero_()
        encode_backward(module, inputs, 2 * error / dim)
        with torch.no_grad():
            part.clip(FIT_CLIP)
            velocity.mul_(FIT_MOMENTUM).add_(part.gradient)
            part.values.sub_(velocity, alpha=order.fit_rate)
    assert first is not None
    return Weights(part.layout, part.values.cpu() - order.gamma.values), first


def _spec(name: str, inputs: Tensor, dim: int) -> EncoderSpec:
    return EncoderSpec(name, tuple(inputs.shape[1:]), dim)


def _loaded(spec: EncoderSpec, weights: Weights, version: str, device: torch.device) -> tuple[Encoder, FlatPart]:
    """Return this process's encoder of an architecture with the given parameters; WireError if they do not fit."""
    if version_of(weights.values) != version:
        raise WireError(f"order: the encoder is not the one that it says, {version}")
    try:
        weights.check(encoder_layout(spec), weights.values.dtype)
        module, part = _module(spec, weights.values.dtype, device)
    except ModelError as error:
        raise WireError(f"order: {error}") from None
    part.load(weights.values)
    return module, part


@cache
def _module(spec: EncoderSpec, dtype: torch.dtype, device: torch.device) -> tuple[Encoder, FlatPart]:
    module = build_encoder(spec).to(device, dtype).eval()
    return module, FlatPart(module, encoder_layout(spec))
