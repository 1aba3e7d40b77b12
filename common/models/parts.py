"""Split a network of any architecture into a representation and its last layer.

The last layer is the last module with parameters that a forward pass calls: `head` in the networks here. A forward pass
finds it, so it also works for users' networks that cannot be traced.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from hyperbloom.common.errors import ModelError

BATCH = 1024
"""Most inputs of which features are computed at once."""


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, then restore the modes and torch's random state.

    In evaluation mode a forward pass does not change running statistics.
    """
    with _modes_kept(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, then restore the modes."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def last_layer(module: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """Find the last layer with parameters by a batch of zeros of `input_shape`; the network stays unchanged.

    Raises:
        ModelError: the network calls no submodule with parameters.
    """
    called: list[nn.Module] = []
    hooks = [
        part.register_forward_pre_hook(lambda part, args: called.append(part))
        for part in module.modules()
        if part is not module and not isinstance(part, parametrize.ParametrizationList)  # a layer's weights, no layer
        if parametrize.is_parametrized(part) or any(True for _ in part.parameters(recurse=False))
    ]
    anchor = next(module.parameters())
    try:
        with untouched(module):
            module(torch.zeros(2, *input_shape, device=anchor.device, dtype=anchor.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise ModelError(f"{type(module).__name__}: expected a last layer that is a module, found none that is called")
    return called[-1]


def represent(module: nn.Module, last: nn.Module, inputs: Tensor) -> Tensor:
    """Return the representation `(N, d)` of a batch of inputs, the input of the layer `last`, with its autograd graph.

    It depends only on weights and inputs. Dropout is off. Batch normalisation uses the statistics of this batch and
    keeps its running ones, which belong to other weights or data.

    Raises:
        ModelError: the layer's input has not one row for each input.
    """
    with _entering(last) as taken, _steady(module):
        module(inputs)
    if not taken or len(taken[-1]) != len(inputs):
        found = tuple(taken[-1].shape) if taken else "none"
        raise ModelError(f"last layer: expected a tensor with {len(inputs)} rows to enter it, found {found}")
    return taken[-1].flatten(1)


@torch.no_grad()
def features(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the features `(N, F)` that enter a network's last layer for inputs `(N, ...)`, in evaluation mode."""
    module.eval()
    with _entering(last_layer(module, tuple(inputs.shape[1:]))) as seen:
        for part in inputs.split(BATCH):
            module(part)
    return torch.cat(seen)


@contextmanager
def _entering(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list, to which every call of a layer in the body adds the tensor that enters it."""
    taken: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: taken.extend(x for x in args[:1] if isinstance(x, Tensor)))
    try:
        yield taken
    finally:
        hook.remove()


def running_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return a network's batch normalisations with running statistics."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]


@contextmanager
def _steady(module: nn.Module) -> Iterator[None]:
    norms = running_norms(module)
    with _modes_kept(module):
        for norm in norms:
            norm.training, norm.track_running_stats = True, False
        try:
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True
