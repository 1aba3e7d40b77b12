"""Local training and evaluation in pure torch, on tensors that are on the device already.

Local SGD follows pFedHN's public code (Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628): a batch of a
fresh shuffle at each step, momentum, weight decay, clipping of the shared part only, a fresh optimiser each round for
what the server sent and one that persists for a personal head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import SplitScore, TrainOrder

__all__ = ["Flat", "FlatPart", "backward", "draw_batches", "evaluate", "has_running_norms", "settle_norms", "train"]

EVALUATION_BATCH = 1024


class Flat:
    """Parameters in flat vectors, and SGD over them.

    Args:
        layout: which parameters, in which order.
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
    def step(self, order: TrainOrder) -> None:
        """Take the step of `torch.optim.SGD`, without the seconds that its first use takes to import."""
        self.gradient.add_(self.values, alpha=order.weight_decay)
        for gradient in self.frozen:
            gradient.zero_()
        if self.momentum is None:
            self.momentum = self.gradient.clone()
        else:
            self.momentum.mul_(order.momentum).add_(self.gradient)
        self.values.add_(self.momentum, alpha=-order.learning_rate)


class FlatPart(Flat):
    """Some parameters of a module, moved into one contiguous vector.

    The module's parameters become views of `values`, their gradients views of `gradient`: copying weights in,
    clipping and stepping are single operations however many tensors there are.

    Args:
        module: the network; its parameters in `layout` are re-bound.
        layout: which parameters, in which order.
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


def train(module: nn.Module, shared: FlatPart, personal: Flat, data: Examples, order: TrainOrder) -> float:
    """Take the order's SGD steps in place and return the mean loss over them.

    Args:
        module: network whose parameters are views of `shared` and `personal`, either of which may be empty.
        shared: what the server sent; its gradient is clipped to `order.clip`.
        personal: what stays on the client, its momentum persists; not clipped, as in the public code of pFedHN-PC.
        data: training examples on the module's device.
        order: hyperparameters and seed.
    """
    parts = [part for part in (shared, personal) if part.layout.numel]
    batches = draw_batches(len(data), order.batch_size, order.steps, order.seed).to(data.labels.device)
    total = torch.zeros((), device=data.labels.device)
    module.train()
    for batch in batches:
        total += backward(module, parts, data, batch)
        if shared.layout.numel:
            shared.clip(order.clip)
        for part in parts:
            part.step(order)
    return (total / order.steps).item()


@torch.no_grad()
def evaluate(module: nn.Module, data: Examples) -> SplitScore:
    """Score the module on examples: number correct, number of all, mean cross-entropy."""
    module.eval()
    correct, loss = 0, 0.0
    for start in range(0, len(data), EVALUATION_BATCH):
        inputs, labels = data.inputs[start : start + EVALUATION_BATCH], data.labels[start : start + EVALUATION_BATCH]
        logits = module(inputs)
        correct += int((logits.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    return SplitScore(correct, len(data), loss / len(data))


@torch.no_grad()
def settle_norms(module: nn.Module, data: Examples) -> None:
    """Take the running statistics of batch normalisation from the client's own examples, for the weights as they are.

    They are no parameters: nobody sends or averages them, and those of the last training belong to other weights than
    the ones to be evaluated.
    """
    norms = _running_norms(module)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    module.eval()  # but for the norms: dropout has no part in this
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over batches
    for inputs in data.inputs.split(EVALUATION_BATCH):
        if len(inputs) > 1 or len(data) == 1:  # one example may have no variance
            module(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def has_running_norms(module: nn.Module) -> bool:
    """Tell whether a network computes with statistics that only the client's own examples can give."""
    return bool(_running_norms(module))


def _running_norms(module: nn.Module) -> list[_BatchNorm]:
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
