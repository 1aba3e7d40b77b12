"""The handler of an evaluation order."""

import logging

from torch import nn

from hyperbloom.client.keep.state import Scored
from hyperbloom.client.work.client import Client, enough_memory
from hyperbloom.client.work.networks import load, spec_of
from hyperbloom.client.work.own_network import tensors_of
from hyperbloom.client.work.refinement import distil, refine
from hyperbloom.client.work.scoring import evaluate, has_running_norms, settle_norms
from hyperbloom.common.errors import HyperbloomError
from hyperbloom.common.models import OWN, ModelSpec
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, SplitScore

log = logging.getLogger("hyperbloom.client")


@enough_memory()
def evaluate_order(client: Client, order: EvaluateOrder) -> EvaluateResult:
    """Score the order's weights with the private part on validation and test examples.

    Raises:
        WireError: the order does not fit this client.
        HyperbloomError: the user does not allow it, the own model failed, or the memory was not enough.
    """
    network = load(client, order.scope, order.target, order.weights)
    if order.target.private == "copy":
        network.shared.load(network.personal.values)
    count_score(client, order, network.module)
    settings, data, parts = order.refinement, client.train_data, [client.val_data, client.test_data]
    with client.hide_own_model():
        module = network.module
        if settings is None or settings.distil_temperature is None:
            module, (data, *parts) = network.on_features(client, data, *parts)
        settle_norms(module, data)
        if settings is not None and settings.distil_temperature is not None:
            module = distil(module, client.own_spec(), data, settings, client.seed(order.scope, "distil"))
            settle_norms(module, data)
        elif settings is not None:
            seed = client.seed(order.scope, order.scope.round, "refine")
            module = refine(module, network.head, data, settings, seed)
        disclose = client.settings.disclose_counts
        val, test = (evaluate(module, part, order.metrics, disclose) for part in parts)
        _keep_scored(client, order, network.module if module is network.tail else module, test)
    return EvaluateResult(val, test)


def count_score(client: Client, order: EvaluateOrder, module: nn.Module) -> None:
    """Count a score that depends on training examples: the loss of a refined model can reveal their labels.

    Raises:
        HyperbloomError: the user allows no more scores.
    """
    if order.target.private != "none" or order.refinement is not None or has_running_norms(module):
        client.releases.spend("scores")


def _keep_scored(client: Client, order: EvaluateOrder, module: nn.Module, test: SplitScore) -> None:
    """Keep a model that only this machine has in full, for `flower-client export`; a full disk causes a warning."""
    target, settings = order.target, order.refinement
    distilled = settings is not None and settings.distil_temperature is not None
    own = client.own if target.model == OWN or target.private == "all" or distilled else None
    if own is None and target.private == "none" and settings is None and not has_running_norms(module):
        return  # the server has it in full
    spec = own or spec_of(client, target)
    spec = ModelSpec.choose(spec.name, spec.size, spec.input_shape, spec.num_classes)
    facts = Scored(
        model=spec.name,
        size=spec.size,
        input_shape=spec.input_shape,
        num_classes=spec.num_classes,
        round=order.scope.round,
        private=target.private,
        task=target.task.name,
        moments=(*target.task.mean, *target.task.std),
        metrics=dict(zip(test.metrics, test.values, strict=True)),
        total=test.total,
        adapt=target.adapt,
    )
    try:
        client.state.save_scored(order.scope.run_id, tensors_of(module), facts)
    except HyperbloomError as error:
        log.warning("the scored model is not kept: %s", error)
