"""The networks that all clients of a process share, and the loading of an order's weights and a client's own into them.

Every order brings the shared weights. The personal part is on the client's disk. It is read if the network holds that
of another client or run, or if another process has written it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from hyperbloom.client.work.client import Client, client_for, log
from hyperbloom.client.work.features import Tail, on_features, tail_of
from hyperbloom.client.work.own_network import make_network, ordered_settings, own_graph
from hyperbloom.client.work.sgd import Flat, FlatPart, Network
from hyperbloom.common import models
from hyperbloom.common.data import Examples
from hyperbloom.common.data.load import sources
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.files.storage import FileState, file_state
from hyperbloom.common.graphs import Settings
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models.parts import features
from hyperbloom.common.wire.orders import PRIVATE, Scope, Target

LOADED_NETWORKS = 32
"""Most networks that one process keeps in memory of each kind; an own model with its hypernetwork is one."""
LARGE_NETWORK = 10_000_000
"""Parameters of a network beside which none that was loaded before is kept."""

Holder = tuple[Client, str, FileState, tuple[int, ...]]


@dataclass
class Loaded(Network):
    """A network of this process.

    Attributes:
        head: names of the parameters of the prediction head.
        tail: the head alone, if nothing else is adapted and the backbone's features can be kept.
        holds: the personal part in memory: its client, its run, the state of its file, and the rounds to which the
            server had gone back by then. None while it differs from every file.
    """

    head: tuple[str, ...] = ()
    holds: Holder | None = None
    tail: Tail | None = None

    def on_features(self, client: Client, *parts: Examples) -> tuple[nn.Module, tuple[Examples, ...]]:
        """Return the head alone with features of the examples, or the network with the examples as they are."""
        if self.tail is None:
            return self.module, parts
        compute = partial(features, self.module)
        return self.tail, tuple(on_features(client, self.tail.backbone, part, compute) for part in parts)


def load(client: Client, scope: Scope, target: Target, weights: Weights | None) -> Loaded:
    """Load an order's weights and the run's personal part into the order's network.

    All clients of the process share this network, so the next call overwrites its values.

    Raises:
        WireError: the order does not fit this client.
        HyperbloomError: the personal part cannot be read, or the own model failed.
    """
    if target.num_classes != client.num_classes:
        raise WireError(f"order: {target.num_classes} classes, but this client's data have {client.num_classes}")
    client.learn(target.task)
    network = loaded_network(client, target, weights)
    layout = network.shared.layout
    if layout.numel:
        if weights is None:
            raise WireError("order: expected weights, found none")
        # An order for a private body may bring the whole network.
        whole = target.private == "body" and len(weights.layout.shapes) > len(layout.shapes)
        weights.check(Layout.of(network.module) if whole else layout, torch.float32)
        network.shared.load(weights.part(layout))
    with client.hide_own_model():
        if network.personal.layout.numel:
            _load_personal(client, scope, target, weights, network)
    return network


def load_alone(client: Client, scope: Scope, target: Target) -> Loaded:
    """Return the network with which a client trains by itself, at its first values: those of the strategy `local`."""
    target = replace(target, private="all", hypernetwork=None, adapt=models.FORM.sub(models.ALL, target.adapt))
    with client.hide_own_model():
        network = _network_alone(client, client.own, target) if client.own else loaded_network(client, target, None)
        network.personal.load(_first_values(client, scope, target, None, network.personal.layout))
    return network


def keep_personal(client: Client, scope: Scope, network: Loaded) -> None:
    """Write the personal part, if there is one, to the disk; HyperbloomError if that fails."""
    personal = network.personal
    if personal.layout.numel:
        client.state.save_personal(scope, personal.layout, personal.values, personal.momentum)
        network.holds = _holder(client, scope)


def spec_of(client: Client, target: Target) -> models.ModelSpec:
    """Return the model that the server chose, for this client's data and size; WireError if it has no backbone."""
    backbone = client.settings.data.backbone if target.model == models.BACKBONE else None
    if target.model == models.BACKBONE and backbone is None:
        raise WireError("order: for a backbone, but this client has none; join with --backbone")
    about = (client.settings.size, client.input_shape, client.num_classes)
    return models.ModelSpec(target.model, *about, target.adapt, backbone)


def loaded_network(client: Client, target: Target, weights: Weights | None) -> Loaded:
    """Return this process's network for an order, without loading values; WireError if the order does not fit."""
    if target.private not in PRIVATE:
        raise WireError(f"order: expected private to be one of {PRIVATE}, found {target.private!r}")
    try:
        models.Adapt.parse(models.FORM.sub(models.ALL, target.adapt))
    except ConfigError as error:
        raise WireError(f"order: {error}") from None
    if target.model == models.OWN:
        own = client.own_spec()
        if target.private != "none":
            raise WireError(f"order: expected private 'none' for the client's own model, found {target.private!r}")
        # A server could learn all names and shapes from which weights fit, and from the error texts.
        if target.hypernetwork is None and client.settings.disclose != "graph":
            raise WireError("order: for weights of a model whose graph this client does not disclose")
        with client.hide_own_model():
            return _own_network(own, ordered_settings(own, target, weights), client.device)
    if target.private == "all" and client.own is not None:  # nothing travels, so the client chooses
        return _network_alone(client, client.own, target)
    spec = spec_of(client, target)
    if not spec.is_new and (found := models.backbone_digest(spec)) not in target.backbones:
        raise WireError(f"order: expected backbone {' or '.join(target.backbones)}, found {found}")
    return _network(spec, target.private, client.device)


def _network_alone(client: Client, own: models.ModelSpec, target: Target) -> Loaded:
    """Return the client's own network, of which nothing travels."""
    if "targets=" in target.adapt:  # from which patterns match a server could learn the names of layers
        raise WireError("order: expected no layers' names for the client's own model, found a pattern for them")
    with client.hide_own_model():
        return _private_network(replace(own, adapt=target.adapt), client.device)


def _load_personal(client: Client, scope: Scope, target: Target, weights: Weights | None, network: Loaded) -> None:
    """Load the personal part from its file unless memory agrees with it, or initialise it if there is no file."""
    wanted = _holder(client, scope)
    if network.holds == wanted:
        return
    network.holds = None
    personal = network.personal
    found = client.state.load_personal(scope, personal.layout)
    if found is None:
        if client.state.personal_path(scope.run_id).exists():
            log.warning("the server has gone back to a time of which no own part is kept here: it begins anew")
        personal.load(_first_values(client, scope, target, weights, personal.layout))
        return
    values, momentum = found
    personal.load(values)
    personal.momentum = None if momentum is None else momentum.to(personal.values.device)
    network.holds = wanted


def _first_values(client: Client, scope: Scope, target: Target, weights: Weights | None, wanted: Layout) -> Tensor:
    """Return the first `(P,)` values of the personal part: those that the server sent, or values from a seed."""
    own = client.own is not None and (target.model == models.OWN or target.private == "all")
    # An own model never takes values from the server, because a fit would disclose its names and shapes.
    if not own and weights is not None and set(wanted.shapes) <= set(weights.layout.shapes):
        return weights.part(wanted)
    spec = replace(client.own_spec(), adapt=target.adapt) if own else spec_of(client, target)
    make = models.build_own if own else models.build
    return models.first_values(spec, wanted, client.seed(scope, models.HEAD), make)


def _holder(client: Client, scope: Scope) -> Holder:
    return client, scope.run_id, file_state(client.state.personal_path(scope.run_id)), scope.rewound


def _make_room(parameters: int) -> None:
    """Forget all networks before a large one: with many of them a server that lies could fill the memory."""
    for cached in (_network, _own_network, _private_network) if parameters > LARGE_NETWORK else ():
        cached.cache_clear()


def forget() -> None:
    """Forget this process's clients, with their data, and networks: in another run names and files may mean others."""
    sources.clear()
    for cached in (client_for, own_graph, models.backbone_digest, models.frozen):
        cached.cache_clear()
    _make_room(LARGE_NETWORK + 1)


@lru_cache(LOADED_NETWORKS)
def _network(spec: models.ModelSpec, private: str, device: torch.device) -> Loaded:
    full = models.full_layout(spec)
    _make_room(full.numel)
    module = models.blank(spec).to(device)
    shared = {"head": models.body_layout(spec), "body": models.head_layout(spec), "all": Layout(())}.get(private, full)
    personal = Layout(tuple(item for item in full.shapes if item not in shared.shapes))
    head = tuple(name for name, _ in models.head_layout(spec).shapes)
    if private == "copy":
        part = FlatPart(module, full)
        made = Loaded(module, part, Flat(full, part.values.clone()), head)
    else:
        made = Loaded(module, FlatPart(module, shared), FlatPart(module, personal), head)
    if spec.adapt == "head":
        made.tail = tail_of(module, spec.input_shape, models.backbone_digest(spec))
    return made


@lru_cache(LOADED_NETWORKS)
def _own_network(spec: models.ModelSpec, settings: Settings | None, device: torch.device) -> Loaded:
    made = make_network(spec, settings, device)
    _make_room(made.shared.layout.numel + made.personal.layout.numel)
    return Loaded(made.module, made.shared, made.personal, own_graph(spec).head)


@lru_cache(LOADED_NETWORKS)
def _private_network(spec: models.ModelSpec, device: torch.device) -> Loaded:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random buffers alike at every start
        module = models.build_own(spec).to(device)
    personal = FlatPart(module, Layout.of(module))
    _make_room(personal.layout.numel)
    return Loaded(module, FlatPart(module, Layout(())), personal)
