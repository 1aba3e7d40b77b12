"""The networks that all clients of a process share, and how an order's weights and a client's own get into them.

Every order brings the shared weights. The personal part is on the client's disk; it is read when the network holds
another client's, or another run's, or when another process has written it.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from hyperbloom.client.keep.state import FileState
from hyperbloom.client.work.client import Client
from hyperbloom.client.work.own_network import OwnNetwork
from hyperbloom.client.work.sgd import Flat, FlatPart, Network
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import HEAD, OWN, ModelSpec, body_layout, build, build_own, full_layout, head_layout
from hyperbloom.common.wire.orders import PRIVATE, Scope, Target
from hyperbloom.common.wire.weights import Weights

__all__ = ["Loaded", "check_common_model", "keep_personal", "load", "loaded_network", "spec_of"]

LOADED_NETWORKS = 32
"""Own models, each with its hypernetwork, that stay in the memory of one process."""

Holder = tuple[Client, str, FileState, tuple[int, ...]]


@dataclass
class Loaded(Network):
    """A network of this process.

    Attributes:
        head: names of the parameters of the prediction head.
        holds: whose personal part is in memory: the client, the run, the state of the file that it agrees with, and
            the rounds to which the server had gone back by then. None while it agrees with no file.
    """

    head: tuple[str, ...] = ()
    holds: Holder | None = None


def load(client: Client, scope: Scope, target: Target, weights: Weights | None) -> Loaded:
    """Put an order's weights and the run's personal part into the network that the order is about.

    It is the network of all clients of the process: what is in it stays until the next call.

    Raises:
        WireError: the order does not fit this client.
    """
    if target.num_classes != client.num_classes:
        raise WireError(f"order: {target.num_classes} classes, but this client's data have {client.num_classes}")
    network = loaded_network(client, target, weights)
    layout = network.shared.layout
    if layout.numel:
        if weights is None:
            raise WireError("order: expected weights, found none")
        # The first order for a private body may bring the whole network.
        whole = target.private == "body" and len(weights.layout.shapes) > len(layout.shapes)
        weights.check(Layout.of(network.module) if whole else layout, torch.float32)
        network.shared.load(weights.part(layout))
    with client.hide_own_model():
        if network.personal.layout.numel:
            _load_personal(client, scope, target, weights, network)
    return network


def keep_personal(client: Client, scope: Scope, network: Loaded) -> None:
    """Write the personal part, if there is one; HyperbloomError if the disk does not take it."""
    personal = network.personal
    if personal.layout.numel:
        client.state.save_personal(scope, personal.layout, personal.values, personal.momentum)
        network.holds = _holder(client, scope)


def check_common_model(client: Client, target: Target) -> None:
    """Refuse an own model where the answer would tell the sizes of its layers."""
    if client.own is not None and (target.model == OWN or target.private == "all"):
        raise WireError("order: expected a model that the server chose, found the client's own")


def spec_of(client: Client, target: Target) -> ModelSpec:
    """Return the model of the server's choice for this client's data and size."""
    return ModelSpec(target.model, client.settings.size, client.input_shape, client.num_classes)


def loaded_network(client: Client, target: Target, weights: Weights | None) -> Loaded:
    """Return this process's network that an order is about, with whatever is in it.

    Raises:
        WireError: the order does not fit this client.
    """
    if target.private not in PRIVATE:
        raise WireError(f"order: expected private to be one of {PRIVATE}, found {target.private!r}")
    if target.model == OWN:
        own = client.own_spec()
        if target.private != "none":
            raise WireError(f"order: expected private 'none' for the client's own model, found {target.private!r}")
        # Which weights fit tells all names and shapes, and so does the reason why others do not.
        if target.hypernetwork is None and client.settings.disclose != "graph":
            raise WireError("order: for weights of a model whose graph this client does not disclose")
        with client.hide_own_model():
            return _own_network(OwnNetwork.ordered(own, target, weights), client.device)
    if target.private == "all" and client.own is not None:  # where nothing travels, the server has no say in it
        return _private_network(client.own, client.device)
    return _network(spec_of(client, target), target.private, client.device)


def _load_personal(client: Client, scope: Scope, target: Target, weights: Weights | None, network: Loaded) -> None:
    """Take the personal part from memory, from the disk, or from the start; the file is the truth."""
    wanted = _holder(client, scope)
    if network.holds == wanted:
        return
    network.holds = None
    personal = network.personal
    found = client.state.load_personal(scope, personal.layout)
    if found is None:
        personal.load(_first_values(client, scope, target, weights, personal.layout))
        return
    values, momentum = found
    personal.load(values)
    personal.momentum = None if momentum is None else momentum.to(personal.values.device)
    network.holds = wanted


def _first_values(
    client: Client, scope: Scope, target: Target, weights: Weights | None, wanted: Layout
) -> torch.Tensor:
    """Return what the server sent for the personal part or, most often, values from a seed of this client's."""
    own = client.own is not None and (target.model == OWN or target.private == "all")
    # Not of an own model: whether what was sent fits would tell its names and shapes.
    if not own and weights is not None and set(wanted.shapes) <= set(weights.layout.shapes):
        return weights.part(wanted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client.seed(scope, HEAD))
        fresh = build_own(client.own_spec()) if own else build(spec_of(client, target))
    return wanted.flatten(dict(fresh.named_parameters()))


def _holder(client: Client, scope: Scope) -> Holder:
    return client, scope.run_id, client.state.personal_file(scope.run_id), scope.rewound


@cache
def _network(spec: ModelSpec, private: str, device: torch.device) -> Loaded:
    """Return this process's network of an architecture."""
    module = build(spec).to(device)
    full = full_layout(spec)
    shared = {"head": body_layout(spec), "body": head_layout(spec), "all": Layout(())}.get(private, full)
    personal = Layout(tuple(item for item in full.shapes if item not in shared.shapes))
    head = tuple(name for name, _ in head_layout(spec).shapes)
    if private == "copy":
        part = FlatPart(module, full)
        return Loaded(module, part, Flat(full, part.values.clone()), head)
    return Loaded(module, FlatPart(module, shared), FlatPart(module, personal), head)


@lru_cache(LOADED_NETWORKS)
def _own_network(wanted: OwnNetwork, device: torch.device) -> Loaded:
    """Return this process's network of an own model, generated or not."""
    made = wanted.make(device)
    return Loaded(made.module, made.shared, made.personal, wanted.head)


@lru_cache(LOADED_NETWORKS)
def _private_network(spec: ModelSpec, device: torch.device) -> Loaded:
    """Return this process's network of an own model of which nothing travels."""
    module = build_own(spec).to(device)
    return Loaded(module, FlatPart(module, Layout(())), FlatPart(module, Layout.of(module)))
