"""Users' own networks from a function, which `package.module:factory` or a plug-in names."""

import inspect
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from hyperbloom.common.data import laid_out
from hyperbloom.common.errors import ModelError, describe
from hyperbloom.common.models.parts import untouched
from hyperbloom.common.program.plugins import Plugin, current_directory, find_function

WHAT = "a function (input_shape, num_classes) that returns a torch.nn.Module"
EXPECTED = f"expected {WHAT}"


def build_from_factory(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Import `package.module:factory`, call it with shape and classes, and check the network with a batch of zeros.

    The current directory is importable during the call. The check changes neither the network's mode and buffers nor
    torch's random state.

    Raises:
        ModelError: the factory cannot be imported, fails, or returns no network with parameters; or the network fails,
            or its logits have the wrong shape.
    """
    with current_directory():
        return _built(find_function(name, WHAT, ModelError), name, input_shape, num_classes)


def build_from_plugin(plugin: Plugin, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a plug-in's network, checked as in `build_from_factory`; ModelError also without a layer `head`."""
    module = _built(plugin.load(WHAT, ModelError), f"plug-in {plugin.name!r}", input_shape, num_classes)
    if not any(name.startswith("head.") for name, _ in module.named_parameters()):
        raise ModelError(
            f"plug-in {plugin.name!r}: expected its last layer to be called head, found "
            f"{', '.join(name for name, _ in module.named_children()) or 'no layers'}"
        )
    return module


def _built(factory: Callable[..., object], name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    _check_arguments(factory, name)
    try:
        module = factory(input_shape, num_classes)
    except Exception as error:
        raise ModelError(f"{name}: {EXPECTED}; found that it fails with {describe(error)}") from error
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):  # which cannot be copied
        raise ModelError(f"{name}: {EXPECTED}; found {describe(module)}")
    if not any(each.requires_grad for each in module.parameters()):
        raise ModelError(f"{name}: expected a network with parameters that learn, found none")
    if odd := {each.dtype for each in module.parameters()} - {torch.float32}:
        raise ModelError(f"{name}: expected parameters in float32, and all else as buffers, found {odd.pop()}")
    if any(isinstance(each, _InstanceNorm) and each.track_running_stats for each in module.modules()):
        raise ModelError(f"{name}: expected instance norms without running statistics, which nothing keeps")
    check_logits(module, name, input_shape, num_classes)
    return module


def _check_arguments(factory: Callable[..., object], name: str) -> None:
    """Refuse a library's constructor, which would read the shape as the argument `weights` or `pretrained`."""
    taken: list[str] = []
    with suppress(TypeError, ValueError):  # functions in C may have no signature
        arguments = list(inspect.signature(factory, follow_wrapped=False).parameters.values())
        if arguments and arguments[0].kind is inspect.Parameter.VAR_POSITIONAL:  # a decorator hides the signature
            arguments = list(inspect.signature(factory).parameters.values())
        taken = [argument.name for argument in arguments[:2]]
    if {"weights", "pretrained"} & set(taken):
        call = name.replace(":", ".")
        raise ModelError(
            f"{name}: {EXPECTED}, found one of {', '.join(taken)}; write a function around it (docs/ghn.md): "
            f"def make(input_shape, num_classes): return {call}(num_classes=num_classes)"
        )


def check_logits(module: nn.Module, name: str, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Raise a ModelError if a network fails on a batch of zeros, or its logits have the wrong shape.

    A network that fails on images channels-last, as with `view` after a convolution, gets them channels-first from now.
    """
    zeros = torch.zeros(2, *input_shape)
    try:
        with untouched(module):
            logits = module(zeros)
    except Exception as error:
        raise ModelError(f"{name}: fails on inputs of shape {input_shape}: {describe(error)}") from error
    of_pixels = (2, num_classes, *input_shape[1:]) if len(input_shape) == 3 else None
    if not isinstance(logits, Tensor) or tuple(logits.shape) not in ((2, num_classes), of_pixels):
        found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else describe(logits)
        raise ModelError(f"{name}: expected logits of shape (2, {num_classes}) for 2 inputs, found {found}")
    try:
        with untouched(module):
            module(laid_out(zeros))
    except RuntimeError:
        module.register_forward_pre_hook(_channels_first)


def _channels_first(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.clone(memory_format=torch.contiguous_format) for each in inputs)
