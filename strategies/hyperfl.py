"""HyperFL: each client has the hypernetwork, a private embedding and a private head; hypernetworks are averaged.

Guo, Zeng, Chen, Zhang, Ren, Zhou, Qu: A New Federated Learning Framework Against Gradient Inversion Attacks, AAAI 2025,
https://arxiv.org/abs/2412.07187.

    client:  SGD on f_i(h(v_i; phi), head_i) over head_i, then over v_i and phi; v_i and head_i stay
    server:  phi <- sum_i n_i phi_i / sum_i n_i

As in the authors' code, the head has a sixth of `local.steps` and five times the rate, and optimisers are fresh each
round. Unlike there, the first weights are a network's own (common/models/generated.py), and the embedding's gradient is
not clipped. HyperFL-LPM, which writes adapters, is not here.
"""

from pydantic import Field

from hyperbloom.common import methods
from hyperbloom.common.config import Rate
from hyperbloom.strategies.fedrep import FedRep, FedRepOptions


class HyperFLOptions(FedRepOptions):
    """Options of HyperFL; the defaults are the values of the authors' code."""

    embedding_dim: int = Field(64, ge=1, le=999, description="dimension of an embedding")
    hidden_dim: int = Field(128, ge=1, le=999, description="width of the hypernetwork")
    head_share: methods.Fraction = Field(1 / 6, description="share of local.steps for the head, which come first")
    head_rate: Rate = Field(5.0, description="learning rate of the head, in units of local.learning_rate")


class HyperFL(FedRep):
    """A hypernetwork on every client, averaged; the embedding and the head never leave it."""

    options: HyperFLOptions
    method_type = methods.HyperFL

    @property
    def adapt(self) -> str:
        """Write the body by the hypernetwork."""
        return f"generated:k={self.options.embedding_dim},h={self.options.hidden_dim}"
