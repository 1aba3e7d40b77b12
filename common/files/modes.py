"""Looking at a network without changing it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["untouched"]


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; give modes and torch's random state back as they were.

    In evaluation mode a forward pass changes no running statistics.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
