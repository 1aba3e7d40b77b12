"""HAFL-distillation: FedAvg on one shared architecture, which every client distils into its own on its own data.

Importing this module registers it.

The baseline of Litany, Maron, Acuna, Kautz, Chechik, Fidler: Federated Learning with Heterogeneous Architectures using
Graph HyperNetworks, 2022, https://arxiv.org/abs/2201.08459, section 5. The authors' temperature is not known.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from hyperbloom.common.config import Positive, Rate, Section
from hyperbloom.common.errors import RefusedError
from hyperbloom.common.wire.orders import Introduction, Refinement
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Recipe
from hyperbloom.strategies.fedavg import FedAvg


class HAFLDistillationOptions(Section):
    """Options of HAFL-distillation."""

    epochs: Positive = Field(
        20, description="passes over a client's examples to distil, before every evaluation; the paper's: 200"
    )
    temperature: Rate = Field(4.0, description="temperature T of both softmaxes")


class HAFLDistillation(FedAvg):
    """FedAvg trains `model`; before an evaluation each client distils it into its own architecture (--model).

    A client works for both: it trains the shared network in each round, and its own one anew at each evaluation.
    """

    options: HAFLDistillationOptions
    own_models: ClassVar[Literal["no", "may", "must"]] = "must"

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse a client without its own model."""
        if about.types is None and about.graph is None:
            raise RefusedError("this run teaches every client's own model; join with --model")

    def recipe(self, number: int) -> Recipe:
        """Distil the shared network before an evaluation."""
        local, options = self.config.local, self.options
        distillation = Refinement(
            options.epochs, local.learning_rate, local.batch_size, distil_temperature=options.temperature
        )
        return replace(super().recipe(number), refinement=distillation)


STRATEGIES["hafl-distillation"] = HAFLDistillation
