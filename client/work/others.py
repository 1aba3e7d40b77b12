"""What a novel client does with the models of others: try them all, or find whose data are like its own.

For `pfl-sampled`, `pfl-ensemble` and `pfl-nearest` (`strategies/pfl.py`).
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.client.work.client import Client
from hyperbloom.client.work.networks import check_common_model, load, loaded_network
from hyperbloom.client.work.permissions import check_release, count_score
from hyperbloom.client.work.scoring import EVALUATION_BATCH, settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.wire.exchanges import ErrorsOrder, ErrorsResult, MomentsOrder, MomentsResult, TryOrder
from hyperbloom.common.wire.orders import EvaluateResult, SplitScore
from hyperbloom.common.wire.weights import Weights

__all__ = ["domain_errors", "features", "moments_of", "score_all", "send_errors", "send_moments", "try_many"]


def try_many(client: Client, order: TryOrder) -> EvaluateResult:
    """Score many models on validation and test examples: each for itself, or the mean of their logits.

    Raises:
        WireError: the order does not bring weights of as many numbers as the network has.
    """
    check_common_model(client, order.target)
    network = loaded_network(client, order.target, order.weights)
    layout = network.shared.layout
    sent = order.weights
    count = 0 if sent is None else sent.layout.numel // layout.numel
    if sent is None or count < 1 or sent.layout.shapes != (("models", (count, layout.numel)),):
        found = sent and sent.layout.shapes
        raise WireError(f"order: expected models of {layout.numel} weights each, found {found}")
    count_score(client, order, network.module)

    def models() -> Iterator[nn.Module]:
        for row in sent.values.view(count, layout.numel):
            module = load(client, order.scope, order.target, Weights(layout, row)).module
            settle_norms(module, client.train_data)
            yield module

    return EvaluateResult(*(score_all(models(), data, order.together) for data in (client.val_data, client.test_data)))


def send_moments(client: Client, order: MomentsOrder) -> MomentsResult:
    """Return mean and covariance of what the head of the ordered network sees of the training examples."""
    check_release(client)
    check_common_model(client, order.target)
    module = load(client, order.scope, order.target, order.weights).module
    found = moments_of(features(module, client.train_data.inputs)).cpu()
    return MomentsResult(Weights(Layout((("moments", tuple(found.shape)),)), found))


def send_errors(client: Client, order: ErrorsOrder) -> ErrorsResult:
    """Return how often each of the ordered classifiers is wrong about the validation examples.

    Raises:
        WireError: the classifiers are not for as many features as there are.
    """
    check_common_model(client, order.target)
    module = load(client, order.scope, order.target, order.weights).module
    count_score(client, order, module)
    seen = features(module, client.val_data.inputs).cpu()
    shapes = order.classifiers.layout.shapes
    if len(shapes) != 1 or shapes[0][1][1:] != (seen.shape[1] + 1,):
        raise WireError(f"order: expected classifiers of {seen.shape[1]} features, found {shapes}")
    return ErrorsResult(domain_errors(seen, order.classifiers.values.view(*shapes[0][1]), order.sign))


@torch.no_grad()
def score_all(models: Iterable[nn.Module], data: Examples, together: bool) -> SplitScore:
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


def moments_of(seen: Tensor) -> Tensor:
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
