"""Evaluation of a network on examples, in pure torch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbloom.common.data import Examples
from hyperbloom.common.wire.orders import SplitScore

__all__ = ["EVALUATION_BATCH", "evaluate", "has_running_norms", "settle_norms"]

EVALUATION_BATCH = 1024


@torch.no_grad()
def evaluate(module: nn.Module, data: Examples) -> SplitScore:
    """Score the module on examples: number of correct answers, number of examples, mean cross-entropy."""
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
    """Recompute the running statistics of batch normalisation from the client's own examples, for the current weights.

    Running statistics are no parameters, so nobody sends or averages them. Those of the last training belong to other
    weights than the ones to evaluate.
    """
    norms = _running_norms(module)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    module.eval()  # without dropout; only the norms train
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over batches
    for inputs in data.inputs.split(EVALUATION_BATCH):
        if len(inputs) > 1 or len(data) == 1:  # batch normalisation may fail on one example
            module(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def has_running_norms(module: nn.Module) -> bool:
    """Return whether a network has batch normalisation with running statistics."""
    return bool(_running_norms(module))


def _running_norms(module: nn.Module) -> list[_BatchNorm]:
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
