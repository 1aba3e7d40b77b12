"""Target networks that write their weights by a hypernetwork: `generated:k=64,h=128` in place of what is adapted.

They are HyperFL's (strategies/hyperfl.py). The head is a parameter as before. All else, with biases and the parameters
of norms, is `Linear(h, P)(ReLU(Linear(k, h)(embedding)))`. Statistics of norms stay where they are.

The network starts as it does alone: the last bias is its own start, the last weight is zero. Embeddings have a length
near 1, so that a step of the hypernetwork is about one of the network itself. With torch's initialisation, which the
authors' code has, written weights have a standard deviation of 0.24 at any fan-in, and a step is twenty times as long.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from hyperbloom.common.layout import Layout

FORM = re.compile(r"generated:k=([1-9]\d{0,2}),h=([1-9]\d{0,2})")
"""Dimension k of the embedding, and width h of the hypernetwork."""


class Generated(nn.Module):
    """A network that changes another one and writes all of its parameters but those whose names start with `head`."""

    def __init__(self, network: nn.Module, head: str, k: int, h: int) -> None:
        super().__init__()
        self.layout = Layout(tuple(item for item in Layout.of(network).shapes if not item[0].startswith(head)))
        self.embedding = nn.Parameter(torch.randn(k) / k**0.5)
        last = nn.Linear(h, self.layout.numel)
        last.weight.data.zero_()
        last.bias.data.copy_(self.layout.flatten(dict(network.named_parameters())))
        self.hypernetwork = nn.Sequential(nn.Linear(k, h), nn.ReLU(), last)
        self.network = network
        for part, leaf, values in self._written():
            del part._parameters[leaf]
            # As an attribute, as recurrent layers keep a list of their weights. No buffer, as these count as frozen.
            setattr(part, leaf, values.detach())

    def _written(self) -> list[tuple[Any, str, Tensor]]:
        """Return for each written tensor its module in the network, its name there, and its values."""
        views = self.layout.views(self.hypernetwork(self.embedding)).items()
        split = [(*name.rpartition("."), values) for name, values in views]
        return [(self.network.get_submodule(owner), leaf, values) for owner, _, leaf, values in split]

    def forward(self, inputs: Tensor) -> Any:
        """Return what the network computes with the written weights."""
        written = self._written()
        for part, leaf, values in written:
            setattr(part, leaf, values)
        try:
            return self.network(inputs)
        finally:
            for part, leaf, values in written:
                setattr(part, leaf, values.detach())  # a tensor with a graph cannot be copied

    def release(self) -> nn.Module:
        """Return the network with the written weights as its own parameters; this one is of no use afterwards."""
        for part, leaf, values in self._written():
            delattr(part, leaf)
            setattr(part, leaf, nn.Parameter(values.detach().clone()))
        return self.network
