"""Ditto: a personal model on each client, pulled towards the global one that FedAvg learns beside it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
https://arxiv.org/abs/2012.04221, algorithm 1.

    client:  K = `local.steps` steps of SGD from w give w_i
             K steps of SGD on f_i(v_i) + lambda/2 |v_i - w|^2, with w as sent
    server:  w <- sum_i n_i w_i / sum_i n_i

A client computes 2 K gradients in a round, on the same batches for both models. The personal model starts as w, is not
clipped, keeps its momentum, and is evaluated. A client that never trained evaluates the global model.
"""

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import NonNegative, Section
from hyperbloom.strategies.fedavg import FedAvg


class DittoOptions(Section):
    """Options of Ditto."""

    lamda: NonNegative = Field(1.0, description="the paper's lambda: how near personal models stay to the global one")


class Ditto(FedAvg):
    """FedAvg, and a personal model on each client that is tied to the global one."""

    options: DittoOptions
    method_type = methods.Ditto
    private = "copy"
