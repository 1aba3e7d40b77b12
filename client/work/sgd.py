"""Local SGD in pure torch, on tensors that are already on the device.

It follows pFedHN's public code (Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628): a batch from a fresh
shuffle at each step, momentum, weight decay, clipping of the shared part only, a fresh optimiser each round for the
shared part, and a persistent one for a personal head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperbloom.client.work.steps import repeat
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import SGD

MOST_DRAWN = 2**27
"""Most examples in all steps of a training, whose numbers take 1 GiB."""
LARGE = 10_000_000
"""Frozen numbers from which on half precision pays for the casts (`benchmarks/half_precision.py`)."""


class Flat:
    """Parameters in flat vectors, and SGD over them.

    Args:
        layout: names and shapes of the parameters, in order.
        values: their first values, which are not copied.

    Shape:
        `values`, `gradient`, `momentum` are `(..., layout.numel)`, with one row per client if several train at once.
        `momentum` is None before the first step.

    Attributes:
        frozen: views of the gradients of frozen parameters, which no step changes, not even by weight decay.
    """

    def __init__(self, layout: Layout, values: Tensor) -> None:
        self.layout = layout
        self.values = values
        self.gradient = torch.zeros_like(values)
        self.momentum: Tensor | None = None
        self.frozen: list[Tensor] = []

    def cut(self) -> "tuple[Flat, Flat]":
        """Return the first parameter and all others, as views with momenta of their own."""
        shapes, sizes = self.layout.shapes, [self.layout.sizes[0], sum(self.layout.sizes[1:])]
        first, rest = map(Flat, (Layout(shapes[:1]), Layout(shapes[1:])), self.values.split(sizes))
        first.gradient, rest.gradient = self.gradient.split(sizes)
        return first, rest

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Copy weights and forget the momentum, because weights from the server start with a fresh optimiser."""
        self.values.copy_(values)
        self.momentum = None

    @torch.no_grad()
    def clip(self, norm: float) -> None:
        """Scale each row of the gradient down to a norm of at most `norm`, like torch's `clip_grad_norm_`."""
        self.gradient.mul_((norm / (self.gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp_(max=1.0))

    @torch.no_grad()
    def step(self, sgd: SGD) -> None:
        """Take a step like `torch.optim.SGD`, whose first use takes seconds to import."""
        self.gradient.add_(self.values, alpha=sgd.weight_decay)
        for gradient in self.frozen:
            gradient.zero_()
        if self.momentum is None:
            self.momentum = self.gradient.clone()
        else:
            self.momentum.mul_(sgd.momentum).add_(self.gradient)
        self.values.add_(self.momentum, alpha=-sgd.learning_rate)


class FlatPart(Flat):
    """Some parameters of a module, moved into one contiguous vector.

    The module's parameters become views of `values`, and their gradients views of `gradient`. Loading, clipping and
    stepping are then single operations for any number of tensors.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        parameters = dict(module.named_parameters())
        anchor = next(iter(parameters.values()))
        super().__init__(layout, layout.flatten(parameters) if layout.numel else anchor.detach().new_empty(0))
        gradients = layout.views(self.gradient)
        for name, view in layout.views(self.values).items():
            parameters[name].data = view
            parameters[name].grad = gradients[name]
            if not parameters[name].requires_grad:  # frozen in a user's own network
                self.frozen.append(gradients[name])


@dataclass
class Network:
    """A network with its parameters in two vectors, either of which may be empty.

    Attributes:
        shared: parameters of the module that the server sends. Their gradient is clipped.
        personal: the other parameters, which stay on the client. As in the public code of pFedHN-PC, they are not
            clipped, and their momentum persists. In an order for a copy, a private model of the same shapes.
    """

    module: nn.Module
    shared: Flat
    personal: Flat

    @property
    def parts(self) -> list[Flat]:
        """Return the parts that are not empty."""
        return [part for part in (self.shared, self.personal) if part.layout.numel]

    @property
    def has_copy(self) -> bool:
        """Return whether the personal part is a private copy and not part of the module."""
        return bool(self.shared.layout.numel) and self.shared.layout == self.personal.layout


def draw_batches(examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Return `(steps, min(batch_size, examples))` indices. Each row is the start of a fresh shuffle.

    They are drawn on the CPU, so that every device trains on the same batches. WireError if they are too many.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(batch_size, examples)
    if steps * size > MOST_DRAWN:
        raise WireError(f"order: expected at most {MOST_DRAWN} examples in all steps, found {steps} steps of {size}")
    # Copy each slice, because a view would keep the whole shuffle of every step in memory.
    return torch.stack([torch.randperm(examples, generator=generator)[:size].clone() for _ in range(steps)])


def gains_by_half(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of bfloat16 faster than those of float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def outputs_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return a network's outputs for training, computed in half precision where a large frozen network gains by it.

    What is trained stays in single precision, and models are scored in single precision. The rule depends on the
    network and the device alone, not on a measurement, so that a run gives the same numbers again.
    """
    frozen = sum(part.numel() for part in module.buffers())
    if frozen < LARGE or not gains_by_half(inputs.device):
        return module(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = module(inputs)
    return outputs.float()


def backward(module: nn.Module, parts: Sequence[Flat], data: Examples, batch: Tensor) -> Tensor:
    """Compute the gradient of the loss on the examples `batch` into `parts`, and return the loss as a scalar."""
    for part in parts:
        part.gradient.zero_()
    loss = data.loss(outputs_of(module, data.inputs[batch]), batch)
    loss.backward()
    return loss.detach()


def start(network: Network, data: Examples, sgd: SGD, seed: int) -> tuple[Tensor, Tensor]:
    """Switch to training mode; return the batches `(steps, B)` of all steps, and 0 for the sum of their losses."""
    torch.manual_seed(seed)  # for dropout
    network.module.train()
    device = data.labels.device
    return draw_batches(len(data), sgd.batch_size, sgd.steps, seed).to(device), torch.zeros((), device=device)


def take_steps(
    network: Network,
    parts: Sequence[Flat],
    data: Examples,
    sgd: SGD,
    batches: Tensor,
    total: Tensor,
    add: Callable[[], Tensor | None] | None = None,
) -> None:
    """Take a step of SGD for each of `batches` `(steps, B)`, and add the losses to `total`, a scalar.

    Only `parts` change; the gradient of the shared one is clipped. Before that, `add` may change the gradients, and
    return a further loss. Steps with it are not recorded, as it may do anything.
    """

    def step(batch: Tensor) -> None:
        total.add_(backward(network.module, parts, data, batch))
        if add is not None and (more := add()) is not None:
            total.add_(more)
        if network.shared in parts:
            network.shared.clip(sgd.clip)
        for part in parts:
            part.step(sgd)

    repeat(step, batches, network.module, data.task, recorded=add is None)


def train(
    network: Network,
    data: Examples,
    sgd: SGD,
    seed: int,
    parts: Sequence[Flat] | None = None,
    add: Callable[[], Tensor | None] | None = None,
) -> float:
    """Take the SGD steps in place, on batches drawn by `seed`, and return the mean loss; `add` as in `take_steps`."""
    batches, total = start(network, data, sgd, seed)
    take_steps(network, network.parts if parts is None else parts, data, sgd, batches, total, add)
    return (total / sgd.steps).item()
