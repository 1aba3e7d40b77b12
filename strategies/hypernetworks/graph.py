"""The server's half of HAFL-GHN: average the clients' replies part by part, or take a step towards them.

strategies/ghn.py has the formulas. The hypernetwork is in `common/graphs`, because it also runs on clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, part_of
from hyperbloom.common.layout import Layout


def split_parts(layout: Layout, values: Tensor) -> dict[str, Tensor]:
    """Split a vector of hypernetwork parameters into its parts, as views; each part is contiguous."""
    sizes: dict[str, int] = {}
    for (name, _), size in zip(layout.shapes, layout.sizes, strict=True):
        sizes[part_of(name)] = sizes.get(part_of(name), 0) + size
    return dict(zip(sizes, values.split(list(sizes.values())), strict=True))


def average_parts(replies: Sequence[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Average every part over the clients that trained it, weighted by their examples.

    `replies` has for each client its number of examples (above zero) and the flat parts that it trained.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    for examples, parts in replies:
        for name, values in parts.items():
            weights[name] = weights.get(name, 0.0) + examples
            if name in sums:
                sums[name].add_(values, alpha=examples)
            else:
                sums[name] = values * examples
    return {name: total.div_(weights[name]) for name, total in sums.items()}


@dataclass(frozen=True)
class Target:
    """The wanted change of an architecture's weights, `(graph.layout.numel,)`; `weight` is its clients' examples."""

    graph: Graph
    weight: float
    delta: Tensor


def follow(hypernetwork: GraphHypernetwork, targets: Sequence[Target], steps: int, rate: float) -> None:
    """Move a hypernetwork by `rate * x` so that the weights it generates follow their targets, to first order.

    `x` minimises `sum_a w_a |J_a x - delta_a|^2` by preconditioned conjugate gradients (CGLS). The preconditioner of a
    part is the total weight of its users. Each step costs one vector-Jacobian and one Jacobian-vector product per
    architecture. Stopping early avoids fitting noise. In mode `linear` the first step is exact, each part's weighted
    mean, if all have equally many layers of each type. There is one target for each architecture.
    """
    parameters = dict(hypernetwork.named_parameters())
    users = {
        part: sum(target.weight for target in targets if part == SHARED or part in map(str, target.graph.types))
        for part in hypernetwork.parts()
    }
    scale = [1 / users[part_of(name)] if users[part_of(name)] else 0.0 for name in parameters]
    jacobians = [_Jacobian(hypernetwork(target.graph), list(parameters.values())) for target in targets]
    left = [target.delta for target in targets]
    found = [torch.zeros_like(parameter) for parameter in parameters.values()]
    direction: list[Tensor] = []
    before = 0.0
    for _ in range(steps):
        gradient = [torch.zeros_like(parameter) for parameter in parameters.values()]
        for jacobian, target, rest in zip(jacobians, targets, left, strict=True):
            for total, piece in zip(gradient, jacobian.transposed(rest * target.weight), strict=True):
                total.add_(piece)
        scaled = [values * factor for values, factor in zip(gradient, scale, strict=True)]
        size = float(sum((a.double() * b.double()).sum() for a, b in zip(gradient, scaled, strict=True)))
        if size == 0:  # all targets are reached
            break
        if before:
            scaled = [new + old * (size / before) for new, old in zip(scaled, direction, strict=True)]
        direction, before = scaled, size
        moved = [jacobian.times(direction) for jacobian in jacobians]
        length = sum(t.weight * float(m.double().square().sum()) for t, m in zip(targets, moved, strict=True))
        if length == 0:
            break
        stride = size / length
        for total, piece in zip(found, direction, strict=True):
            total.add_(piece, alpha=stride)
        left = [rest - stride * move for rest, move in zip(left, moved, strict=True)]
    with torch.no_grad():
        for parameter, step in zip(parameters.values(), found, strict=True):
            parameter.add_(step, alpha=rate)


class _Jacobian:
    """Products with the Jacobian `J` of generated weights `(P,)` and with its transpose."""

    def __init__(self, weights: Tensor, parameters: Sequence[Tensor]) -> None:
        self.weights, self.parameters = weights, parameters
        # Double backward: `J^T u` is linear in u, so its derivative along x gives `J x`.
        self.dummy = torch.zeros_like(weights, requires_grad=True)
        self.pulled = torch.autograd.grad(weights, parameters, self.dummy, create_graph=True, allow_unused=True)

    def transposed(self, values: Tensor) -> Sequence[Tensor]:
        """Return `J^T values`, by parameter."""
        return torch.autograd.grad(self.weights, self.parameters, values, retain_graph=True, materialize_grads=True)

    def times(self, direction: Sequence[Tensor]) -> Tensor:
        """Return `J direction`, `(P,)`."""
        used = [(one, by) for one, by in zip(self.pulled, direction, strict=True) if one is not None]
        outputs, along = zip(*used, strict=True)
        (moved,) = torch.autograd.grad(outputs, self.dummy, along, retain_graph=True)
        return moved
