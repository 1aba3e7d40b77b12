"""Per-FedAvg: a global model that adapts well to each client in one step (MAML over clients).

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, https://arxiv.org/abs/2002.07948, algorithm 1.

    F_i(w)      = f_i(w - alpha grad f_i(w))
    client:       steps of SGD on F_i, whose gradient is (I - alpha H_i(w)) grad f_i(w - alpha grad f_i(w))
        first-order    leaves H_i out
        hessian-free   H_i(w) g  ~  (grad f_i(w + delta g) - grad f_i(w - delta g)) / (2 delta)
    server:       w <- sum_i n_i w_i / sum_i n_i
    evaluation:   each client takes one step, w - alpha grad f_i(w), on all its training examples

Importing this module registers its local method, so its clients are those of this process (engine `inline`).

`local.steps` counts gradients. An update takes two of them, or four with the curvature, so there are half or a quarter
as many updates as in FedAvg. With `alpha: 0` it is FedAvg with that many updates. Each gradient of an update uses a
batch of its own, as in the paper. Momentum, weight decay and clipping act on the gradient of F_i. A client does not use
an adapted model whose loss on its training examples is worse than the global model's. The paper's alpha is 0.01.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from hyperbloom.client.work.methods import LOCAL_METHODS
from hyperbloom.client.work.sgd import Network, backward, draw_batches
from hyperbloom.common.config import NonNegative, Rate, Section
from hyperbloom.common.data import Examples
from hyperbloom.common.methods import METHODS, Method
from hyperbloom.common.wire.orders import SGD, Refinement
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedavg import FedAvg

Variant = Literal["first-order", "hessian-free"]

ALL_EXAMPLES = 2**31 - 1
"""Size of a batch that holds all examples of a client."""
ALPHA = 0.1


class Adapted(Method):
    """SGD on the loss after one step of rate `alpha`."""

    kind: Literal["per-fedavg"] = "per-fedavg"
    alpha: NonNegative
    variant: Variant
    delta: Rate  # hessian-free: length of the finite difference, in units of the gradient

    @property
    def fewest_steps(self) -> int:
        """Number of gradients in one update."""
        return 4 if self.variant == "hessian-free" else 2


def train_adapted(network: Network, data: Examples, sgd: SGD, seed: int, settings: Adapted) -> float:
    """SGD on `f(w - alpha grad f(w))`, with two gradients in a step, or four with the curvature.

    The gradient is `(I - alpha H(w)) g` with `g = grad f(w - alpha grad f(w))`. The first-order variant leaves `H` out;
    the hessian-free one computes `H g` from the difference of gradients at `w +- delta g`. The inner gradient, `g` and
    `H g` use separate batches; those of `g` are the batches of plain SGD. The inner step is not clipped.
    """
    module, shared = network.module, network.shared
    curved = settings.variant == "hessian-free"
    updates, total = sgd.steps // (4 if curved else 2), torch.zeros((), device=data.labels.device)
    batches = draw_batches(len(data), sgd.batch_size, updates * (3 if curved else 2), seed)
    outer, inner, *rest = batches.to(data.labels.device).split(updates)
    module.train()
    for number in range(updates):
        start = shared.values.clone()
        backward(module, [shared], data, inner[number])
        shared.values.sub_(shared.gradient, alpha=settings.alpha)
        total += backward(module, [shared], data, outer[number])
        gradient = shared.gradient.clone()
        if curved:
            torch.add(start, gradient, alpha=settings.delta, out=shared.values)
            backward(module, [shared], data, rest[0][number])
            ahead = shared.gradient.clone()
            torch.sub(start, gradient, alpha=settings.delta, out=shared.values)
            backward(module, [shared], data, rest[0][number])
            gradient.sub_(ahead - shared.gradient, alpha=settings.alpha / (2 * settings.delta))
        shared.values.copy_(start)
        shared.gradient.copy_(gradient)
        shared.clip(sgd.clip)
        shared.step(sgd)
    return (total / updates).item()


class PerFedAvgOptions(Section):
    """Options of Per-FedAvg."""

    alpha: NonNegative = Field(ALPHA, description="rate of the adaptation step; 0 adapts nothing")
    variant: Variant = Field("first-order", description="what of the Hessian: first-order, hessian-free")
    delta: Rate = Field(1e-3, description="hessian-free: step of the finite difference, in units of the gradient")


class PerFedAvg(FedAvg):
    """A global model that adapts to each client in one step (MAML)."""

    options: PerFedAvgOptions
    method_type: ClassVar[type[Method]] = Adapted

    def recipe(self, number: int) -> Recipe:
        """Take the adaptation step before an evaluation."""
        alpha = self.options.alpha
        step = Refinement(1, alpha, ALL_EXAMPLES, "all") if alpha else None
        return replace(super().recipe(number), refinement=step)


class FedAvgTwoSteps(FedAvg):
    """FedAvg, whose clients take two steps on all their training examples before they are scored: a control.

    It tells how much of Per-FedAvg's score is the adaptation before an evaluation, and how much is its training.
    """

    def recipe(self, number: int) -> Recipe:
        """Take both steps at the rate of Per-FedAvg."""
        return replace(super().recipe(number), refinement=Refinement(2, ALPHA, ALL_EXAMPLES, "all"))


STRATEGIES["per-fedavg"], METHODS["per-fedavg"], LOCAL_METHODS["per-fedavg"] = PerFedAvg, Adapted, train_adapted
