"""The handler of a training order."""

import logging
import math
import time
from dataclasses import replace

from hyperbloom.client.keep.feedback import encode_with_feedback
from hyperbloom.client.work.client import Client, enough_memory
from hyperbloom.client.work.encoding import encoder_inputs, fit_encoder
from hyperbloom.client.work.methods import check_method, train_by
from hyperbloom.client.work.networks import Loaded, keep_personal, load
from hyperbloom.client.work.reference import reference_rows
from hyperbloom.common.config import MOST_STEPS
from hyperbloom.common.errors import HyperbloomError, WireError
from hyperbloom.common.layout import LARGEST_NORM, Weights
from hyperbloom.common.methods import Aligned
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy.noise import release
from hyperbloom.common.wire.exchanges import FitOrder, FitResult
from hyperbloom.common.wire.masks import MaskedOrder
from hyperbloom.common.wire.orders import REPLIES, TrainOrder, TrainResult

log = logging.getLogger("hyperbloom.client")


@enough_memory()
def train(client: Client, order: TrainOrder) -> TrainResult:
    """Train as ordered, and write the private part to the disk before returning."""
    start = time.perf_counter()
    network, seed = prepare(client, order)
    method, likeness = order.method, None
    if isinstance(method, Aligned) and method.eta:
        likeness = reference_rows(client, method.reference, method.rows, method.draw), order.resemble
    with client.hide_own_model():
        module, (data,) = network.module, (client.train_data,)
        if likeness is None:  # which compares what enters the head
            module, (data,) = network.on_features(client, data)
        loss = train_by(method, replace(network, module=module), data, order.sgd, seed, likeness)
    return conclude(client, order, network, loss, time.perf_counter() - start)


def fit(client: Client, order: FitOrder) -> FitResult:
    """Train, and fit the encoder to the order's descriptor."""
    result = train(client, order)
    return FitResult(**vars(result), version=order.fit.version, gamma=fit_encoder(order.fit, encoder_inputs(client)))


def prepare(client: Client, order: TrainOrder) -> tuple[Loaded, int]:
    """Check an order, load its network, and return it with the seed of the batches."""
    steps = (order.sgd.steps, order.fit.steps) if isinstance(order, FitOrder) else (order.sgd.steps,)
    if order.reply not in REPLIES or order.sgd.steps < 1 or max(steps) > MOST_STEPS or order.sgd.batch_size < 1:
        raise WireError(f"order: expected reply in {REPLIES}, 1 to {MOST_STEPS} steps, found {order.reply!r}, {steps}")
    noise = order.noise
    if noise is not None and not (noise.clip > 0 and noise.scale > 0):
        raise WireError(f"order: expected noise with clip and scale above 0, found {noise}")
    check_method(order.method, order.target.private, order.sgd.steps)
    if isinstance(order, FitOrder):
        client.releases.check_change()  # the encoder's change has no noise
    if order.reply != "nothing":
        client.releases.check_change(noise.scale if noise else None, isinstance(order, MaskedOrder))
    network = load(client, order.scope, order.target, order.weights)
    network.holds = None  # until the trained part is on the disk
    return network, client.seed(order.scope, order.scope.round)


def conclude(client: Client, order: TrainOrder, network: Loaded, loss: float, seconds: float) -> TrainResult:
    """Keep the private part of the trained network, and return the result that the order asks for.

    Whether a training diverges depends on the examples, and a server that chooses weights and rates can read them off
    it, one question at a time. So where the examples are hidden a diverged training has changed nothing.
    """
    network.holds = None  # when several train at once, an earlier one has set it
    hidden = order.noise is not None or order.quiet or client.releases.bounded or isinstance(order, MaskedOrder)
    norms = (float(part.values.norm()) for part in (network.shared, network.personal))  # the loss is a step older
    diverged = not math.isfinite(loss) or not all(norm <= LARGEST_NORM for norm in norms)
    if diverged:
        task, how = client.train_data.task, "scale the inputs, or lower local.learning_rate"
        if task.standardises and not task.spec.std:
            how += ", or set target_moments (or --disclose-moments) for the targets"
        if not hidden:
            raise HyperbloomError(f"training diverged (loss {loss}); {how}", reason=Reason.DIVERGED)
        log.warning("training diverged, and the server is not told: it sees no change from this client; %s", how)
    else:
        keep_personal(client, order.scope, network)
    reply, encoded = None, None
    if order.reply != "nothing" and order.weights is not None:
        layout = network.shared.layout
        sent = order.weights.part(layout)
        trained = sent if diverged else network.shared.values.cpu()
        if order.noise is not None:  # the code below must see only the noisy change
            trained = sent + release(trained - sent, order.noise.clip, order.noise.scale)
        if order.codec is None:
            reply = Weights(layout, trained - sent if order.reply == "delta" else trained.clone())
        else:
            bounded, change = order.reply == "delta", trained - sent
            encoded = encode_with_feedback(
                order.codec, client.state, order.scope, layout, change, bounded, str(order.noise or "")
            )
    return TrainResult(seconds, reply, None if hidden else loss, encoded)
