"""Per-FedAvg: a global model from which one step of a client's own is a good one (MAML over clients).

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948, algorithm 1.

    F_i(w)      = f_i(w - alpha grad f_i(w))
    client:       steps of SGD on F_i, whose gradient is (I - alpha H_i(w)) grad f_i(w - alpha grad f_i(w))
        first-order    leaves H_i out
        hessian-free   H_i(w) g  ~  (grad f_i(w + delta g) - grad f_i(w - delta g)) / (2 delta)
    server:       w <- sum_i n_i w_i / sum_i n_i
    evaluation:   each client takes one step, w - alpha grad f_i(w), on all its training examples

`local.steps` counts gradients: an update spends two of them, or four with the curvature, so there are half or a quarter
as many updates as in FedAvg. With `alpha: 0` it is FedAvg with that many. The gradients of one update are on batches of
their own, as in the paper. Momentum, weight decay and clipping act on the gradient of F_i. An adapted model whose loss
on the client's training examples is worse than the global model's is not used. The paper's alpha is 0.01.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import Rate, Section, Share
from hyperbloom.common.wire import Refinement
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedavg import FedAvg

__all__ = ["PerFedAvg", "PerFedAvgOptions"]

ALL_EXAMPLES = 2**31 - 1
"""A batch that holds all that a client has."""


class PerFedAvgOptions(Section):
    """Options of Per-FedAvg."""

    alpha: Share = Field(0.1, description="rate of the adaptation step; 0 adapts nothing")
    variant: methods.Variant = Field("first-order", description="what of the Hessian: first-order, hessian-free")
    delta: Rate = Field(1e-3, description="hessian-free: step of the finite difference, in units of the gradient")


class PerFedAvg(FedAvg):
    """A global model made for one step of adaptation on each client (MAML)."""

    options_type: ClassVar[type[Section]] = PerFedAvgOptions
    options: PerFedAvgOptions

    def check(self) -> None:
        """There are steps enough for an update."""
        super().check()
        options = self.options
        self._method = methods.PerFedAvg(alpha=options.alpha, variant=options.variant, delta=options.delta)
        self.check_steps(self._method)

    def recipe(self, number: int) -> Recipe:
        """SGD on the loss after the step; the step before an evaluation."""
        alpha = self.options.alpha
        step = Refinement(1, alpha, ALL_EXAMPLES, "all") if alpha else None
        return replace(super().recipe(number), method=self._method, refinement=step)
