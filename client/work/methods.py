"""Local methods on the client: the training function of each kind in `common/methods.py`.

Each function replaces `sgd.train`. `sgd.steps` counts all gradients of the loss on a batch, so that all methods have
the same budget. As in `train`, the shared part is clipped and starts with a fresh optimiser, the personal part is not
clipped and keeps its momentum, and weight decay applies to both. All return the mean loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from hyperbloom.client.work.sgd import Flat, Network, start, take_steps, train
from hyperbloom.common.alignment import check_factor
from hyperbloom.common.cka import linear_cka_with
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Weights
from hyperbloom.common.methods import Aligned, Ditto, FedProx, FedRep, HyperFL, Method
from hyperbloom.common.models import last_layer, represent
from hyperbloom.common.wire.orders import SGD

Likeness = tuple[Tensor, Weights | None]
"""The target of representations (FedHeNN): inputs, and a factor `(n, r)` of a kernel matrix; None: as the sent ones."""


def check_method(method: Method | None, private: str, steps: int) -> None:
    """Raise a WireError, before any work, if a method does not fit the private part or the number of steps."""
    if method is None:
        if private == "copy":
            raise WireError("order: expected a method that trains the client's copy, found none")
        return
    if private not in method.private:
        raise WireError(f"order: expected private in {method.private} for {method.kind}, found {private!r}")
    if steps < method.fewest_steps:
        raise WireError(f"order: expected at least {method.fewest_steps} steps for {method.kind}, found {steps}")


def train_by(
    method: Method | None, network: Network, data: Examples, sgd: SGD, seed: int, likeness: Likeness | None = None
) -> float:
    """Train in place by a method, or by plain SGD if it is None, and return the mean loss."""
    if method is None:
        return train(network, data, sgd, seed)
    more = (likeness,) if isinstance(method, Aligned) else ()
    return LOCAL_METHODS[method.kind](network, data, sgd, seed, method, *more)


def fedprox(network: Network, data: Examples, sgd: SGD, seed: int, settings: FedProx) -> float:
    """SGD with `mu (w - w_sent)` added to the gradient of the shared part before clipping."""
    return train(network, data, sgd, seed, add=_pull(network.shared, settings.mu))


def _pull(part: Flat, strength: float) -> Callable[[], None]:
    """Return a function that adds `strength` times the distance from the present values to the gradient."""
    sent = part.values.clone()

    def add() -> None:
        part.gradient.add_(part.values - sent, alpha=strength)

    return add


def ditto(network: Network, data: Examples, sgd: SGD, seed: int, settings: Ditto) -> float:
    """SGD as in FedAvg, then on the personal model with `lamda (v - w_sent)` in its gradient, on the same batches."""
    shared, personal, pull = network.shared, network.personal, _pull(network.shared, settings.lamda)
    batches, total = start(network, data, sgd, seed)
    take_steps(network, [shared], data, sgd, batches, total)
    trained = shared.values.clone()
    shared.load(personal.values)
    shared.momentum = personal.momentum
    swapped = Network(network.module, personal, shared)  # the personal model is not clipped
    take_steps(swapped, [shared], data, sgd, batches, torch.zeros_like(total), pull)
    personal.load(shared.values)
    personal.momentum, shared.momentum = shared.momentum, None
    shared.values.copy_(trained)
    return (total / sgd.steps).item()


def fedrep(network: Network, data: Examples, sgd: SGD, seed: int, settings: FedRep) -> float:
    """SGD on the head only, then on the body only, with at least one step each."""
    head_steps = min(max(1, round(settings.head_share * sgd.steps)), sgd.steps - 1)
    batches, total = start(network, data, sgd, seed)
    head, body, faster = [network.personal], [network.shared], sgd
    if isinstance(settings, HyperFL):  # the embedding comes first; neither keeps its momentum
        embedding, last = network.personal.cut()
        head, body = [last], [embedding, network.shared]
        faster = replace(sgd, learning_rate=settings.head_rate * sgd.learning_rate)
    for parts, how, some in ((head, faster, batches[:head_steps]), (body, sgd, batches[head_steps:])):
        with train_only(network.module, {name for part in parts for name, _ in part.layout.shapes}):
            take_steps(network, parts, data, how, some, total)
    return (total / sgd.steps).item()


def aligned(
    network: Network,
    data: Examples,
    sgd: SGD,
    seed: int,
    settings: Aligned,
    likeness: Likeness | None = None,
    similarity_to: Callable[[Tensor], Callable[[Tensor], Tensor]] = linear_cka_with,
) -> float:
    """SGD on the loss plus `eta (1 - CKA)`, with all of the round's reference inputs in each step (FedHeNN).

    A private copy gets the trained weights.
    """
    align = _alignment(network.module, data, likeness, settings.eta, similarity_to) if settings.eta else None
    loss = train(network, data, sgd, seed, [network.shared] if network.has_copy else network.parts, align)
    if network.has_copy:
        network.personal.load(network.shared.values)
    return loss


def _alignment(
    module: nn.Module,
    data: Examples,
    likeness: Likeness | None,
    eta: float,
    similarity_to: Callable[[Tensor], Callable[[Tensor], Tensor]],
) -> Callable[[], Tensor]:
    """Return a function that adds the gradient of `eta (1 - CKA)` and returns this term."""
    if likeness is None:
        raise WireError("order: expected reference inputs, found none")
    inputs, factor = likeness[0].to(data.inputs), likeness[1]
    last = last_layer(module, tuple(inputs.shape[1:]))
    if factor is not None:
        target = check_factor(factor, len(inputs)).to(inputs)
    else:
        with torch.no_grad():
            target = represent(module, last, inputs).clone()
    similarity = similarity_to(target)

    def align() -> Tensor:
        penalty = eta * (1 - similarity(represent(module, last, inputs)))
        if penalty.requires_grad:  # what an own network with a frozen body sees cannot be aligned
            penalty.backward()
        return penalty.detach()

    return align


@contextmanager
def train_only(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Compute gradients only of the parameters in `names` that are not frozen."""
    others = [each for name, each in module.named_parameters() if each.requires_grad and name not in names]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_()


LOCAL_METHODS: dict[str, Callable[..., float]] = {
    "aligned": aligned,
    "ditto": ditto,
    "fedprox": fedprox,
    "fedrep": fedrep,
    "hyperfl": fedrep,
}
"""Functions by kind, with the signature of `fedprox`; `aligned` also takes a `Likeness`."""
