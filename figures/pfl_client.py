"""Novel clients and the models of other clients: score all of them, or find the client with the most similar data.

The orders of `figures/pfl.py`, and what clients do with them. Importing this module registers them in this process, so
clients of the engine `inline` take them, and no others do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from hyperbloom.client.app import take
from hyperbloom.client.work.client import Client
from hyperbloom.client.work.evaluation import count_score
from hyperbloom.client.work.networks import load, loaded_network
from hyperbloom.client.work.scoring import EVALUATION_BATCH, score_of, settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import OWN
from hyperbloom.common.models.parts import features
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, SplitScore, Target


@dataclass(frozen=True, kw_only=True)
class TryOrder(EvaluateOrder, message_type="evaluate.many", answer=EvaluateResult):
    """Evaluate many models, the rows of one tensor `models`: each by itself, or together by their mean logits."""

    together: bool


@dataclass(frozen=True)
class MomentsResult:
    """One tensor `moments` `(1 + F, F)`: the mean of the features in the first row, then their covariance."""

    weights: Weights


@dataclass(frozen=True)
class MomentsOrder(EvaluateOrder, message_type="evaluate.moments", answer=MomentsResult):
    """Describe the training examples, without labels, by the moments of the features that enter the head."""


@dataclass(frozen=True)
class ErrorsResult:
    """The error rate of each classifier on the client's examples."""

    errors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ErrorsOrder(EvaluateOrder, message_type="evaluate.errors", answer=ErrorsResult):
    """Return the error rates of linear classifiers `(M, F + 1)` that tell two clients' features apart.

    Attributes:
        sign: correct sign of the classifiers' values on this client's validation examples, 1 or -1.
    """

    sign: int
    classifiers: Weights


def try_many(client: Client, order: TryOrder) -> EvaluateResult:
    """Score many models on validation and test examples, each by itself or together by the mean of their outputs.

    Raises:
        WireError: the order's weights do not fit the network.
        HyperbloomError: the user does not allow it.
    """
    check_common_model(client, order.target)
    network = loaded_network(client, order.target, order.weights)
    layout = network.shared.layout
    sent = order.weights
    count = 0 if sent is None else sent.layout.numel // layout.numel
    if sent is None or count < 1 or sent.layout.shapes != (("models", (count, layout.numel)),):
        found = sent and sent.layout.shapes
        raise WireError(f"order: expected models of {layout.numel} weights each, found {found}")
    count_score(client, order, network.module, lambda: None)

    def models() -> Iterator[nn.Module]:
        for row in sent.values.view(count, layout.numel):
            module = load(client, order.scope, order.target, Weights(layout, row)).module
            settle_norms(module, client.train_data)
            yield module

    parts = (client.val_data, client.test_data)
    return EvaluateResult(*(score_all(models(), data, order.together, order.metrics) for data in parts))


def check_common_model(client: Client, target: Target) -> None:
    """Raise a WireError if the network is the client's own: the answer would disclose sizes of its layers."""
    if client.own is not None and (target.model == OWN or target.private == "all"):
        raise WireError("order: expected a model that the server chose, found the client's own")


def send_moments(client: Client, order: MomentsOrder) -> MomentsResult:
    """Return mean and covariance of the training examples' features before the head; errors as in `try_many`."""
    client.releases.check_change()
    check_common_model(client, order.target)
    module = load(client, order.scope, order.target, order.weights).module
    found = moments_of(features(module, client.train_data.inputs)).cpu()
    return MomentsResult(Weights(Layout((("moments", tuple(found.shape)),)), found))


def send_errors(client: Client, order: ErrorsOrder) -> ErrorsResult:
    """Return the error rate of each of the order's classifiers on the validation examples.

    Raises:
        WireError: the classifiers do not fit the number of features.
        HyperbloomError: the user does not allow it.
    """
    check_common_model(client, order.target)
    module = load(client, order.scope, order.target, order.weights).module
    count_score(client, order, module, lambda: None)
    seen = features(module, client.val_data.inputs).cpu()
    shapes = order.classifiers.layout.shapes
    if len(shapes) != 1 or shapes[0][1][1:] != (seen.shape[1] + 1,):
        raise WireError(f"order: expected classifiers of {seen.shape[1]} features, found {shapes}")
    return ErrorsResult(domain_errors(seen, order.classifiers.values.view(*shapes[0][1]), order.sign))


@torch.no_grad()
def score_all(models: Iterable[nn.Module], data: Examples, together: bool, metrics: Sequence[str] = ()) -> SplitScore:
    """Score several models, each used before the next is drawn; `together`: by the mean of their outputs."""
    answers = []
    for model in models:
        model.eval()
        answers.append(torch.cat([model(inputs) for inputs in data.inputs.split(EVALUATION_BATCH)]))
    if together:
        answers = [torch.stack(answers).mean(0)]
    scores = []
    for outputs in answers:
        loss, labels = data.task.total(outputs, data.labels)
        found = data.task.answers(outputs)
        scores.append(score_of(data, found, outputs.shape[1], loss / max(1, labels), metrics, disclose=False))
    # Whether a metric is defined depends on the labels alone, so all models have the same ones.
    values = (fmean(each) for each in zip(*(score.values for score in scores), strict=True))
    return SplitScore(len(scores) * len(data), fmean(score.loss for score in scores), scores[0].metrics, tuple(values))


def moments_of(seen: Tensor) -> Tensor:
    """Return the mean of features `(N, F)` stacked on their covariance, `(1 + F, F)`."""
    mean = seen.mean(0, keepdim=True)
    centred = seen - mean
    return torch.cat([mean, centred.T @ centred / len(seen)])


def domain_errors(seen: Tensor, classifiers: Tensor, sign: int) -> tuple[float, ...]:
    """Return the error rate of each of the linear classifiers `(M, F + 1)`, on features `(N, F)` of one domain.

    A classifier is its weights and then its bias. The sign of its value gives the domain; `sign` is that of these.
    """
    values = sign * (seen @ classifiers[:, :-1].T + classifiers[:, -1])  # (N, M)
    return tuple((values <= 0).double().mean(0).tolist())


take(TryOrder, try_many)
take(MomentsOrder, send_moments)
take(ErrorsOrder, send_errors)
