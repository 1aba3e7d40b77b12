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

The personal model stays on the client and is evaluated. A client that never trained evaluates the global model.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import Positive, Rate, Section
from hyperbloom.common.errors import ConfigError
from hyperbloom.strategies.exchange import Update
from hyperbloom.strategies.fedavg import FedAvg


class PFedMeOptions(Section):
    """Options of pFedMe."""

    lamda: Rate = Field(3.0, description="the paper's lambda: how closely a personal model is tied to the global one")
    inner_steps: Positive = Field(5, description="gradient steps of the personal model on a batch")
    inner_rate: Rate = Field(0.1, description="learning rate of these; less than 2 / lamda")
    beta: Rate = Field(1.0, description="weight of the clients' average in the new global model")


class PFedMe(FedAvg):
    """A personal model on each client, tied to a global one by a Moreau envelope."""

    options: PFedMeOptions
    method_type: ClassVar[type[methods.Method]] = methods.PFedMe
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
