"""pFedHN and ODPFL-HN whose hypernetwork starts each tensor with the deviation that torch would give it.

`--strategy figures.scaled:PFedHNScaled` and `--strategy figures.scaled:ODPFLScaled` run them.

Chang, Flokas, Lipson: Principled Weight Initialization for Hypernetworks, ICLR 2020,
https://openreview.net/forum?id=H1lma24tPB. The default initialisation of the heads looks at their fan-in alone: the
tensors of one network get one deviation, up to eight times torch's.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hyperbloom.common.layout import Layout
from hyperbloom.strategies.hypernetworks import ChunkedHypernetwork
from hyperbloom.strategies.hypernetworks.learner import Hypernetwork
from hyperbloom.strategies.odpfl import ODPFL, ODPFLOptions
from hyperbloom.strategies.pfedhn import PFedHN, PFedHNOptions

DRAWS = 16
"""Networks from which torch's initial deviations are taken."""

SHARE = 0.3
"""Most of a tensor's deviation that a chunked head writes; the rest is common to all clients."""


@torch.no_grad()
def start_like(
    network: Hypernetwork, draws: Mapping[str, Tensor], layouts: Mapping[str, Layout], descriptors: Tensor
) -> None:
    """Give each generated tensor, biases too, the standard deviation of torch's initial weights.

    It is that over clients and entries. What torch sets to a constant starts as it.

    Args:
        network: a new hypernetwork.
        draws: by size, initial weights of some networks `(D, P)`.
        layouts: by size, the target network.
        descriptors: `(C, k)`, such as clients have.
    """
    ratios = {}
    for size, layout in layouts.items():
        ratios[size] = deviations(draws[size], layout.sizes) / deviations(network(descriptors, size), layout.sizes)
    if isinstance(network, ChunkedHypernetwork):
        # One head writes all tensors. So the tensor with the least deviation decides, and the start has what is left.
        factor = SHARE * min(float(each[each > 0].min()) for each in ratios.values())
        for parameter in network.head.parameters():
            parameter.mul_(factor)
        left = {size: (1 - (factor / each).square()).clamp_min(0).sqrt() for size, each in ratios.items()}
        starts = {size: draws[size][0] * left[size].where(ratios[size] > 0, 1.0) for size in ratios}
    else:
        for size, rows in ratios.items():
            for parameter in network.heads[size].parameters():  # each row writes one weight
                parameter.view(len(rows), -1).mul_(rows[:, None])
        starts = {size: draws[size][0] * (ratios[size] == 0) for size in ratios}
    for size, start in starts.items():
        network.register_buffer(f"start_{size}", start)


def deviations(weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return for each weight the standard deviation `(P,)` of its tensor, over rows and entries of `(C, P)`."""
    each = torch.stack([part.std() for part in weights.split(list(sizes), dim=1)])
    return each.repeat_interleave(torch.tensor(sizes))


class Scaled(PFedHN):
    """A strategy whose generated tensors have torch's initial deviations."""

    def hypernetwork(self, layouts: Mapping[str, Layout], dim: int) -> Hypernetwork:
        """Return a new hypernetwork, scaled."""
        network, seeds = super().hypernetwork(layouts, dim), range(self.config.seed, self.config.seed + DRAWS)
        draws = {x: torch.stack([self.setting.first_values(x, seed) for seed in seeds]) for x in layouts}
        rows = min(256, max(8, 2**25 // max(x.numel for x in layouts.values())))  # what fits into memory
        start_like(network, draws, layouts, torch.randn(rows, dim))
        return network


class PFedHNScaledOptions(PFedHNOptions):
    """Options of pFedHN with a scaled start."""

    start: Literal["hypernetwork"] = Field("hypernetwork", description="of it, what each tensor starts with is scaled")


class PFedHNScaled(Scaled):
    """pFedHN with a scaled start."""

    options: PFedHNScaledOptions


class ODPFLScaledOptions(ODPFLOptions):
    """Options of ODPFL-HN with a scaled start."""

    start: Literal["hypernetwork"] = Field("hypernetwork", description="of it, what each tensor starts with is scaled")


class ODPFLScaled(Scaled, ODPFL):
    """ODPFL-HN with a scaled start; its calibrated descriptors have the deviation 1 that the scaling takes."""

    options: ODPFLScaledOptions
