"""Local SGD in pure torch, on tensors that are on the device already.

It follows pFedHN's public code (Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628): a batch of a fresh
shuffle at each step, momentum, weight decay, clipping of the shared part only, a fresh optimiser each round for what
the server sent and one that persists for a personal head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.orders import SGD

__all__ = ["Flat", "FlatPart", "Network", "backward", "draw_batches", "train"]


class Flat:
    """Parameters in flat vectors, and SGD over them.

    Args:
        layout: which parameters, in which sgd.
        values: what they start from; taken over, not copied.

    Shape:
        `values`, `gradient`, `momentum` are `(..., layout.numel)`, one row per client where several train at once;
        `momentum` is None before the first step.

    Attributes:
        frozen: views of the gradient of parameters that no step moves, weight decay neither.
    """

    def __init__(self, layout: Layout, values: Tensor) -> None:
        """Start without gradient and momentum."""
        self.layout = layout
        self.values = values
        self.gradient = torch.zeros_like(values)
        self.momentum: Tensor | None = None
        self.frozen: list[Tensor] = []

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Take over weights and forget the momentum: what the server sends starts with a fresh optimiser."""
        self.values.copy_(values)
        self.momentum = None

    @torch.no_grad()
    def clip(self, norm: float) -> None:
        """Scale each row of the gradient down to a norm of at most `norm`, as `clip_grad_norm_` of torch does."""
        self.gradient.mul_((norm / (self.gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp_(max=1.0))

    @torch.no_grad()
    def step(self, sgd: SGD) -> None:
        """Take the step of `torch.optim.SGD`, without the seconds that its first use takes to import."""
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

    The module's parameters become views of `values`, their gradients views of `gradient`: copying weights in,
    clipping and stepping are single operations however many tensors there are.

    Args:
        module: the network; its parameters in `layout` are re-bound.
        layout: which parameters, in which sgd.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        """Move the parameters of `layout` into `values`."""
        parameters = dict(module.named_parameters())
        anchor = next(iter(parameters.values()))
        super().__init__(layout, layout.flatten(parameters) if layout.numel else anchor.detach().new_empty(0))
        gradients = layout.views(self.gradient)
        for name, view in layout.views(self.values).items():
            parameters[name].data = view
            parameters[name].grad = gradients[name]
            if not parameters[name].requires_grad:  # of a user's own network, where nothing travels
                self.frozen.append(gradients[name])


@dataclass
class Network:
    """A network, and its parameters as two vectors, either of which may be empty.

    Attributes:
        module: what computes.
        shared: parameters of the module that the server sends; their gradient is clipped.
        personal: its other parameters, which stay on the client: not clipped, and their momentum persists, as in the
            public code of pFedHN-PC. In an order for a copy, a model of the same shapes beside the module.
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
        """Tell whether the personal part is a model beside the module."""
        return bool(self.shared.layout.numel) and self.shared.layout == self.personal.layout


def draw_batches(examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Return `(steps, min(batch_size, examples))` indices: each row the start of a fresh shuffle.

    Drawn on the CPU, so that every device trains on the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(batch_size, examples)
    # Copies: a slice would keep the whole shuffle in memory, for every step.
    return torch.stack([torch.randperm(examples, generator=generator)[:size].clone() for _ in range(steps)])


def backward(module: nn.Module, parts: Sequence[Flat], data: Examples, batch: Tensor) -> Tensor:
    """Put the gradient of the loss on the examples `batch` into `parts`, and return the loss."""
    for part in parts:
        part.gradient.zero_()
    loss = F.cross_entropy(module(data.inputs[batch]), data.labels[batch])
    loss.backward()
    return loss.detach()


def train(network: Network, data: Examples, sgd: SGD, seed: int) -> float:
    """Take the SGD steps in place and return the mean loss over them.

    Args:
        network: what is trained.
        data: training examples on the module's device.
        sgd: hyperparameters.
        seed: of the batches.
    """
    parts = network.parts
    batches = draw_batches(len(data), sgd.batch_size, sgd.steps, seed).to(data.labels.device)
    total = torch.zeros((), device=data.labels.device)
    network.module.train()
    for batch in batches:
        total += backward(network.module, parts, data, batch)
        if network.shared.layout.numel:
            network.shared.clip(sgd.clip)
        for part in parts:
            part.step(sgd)
    return (total / sgd.steps).item()
