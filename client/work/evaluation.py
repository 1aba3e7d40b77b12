"""The handler of an evaluation order."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from hyperbloom.client.keep.state import Scored
from hyperbloom.client.work.client import Client, enough_memory
from hyperbloom.client.work.networks import Loaded, load, spec_of
from hyperbloom.client.work.own_network import tensors_of
from hyperbloom.client.work.refinement import REFINERS
from hyperbloom.client.work.scoring import evaluate, settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import HyperbloomError, WireError, attempt, describe
from hyperbloom.common.models import ALL, FORM, OWN, ModelSpec
from hyperbloom.common.models.parts import running_norms
from hyperbloom.common.wire.orders import REFINED, EvaluateOrder, EvaluateResult, SplitScore

ResultT = TypeVar("ResultT")
log = logging.getLogger("hyperbloom.client")


@enough_memory()
def evaluate_order(client: Client, order: EvaluateOrder) -> EvaluateResult:
    """Score the order's weights with the private part on validation and test examples.

    Raises:
        HyperbloomError: the user allows no more scores. The client keeps its own model all the same.
    """
    network = load(client, order.scope, order.target, order.weights)
    if order.target.private == "copy":
        network.shared.load(network.personal.values)
    return count_score(client, order, network.module, partial(_score, client, order, network))


def _score(client: Client, order: EvaluateOrder, network: Loaded) -> EvaluateResult:
    with client.hide_own_model():
        module, (_, *parts) = personal_model(client, order, network)
        disclose = client.settings.disclose_counts
        val, test = (evaluate(module, part, order.metrics, disclose) for part in parts)
        module = network.module if module is network.tail else module
        if order.refinement or order.target.private != "none" or own_of(client, order) or running_norms(module):
            keep_scored(client, order, tensors_of(module), test)  # else the server has it in full
    return EvaluateResult(val, test)


def count_score(client: Client, order: EvaluateOrder, module: nn.Module, score: Callable[[], ResultT]) -> ResultT:
    """Return what `score` returns, and count it if it depends on training examples: a loss can reveal their labels.

    Raises:
        HyperbloomError: the user allows no more scores. `score` is called all the same, to keep the client's own model.
    """
    counts = order.target.private != "none" or order.refinement is not None or running_norms(module)
    refused, result = attempt(client.releases.spend, "scores") if counts else None, attempt(score)
    if isinstance(refused, Exception):  # the server does not learn how the scoring went
        if isinstance(result, Exception):
            log.error("the model cannot be scored here: %s", describe(result))
        raise refused
    if isinstance(result, Exception):
        raise result
    return result


def personal_model(client: Client, order: EvaluateOrder, network: Loaded) -> tuple[nn.Module, tuple[Examples, ...]]:
    """Return a loaded network as the client uses it, perhaps refined, and examples to train, validate and test it."""
    module, data = network.on_features(client, client.train_data, client.val_data, client.test_data)
    settle_norms(module, data[0])
    settings = order.refinement
    if settings is not None:
        if settings.part not in REFINERS:
            raise WireError(f"order: expected to refine one of {REFINED}, found {settings.part!r}")
        seed = client.seed(order.scope, order.scope.round, "refine")
        module = REFINERS[settings.part](client, module, network.head, data[0], settings, seed)
    return module, data


def own_of(client: Client, order: EvaluateOrder) -> ModelSpec | None:
    """Return the client's own model if an order scores it."""
    taught = order.refinement is not None and order.refinement.part not in REFINED
    return client.own if order.target.model == OWN or order.target.private == "all" or taught else None


def keep_scored(
    client: Client, order: EvaluateOrder, state: dict[str, Tensor], test: SplitScore, gain: str = "", lone: bool = False
) -> None:
    """Keep a model, perhaps one trained alone, for `flower-client export`; a full disk causes a warning."""
    target = order.target
    spec = ((client.own if lone else None) or own_of(client, order) or spec_of(client, target)).resolved()
    facts = Scored(
        model=spec.name,
        size=spec.size,
        input_shape=spec.input_shape,
        num_classes=spec.num_classes,
        round=order.scope.round,
        private="all" if lone else target.private,
        task=target.task.name,
        moments=(*target.task.mean, *target.task.std),
        metrics=dict(zip(test.metrics, test.values, strict=True)),
        total=test.total,
        adapt=FORM.sub(ALL, target.adapt) if lone else target.adapt,
        backbone=client.backbone,
        gain=gain,
        table=client.schema.text if client.schema else None,
    )
    try:
        client.state.save_scored(order.scope.run_id, state, facts)
    except HyperbloomError as error:
        log.warning("the scored model is not kept: %s", error)
