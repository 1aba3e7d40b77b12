"""Three ways of using a trained pFedHN for a novel client without labels: the comparisons of ODPFL-HN.

Amosy, Eyal, Chechik, https://arxiv.org/abs/2111.08356, section 6.2. Training is pFedHN's. With `init_from` a trained
run is used as it is: nothing is learned, so that one run serves all three.

* `pfl-sampled`: the accuracy to be expected of the model of a client drawn at random, that is the mean over all.
* `pfl-ensemble`: the mean of all models' logits. All models travel to each novel client, as for `pfl-sampled`.
* `pfl-nearest`: the model of the client with the smallest A-distance, `2 (1 - 2 err)` with err the error of a
  classifier that tells the two clients' examples apart (Ben-David et al., Analysis of Representations for Domain
  Adaptation, NeurIPS 2006).

No example leaves a client for that distance. All clients look at their inputs through one network, which the
hypernetwork writes for the mean embedding. Each sends mean and covariance of what its last layer sees of the training
inputs; from two of these the server makes the linear classifier that is best for normal distributions of like
covariance (Fisher's discriminant); both clients say how often it is wrong on their validation inputs. Disclosed are to
the server those moments, F + F^2 numbers for F features (84 for LeNet), which tell much of the classes that a client
has; and to a client classifiers made of its moments and others', without their names.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from flwr.app import Message
from torch import Tensor

from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    LARGEST_NORM,
    ErrorsOrder,
    ErrorsResult,
    MomentsOrder,
    MomentsResult,
    TryOrder,
    Weights,
)
from hyperbloom.strategies.personalised import Leg
from hyperbloom.strategies.pfedhn import PFedHN
from hyperbloom.strategies.roster import Client

__all__ = ["PFLEnsemble", "PFLNearest", "PFLSampled", "a_distance", "discriminant"]

RIDGE = 1e-3
"""Share of the mean variance that is added to each feature's: a client has fewer examples than features squared."""


def discriminant(one: Tensor, other: Tensor) -> Tensor:
    """Return the linear classifier `(F + 1,)` between two clients' moments `(1 + F, F)`, positive for the first."""
    (mean, other_mean), spread = (one[0], other[0]), (one[1:] + other[1:]) / 2
    ridge = RIDGE * spread.diagonal().mean().clamp_min(1e-12)
    # What a client makes up may have no solution; it then gets classifiers of no use, and nobody else is disturbed.
    weights, _ = torch.linalg.solve_ex(spread + ridge * torch.eye(len(spread)).to(spread), mean - other_mean)
    return torch.cat([weights, -(weights @ (mean + other_mean) / 2)[None]])


def a_distance(error: float) -> float:
    """Return `2 |1 - 2 err|`: 2 for clients that a classifier tells apart, 0 for those that it cannot.

    The paper has no absolute value; a classifier that is mostly wrong tells them apart too, the other way round.
    """
    return 2 * abs(1 - 2 * error)


class _PFL(PFedHN):
    """pFedHN, and what a novel client gets of it."""

    asynchronous: ClassVar[bool] = False
    noise_at: ClassVar[tuple[str, ...]] = ()

    def check_config(self) -> None:
        """There is something to say about novel clients only, and one network must do for all."""
        super().check_config()
        if not self.config.novel:
            raise ConfigError(f"novel: {self.config.strategy} is about novel clients; expected a percentage, found 0")
        if len(self.config.sizes) != 1:
            raise ConfigError(f"sizes: {self.config.strategy} compares one architecture, found {self.config.sizes}")

    def trainable(self) -> list[Client]:
        """Nobody, if a trained run is used."""
        return [] if self.config.init_from else super().trainable()

    def evaluation_legs(self, server_round: int, clients: Sequence[Client]) -> Iterator[Leg]:
        """Score those who trained as in pFedHN, then the novel ones."""
        yield from super().evaluation_legs(server_round, [client for client in clients if not self.is_novel(client)])
        if novel := [client for client in clients if self.is_novel(client)]:
            yield from self.novel_legs(server_round, novel)

    @abstractmethod
    def novel_legs(self, server_round: int, novel: Sequence[Client]) -> Iterator[Leg]:
        """Yield the exchanges that score novel clients."""

    def models(self) -> dict[str, Tensor]:
        """Return the weights `(P,)` of all who trained, by name."""
        trained = [client for client in self.roster if not self.is_novel(client)]
        return dict(zip((client.client_id for client in trained), self.weights_for(trained), strict=True))


class _Many(_PFL):
    together: ClassVar[bool]

    def novel_legs(self, server_round: int, novel: Sequence[Client]) -> Iterator[Leg]:
        """One exchange per client: its order holds all models."""
        rows = torch.stack(list(self.models().values()))
        weights = Weights(Layout((("models", tuple(rows.shape)),)), rows.flatten())
        order = TryOrder(**self._common(server_round), weights=weights, together=self.together)
        for client in novel:
            yield Leg(
                [client],
                lambda some: self.post(server_round, ((client, order) for client in some)),
                partial(self.aggregate_evaluate, server_round),
            )


class PFLSampled(_Many):
    """PFL-sampled: the mean accuracy of all personal models."""

    together: ClassVar[bool] = False

    def answers(self, client: Client) -> int:
        """Every model's counts for itself."""
        return sum(not self.is_novel(other) for other in self.roster) if self.is_novel(client) else 1


class PFLEnsemble(_Many):
    """PFL-ensemble: the mean of the logits of all personal models."""

    together: ClassVar[bool] = True


class PFLNearest(_PFL):
    """PFL-nearest: the personal model of the client at the smallest A-distance.

    Attributes:
        distances: of the last evaluation, by names of the novel client and of the other.
    """

    distances: Mapping[str, Mapping[str, float]] = {}

    def novel_legs(self, server_round: int, novel: Sequence[Client]) -> Iterator[Leg]:
        """Three exchanges: moments of features, errors of classifiers, and the nearest client's model."""
        network = self._network()
        trained = [client for client in self.roster.idle if not self.is_novel(client)]
        moments: dict[str, Tensor] = {}
        yield self._ask_moments(server_round, [*trained, *novel], network, moments)
        ours = [client for client in novel if client.client_id in moments]
        theirs = [client for client in trained if client.client_id in moments]
        if not ours or not theirs:
            return
        pairs = {
            (one.client_id, other.client_id): discriminant(moments[one.client_id], moments[other.client_id])
            for one in ours
            for other in theirs
        }
        errors: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
        yield self._ask_errors(server_round, ours, theirs, 1, network, pairs, errors)
        yield self._ask_errors(server_round, theirs, ours, -1, network, pairs, errors)
        distances: dict[str, dict[str, float]] = {}
        for (one, other), found in errors.items():
            if len(found) == 2:  # of either side; the larger, so that nobody makes itself near by what it says
                distances.setdefault(one, {})[other] = max(map(a_distance, found))
        self.distances = distances
        models = self.models()
        nearest = {one: models[min(each, key=each.__getitem__)] for one, each in distances.items()}
        orders = partial(self.score_orders, server_round, lambda some: [nearest[client.client_id] for client in some])
        yield Leg(
            [client for client in ours if client.client_id in nearest],
            orders,
            partial(self.aggregate_evaluate, server_round),
        )

    def _network(self) -> Weights:
        """Return the network through which all look: that of the mean embedding of those who trained."""
        rows = [client.row for client in self.roster if not self.is_novel(client)]
        (size,) = self.config.sizes
        mean = self.learner.table.weight.detach()[rows].mean(0, keepdim=True)
        return Weights(self.layouts[size], self.learner.write(mean, size)[0])

    def _ask_moments(
        self, server_round: int, clients: Sequence[Client], network: Weights, moments: dict[str, Tensor]
    ) -> Leg:
        order = MomentsOrder(**self._common(server_round), weights=network)
        features = dict(network.layout.shapes)["head.weight"][1]

        def check(client: Client, result: MomentsResult) -> None:
            result.weights.check(Layout((("moments", (1 + features, features)),)), torch.float32)
            values = result.weights.values.view(1 + features, features)
            norm, least = float(values.double().norm()), float(values[1:].diagonal().min())
            if norm > LARGEST_NORM or least < 0:
                raise WireError(
                    f"expected moments of norm up to {LARGEST_NORM:.0e} and no variance below 0, found {norm:.1e}, "
                    f"{least:.1e}"
                )

        def take(replies: Iterator[Message]) -> None:
            for client, result in self.collect(replies, MomentsResult, check, quorum=False):
                moments[client.client_id] = result.weights.values.view(1 + features, features)

        return Leg(clients, lambda some: self.post(server_round, ((client, order) for client in some)), take)

    def _ask_errors(
        self,
        server_round: int,
        asked: Sequence[Client],
        against: Sequence[Client],
        sign: int,
        network: Weights,
        pairs: Mapping[tuple[str, str], Tensor],
        errors: Mapping[tuple[str, str], list[float]],
    ) -> Leg:
        """Ask one side of each pair for the errors of its classifiers, all at once; the novel client's comes first."""

        def of(client: Client) -> list[tuple[str, str]]:
            names = [other.client_id for other in against]
            return [(client.client_id, name) if sign > 0 else (name, client.client_id) for name in names]

        def orders(some: Sequence[Client]) -> list[Message]:
            contents = []
            for client in some:
                rows = torch.stack([pairs[pair] for pair in of(client)])
                classifiers = Weights(Layout((("classifiers", tuple(rows.shape)),)), rows.flatten())
                order = ErrorsOrder(**self._common(server_round), weights=network, sign=sign, classifiers=classifiers)
                contents.append((client, order))
            return self.post(server_round, contents)

        def check(client: Client, result: ErrorsResult) -> None:
            if len(result.errors) != len(against) or not all(0 <= error <= 1 for error in result.errors):
                raise WireError(f"expected {len(against)} shares of errors, found {result.errors[:5]}")

        def take(replies: Iterator[Message]) -> None:
            for client, result in self.collect(replies, ErrorsResult, check, quorum=False):
                for pair, error in zip(of(client), result.errors, strict=True):
                    errors[pair].append(error)

        return Leg(asked, orders, take)
