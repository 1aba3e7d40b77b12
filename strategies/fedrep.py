"""FedRep: a shared body and a personal head, trained one after the other.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, https://arxiv.org/abs/2102.07078, algorithm 1.

    client:  tau K steps of SGD on f_i(body, head_i) over head_i, then (1 - tau) K over body; the head stays
    server:  body <- sum_i n_i body_i / sum_i n_i

`head_share` divides `local.steps` between the two; each gets at least one. The paper trains the head for ten epochs and
the body for one or five, and averages bodies evenly, over clients with equally many examples.
"""

from typing import ClassVar

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import Section
from hyperbloom.common.methods import Fraction
from hyperbloom.strategies.fedavg import FedAvg


class FedRepOptions(Section):
    """Options of FedRep."""

    head_share: Fraction = Field(0.9, description="share of local.steps for the head; the others are for the body")


class FedRep(FedAvg):
    """A shared body, averaged, and a personal head that is trained before it."""

    options: FedRepOptions
    private = "head"
    method_type: ClassVar[type[methods.Method]] = methods.FedRep
