"""FedMA: match the neurons of clients' networks layer by layer, then average them.

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni: Federated Learning with Matched Averaging, ICLR 2020,
https://arxiv.org/abs/2002.06440, algorithm 1, with communication as in its section 3.

Two networks may have the same hidden neurons (or channels) in different orders. Permuting a layer's outputs and the
next layer's inputs alike does not change a network's function. So equal neurons are matched before the average.

    for each hidden layer l:   Pi_i = argmin over permutations of |Pi W_i,l - W_l|^2    (Hungarian algorithm)
                               W_i,l <- Pi_i W_i,l,   W_i,l+1 <- W_i,l+1 Pi_i^T
                               W_l = sum_i n_i W_i,l / sum_i n_i
    round l of a cycle:        layers before l are frozen; each client trains the others of its own network, as matched
    end of a cycle:            the next one starts from the average for everyone

A row of W_l is a neuron's signature: its incoming weights and its bias. W_l is the average of the networks matched so
far, starting with the client that has most examples. Within a cycle, the server keeps each client's own network. A
client that joins in mid-cycle starts from the average of all layers. This average is also what is evaluated.

Departures: the width is fixed, while the paper's Bayesian nonparametric matching may add neurons. The last layer is
averaged by number of examples, not by examples of each class, which clients do not disclose.

Importing this module registers its local method, so its clients are those of this process (engine `inline`).

`local.steps` are all spent on the layers that are not frozen. A cycle takes as many rounds as there are layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hyperbloom.client.work.methods import LOCAL_METHODS, train_only
from hyperbloom.client.work.sgd import Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import METHODS, Method
from hyperbloom.common.models import ALL
from hyperbloom.common.wire.orders import SGD, Introduction
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Recipe, Setting
from hyperbloom.strategies.exchange import Client, Exchanges, Update
from hyperbloom.strategies.fedavg import FedAvg, average
from hyperbloom.strategies.turn import Evaluation, Turn

MATCHABLE = ("mlp", "lenet")
"""Networks that are a chain of convolutions and linear layers; skips or norms would tie several layers together."""


class Frozen(Method):
    """SGD on all parameters except those in `names`."""

    kind: Literal["frozen"] = "frozen"
    names: tuple[str, ...]


def train_the_others(network: Network, data: Examples, sgd: SGD, seed: int, settings: Frozen) -> float:
    """SGD that keeps some parameters exactly as sent, without weight decay."""
    shared = network.shared
    names, usual = {name for name, _ in shared.layout.shapes}, shared.frozen
    if not set(settings.names) < names:
        raise WireError(f"order: expected to freeze some of {', '.join(sorted(names))}, found {settings.names}")
    gradients = shared.layout.views(shared.gradient)
    shared.frozen = [*usual, *(gradients[name] for name in settings.names)]
    try:
        with train_only(network.module, names - set(settings.names)):
            return train(network, data, sgd, seed, [shared])
    finally:
        shared.frozen = usual


def layers_of(layout: Layout) -> list[str]:
    """Return the names of the layers of a chain, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in layout.shapes))


def match(networks: Sequence[Tensor], examples: Sequence[int], layout: Layout, first: int = 0) -> list[Tensor]:
    """Return the networks with their hidden neurons in one common order. Each network's function stays the same.

    Args:
        networks: `(P,)` each.
        examples: number of each client's examples, its weight in the average.
        layout: of a chain of layers.
        first: index of the first layer to match; earlier layers stay as they are.
    """
    matched = [network.clone() for network in networks]
    views = [layout.views(network) for network in matched]
    leading, *others = sorted(range(len(networks)), key=lambda index: -examples[index])
    for layer, following in list(pairwise(layers_of(layout)))[first:]:
        average, total = _signatures(views[leading], layer), examples[leading]
        for index in others:
            order = _assign(average, _signatures(views[index], layer))
            _permute(views[index], layer, following, order)
            total += examples[index]
            average = average.lerp(_signatures(views[index], layer), examples[index] / total)
    return matched


def _signatures(network: dict[str, Tensor], layer: str) -> Tensor:
    """Return the signatures of a layer's neurons, `(neurons, inputs + 1)`."""
    return torch.cat([network[f"{layer}.weight"].flatten(1), network[f"{layer}.bias"][:, None]], dim=1).double()


def _assign(average: Tensor, found: Tensor) -> Tensor:
    """Return for each neuron of `average` the index of its match in `found`, at the least sum of squared distances."""
    from scipy.optimize import linear_sum_assignment

    # Maximise the inner products: the squares of both sides add the same to every assignment.
    _, order = linear_sum_assignment((average @ found.T).numpy(), maximize=True)
    return torch.from_numpy(order)


def _permute(network: dict[str, Tensor], layer: str, following: str, order: Tensor) -> None:
    """Put the neurons of a layer, and the inputs of the following layer, in this order."""
    for name in (f"{layer}.weight", f"{layer}.bias"):
        network[name].copy_(network[name][order])
    weight = network[f"{following}.weight"]
    # After flattening, a channel is a run of inputs, one per pixel.
    inputs = weight.reshape(len(weight), len(order), -1)
    weight.copy_(inputs[:, order].reshape(weight.shape))


def _check_matchable(model: str) -> None:
    if model not in MATCHABLE:
        raise ConfigError(
            f"model: fedma matches the neurons of {', '.join(MATCHABLE)} (or auto), found {model!r}; "
            "skips and norms tie layers that it would permute apart"
        )


class FedMA(FedAvg):
    """FedAvg of matched neurons, with layers frozen in turn."""

    noise_at: ClassVar[tuple[str, ...]] = ()  # matching is not a sum of changes
    sums: ClassVar[bool] = False
    _frozen = 0  # number of layers

    def check(self) -> None:
        """Refuse networks that are not a chain of layers."""
        super().check()
        if self.config.adapt != ALL or self.config.backbone:
            raise ConfigError("adapt: expected all, and no backbone, with fedma, which matches whole layers")
        if self.config.model != "auto":
            _check_matchable(self.config.model)

    def settle(self, about: Introduction) -> Setting:
        """Refuse data for which `auto` is another network."""
        setting = super().settle(about)
        _check_matchable(setting.spec.name)
        return setting

    def build(self, setting: Setting) -> None:
        """Initialise as FedAvg, with no layer frozen."""
        super().build(setting)
        self._layers = layers_of(self.whole)
        self._own: dict[int, Tensor] = {}  # by row, each client's own network in this cycle
        self._frozen = 0

    def recipe(self, number: int) -> Recipe:
        """Train by SGD on the layers that are not frozen."""
        method = Frozen(names=self._names()) if self._frozen else None
        return replace(super().recipe(number), method=method)

    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        """Return the frozen layers of the average with each client's own other layers."""
        done, mean = self._length(), self.global_weights
        own = [self._own.get(client.row, mean) for client in clients]
        return [Weights(self.whole, torch.cat([mean[:done], weights[done:]])) for weights in own]

    def learn(self, updates: Sequence[Update]) -> None:
        """Match and average, then freeze one more layer. The last layer ends the cycle."""
        if not updates:
            return
        networks = [update.returned for update in updates if update.returned is not None]
        matched = match(networks, [update.examples for update in updates], self.whole, self._frozen)
        mean = average([replace(each, returned=own) for each, own in zip(updates, matched, strict=True)])
        mean[: self._length()] = self.global_weights[: self._length()]
        self.global_weights = mean
        self._frozen += 1
        self._own |= {each.client.row: own for each, own in zip(updates, matched, strict=True)}
        if self._frozen == len(self._layers):
            self._own, self._frozen = {}, 0

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        """Evaluate the average of all layers."""
        return Evaluation((yield from turn.score(clients, super().weights)))

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the average, the number of frozen layers, and each client's own network."""
        frozen = {"frozen": torch.tensor(self._frozen)}
        return self.state() | frozen | {f"own.{row}": network for row, network in self._own.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the average and, if they are stored, frozen layers and own networks."""
        super().restore(tensors)
        self._frozen = int(tensors["frozen"]) if "frozen" in tensors else 0
        self._own = {int(name[4:]): network for name, network in tensors.items() if name.startswith("own.")}

    def _names(self) -> tuple[str, ...]:
        frozen = self._layers[: self._frozen]
        return tuple(name for name, _ in self.whole.shapes if name.rpartition(".")[0] in frozen)

    def _length(self) -> int:
        return sum(self.whole.sizes[: len(self._names())])


STRATEGIES["fedma"], METHODS["frozen"], LOCAL_METHODS["frozen"] = FedMA, Frozen, train_the_others
