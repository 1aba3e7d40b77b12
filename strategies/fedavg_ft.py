"""FedAvg with fine-tuning: each client trains the global model a little further before it is used there.

Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage: Federated Evaluation of On-device Personalization, 2019,
https://arxiv.org/abs/1910.10252.

    rounds:      as FedAvg, `local.steps` steps of SGD each
    evaluation:  a client takes `epochs` passes of plain SGD over its own examples, and forgets them afterwards

Fine-tuning uses no momentum, weight decay or clipping; the default of its rate makes up for the missing momentum.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from hyperbloom.common.config import Rate, Section
from hyperbloom.common.wire.orders import Refinement
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedavg import FedAvg


class FedAvgFTOptions(Section):
    """Options of FedAvg with fine-tuning."""

    epochs: Annotated[int, Field(gt=0, le=100)] = Field(5, description="passes over a client's data before a score")
    rate: Rate | None = Field(
        None, description="learning rate of these; default: that of local training, on average, / (1 - local.momentum)"
    )


class FedAvgFT(FedAvg):
    """FedAvg, then local fine-tuning before each evaluation."""

    options: FedAvgFTOptions

    def recipe(self, number: int) -> Recipe:
        """Fine-tune all weights before an evaluation."""
        local = self.config.local
        rate = self.options.rate or local.mean_rate / (1 - local.momentum)
        tuning = Refinement(self.options.epochs, rate, local.batch_size, "all")
        return replace(super().recipe(number), refinement=tuning)
