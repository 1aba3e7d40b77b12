"""LG-FedAvg: a personal body under a shared head, both from a FedAvg model.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations, 2020, https://arxiv.org/abs/2001.01523.

    first `fedavg_rounds`:  as FedAvg; its weights are where every client's body starts
    after them, client:     K steps of SGD on f_i(body_i, head), both at once; the body stays
    server:                 head <- sum_i n_i head_i / sum_i n_i

The paper trains FedAvg to its end and adds a thousand rounds; here both are among the run's rounds, so that all
strategies have equally many. On the wire: all weights in the first rounds, the head alone after them, but for the first
order to each client, and to one that has come back, which brings the body to start from. Replies hold the head alone.

`local.steps` are all spent on both parts. The head starts each round with a fresh optimiser and is clipped; the body
keeps its momentum on the client and is not, as everything personal here.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from hyperbloom.common.config import Section
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import Weights
from hyperbloom.common.models import head_layout
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.personalised import ClientUpdate
from hyperbloom.strategies.roster import Client

__all__ = ["LGFedAvg", "LGFedAvgOptions"]


class LGFedAvgOptions(Section):
    """Options of LG-FedAvg."""

    fedavg_rounds: Annotated[int, Field(ge=0)] | None = Field(
        None, description="rounds of FedAvg to start from; default: half of the run's"
    )


class LGFedAvg(FedAvg):
    """A personal body under a shared head, averaged; starts from FedAvg."""

    options_type: ClassVar[type[Section]] = LGFedAvgOptions
    options: LGFedAvgOptions

    def check_config(self) -> None:
        """There must be rounds for what it is about."""
        super().check_config()
        given, rounds = self.options.fedavg_rounds, self.config.rounds
        if given is not None and given >= rounds:
            raise ConfigError(f"options.fedavg_rounds: expected less than rounds = {rounds}, found {given}")
        self._fedavg_rounds = rounds // 2 if given is None else given

    def build(self) -> None:
        """Initialise as FedAvg; nobody has a body yet."""
        super().build()
        assert self.spec is not None
        self._head = head_layout(self.spec)
        self._apart = False  # whether bodies have become personal
        self._have_body: set[int] = set()  # rows of clients that trained with one of their own
        self._back: set[int] = set()  # rows of those that have come back since the round began

    def begin_round(self, server_round: int) -> list[Client]:
        """Draw the cohort; after the rounds of FedAvg bodies are personal."""
        self._apart = server_round > self._fedavg_rounds
        self._back.clear()
        return super().begin_round(server_round)

    def returned(self, client: Client) -> None:
        """Send it a body again: its disk may be lost, and one that is there is not replaced."""
        self._have_body.discard(client.row)
        self._back.add(client.row)

    def layout_for(self, client: Client) -> Layout:
        """The head, once bodies are personal."""
        return self._head if self._apart else super().layout_for(client)

    def sent_layout_for(self, client: Client) -> Layout:
        """All weights for who has no body yet."""
        return self.layout_for(client) if client.row in self._have_body else super().layout_for(client)

    def weights_for(self, clients: Sequence[Client]) -> list[Tensor]:
        """The head, or with it the body to start from."""
        whole = Weights(self._layout, self.weights)
        return [whole.part(self.sent_layout_for(client)) for client in clients]

    def update(self, updates: Sequence[ClientUpdate]) -> None:
        """Average all weights, or the heads."""
        if not self._apart or not updates:
            super().update(updates)
            return
        weights = self.weights.clone()
        views = self._layout.views(weights)
        for name, values in self._head.views(self.average(updates)).items():
            views[name].copy_(values)
        self.weights = weights
        self._have_body |= {update.client.row for update in updates} - self._back

    def _common(self, server_round: int) -> dict[str, Any]:
        return super()._common(server_round) | {"private": "body" if self._apart else "none"}
