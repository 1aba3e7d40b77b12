"""A context in which a forward pass leaves a network unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, then restore the modes and torch's random state.

    In evaluation mode a forward pass does not change running statistics.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
