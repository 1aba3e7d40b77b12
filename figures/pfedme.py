"""pFedMe: personal models tied to a global model by Moreau envelopes.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
https://arxiv.org/abs/2006.08848, algorithm 1.

    F_i(w)    = min_theta f_i(theta) + lambda/2 |theta - w|^2,   attained at theta_i, the personal model
    client:     for each batch  theta_i <- `inner_steps` gradient steps of rate `inner_rate` on the minimum's objective
                                w_i     <- w_i - eta lambda (w_i - theta_i)
    server:     w <- (1 - beta) w + beta sum_i n_i w_i / sum_i n_i

`local.steps` counts the gradients of inner steps: there are `local.steps / inner_steps` batches, each with one step of
w. The step of w is the run's SGD with eta = `local.learning_rate`, momentum, weight decay and clipping; the paper has
none of the last three. As lambda grows, lambda (w - theta) tends to the gradient of f_i at w, and pFedMe to FedAvg with
one step per batch. Inner steps are plain, and theta starts each round from the sent weights.

Importing this module registers its local method, so its clients are those of this process (engine `inline`).

The personal model stays on the client and is evaluated. A client that never trained evaluates the global model.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from hyperbloom.client.work.methods import LOCAL_METHODS
from hyperbloom.client.work.sgd import Flat, Network, backward, draw_batches
from hyperbloom.common.config import Positive, Rate, Section
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.methods import METHODS, Method
from hyperbloom.common.wire.orders import SGD
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.exchange import Update
from hyperbloom.strategies.fedavg import FedAvg


class Moreau(Method):
    """SGD on the Moreau envelope of the loss with parameter `lamda`. Its minimiser is the personal model."""

    private: ClassVar[tuple[str, ...]] = ("copy",)
    kind: Literal["pfedme"] = "pfedme"
    lamda: Rate
    inner_steps: Positive
    inner_rate: Rate


def train_by_envelope(network: Network, data: Examples, sgd: SGD, seed: int, settings: Moreau) -> float:
    """SGD on the Moreau envelope, whose gradient at `w` is `lamda (w - theta)`.

    `theta` starts the round at `w`. For each batch it takes `inner_steps` plain gradient steps on
    `f(theta) + lamda/2 |theta - w|^2`. Then `w` takes one step of the order's SGD with clipping and weight decay. The
    last batch has fewer inner steps if the budget ends there. The personal model becomes `theta`.
    """
    module, shared = network.module, network.shared
    w, total = Flat(shared.layout, shared.values.clone()), torch.zeros((), device=data.labels.device)
    starts = range(0, sgd.steps, settings.inner_steps)
    batches = draw_batches(len(data), sgd.batch_size, len(starts), seed).to(data.labels.device)
    module.train()
    for first, batch in zip(starts, batches, strict=True):
        for _ in range(min(settings.inner_steps, sgd.steps - first)):
            total += backward(module, [shared], data, batch)
            shared.gradient.add_(shared.values - w.values, alpha=settings.lamda)
            shared.values.sub_(shared.gradient, alpha=settings.inner_rate)
        torch.sub(w.values, shared.values, out=w.gradient).mul_(settings.lamda)
        w.clip(sgd.clip)
        w.step(sgd)
    network.personal.load(shared.values)
    shared.values.copy_(w.values)
    return (total / sgd.steps).item()


class PFedMeOptions(Section):
    """Options of pFedMe."""

    lamda: Rate = Field(3.0, description="the paper's lambda: how closely a personal model is tied to the global one")
    inner_steps: Positive = Field(5, description="gradient steps of the personal model on a batch")
    inner_rate: Rate = Field(0.1, description="learning rate of these; less than 2 / lamda")
    beta: Rate = Field(1.0, description="weight of the clients' average in the new global model")


class PFedMe(FedAvg):
    """A personal model on each client, tied to a global one by a Moreau envelope."""

    options: PFedMeOptions
    method_type: ClassVar[type[Method]] = Moreau
    private: ClassVar[str] = "copy"

    def check(self) -> None:
        """Refuse an inner rate of 2 / lamda or more: inner steps would diverge, whatever the loss."""
        super().check()
        options = self.options
        limit = 2 / options.lamda
        if options.inner_rate >= limit:
            raise ConfigError(
                f"options.inner_rate: expected less than 2 / lamda = {limit:g}, found {options.inner_rate:g}"
            )

    def learn(self, updates: Sequence[Update]) -> None:
        """Average by number of training examples, and move the global model by the share `beta` towards the average."""
        before = self.global_weights
        super().learn(updates)
        if updates and self.options.beta != 1:
            self.global_weights = before.lerp(self.global_weights, self.options.beta)


STRATEGIES["pfedme"], METHODS["pfedme"], LOCAL_METHODS["pfedme"] = PFedMe, Moreau, train_by_envelope
