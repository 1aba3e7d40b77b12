"""The server's half of HAFL-GHN: the average of what clients return, part by part, or a step that follows it.

Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using Graph
HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, algorithm 1. The hypernetwork itself is in `common/graphs`, as it
runs on the clients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperbloom.common.graphs import SHARED, Graph, GraphHypernetwork, part_of
from hyperbloom.common.layout import Layout

__all__ = ["Target", "average_parts", "follow", "split_parts"]


def split_parts(layout: Layout, values: Tensor) -> dict[str, Tensor]:
    """Return the parts that lie one after the other in a vector of some of a hypernetwork's parameters, as views."""
    sizes: dict[str, int] = {}
    for (name, _), size in zip(layout.shapes, layout.sizes, strict=True):
        sizes[part_of(name)] = sizes.get(part_of(name), 0) + size
    return dict(zip(sizes, values.split(list(sizes.values())), strict=True))


def average_parts(replies: Sequence[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Average every part over the clients that trained it, weighted by their examples.

    The paper averages all clients' copies; a decoder that some of them never used would then be held back by theirs.

    Args:
        replies: for each client its number of examples, above zero, and the flat parts that it trained.

    Returns:
        the parts that anyone trained.
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
    """Where clients of one architecture want their weights to go: `delta` is `(graph.layout.numel,)`."""

    graph: Graph
    weight: float
    delta: Tensor


def follow(hypernetwork: GraphHypernetwork, targets: Sequence[Target], steps: int, rate: float) -> None:
    """Move a hypernetwork such that the weights that it writes follow their targets, to first order.

    `x` minimises `sum_a w_a |J_a x - delta_a|^2` by preconditioned conjugate gradients (CGLS), with the total weight of
    those who use a part as the part's preconditioner; each step costs one vector-Jacobian product and one of the
    Jacobian with a vector per architecture. Stopping early keeps it from fitting noise. In mode `linear` the
    first step is exact: each part's weighted mean.

    Args:
        hypernetwork: its parameters are moved by `rate * x`.
        targets: one for each architecture, with the examples of its clients as weight.
        steps: of conjugate gradients.
        rate: eta.
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
        size = _inner(gradient, scaled)
        if size == 0:  # nothing left to follow
            break
        if before:
            scaled = [new + old * (size / before) for new, old in zip(scaled, direction, strict=True)]
        direction, before = scaled, size
        moved = [jacobian.times(direction) for jacobian in jacobians]
        length = sum(
            target.weight * float(move.double().square().sum()) for target, move in zip(targets, moved, strict=True)
        )
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
    """Products with the Jacobian `J` of generated weights `(P,)`, in both directions."""

    def __init__(self, weights: Tensor, parameters: Sequence[Tensor]) -> None:
        self.weights, self.parameters = weights, parameters
        # `J^T u` is linear in u, so its derivative by u in direction x is `J x`.
        self.dummy = torch.zeros_like(weights, requires_grad=True)
        self.pulled = torch.autograd.grad(weights, parameters, self.dummy, create_graph=True, allow_unused=True)

    def transposed(self, values: Tensor) -> Iterator[Tensor]:
        """Yield `J^T values`, by parameter."""
        found = torch.autograd.grad(self.weights, self.parameters, values, retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(self.parameters, found, strict=True):
            yield torch.zeros_like(parameter) if gradient is None else gradient

    def times(self, direction: Sequence[Tensor]) -> Tensor:
        """Return `J direction`, `(P,)`."""
        used = [
            (one, by) for one, by in zip(self.pulled, direction, strict=True) if one is not None and one.requires_grad
        ]
        outputs, along = zip(*used, strict=True)
        (moved,) = torch.autograd.grad(outputs, self.dummy, along, retain_graph=True)
        return moved


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return float(sum((a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)))
