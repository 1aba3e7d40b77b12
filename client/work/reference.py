"""FedHeNN on the client: the reference set on its disk, and its network's representations of it.

The network stays on the client. Only a factor of the kernel matrix of its representations leaves, and the represented
inputs are public. strategies/fedhenn.py has the formulas.
"""

import torch
from torch import Tensor

from hyperbloom.client.work.client import Client
from hyperbloom.client.work.networks import load
from hyperbloom.common.alignment import LARGEST_REFERENCE, digest_of, draw_rows, factor_of, factor_weights, widest
from hyperbloom.common.data import laid_out
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.models import last_layer
from hyperbloom.common.models import represent as representations
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.exchanges import ReferenceOrder, ReferenceResult, RepresentOrder, RepresentResult


def keep_reference(client: Client, order: ReferenceOrder) -> ReferenceResult:
    """Write the reference set to the client's disk."""
    arrived, input_shape = order.weights, client.input_shape
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
    client.state.reference.save({"inputs": arrived.values.view(shape)}, {"digest": order.reference})
    return ReferenceResult(order.reference)


def represent(client: Client, order: RepresentOrder) -> RepresentResult:
    """Return a factor of the kernel matrix of the network's representations of a round's reference inputs."""
    client.releases.check_change()
    inputs = reference_rows(client, order.reference, order.rows, order.draw)
    module = load(client, order.scope, order.target, None).module
    with client.hide_own_model():
        with torch.no_grad():
            features = representations(module, last_layer(module, tuple(inputs.shape[1:])), inputs)
        if not bool(features.isfinite().all()):
            raise HyperbloomError(
                "the representations are not finite: the network has diverged; lower its learning rate",
                reason=Reason.DIVERGED,
            )
        return RepresentResult(factor_weights(factor_of(features, widest(len(inputs))).cpu()))


def reference_rows(client: Client, reference: str, rows: int, draw: int) -> Tensor:
    """Return a round's inputs of the reference set, float32 `(rows, *shape)`, or all if it has fewer.

    Raises:
        WireError: the set is missing or damaged, or `rows` is below 2.
    """
    if rows < 2:
        raise WireError(f"order: expected at least 2 rows of the reference set, found {rows}")
    kept = client.state.reference.load({"digest": reference})
    if kept is None:
        found = "a damaged file" if client.state.reference.is_of({"digest": reference}) else "none"
        raise WireError(
            f"order: expected the reference set {reference[:12]} on this client, found {found}",
            reason=Reason.LACKS_REFERENCE,
        )
    inputs = kept["inputs"]
    return laid_out(inputs[draw_rows(len(inputs), rows, draw)].float().to(client.device))
