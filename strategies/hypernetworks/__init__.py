"""Networks that write networks, in pure torch; nothing here knows of Flower."""

from hyperbloom.strategies.hypernetworks.embedding import EmbeddingTable
from hyperbloom.strategies.hypernetworks.mlp import LinearHypernetwork, MLPHypernetwork

__all__ = ["EmbeddingTable", "LinearHypernetwork", "MLPHypernetwork"]
