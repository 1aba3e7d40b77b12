"""The client's part of ODPFL-HN: encode its examples, backpropagate through the encoder, fit it to a descriptor.

It uses no labels. Between the descriptor and its gradient the client keeps the encoder and the descriptor on its disk.
It then repeats the forward pass, which must give the same descriptor.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from hyperbloom.client.work.client import Client
from hyperbloom.client.work.features import on_features
from hyperbloom.client.work.sgd import FlatPart
from hyperbloom.common import encoders
from hyperbloom.common.errors import HyperbloomError, ModelError, WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.models import backbone_features
from hyperbloom.common.wire.exchanges import BackpropOrder, BackpropResult, DescribeOrder, DescribeResult, Fit

LOADED_ENCODERS = 4


def describe(client: Client, order: DescribeOrder) -> DescribeResult:
    """Return the descriptor of the training examples, and keep the encoder if a gradient follows."""
    client.releases.check_change()
    inputs = encoder_inputs(client)
    module, _ = loaded_encoder(order.encoder, inputs, order.dim, order.weights, order.version)
    with torch.no_grad():
        descriptor = encoders.encode(module, inputs.to(order.weights.values.dtype)).cpu()
    if order.keep:
        tensors = {"values": order.weights.values, "descriptor": descriptor}
        client.state.encoder.save(tensors, {"run": order.run_id, "version": order.version})
    return DescribeResult(order.version, Weights(encoders.descriptor_layout(order.dim), descriptor))


def backprop(client: Client, order: BackpropOrder) -> BackpropResult:
    """Return the vector-Jacobian product of the descriptor with the order's gradient."""
    client.releases.check_change()
    kept = client.state.encoder.load({"run": order.run_id, "version": order.version})
    if kept is None:
        raise WireError(f"order: for the encoder {order.version}, which this client does not hold")
    values, before = kept["values"], kept["descriptor"]
    inputs = encoder_inputs(client)
    spec = encoders.EncoderSpec(order.encoder, tuple(inputs.shape[1:]), order.dim)
    sent = Weights(encoders.encoder_layout(spec), values)
    module, part = loaded_encoder(order.encoder, inputs, order.dim, sent, order.version)
    order.weights.check(encoders.descriptor_layout(order.dim), values.dtype)
    part.gradient.zero_()
    now = encoders.encode_backward(module, inputs.to(values.dtype), order.weights.values.to(inputs.device)).cpu()
    if not torch.allclose(now, before, rtol=1e-4, atol=1e-5):
        raise HyperbloomError("the examples are no longer those that were described")
    client.state.encoder.path.unlink(missing_ok=True)
    return BackpropResult(order.version, Weights(part.layout, part.gradient.cpu().clone()))


def fit_encoder(fit: Fit, inputs: Tensor) -> Weights:
    """Fit the encoder to a descriptor on inputs `(N, ...)`, and return its change.

    Full-batch gradient descent on `mean_k (g(inputs) - e)_k^2` (equation 10 of ODPFL-HN, up to a factor).

    Raises:
        WireError: the encoder or the descriptor does not fit this client, or there are no steps.
    """
    if fit.steps < 1:
        raise WireError(f"order: expected at least 1 step to fit the encoder, found {fit.steps}")
    dim = fit.descriptor.layout.numel
    module, part = loaded_encoder(fit.encoder, inputs, dim, fit.gamma, fit.version)
    fit.descriptor.check(encoders.descriptor_layout(dim), fit.gamma.values.dtype)
    inputs, wanted = inputs.to(fit.gamma.values.dtype), fit.descriptor.values.to(inputs.device)
    velocity = torch.zeros_like(part.values)
    for _ in range(fit.steps):
        with torch.no_grad():
            error = encoders.encode(module, inputs) - wanted
        part.gradient.zero_()
        encoders.encode_backward(module, inputs, 2 * error / dim)
        with torch.no_grad():
            part.clip(encoders.FIT_CLIP)
            velocity.mul_(encoders.FIT_MOMENTUM).add_(part.gradient)
            part.values.sub_(velocity, alpha=fit.rate)
    return Weights(part.layout, part.values.cpu() - fit.gamma.values)


def encoder_inputs(client: Client) -> Tensor:
    """Return what the encoder reads: the training inputs `(N, ...)`, or a backbone's features of them."""
    if client.pretrained is None:
        return client.train_data.inputs
    compute = partial(backbone_features, client.pretrained)
    return on_features(client, client.backbone or "", client.train_data, compute).inputs


def loaded_encoder(
    name: str, inputs: Tensor, dim: int, weights: Weights, version: str
) -> tuple[encoders.Encoder, FlatPart]:
    """Return this process's encoder for inputs `(N, ...)` with these weights; WireError if they do not fit."""
    if encoders.version_of(weights.values) != version:
        raise WireError(f"order: the encoder is not the one that it says, {version}")
    spec = encoders.EncoderSpec(name, tuple(inputs.shape[1:]), dim)
    try:
        weights.check(encoders.encoder_layout(spec), weights.values.dtype)
        module, part = _module(spec, weights.values.dtype, inputs.device)
    except ModelError as error:
        raise WireError(f"order: {error}") from None
    part.load(weights.values)
    return module, part


@lru_cache(LOADED_ENCODERS)
def _module(spec: encoders.EncoderSpec, dtype: torch.dtype, device: torch.device) -> tuple[encoders.Encoder, FlatPart]:
    module = encoders.build_encoder(spec).to(device, dtype).eval()
    return module, FlatPart(module, encoders.encoder_layout(spec))
