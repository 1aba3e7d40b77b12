"""Three ways to use a trained pFedHN for a novel client without labels: the comparisons of ODPFL-HN.

Importing this module registers them, and their orders with clients in this process: they need the engine `inline`.

Amosy, Eyal, Chechik, https://arxiv.org/abs/2111.08356, section 6.2. Training is pFedHN's. With `init_from`, a trained
run is used as it is and nothing is learned, so that one run serves all three.

* `pfl-sampled`: the expected accuracy of a randomly drawn client's model, which is the mean over all models.
* `pfl-ensemble`: the mean of all models' logits. All models travel to each novel client, as for `pfl-sampled`.
* `pfl-nearest`: the model of the client with the smallest A-distance, `2 (1 - 2 err)` with err the error of a
  classifier that tells the two clients' examples apart (Ben-David et al., Analysis of Representations for Domain
  Adaptation, NeurIPS 2006). Both clients count alike, however many examples they have: err is the mean of the error
  rates on the examples of either.

The distance needs no example of another client. All clients pass their inputs through one network, which the
hypernetwork generates for the mean embedding. Each sends the mean and covariance of the last layer's inputs over its
training inputs. From two of these, the server computes the best linear classifier for normal distributions of equal
covariance (Fisher's discriminant). Both clients report its error on their validation inputs. The server thus learns
F + F^2 numbers for F features (84 for LeNet), which reveal much about a client's classes. A client receives classifiers
made of its own and other clients' moments, without names. A client can make itself near by a false error rate.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from figures.pfl_client import ErrorsOrder, ErrorsResult, MomentsOrder, MomentsResult, TryOrder
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import ModelSpec, head_layout
from hyperbloom.common.wire.orders import EvaluateResult, Introduction
from hyperbloom.strategies import STRATEGIES
from hyperbloom.strategies.algorithm import Setting
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, ask
from hyperbloom.strategies.pfedhn import PFedHN
from hyperbloom.strategies.turn import Evaluation, Turn

RIDGE = 1e-3
"""Share of the mean variance added to each feature's variance: clients have too few examples for F^2 covariances."""


def _last_weight(spec: ModelSpec) -> tuple[int, ...]:
    return next(shape for _, shape in reversed(head_layout(spec).shapes) if len(shape) > 1)


def discriminant(one: Tensor, other: Tensor) -> Tensor:
    """Return the linear classifier `(F + 1,)` between two clients' moments `(1 + F, F)`, positive for the first."""
    (mean, other_mean), spread = (one[0], other[0]), (one[1:] + other[1:]) / 2
    ridge = RIDGE * spread.diagonal().mean().clamp_min(1e-12)
    # Invented moments may have no solution. `solve_ex` then yields useless numbers for this client only, but no error.
    weights, _ = torch.linalg.solve_ex(spread + ridge * torch.eye(len(spread)).to(spread), mean - other_mean)
    return torch.cat([weights, -(weights @ (mean + other_mean) / 2)[None]])


def a_distance(error: float) -> float:
    """Return `2 |1 - 2 err|`: 2 if the classifier separates the clients, 0 if it cannot.

    Args:
        error: the mean of the error rates on either client's examples. One alone would not do: a classifier that says
            the same of all examples is never wrong on one side.

    The paper has no absolute value, but a classifier that is mostly wrong separates the clients, too.
    """
    return 2 * abs(1 - 2 * error)


class _PFL(PFedHN):
    """pFedHN with an evaluation of novel clients."""

    asynchronous: ClassVar[bool] = False
    noise_at: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Refuse runs without novel clients or with several sizes."""
        super().check()
        if not self.config.novel:
            raise ConfigError(f"novel: {self.config.strategy} is about novel clients; expected a percentage, found 0")
        if len(self.config.sizes) != 1:
            raise ConfigError(f"sizes: {self.config.strategy} compares one architecture, found {self.config.sizes}")

    def trains(self, client: Client) -> bool:
        """Return False if a trained run is used."""
        return not self.config.init_from and super().trains(client)

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        """Score known clients as in pFedHN, then the novel ones."""
        known = [client for client in clients if not self.config.is_novel(client.row)]
        scores = yield from turn.score(known)
        if novel := [client for client in clients if self.config.is_novel(client.row)]:
            scores |= yield from self.score_novel(turn, novel, known)
        return Evaluation(scores)

    @abstractmethod
    def score_novel(
        self, turn: Turn, novel: Sequence[Client], known: Sequence[Client]
    ) -> Exchanges[dict[str, EvaluateResult]]:
        """Play the exchanges that score novel clients with the help of the known ones; return scores by name."""

    def trained(self) -> list[Client]:
        """Return all clients that are not novel, by row."""
        return [client for _, client in sorted(self.clients.items()) if not self.config.is_novel(client.row)]

    def models(self) -> dict[str, Tensor]:
        """Return the weights `(P,)` that all training clients use, by name."""
        trained = self.trained()
        return {c.client_id: weights.values for c, weights in zip(trained, self.personal(trained), strict=True)}


class _Many(_PFL):
    together: ClassVar[bool]

    def score_novel(
        self, turn: Turn, novel: Sequence[Client], known: Sequence[Client]
    ) -> Exchanges[dict[str, EvaluateResult]]:
        """Let every novel client score all models, a client at a time because an order holds all models."""
        rows = torch.stack(list(self.models().values()))
        weights = Weights(Layout((("models", tuple(rows.shape)),)), rows.flatten())
        order = TryOrder(turn.scope, turn.target, weights, metrics=self.metrics, together=self.together)
        check = partial(turn.check_score, models=1 if self.together else len(rows))
        wanted: Ask[EvaluateResult] = Ask(
            novel, lambda some: [order] * len(some), check, rows.numel(), quorum=False, in_turns=True
        )
        return {client.client_id: result for client, result in (yield from ask(wanted))}


class PFLSampled(_Many):
    """PFL-sampled: the mean accuracy of all personal models, each scored on its own."""

    together: ClassVar[bool] = False


class PFLEnsemble(_Many):
    """PFL-ensemble: the mean of the logits of all personal models."""

    together: ClassVar[bool] = True


Pair = tuple[str, str]
"""Names of a novel and of a known client."""


class PFLNearest(_PFL):
    """PFL-nearest: the personal model of the client at the smallest A-distance.

    Attributes:
        distances: by novel client and known client, from the last evaluation.
    """

    distances: Mapping[str, Mapping[str, float]] = {}

    def settle(self, about: Introduction) -> Setting:
        """Refuse data whose network has features for each pixel, of which there are no moments of examples."""
        setting = super().settle(about)
        if len(_last_weight(setting.spec)) != 2:
            raise ConfigError(
                f"pfl-nearest compares features of whole inputs, and {setting.spec.name} has them for each pixel; "
                "take pfl-sampled or pfl-ensemble"
            )
        return setting

    def score_novel(
        self, turn: Turn, novel: Sequence[Client], known: Sequence[Client]
    ) -> Exchanges[dict[str, EvaluateResult]]:
        """Play three exchanges: moments of features, errors of classifiers, and the nearest client's model."""
        network = self._network()
        moments = yield from self._moments(turn, [*known, *novel], network)
        ours = [client for client in novel if client.client_id in moments]
        theirs = [client for client in known if client.client_id in moments]
        if not ours or not theirs:
            return {}
        pairs = {
            (one.client_id, other.client_id): discriminant(moments[one.client_id], moments[other.client_id])
            for one in ours
            for other in theirs
        }
        of_ours = yield from self._errors(turn, ours, theirs, 1, network, pairs)
        of_theirs = yield from self._errors(turn, theirs, ours, -1, network, pairs)
        distances: dict[str, dict[str, float]] = {}
        for one, other in (pair for pair in pairs if pair in of_ours and pair in of_theirs):
            distances.setdefault(one, {})[other] = a_distance((of_ours[one, other] + of_theirs[one, other]) / 2)
        self.distances = distances
        models, (size,) = self.models(), self.config.sizes
        layout = self.setting.layouts[size]
        nearest = {one: models[min(each, key=each.__getitem__)] for one, each in distances.items()}
        return (
            yield from turn.score(
                [client for client in ours if client.client_id in nearest],
                lambda some: [Weights(layout, nearest[client.client_id]) for client in some],
            )
        )

    def _network(self) -> Weights:
        """Return the network for the mean embedding, which all clients use to compute features."""
        (size,) = self.config.sizes
        mean = self.learner.table.weight.detach()[[client.row for client in self.trained()]].mean(0, keepdim=True)
        return Weights(self.setting.layouts[size], self.learner.write(mean, size)[0])

    def _moments(self, turn: Turn, clients: Sequence[Client], network: Weights) -> Exchanges[dict[str, Tensor]]:
        """Ask for the moments `(1 + F, F)` of the inputs of the network's head; return them by name."""
        order = MomentsOrder(turn.scope, turn.target, network)
        features = _last_weight(self.setting.spec)[1]

        def check(client: Client, result: MomentsResult) -> None:
            result.weights.check(Layout((("moments", (1 + features, features)),)), torch.float32)
            result.weights.check_norm()
            if float(result.weights.values.view(1 + features, features)[1:].diagonal().min()) < 0:
                raise WireError("expected moments with no variance below 0")

        wanted = Ask(clients, lambda some: [order] * len(some), check, network.layout.numel, quorum=False)
        answers = yield from ask(wanted)
        return {client.client_id: found.weights.values.view(1 + features, features) for client, found in answers}

    def _errors(
        self,
        turn: Turn,
        asked: Sequence[Client],
        against: Sequence[Client],
        sign: int,
        network: Weights,
        pairs: Mapping[Pair, Tensor],
    ) -> Exchanges[dict[Pair, float]]:
        """Ask one side of each pair for all its classifiers' errors; pairs name the novel client first."""

        def of(client: Client) -> list[Pair]:
            names = [other.client_id for other in against]
            return [(client.client_id, name) if sign > 0 else (name, client.client_id) for name in names]

        def order(client: Client) -> ErrorsOrder:
            rows = torch.stack([pairs[pair] for pair in of(client)])
            classifiers = Weights(Layout((("classifiers", tuple(rows.shape)),)), rows.flatten())
            target = turn.target
            return ErrorsOrder(turn.scope, target, network, sign=sign, classifiers=classifiers)

        def check(client: Client, result: ErrorsResult) -> None:
            if len(result.errors) != len(against) or not all(0 <= error <= 1 for error in result.errors):
                raise WireError(f"expected {len(against)} shares of errors, found {result.errors[:5]}")

        size = network.layout.numel
        answers = yield from ask(Ask(asked, lambda some: [order(c) for c in some], check, size, quorum=False))
        return {pair: e for client, found in answers for pair, e in zip(of(client), found.errors, strict=True)}


STRATEGIES |= {"pfl-sampled": PFLSampled, "pfl-ensemble": PFLEnsemble, "pfl-nearest": PFLNearest}
