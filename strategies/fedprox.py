"""FedProx: FedAvg with a proximal term that keeps clients near the weights they were sent.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
https://arxiv.org/abs/1812.06127. The clients compute the term; the server averages as FedAvg.

    client:  K = `local.steps` steps of SGD on f_i(w) + mu/2 |w - w_sent|^2
    server:  w <- sum_i n_i w_i / sum_i n_i

The gradient of the term is added to that of the loss before clipping. With `mu: 0` it equals FedAvg to the bit. The
paper's variable amounts of local work are not implemented.
"""

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import NonNegative, Section
from hyperbloom.strategies.fedavg import FedAvg


class FedProxOptions(Section):
    """Options of FedProx."""

    mu: NonNegative = Field(0.1, description="strength of the proximal term; 0 is FedAvg")


class FedProx(FedAvg):
    """FedAvg with a proximal term in the local loss."""

    options: FedProxOptions
    method_type = methods.FedProx
