"""Computation graphs of networks, and the graph hypernetwork. Server and clients use both."""

from hyperbloom.common.graphs.graph import Graph, Node
from hyperbloom.common.graphs.layer import LayerType
from hyperbloom.common.graphs.network import SHARED, GraphHypernetwork, Settings, part_of
from hyperbloom.common.graphs.trace import trace
