"""Base of all encoders, which map a set of samples to one descriptor, and their evaluation in batches."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.models import MLP, LeNet

BATCH = 1024
"""Samples that are encoded at once. The descriptor of a larger set is the average over such batches."""
DENSE = 500
"""Width of dense layers, for feature vectors (appendix C)."""


class Encoder(nn.Module):
    """Base of all encoders.

    A subclass's `forward` maps samples `(N, *input_shape)` to a descriptor `(k,)`. The result must not depend on the
    order of the samples or on earlier calls: no dropout, no batch statistics. The last layer is an `nn.Linear` `tail`.
    """

    def sensitivity(self, examples: int) -> float:
        """Return the L2 sensitivity: how far the descriptor moves at most if one of `examples` samples is replaced.

        Raises:
            ConfigError: there is no such bound for this encoder, or there are no samples.
        """
        raise ConfigError(
            f"options.encoder: expected private, whose descriptor changes little with any one example, found "
            f"{type(self).__name__}, for which no bound holds (it pools by maximum or goes on non-linearly)"
        )


def is_image(input_shape: tuple[int, ...]) -> bool:
    """Return whether inputs are images of at least 16 x 16 pixels. All others count as feature vectors."""
    return len(input_shape) == 3 and min(input_shape[1:]) >= 16


def per_sample(input_shape: tuple[int, ...], width: int) -> nn.Module:
    """Return a network from samples `(N, *input_shape)` to features `(N, width)`: a LeNet or an MLP."""
    return LeNet(input_shape, width) if is_image(input_shape) else MLP(input_shape, width, DENSE)


def encode(encoder: nn.Module, inputs: Tensor, batch: int = BATCH) -> Tensor:
    """Return the descriptor `(k,)` of `inputs` `(N, ...)`: the mean over batches, weighted by their sizes.

    It is exact for encoders that end in a mean and a linear map. For others it is the paper's approximation (appendix
    B.1).
    """
    return torch.stack([share * encoder(part) for part, share in _batches(inputs, batch)]).sum(0)


def encode_backward(encoder: nn.Module, inputs: Tensor, gradient: Tensor, batch: int = BATCH) -> Tensor:
    """Add the vector-Jacobian product of `encode` with `gradient` `(k,)` to the parameters' `.grad`.

    It works batch by batch to keep only one batch's graph in memory. It returns the descriptor `(k,)` like `encode`.
    """
    descriptor = torch.zeros_like(gradient)
    for part, share in _batches(inputs, batch):
        piece = encoder(part)
        piece.backward(share * gradient)
        descriptor += share * piece.detach()
    return descriptor


def _batches(inputs: Tensor, batch: int) -> Iterator[tuple[Tensor, float]]:
    for part in inputs.split(batch):
        yield part, len(part) / len(inputs)
