"""Hypernetworks: networks that generate the weights of other networks. Pure torch, without Flower."""

from hyperbloom.strategies.hypernetworks.chunked import ChunkedHypernetwork
from hyperbloom.strategies.hypernetworks.learner import EmbeddingTable, Hypernetwork
from hyperbloom.strategies.hypernetworks.mlp import MLPHypernetwork
