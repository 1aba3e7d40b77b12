"""Local training and evaluation in pure torch, on tensors that are on the device already.

Local SGD follows pFedHN's public code (Shamsian et al., ICML 2021, https://arxiv.org/abs/2103.04628): a batch of a
fresh shuffle at each step, momentum, weight decay, clipping of the shared part only, a fresh optimiser each round for
what the server sent and one that persists for a personal head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import SplitScore, TrainOrder

__all__ = ["FlatPart", "draw_batches", "evaluate", "train"]

EVALUATION_BATCH = 1024


class FlatPart:
    """Some parameters of a module, moved into one contiguous vector, with one SGD optimiser over it.

    The module's parameters become views of `values`, their gradients views of `values.grad`: copying weights in,
    clipping and stepping are single operations however many tensors there are.

    Args:
        module: the network; its parameters in `layout` are re-bound.
        layout: which parameters, in which order.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        """Move the parameters of `layout` into `values`."""
        self.layout = layout
        parameters = dict(module.named_parameters())
        first = next(iter(parameters.values()))
        values = layout.flatten(parameters) if layout.numel else first.new_empty(0)
        self.values = nn.Parameter(values.clone())
        self.values.grad = torch.zeros_like(self.values)
        for (name, view), grad in zip(
            layout.views(self.values.data).items(), layout.views(self.values.grad).values(), strict=True
        ):
            parameters[name].data = view
            parameters[name].grad = grad

    def optimizer(self, order: TrainOrder) -> torch.optim.SGD:
        """Return a fresh SGD over this part with the order's hyperparameters."""
        return torch.optim.SGD(
            [self.values], lr=order.learning_rate, momentum=order.momentum, weight_decay=order.weight_decay
        )


@dataclass(frozen=True)
class Trained:
    """Outcome of local training."""

    loss: float


def draw_batches(examples: int, batch_size: int, steps: int, seed: int) -> Tensor:
    """Return `(steps, min(batch_size, examples))` indices: each row the start of a fresh shuffle.

    Drawn on the CPU, so that every device trains on the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(batch_size, examples)
    return torch.stack([torch.randperm(examples, generator=generator)[:size] for _ in range(steps)])


def train(
    module: nn.Module,
    shared: FlatPart,
    data: Examples,
    order: TrainOrder,
    personal: tuple[FlatPart, torch.optim.SGD] | None = None,
) -> float:
    """Take the order's SGD steps in place and return the mean loss over them.

    Args:
        module: network whose parameters are views of `shared` and of the personal part.
        shared: what the server sent; gets a fresh optimiser and is clipped to `order.clip`.
        data: training examples on the module's device.
        order: hyperparameters and seed.
        personal: what stays on the client, with the optimiser whose momentum persists; not clipped, as in the
            public code of pFedHN-PC.
    """
    parts = [(shared, shared.optimizer(order))] if shared.layout.numel else []
    parts += [personal] if personal else []
    batches = draw_batches(len(data), order.batch_size, order.steps, order.seed).to(data.labels.device)
    total = torch.zeros((), device=data.labels.device)
    module.train()
    for batch in batches:
        for part, _ in parts:
            _grad(part).zero_()
        loss = F.cross_entropy(module(data.inputs[batch]), data.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        if shared.layout.numel:
            nn.utils.clip_grad_norm_(shared.values, order.clip)
        for _, optimizer in parts:
            optimizer.step()
        total += loss.detach()
    return (total / order.steps).item()


def _grad(part: FlatPart) -> Tensor:
    assert part.values.grad is not None
    return part.values.grad


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
