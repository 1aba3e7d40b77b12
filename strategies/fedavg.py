"""FedAvg: one global model, averaged over the cohort by number of examples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, https://arxiv.org/abs/1602.05629. The averaging is Flower's own class.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import build
from hyperbloom.common.privacy import noisy_mean
from hyperbloom.common.seeds import derive
from hyperbloom.strategies.personalised import ClientUpdate, PersonalisedStrategy
from hyperbloom.strategies.roster import Client

__all__ = ["FedAvg"]


class FedAvg(PersonalisedStrategy):
    """The same weights for everyone; Flower's `FedAvg` averages what comes back."""

    reply: ClassVar[str] = "weights"
    noise_at: ClassVar[tuple[str, ...]] = ("client", "server")
    sums: ClassVar[bool] = True
    weights: Tensor

    def check_config(self) -> None:
        """There is one architecture to average, and the local method has the steps that it needs."""
        name, sizes, method = self.config.strategy, self.config.sizes, self.method()
        if len(sizes) != 1:
            raise ConfigError(f"sizes: {name} averages one architecture, found {', '.join(sizes)}")
        if method and self.config.local.steps < method.fewest_steps:
            raise ConfigError(
                f"local.steps: {name} needs at least {method.fewest_steps}, found {self.config.local.steps}"
            )

    def build(self) -> None:
        """Initialise the global model from the run's seed."""
        assert self.spec is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.config.seed, "model"))
            module = build(self.spec)
        self.weights = self._layout.flatten(dict(module.named_parameters()))

    def weights_for(self, clients: Sequence[Client]) -> list[Tensor]:
        """One model for all."""
        return [self.weights] * len(clients)

    def update(self, updates: Sequence[ClientUpdate]) -> None:
        """Average by number of training examples."""
        if updates:
            self.weights = self.average(updates)

    def average(self, updates: Sequence[ClientUpdate]) -> Tensor:
        """Return the mean of what came back, `(P,)`, weighted by number of training examples.

        With noise on the server all count alike, and the mean is of as many as were to be asked: how many answered, and
        with how many examples, must not change how much one of them moves it.
        """
        privacy = self.config.privacy
        if privacy.where == "server":
            sent = updates[0].sent
            assert sent is not None
            changes = [update.returned - sent for update in updates if update.returned is not None]
            return sent + noisy_mean(changes, privacy.clip, privacy.noise, self.config.cohort)
        counted = zip(updates, self.counts(updates), strict=True)
        arrays, _ = self.flower().aggregate_train(0, [_as_flower_expects(*each) for each in counted])
        assert arrays is not None
        return torch.from_numpy(arrays["weights"].numpy())

    def flower(self) -> FlowerFedAvg:
        """Return Flower's class for this strategy."""
        return FlowerFedAvg(weighted_by_key="examples")

    def state(self) -> dict[str, Tensor]:
        """The global model, by parameter."""
        return self._layout.views(self.weights)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the global model over."""
        self.weights = self._layout.flatten(tensors)

    @property
    def _layout(self) -> Layout:
        return self.layouts[self.config.sizes[0]]


def _as_flower_expects(update: ClientUpdate, examples: int) -> Message:
    """Return the reply in the records that Flower's class averages."""
    assert update.returned is not None and update.client.node_id is not None
    arrays = ArrayRecord({"weights": Array(update.returned.numpy())})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"examples": examples})})
    return Message(content, update.client.node_id, "train")
