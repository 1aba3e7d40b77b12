"""Evaluation in pure torch: how right a network is on some examples."""

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
