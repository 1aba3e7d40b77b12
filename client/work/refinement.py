"""Temporary training on a client's own examples before its network is scored."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperbloom.client.work.client import Client
from hyperbloom.client.work.own_network import Fixed, Generated
from hyperbloom.client.work.scoring import EVALUATION_BATCH, settle_norms
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.wire.orders import REFINED, Refinement

MOST_EPOCHS = 100


def refine(module: nn.Module, head: tuple[str, ...], data: Examples, settings: Refinement, seed: int) -> nn.Module:
    """Return the network after some passes of plain SGD over the client's own examples.

    In HAFL-GHN this is the inference step of the paper's section 4.2, on the last layer. In FedAvg with fine-tuning and
    Per-FedAvg it adapts all weights. The other weights stay as sent or generated, and norms run in evaluation mode. The
    given module's weights do not change. If the loss on the examples grows, the result has the weights as sent.

    Raises:
        WireError: a setting is out of range.
    """
    if not 1 <= settings.epochs <= MOST_EPOCHS or settings.rate <= 0 or settings.batch < 1:
        raise WireError(f"order: expected 1 to {MOST_EPOCHS} epochs with a rate and batches, found {settings}")
    network, given = module, dict[str, Tensor](module.named_parameters())
    if isinstance(module, Generated):
        with torch.no_grad():
            network, given = module.network, module.weights()
    weights = {name: values.detach() for name, values in given.items()}
    chosen = tuple(weights) if settings.part == "all" else head
    refined = {name: weights[name].clone().requires_grad_() for name in chosen if name in weights}
    generator = torch.Generator().manual_seed(seed)
    sent = Fixed(network, weights)
    loss_as_sent = _loss(sent, data)
    network.eval()
    for _ in range(settings.epochs if refined else 0):
        for rows in torch.randperm(len(data), generator=generator).split(settings.batch):
            gradients = [torch.zeros_like(values) for values in refined.values()]
            # A batch may contain all of a client's examples, so accumulate gradients in chunks that fit in memory.
            for some in rows.to(data.labels.device).split(EVALUATION_BATCH):
                outputs = functional_call(network, {**weights, **refined}, (data.inputs[some],))
                loss = data.loss(outputs, some) * (len(some) / len(rows))
                for total, gradient in zip(gradients, torch.autograd.grad(loss, list(refined.values())), strict=True):
                    total.add_(gradient)
            with torch.no_grad():
                for values, gradient in zip(refined.values(), gradients, strict=True):
                    values.sub_(gradient, alpha=settings.rate)
    after = Fixed(network, {**weights, **{name: values.detach() for name, values in refined.items()}})
    if settings.part == "all":
        settle_norms(after, data)  # the statistics belong to the weights as sent
    # Too large a learning rate must not make the model worse. A NaN also fails this test.
    if _loss(after, data) <= loss_as_sent:
        return after
    settle_norms(sent, data)
    return sent


@torch.no_grad()
def _loss(module: nn.Module, data: Examples) -> float:
    """Return the loss that training makes smaller, with its weights of classes."""
    module.eval()
    parts = torch.arange(len(data), device=data.labels.device).split(EVALUATION_BATCH)
    return sum(len(some) / len(data) * float(data.loss(module(data.inputs[some]), some)) for some in parts)


Refiner = Callable[[Client, nn.Module, tuple[str, ...], Examples, Refinement, int], nn.Module]

REFINERS: dict[str, Refiner] = dict.fromkeys(REFINED, lambda client, *given: refine(*given))
"""What makes a client's network of one that is loaded, and of its head, by `Refinement.part`."""
