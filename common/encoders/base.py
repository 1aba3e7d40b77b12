"""What encoders have in common: a set of samples in, one descriptor out, in batches where the set is large."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.models import MLP, LeNet

__all__ = ["BATCH", "Encoder", "encode", "encode_backward", "is_image", "per_sample"]

BATCH = 1024
"""Samples that are encoded at once; what of larger sets is averaged are the descriptors of such batches."""

DENSE = 500
"""Width of dense layers, for feature vectors (appendix C)."""


class Encoder(nn.Module):
    """Base of all encoders.

    A subclass's `forward` maps samples `(N, *input_shape)` to a descriptor `(k,)`, whatever their order, and gives the
    same for the same samples: no dropout, no statistics of batches. Its last layer is an `nn.Linear` called `tail`.
    """

    def sensitivity(self, examples: int) -> float:
        """Return how far (L2) the descriptor of `examples` samples moves at most if one of them is exchanged.

        Raises:
            ConfigError: no such bound holds for this encoder, or there are no samples.
        """
        raise ConfigError(
            f"options.encoder: expected private, whose descriptor changes little with any one example, found "
            f"{type(self).__name__}, for which no bound holds (it pools by maximum or goes on non-linearly)"
        )


def is_image(input_shape: tuple[int, ...]) -> bool:
    """Return whether convolutions are used: images of at least 16 x 16 pixels; others are taken for feature vectors."""
    return len(input_shape) == 3 and min(input_shape[1:]) >= 16


def per_sample(input_shape: tuple[int, ...], width: int) -> nn.Module:
    """Return a network from samples `(N, *input_shape)` to features `(N, width)`: LeNet, or one hidden dense layer."""
    return LeNet(input_shape, width) if is_image(input_shape) else MLP(input_shape, width, DENSE)


def encode(encoder: nn.Module, inputs: Tensor, batch: int = BATCH) -> Tensor:
    """Return the descriptor `(k,)` of `inputs` `(N, ...)`: the mean over batches, by their numbers of samples.

    For a mean followed by a linear map it is the descriptor of the whole set; for others the paper's approximation
    (appendix B.1).
    """
    return torch.stack([share * encoder(part) for part, share in _batches(inputs, batch)]).sum(0)


def encode_backward(encoder: nn.Module, inputs: Tensor, gradient: Tensor, batch: int = BATCH) -> Tensor:
    """Add the vector-Jacobian product of `encode` with `gradient` `(k,)` to the parameters' `.grad`.

    Batch by batch, so that one batch's graph is all that memory has to hold; returns the descriptor as `encode` does.
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
