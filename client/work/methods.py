"""Local methods on the client: for each kind of `common/methods.py` the function that trains by it.

Each takes the place of `sgd.train`. `sgd.steps` counts gradients of the loss on one batch, whatever they are for, so
that all methods have the same budget. What the server sent is clipped and starts with a fresh optimiser, what is
personal is not clipped and keeps its momentum, weight decay is on both: all as in `train`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperbloom.client.work.sgd import Flat, Network, backward, draw_batches, train
from hyperbloom.common.alignment import check_factor, distance
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.methods import Aligned, FedProx, FedRep, Frozen, Method, PerFedAvg, PFedMe
from hyperbloom.common.models import last_layer, represent
from hyperbloom.common.wire.orders import SGD
from hyperbloom.common.wire.weights import Weights

__all__ = ["LOCAL_METHODS", "Likeness", "check_method", "train_by"]


@dataclass(frozen=True)
class Likeness:
    """What representations are to resemble (FedHeNN).

    Attributes:
        inputs: of which they are taken, `(n, *shape)`.
        factor: of the kernel matrix to resemble, `(n, r)`; None: that of the weights as they were sent.
    """

    inputs: Tensor
    factor: Weights | None


def check_method(method: Method | None, private: str, steps: int) -> None:
    """Refuse a method that does not go with the rest of an order, before any work is done.

    Raises:
        WireError: says what does not fit.
    """
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
    """Train in place by a method, or by plain SGD if there is none; returns the mean loss."""
    if method is None:
        return train(network, data, sgd, seed)
    more = (likeness,) if isinstance(method, Aligned) else ()
    return LOCAL_METHODS[method.kind](network, data, sgd, seed, method, *more)


def fedprox(network: Network, data: Examples, sgd: SGD, seed: int, settings: FedProx) -> float:
    """SGD with `mu (w - w_sent)` added to the gradient of what the server sent, before it is clipped."""
    module, shared = network.module, network.shared
    sent, total = shared.values.clone(), _zero(data)
    module.train()
    for batch in draw_batches(len(data), sgd.batch_size, sgd.steps, seed).to(data.labels.device):
        total += backward(module, network.parts, data, batch)
        shared.gradient.add_(shared.values - sent, alpha=settings.mu)
        shared.clip(sgd.clip)
        for part in network.parts:
            part.step(sgd)
    return (total / sgd.steps).item()


def fedrep(network: Network, data: Examples, sgd: SGD, seed: int, settings: FedRep) -> float:
    """SGD on the head alone, then on the body alone; each has at least one step."""
    module, shared, personal = network.module, network.shared, network.personal
    head_steps = min(max(1, round(settings.head_share * sgd.steps)), sgd.steps - 1)
    batches = draw_batches(len(data), sgd.batch_size, sgd.steps, seed).to(data.labels.device)
    total = _zero(data)
    module.train()
    with _only(module, {name for name, _ in personal.layout.shapes}):
        for batch in batches[:head_steps]:
            total += backward(module, [personal], data, batch)
            personal.step(sgd)
    with _only(module, {name for name, _ in shared.layout.shapes}):
        for batch in batches[head_steps:]:
            total += backward(module, [shared], data, batch)
            shared.clip(sgd.clip)
            shared.step(sgd)
    return (total / sgd.steps).item()


def per_fedavg(network: Network, data: Examples, sgd: SGD, seed: int, settings: PerFedAvg) -> float:
    """SGD on `f(w - alpha grad f(w))`, with two gradients for a step, or four with the curvature.

    Its gradient is `(I - alpha H(w)) g` with `g = grad f(w - alpha grad f(w))`; first-order leaves `H` out,
    hessian-free takes `H g` from a difference of gradients at `w +- delta g`. The three are on batches of their own,
    and those of `g` are the batches of plain SGD. The step to `w - alpha grad f(w)` is not clipped.
    """
    module, shared = network.module, network.shared
    curved = settings.variant == "hessian-free"
    updates, total = sgd.steps // (4 if curved else 2), _zero(data)
    batches = draw_batches(len(data), sgd.batch_size, updates * (3 if curved else 2), seed)
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
        shared.clip(sgd.clip)
        shared.step(sgd)
    return (total / updates).item()


def pfedme(network: Network, data: Examples, sgd: SGD, seed: int, settings: PFedMe) -> float:
    """SGD on the Moreau envelope, whose gradient at `w` is `lamda (w - theta)`.

    `theta` takes `inner_steps` plain gradient steps on one batch's `f(theta) + lamda/2 |theta - w|^2`, from where it
    was after the last batch; the round begins with `theta = w`. Then `w` takes one step of the order's SGD, clipped and
    decayed as every model that was sent. The last of the inner solutions is shorter where the budget ends in it.
    """
    module, shared = network.module, network.shared
    w, total = Flat(shared.layout, shared.values.clone()), _zero(data)
    starts = range(0, sgd.steps, settings.inner_steps)
    batches = draw_batches(len(data), sgd.batch_size, len(starts), seed).to(data.labels.device)
    module.train()
    for start, batch in zip(starts, batches, strict=True):
        for _ in range(min(settings.inner_steps, sgd.steps - start)):
            total += backward(module, [shared], data, batch)
            shared.gradient.add_(shared.values - w.values, alpha=settings.lamda)
            shared.values.sub_(shared.gradient, alpha=settings.inner_rate)
        torch.sub(w.values, shared.values, out=w.gradient).mul_(settings.lamda)
        w.clip(sgd.clip)
        w.step(sgd)
    network.personal.load(shared.values)
    shared.values.copy_(w.values)
    return (total / sgd.steps).item()


def frozen(network: Network, data: Examples, sgd: SGD, seed: int, settings: Frozen) -> float:
    """SGD that leaves some parameters as they were sent, weight decay included."""
    module, shared = network.module, network.shared
    names = {name for name, _ in shared.layout.shapes}
    if not set(settings.names) < names:
        raise WireError(f"order: expected to freeze some of {', '.join(sorted(names))}, found {settings.names}")
    kept = [
        (place, shared.values[place].clone()) for name, place, _ in shared.layout.slices() if name in settings.names
    ]
    total = _zero(data)
    module.train()
    with _only(module, names - set(settings.names)):
        for batch in draw_batches(len(data), sgd.batch_size, sgd.steps, seed).to(data.labels.device):
            total += backward(module, [shared], data, batch)
            shared.clip(sgd.clip)
            shared.step(sgd)
            for place, values in kept:
                shared.values[place] = values
    return (total / sgd.steps).item()


def aligned(
    network: Network, data: Examples, sgd: SGD, seed: int, settings: Aligned, likeness: Likeness | None = None
) -> float:
    """SGD on the loss plus `eta (1 - CKA)`, each step on all of the round's reference inputs (FedHeNN).

    A private copy is what was trained.
    """
    module, shared = network.module, network.shared
    parts = [shared] if network.has_copy else network.parts
    apart = _distance(module, data, settings, likeness) if settings.eta else None
    total = _zero(data)
    module.train()
    for batch in draw_batches(len(data), sgd.batch_size, sgd.steps, seed).to(data.labels.device):
        total += backward(module, parts, data, batch)
        if apart is not None:
            penalty = settings.eta * apart()
            penalty.backward()
            total += penalty.detach()
        if shared.layout.numel:
            shared.clip(sgd.clip)
        for part in parts:
            part.step(sgd)
    if network.has_copy:
        network.personal.load(shared.values)
    return (total / sgd.steps).item()


def _distance(module: nn.Module, data: Examples, settings: Aligned, likeness: Likeness | None) -> Callable[[], Tensor]:
    """Return what computes how far the module's representations are from those that they are to resemble.

    Raises:
        WireError: there are no inputs, or the factor does not fit them.
    """
    if likeness is None:
        raise WireError("order: expected reference inputs, found none")
    inputs, factor = likeness.inputs.to(data.inputs), likeness.factor
    last = last_layer(module, tuple(inputs.shape[1:]))
    if factor is not None:
        target = check_factor(factor, len(inputs)).to(inputs)
    else:
        with torch.no_grad():
            target = represent(module, last, inputs).clone()
    return lambda: distance(
        settings.kernel, settings.bandwidth, represent(module, last, inputs), target, factor is not None
    )


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


LOCAL_METHODS: dict[str, Callable[..., float]] = {
    "aligned": aligned,
    "fedprox": fedprox,
    "fedrep": fedrep,
    "frozen": frozen,
    "per-fedavg": per_fedavg,
    "pfedme": pfedme,
}
"""By kind, in the form of `fedprox`; `aligned` takes a `Likeness` as well."""
