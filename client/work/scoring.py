"""Evaluation of a network on examples, in pure torch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hyperbloom.common.data import Examples
from hyperbloom.common.models.parts import running_norms
from hyperbloom.common.wire.orders import SplitScore

EVALUATION_BATCH = 1024


def evaluate(module: nn.Module, data: Examples, metrics: Sequence[str] = (), disclose: bool = False) -> SplitScore:
    """Score the module on examples, by default by the usual metrics of the task; `disclose`: also send counts."""
    return score_of(data, *respond(module, data), metrics, disclose)


@torch.no_grad()
def respond(module: nn.Module, data: Examples) -> tuple[Tensor, int, float]:
    """Return the module's answers to examples, the number of its outputs, and its mean loss over the labels."""
    module.eval()
    answers, loss, labels = [], 0.0, 0
    for start in range(0, len(data), EVALUATION_BATCH):
        some = slice(start, start + EVALUATION_BATCH)
        outputs = module(data.inputs[some])
        summed, count = data.task.total(outputs, data.labels[some])
        answers.append(data.task.answers(outputs))
        loss, labels = loss + summed, labels + count
    return torch.cat(answers), outputs.shape[1], loss / max(1, labels)


def score_of(
    data: Examples, answers: Tensor, outputs: int, loss: float, metrics: Sequence[str], disclose: bool
) -> SplitScore:
    """Return the score of a network's answers to examples; `outputs` is how many outputs it has."""
    measured = data.task.measure(answers.cpu(), data.labels.cpu(), outputs, data.task.asked(metrics))
    names, values = tuple(measured.values), tuple(measured.values.values())
    counts = measured.counts if len(measured.counts) <= 2**18 else ()  # of more than 512 classes too many to send
    return SplitScore(len(data), loss, names, values, counts if disclose else ())


@torch.no_grad()
def settle_norms(module: nn.Module, data: Examples) -> None:
    """Recompute the running statistics of batch normalisation from the client's own examples, for the current weights.

    Running statistics are no parameters, so nobody sends or averages them. Those of the last training belong to other
    weights than the ones to evaluate.
    """
    norms = running_norms(module)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    module.eval()  # without dropout; only the norms train
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over batches
    # Batches count alike, so they are alike in size, and shuffled: in files, classes often follow one another.
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).to(data.inputs.device)
    for batch in order.tensor_split(-(-len(data) // EVALUATION_BATCH)):
        module(data.inputs[batch])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
