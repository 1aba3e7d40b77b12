"""The server's half of HAFL-GHN: the average of what clients return, part by part.

Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using Graph
HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, algorithm 1. The hypernetwork itself is in `common/graphs`, as it
runs on the clients.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hyperbloom.common.graphs import part_of
from hyperbloom.common.layout import Layout

__all__ = ["average_parts", "split_parts"]


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
