"""A client's own model, the graph hypernetwork that fills it, and orders of strategy `ghn`."""

from typing import Any

from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.graphs import GraphHypernetwork, LayerType, Settings
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import OWN, ModelSpec
from hyperbloom.common.wire.orders import EvaluateOrder

from ..orders import evaluate_order

SPEC = ModelSpec("plain-4", "S", (1, 8, 8), 10)
GRAPH = own_graph(SPEC)
SETTINGS = Settings(layers=2, latent=8, hidden=4)


def hypernetwork(settings: Settings = SETTINGS, types: tuple[LayerType, ...] = GRAPH.types) -> GraphHypernetwork:
    """Return what the server holds."""
    return GraphHypernetwork(types, settings, seed=3)


def parts(network: GraphHypernetwork) -> Weights:
    """Return all parts of a hypernetwork as they travel."""
    layout = Layout.of(network)
    return Weights(layout, layout.flatten(dict(network.named_parameters())))


def ordered(**changes: Any) -> dict[str, Any]:
    """Return what an order of strategy `ghn` is about."""
    values: dict[str, Any] = {"round": 2, "model": OWN, "private": "none", "weights": parts(hypernetwork())}
    return values | {"hypernetwork": SETTINGS.model_dump_json()} | changes


def to_evaluate(**changes: Any) -> EvaluateOrder:
    """Return the order to evaluate such a model."""
    return evaluate_order(**ordered(**changes))
