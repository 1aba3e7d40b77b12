"""FedAvg: one global model, averaged over the cohort by number of examples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1:

    client:   K steps of SGD from w give w_i
    server:   w <- sum_i n_i w_i / sum_i n_i
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.methods import Method
from hyperbloom.strategies.algorithm import Algorithm, Recipe, Setting
from hyperbloom.strategies.exchange import Client, Update


class FedAvg(Algorithm):
    """The same weights for everyone, averaged by number of training examples."""

    reply = "weights"
    noise_at: ClassVar[tuple[str, ...]] = ("client", "server")
    sums = True
    keeps_sent = False
    method_type: ClassVar[type[Method] | None] = None
    """The method of local training, whose values are options of the same names; None: plain SGD."""
    _method: Method | None = None
    global_weights: Tensor

    def check(self) -> None:
        """Refuse several sizes, as only equal architectures can be averaged, and fewer steps than the method needs."""
        name, sizes = self.config.strategy, self.config.sizes
        if len(sizes) != 1:
            raise ConfigError(f"sizes: {name} averages one architecture, found {', '.join(sizes)}")
        if self.method_type is not None:
            names = set(self.method_type.model_fields) - {"kind"}
            self._method = self.method_type(**self.options.model_dump(include=names))
            found, needed = self.config.local.steps, self._method.fewest_steps
            if found < needed:
                raise ConfigError(f"local.steps: {name} needs at least {needed}, found {found}")

    def recipe(self, number: int) -> Recipe:
        """Train by the method."""
        return Recipe(self.private, self._method)

    def build(self, setting: Setting) -> None:
        """Initialise the global model from the run's seed."""
        super().build(setting)
        self.global_weights = setting.first_values(self.config.sizes[0], self.config.seed)

    @property
    def whole(self) -> Layout:
        """Return the layout of the global model."""
        return self.setting.layouts[self.config.sizes[0]]

    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        """Return the global model for every client."""
        return [Weights(self.whole, self.global_weights)] * len(clients)

    def learn(self, updates: Sequence[Update]) -> None:
        """Average the returned weights by number of training examples."""
        if updates:
            self.global_weights = average(updates)

    def common(self, client: Client) -> Weights | None:
        """Return the global model, unless clients keep a part of theirs to themselves."""
        return Weights(self.whole, self.global_weights) if self.private in ("none", "copy") else None

    def state(self) -> dict[str, Tensor]:
        """Return the global model by parameter."""
        return self.whole.views(self.global_weights)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the global model."""
        self.global_weights = self.whole.flatten(tensors)


def average(updates: Sequence[Update]) -> Tensor:
    """Return the mean `(P,)` of the returned vectors, weighted by number of training examples."""
    total = sum(update.examples for update in updates)
    mean: Tensor | None = None
    for update in updates:
        assert update.returned is not None
        share = update.returned * (update.examples / total)
        mean = share if mean is None else mean.add_(share)
    assert mean is not None, "there is something to average"
    return mean
