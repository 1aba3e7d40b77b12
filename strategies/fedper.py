"""FedPer: a shared body and a personal head, trained together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, 2019,
https://arxiv.org/abs/1912.00818.

    client:  K = `local.steps` steps of SGD on f_i(body, head_i), both at once; the head stays
    server:  body <- sum_i n_i body_i / sum_i n_i
"""

from hyperbloom.strategies.fedavg import FedAvg


class FedPer(FedAvg):
    """A shared body, averaged, and a personal head, trained together."""

    private = "head"
