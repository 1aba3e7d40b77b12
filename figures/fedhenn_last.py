"""FedHeNN as its authors' code scores it: `figures.fedhenn_last:FedHeNNLast`.

Makhija, Han, Ho, Ghosh: Architecture Agnostic Federated Learning for Neural Networks, ICML 2022,
https://arxiv.org/abs/2202.07757; its code is https://github.com/dishamakhija/FedHeNN, scripts/homogeneous_clients.py.
The text does not say that in a last round all clients start from the global model and train its last layer for 10
epochs, before they are scored. With `eta=0` this is FedAvg, scored in the same way: the control.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from hyperbloom.common.wire.orders import Refinement
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedhenn import FedHeNNHomogeneous, FedHeNNHomogeneousOptions

EPOCHS = 10


class FedHeNNLastOptions(FedHeNNHomogeneousOptions):
    """Options of FedHeNN with a last round."""

    score: Literal["global"] = Field("global", description="the global model, with a last layer of the client's own")


class FedHeNNLast(FedHeNNHomogeneous):
    """FedHeNN for one architecture; before an evaluation every client trains the last layer."""

    options: FedHeNNLastOptions  # type: ignore[assignment]

    def recipe(self, number: int) -> Recipe:
        """Train the last layer before an evaluation, at the rate that momentum makes of the local one.

        Representations do not depend on it, so the authors' alignment term has no gradient there.
        """
        local = self.config.local
        rate = local.mean_rate / (1 - local.momentum)
        return replace(super().recipe(number), refinement=Refinement(EPOCHS, rate, local.batch_size))
