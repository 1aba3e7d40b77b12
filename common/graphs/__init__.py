"""Computation graphs of networks, and the hypernetwork that reads them: on the client as on the server."""

from hyperbloom.common.graphs.graph import Graph, Node
from hyperbloom.common.graphs.layer import LayerType
from hyperbloom.common.graphs.network import GraphHypernetwork, Settings, parts_of
from hyperbloom.common.graphs.trace import trace

__all__ = ["Graph", "GraphHypernetwork", "LayerType", "Node", "Settings", "parts_of", "trace"]
