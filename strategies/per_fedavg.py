"""Per-FedAvg: a global model that adapts well to each client in one step (MAML over clients).

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948, algorithm 1.

    F_i(w)      = f_i(w - alpha grad f_i(w))
    client:       steps of SGD on F_i, whose gradient is (I - alpha H_i(w)) grad f_i(w - alpha grad f_i(w))
        first-order    leaves H_i out
        hessian-free   H_i(w) g  ~  (grad f_i(w + delta g) - grad f_i(w - delta g)) / (2 delta)
    server:       w <- sum_i n_i w_i / sum_i n_i
    evaluation:   each client takes one step, w - alpha grad f_i(w), on all its training examples

`local.steps` counts gradients. An update takes two of them, or four with the curvature, so there are half or a quarter
as many updates as in FedAvg. With `alpha: 0` it is FedAvg with that many updates. Each gradient of an update uses a
batch of its own, as in the paper. Momentum, weight decay and clipping act on the gradient of F_i. A client does not use
an adapted model whose loss on its training examples is worse than the global model's. The paper's alpha is 0.01.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import Rate, Section, Share
from hyperbloom.common.wire.orders import Refinement
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedavg import FedAvg

ALL_EXAMPLES = 2**31 - 1
"""Size of a batch that holds all examples of a client."""


class PerFedAvgOptions(Section):
    """Options of Per-FedAvg."""

    alpha: Share = Field(0.1, description="rate of the adaptation step; 0 adapts nothing")
    variant: methods.Variant = Field("first-order", description="what of the Hessian: first-order, hessian-free")
    delta: Rate = Field(1e-3, description="hessian-free: step of the finite difference, in units of the gradient")


class PerFedAvg(FedAvg):
    """A global model that adapts to each client in one step (MAML)."""

    options: PerFedAvgOptions
    method_type: ClassVar[type[methods.Method]] = methods.PerFedAvg

    def recipe(self, number: int) -> Recipe:
        """Take the adaptation step before an evaluation."""
        alpha = self.options.alpha
        step = Refinement(1, alpha, ALL_EXAMPLES, "all") if alpha else None
        return replace(super().recipe(number), refinement=step)
