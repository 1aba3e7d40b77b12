"""What a client does with the models of others: try them all, or find whose data are like its own.

For `pfl-sampled`, `pfl-ensemble` and `pfl-nearest` (`strategies/pfl.py`).
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.client.training import EVALUATION_BATCH
from hyperbloom.common.data import Examples
from hyperbloom.common.messages import SplitScore

__all__ = ["domain_errors", "features", "moments", "score"]


@torch.no_grad()
def score(models: Iterable[nn.Module], data: Examples, together: bool) -> SplitScore:
    """Score several models on examples.

    Args:
        models: each is used before the next one is taken: they may be one network with other weights.
        data: the examples.
        together: the mean of their logits decides; else every answer of each counts, so that the accuracy is the mean
            of theirs.
    """
    answers = []
    for model in models:
        model.eval()
        answers.append(torch.cat([model(inputs) for inputs in data.inputs.split(EVALUATION_BATCH)]))
    logits = torch.stack(answers).mean(0, keepdim=True) if together else torch.stack(answers)  # (M, N, classes)
    labels = data.labels.expand(len(logits), -1)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return SplitScore(int((logits.argmax(2) == labels).sum()), labels.numel(), float(loss))


@torch.no_grad()
def features(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a network's last layer, `head`, sees of inputs `(N, ...)`: `(N, F)`."""
    module.eval()
    seen: list[Tensor] = []
    head: nn.Module = module.head  # type: ignore[assignment]
    hook = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        for part in inputs.split(EVALUATION_BATCH):
            module(part)
    finally:
        hook.remove()
    return torch.cat(seen)


def moments(seen: Tensor) -> Tensor:
    """Return the mean of features `(N, F)` above their covariance, `(1 + F, F)`."""
    mean = seen.mean(0, keepdim=True)
    centred = seen - mean
    return torch.cat([mean, centred.T @ centred / len(seen)])


def domain_errors(seen: Tensor, classifiers: Tensor, sign: int) -> tuple[float, ...]:
    """Return the share of features `(N, F)` that each of linear classifiers `(M, F + 1)` puts on the other side.

    Args:
        seen: the features.
        classifiers: weights, and the threshold last; positive is the one domain, negative the other.
        sign: of the domain that the features come from, 1 or -1.
    """
    values = sign * (seen @ classifiers[:, :-1].T + classifiers[:, -1])  # (N, M)
    return tuple((values <= 0).double().mean(0).tolist())
