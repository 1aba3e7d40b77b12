"""LG-FedAvg: a personal body under a shared head. Both start from a FedAvg model.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations, 2020, https://arxiv.org/abs/2001.01523.

    first `fedavg_rounds`:  as FedAvg; its weights are where every client's body starts
    after them, client:     K = `local.steps` steps of SGD on f_i(body_i, head), both at once; the body stays
    server:                 head <- sum_i n_i head_i / sum_i n_i

The paper trains FedAvg to its end and adds a thousand rounds. Here, both count among the run's rounds, so that all
strategies have equally many. The first rounds send all weights. After them, only the head travels, except that the
first order to a client, or to one that has come back, also carries the body to start from. Replies hold only the head.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from hyperbloom.common.config import Section
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import head_layout
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Recipe, Setting
from hyperbloom.strategies.exchange import Client, Exchanges, Update
from hyperbloom.strategies.fedavg import FedAvg, average
from hyperbloom.strategies.turn import Turn


class LGFedAvgOptions(Section):
    """Options of LG-FedAvg."""

    fedavg_rounds: Annotated[int, Field(ge=0)] | None = Field(
        None, description="rounds of FedAvg to start from; default: half of the run's"
    )


class LGFedAvg(FedAvg):
    """A personal body under a shared head, averaged; starts from FedAvg."""

    options: LGFedAvgOptions

    def check(self) -> None:
        """Refuse options that leave no round after those of FedAvg."""
        super().check()
        given, rounds = self.options.fedavg_rounds, self.config.rounds
        if given is not None and given >= rounds:
            raise ConfigError(f"options.fedavg_rounds: expected less than rounds = {rounds}, found {given}")
        self._fedavg_rounds = rounds // 2 if given is None else given

    def build(self, setting: Setting) -> None:
        """Initialise as FedAvg; no client has a body of its own yet."""
        super().build(setting)
        self._head = head_layout(setting.spec)
        self._apart = False  # whether bodies are personal now
        self._have_body: set[int] = set()  # rows of clients that have trained a body of their own
        self._back: set[int] = set()  # rows of clients that have come back since the round began

    def join(self, client: Client, first: bool) -> None:
        """Send a returning client the body again in case it lost its own; a client that has one keeps it."""
        super().join(client, first)
        if not first:
            self._have_body.discard(client.row)
            self._back.add(client.row)

    def recipe(self, number: int) -> Recipe:
        """Make bodies personal after the rounds of FedAvg."""
        return replace(super().recipe(number), private="body" if number > self._fedavg_rounds else "none")

    def layout(self, client: Client) -> Layout:
        """Return the head's layout once bodies are personal."""
        return self._head if self._apart else self.whole

    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        """Return the head, or all weights for a client without a body."""
        whole = Weights(self.whole, self.global_weights)
        head = Weights(self._head, whole.part(self._head))
        return [head if self._apart and client.row in self._have_body else whole for client in clients]

    def round(self, turn: Turn) -> Exchanges[None]:
        """Play a round as FedAvg does; after its rounds, bodies are personal."""
        self._apart = turn.number > self._fedavg_rounds
        self._back.clear()
        yield from super().round(turn)

    def learn(self, updates: Sequence[Update]) -> None:
        """Average all weights, or the heads."""
        if not self._apart or not updates:
            super().learn(updates)
            return
        weights = self.global_weights.clone()
        views = self.whole.views(weights)
        for name, values in self._head.views(average(updates)).items():
            views[name].copy_(values)
        self.global_weights = weights
        self._have_body |= {update.client.row for update in updates} - self._back


STRATEGIES["lg-fedavg"] = LGFedAvg
