"""FedHeNN on the client: the reference set on its disk, and what its network makes of it.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757. The network stays here; what leaves is a factor of the kernel matrix of its
representations of inputs that are not the client's.
"""

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor, nn

from hyperbloom.client.state import ClientState
from hyperbloom.common.alignment import (
    LARGEST_REFERENCE,
    MISSING,
    digest_of,
    draw_rows,
    factor_of,
    factor_weights,
    widest,
)
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import ReferenceOrder, ReferenceResult, RepresentResult, TrainOrder, Weights
from hyperbloom.common.methods import Aligned, Method
from hyperbloom.common.models import last_layer, represent

__all__ = ["answer_representations", "keep_reference", "reference_rows", "with_reference"]

LOADED_REFERENCES = 2
_loaded: OrderedDict[str, Weights] = OrderedDict()  # by digest: all clients of a process read the same inputs


def keep_reference(state: ClientState, order: ReferenceOrder, input_shape: tuple[int, ...]) -> ReferenceResult:
    """Write the reference set to the client's disk.

    Raises:
        WireError: it is not what its digest says, or no set of inputs like the client's own.
    """
    arrived = order.weights
    if arrived is None:
        raise WireError("order: expected a reference set, found none")
    shapes = arrived.layout.shapes
    shape = shapes[0][1] if len(shapes) == 1 else ()
    if shape[1:] != input_shape or not 2 <= shape[0] <= LARGEST_REFERENCE:
        expected = f"2 to {LARGEST_REFERENCE} inputs of shape {input_shape}"
        raise WireError(f"order: expected a reference set of {expected}, found {shape}")
    if arrived.values.dtype not in (torch.float16, torch.float32):
        raise WireError(f"order: expected a reference set of float16 or float32, found {arrived.values.dtype}")
    arrived.check(arrived.layout, arrived.values.dtype)
    if digest_of(arrived) != order.reference:
        raise WireError("order: the reference set is not the one that its digest names")
    state.save_reference(order.reference, arrived.values.view(shape))
    return ReferenceResult(order.reference)


def reference_rows(state: ClientState, reference: str, rows: int, draw: int, device: torch.device) -> Tensor:
    """Return a round's inputs of the reference set, float32 `(rows, *shape)`; all if it has fewer.

    Raises:
        WireError: it is not here.
    """
    if rows < 2:
        raise WireError(f"order: expected at least 2 rows of the reference set, found {rows}")
    if not state.has_reference(reference):
        raise WireError(f"order: {MISSING} {reference[:12]} on this client, found none")
    kept = _loaded.get(reference) or state.load_reference(reference)
    if kept is None:
        raise WireError(f"order: {MISSING} {reference[:12]} on this client, found a damaged file")
    _loaded[reference] = kept
    while len(_loaded) > LOADED_REFERENCES:
        _loaded.popitem(last=False)
    inputs = kept.values.view(kept.layout.shapes[0][1])
    return inputs[draw_rows(len(inputs), rows, draw)].float().to(device)


def with_reference(state: ClientState, order: TrainOrder, device: torch.device) -> TrainOrder:
    """Return an order to align with its inputs, from the client's disk; any other as it is.

    Raises:
        WireError: they are not there.
    """
    method = Method.from_json(order.method) if order.method else None
    if not isinstance(method, Aligned) or not method.eta:
        return order
    inputs = reference_rows(state, method.reference, method.rows, method.draw, device)
    return replace(order, reference=Weights(Layout((("inputs", tuple(inputs.shape)),)), inputs.reshape(-1)))


def answer_representations(module: nn.Module, inputs: Tensor) -> RepresentResult:
    """Return what a network makes of some inputs.

    Raises:
        HyperbloomError: it is not finite.
    """
    with torch.no_grad():
        features = represent(module, last_layer(module, tuple(inputs.shape[1:])), inputs)
    if not bool(features.isfinite().all()):
        raise HyperbloomError("the representations are not finite: the network has diverged; lower its learning rate")
    return RepresentResult(factor_weights(factor_of(features, widest(len(inputs))).cpu()))
