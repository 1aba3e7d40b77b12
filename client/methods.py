"""Local methods on the client: for each kind of `common/methods.py` the function that trains by it.

Each stands where `training.train` does for an order without a method. `order.steps` counts gradients of the loss on one
batch, whatever they are for, so that all methods have the same budget. What the server sent is clipped and starts with
a fresh optimiser, what is personal is not clipped and keeps its momentum, weight decay is on both: all as in `train`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyperbloom.client.training import Flat, FlatPart, backward, draw_batches, train
from hyperbloom.common.alignment import check_factor, distance
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.messages import TrainOrder
from hyperbloom.common.methods import Aligned, FedProx, FedRep, Frozen, Method, PerFedAvg, PFedMe
from hyperbloom.common.models import last_layer, represent

__all__ = ["LOCAL_METHODS", "Train", "trainer"]

Train = Callable[[nn.Module, FlatPart, Flat, Examples, TrainOrder], float]
"""Trains in place and returns the mean loss, as `training.train`."""


def trainer(order: TrainOrder) -> Train:
    """Return the function that trains as the order says.

    Raises:
        WireError: the method does not exist, has wrong hyperparameters, or does not go with the rest of the order.
    """
    if order.method is None:
        if order.private == "copy":
            raise WireError("order: expected a method that trains the client's copy, found none")
        return train
    method = Method.from_json(order.method)
    function = LOCAL_METHODS[method.kind]
    if order.private not in method.private:
        raise WireError(f"order: expected private in {method.private} for {method.kind}, found {order.private!r}")
    if order.steps < method.fewest_steps:
        raise WireError(f"order: expected at least {method.fewest_steps} steps for {method.kind}, found {order.steps}")
    return lambda module, shared, personal, data, own: function(module, shared, personal, data, own, method)


def fedprox(
    module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder, settings: FedProx
) -> float:
    """SGD with `mu (w - w_sent)` added to the gradient of what the server sent, before it is clipped."""
    sent, total = shared.values.clone(), _zero(data)
    parts = [part for part in (shared, personal) if part.layout.numel]
    module.train()
    for batch in draw_batches(len(data), order.batch_size, order.steps, order.seed).to(data.labels.device):
        total += backward(module, parts, data, batch)
        shared.gradient.add_(shared.values - sent, alpha=settings.mu)
        shared.clip(order.clip)
        for part in parts:
            part.step(order)
    return (total / order.steps).item()


def fedrep(
    module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder, settings: FedRep
) -> float:
    """SGD on the head alone, then on the body alone; each has at least one step."""
    head_steps = min(max(1, round(settings.head_share * order.steps)), order.steps - 1)
    batches = draw_batches(len(data), order.batch_size, order.steps, order.seed).to(data.labels.device)
    total = _zero(data)
    module.train()
    with _only(module, {name for name, _ in personal.layout.shapes}):
        for batch in batches[:head_steps]:
            total += backward(module, [personal], data, batch)
            personal.step(order)
    with _only(module, {name for name, _ in shared.layout.shapes}):
        for batch in batches[head_steps:]:
            total += backward(module, [shared], data, batch)
            shared.clip(order.clip)
            shared.step(order)
    return (total / order.steps).item()


def per_fedavg(
    module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder, settings: PerFedAvg
) -> float:
    """SGD on `f(w - alpha grad f(w))`, with two gradients for a step, or four with the curvature.

    Its gradient is `(I - alpha H(w)) g` with `g = grad f(w - alpha grad f(w))`; first-order leaves `H` out,
    hessian-free takes `H g` from a difference of gradients at `w +- delta g`. The three are on batches of their own,
    and those of `g` are the batches of plain SGD. The step to `w - alpha grad f(w)` is not clipped.
    """
    curved = settings.variant == "hessian-free"
    updates, total = order.steps // (4 if curved else 2), _zero(data)
    batches = draw_batches(len(data), order.batch_size, updates * (3 if curved else 2), order.seed)
    outer, inner, *rest = batches.to(data.labels.device).split(updates)
    module.train()
    for number in range(updates):
        start = shared.values.clone()
        backward(module, [shared], data, inner[number])
        shared.values.sub_(shared.gradient, alpha=settings.alpha)
        total += backward(module, [shared], data, outer[number])
        gradient = shared.gradient.clone()
        if curved:
            torch.add(start, gradient, alpha=settings.delta, out=shared.values)
            backward(module, [shared], data, rest[0][number])
            ahead = shared.gradient.clone()
            torch.sub(start, gradient, alpha=settings.delta, out=shared.values)
            backward(module, [shared], data, rest[0][number])
            gradient.sub_(ahead - shared.gradient, alpha=settings.alpha / (2 * settings.delta))
        shared.values.copy_(start)
        shared.gradient.copy_(gradient)
        shared.clip(order.clip)
        shared.step(order)
    return (total / updates).item()


def pfedme(
    module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder, settings: PFedMe
) -> float:
    """SGD on the Moreau envelope, whose gradient at `w` is `lamda (w - theta)`.

    `theta` takes `inner_steps` plain gradient steps on one batch's `f(theta) + lamda/2 |theta - w|^2`, from where it
    was after the last batch; the round begins with `theta = w`. Then `w` takes one step of the order's SGD, clipped and
    decayed as every model that was sent. The last of the inner solutions is shorter where the budget ends in it.
    """
    w, total = Flat(shared.layout, shared.values.clone()), _zero(data)
    starts = range(0, order.steps, settings.inner_steps)
    batches = draw_batches(len(data), order.batch_size, len(starts), order.seed).to(data.labels.device)
    module.train()
    for start, batch in zip(starts, batches, strict=True):
        for _ in range(min(settings.inner_steps, order.steps - start)):
            total += backward(module, [shared], data, batch)
            shared.gradient.add_(shared.values - w.values, alpha=settings.lamda)
            shared.values.sub_(shared.gradient, alpha=settings.inner_rate)
        torch.sub(w.values, shared.values, out=w.gradient).mul_(settings.lamda)
        w.clip(order.clip)
        w.step(order)
    personal.load(shared.values)
    shared.values.copy_(w.values)
    return (total / order.steps).item()


def frozen(
    module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder, settings: Frozen
) -> float:
    """SGD that leaves some parameters as they were sent, weight decay included."""
    names = {name for name, _ in shared.layout.shapes}
    if not set(settings.names) < names:
        raise WireError(f"order: expected to freeze some of {', '.join(sorted(names))}, found {settings.names}")
    kept = [
        (place, shared.values[place].clone()) for name, place, _ in shared.layout.slices() if name in settings.names
    ]
    total = _zero(data)
    module.train()
    with _only(module, names - set(settings.names)):
        for batch in draw_batches(len(data), order.batch_size, order.steps, order.seed).to(data.labels.device):
            total += backward(module, [shared], data, batch)
            shared.clip(order.clip)
            shared.step(order)
            for place, values in kept:
                shared.values[place] = values
    return (total / order.steps).item()


def aligned(
    module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder, settings: Aligned
) -> float:
    """SGD on the loss plus `eta (1 - CKA)`, each step on all of the round's reference inputs (FedHeNN).

    The representations are to resemble what the order's target says or, without one, those of the weights as they were
    sent. A private copy is what was trained.
    """
    parts = [part for part in (shared, personal) if part.layout.numel and not (part is personal and _beside(order))]
    apart = _distance(module, data, order, settings) if settings.eta else None
    total = _zero(data)
    module.train()
    for batch in draw_batches(len(data), order.batch_size, order.steps, order.seed).to(data.labels.device):
        total += backward(module, parts, data, batch)
        if apart is not None:
            penalty = settings.eta * apart()
            penalty.backward()
            total += penalty.detach()
        if shared.layout.numel:
            shared.clip(order.clip)
        for part in parts:
            part.step(order)
    if _beside(order):
        personal.load(shared.values)
    return (total / order.steps).item()


def _beside(order: TrainOrder) -> bool:
    return order.private == "copy"


def _distance(module: nn.Module, data: Examples, order: TrainOrder, settings: Aligned) -> Callable[[], Tensor]:
    """Return what computes how far the module's representations are from the target.

    Raises:
        WireError: there are no inputs, or the target does not fit them.
    """
    if order.reference is None:
        raise WireError("order: expected reference inputs, found none")
    inputs = order.reference.values.view(order.reference.layout.shapes[0][1]).to(data.inputs)
    last = last_layer(module, tuple(inputs.shape[1:]))
    if order.target is not None:
        target = check_factor(order.target, len(inputs)).to(inputs)
    else:
        with torch.no_grad():
            target = represent(module, last, inputs).clone()
    factored = order.target is not None
    return lambda: distance(settings.kernel, settings.bandwidth, represent(module, last, inputs), target, factored)


def _zero(data: Examples) -> Tensor:
    return torch.zeros((), device=data.labels.device)


@contextmanager
def _only(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Take gradients of these parameters alone, as far as they are not frozen."""
    others = [each for name, each in module.named_parameters() if each.requires_grad and name not in names]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_()


LOCAL_METHODS: dict[str, Callable[[nn.Module, FlatPart, Flat, Examples, TrainOrder, Any], float]] = {
    "aligned": aligned,
    "fedprox": fedprox,
    "fedrep": fedrep,
    "frozen": frozen,
    "per-fedavg": per_fedavg,
    "pfedme": pfedme,
}
"""By kind; the last argument are the method's hyperparameters."""
