"""A round from the algorithm's side: the exchanges in which clients train and score what the algorithm writes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hyperbloom.common.errors import ConfigError, WireError, describe
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import SGD, EvaluateOrder, EvaluateResult, Scope, Target, TrainOrder
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, ask

if TYPE_CHECKING:
    from hyperbloom.strategies.algorithm import Algorithm


@dataclass(frozen=True)
class Evaluation:
    """Scores of clients by name.

    Attributes:
        rank: selects the best round; None: the mean of the selecting metric on validation examples does.
    """

    scores: Mapping[str, EvaluateResult] = field(default_factory=dict)
    rank: tuple[int, float] | None = None


@dataclass(frozen=True)
class Turn:
    """A round of an algorithm.

    Attributes:
        scope: what the orders say of run and round.
        cohort: the clients drawn for this round.
        candidates: the clients from whom the cohort was drawn.
    """

    algorithm: "Algorithm"
    scope: Scope
    cohort: Sequence[Client] = ()
    candidates: Sequence[Client] = ()

    @property
    def number(self) -> int:
        """Return the number of the round."""
        return self.scope.round

    @property
    def target(self) -> Target:
        """Return the description of the target network in orders of this round."""
        setting, recipe = self.algorithm.setting, self.algorithm.recipe(self.number)
        about = (recipe.private, recipe.hypernetwork, setting.task.spec)
        return Target(setting.spec.name, setting.spec.num_classes, *about, setting.spec.adapt, setting.backbones)

    @property
    def sgd(self) -> SGD:
        """Return the local training of this round."""
        local, rounds = self.algorithm.config.local, self.algorithm.config.rounds
        rate = local.rate(self.number, rounds)
        return SGD(local.steps, local.batch_size, rate, local.momentum, local.weight_decay, local.clip)

    def training(self, clients: Sequence[Client]) -> Train:
        """Return the exchange in which these clients train."""
        algorithm, target, sgd = self.algorithm, self.target, self.sgd
        recipe = algorithm.recipe(self.number)

        def orders(some: Sequence[Client]) -> list[TrainOrder]:
            return [
                TrainOrder(self.scope, target, sgd, algorithm.reply, row, recipe.method, recipe.resemble)
                for row in self._written(algorithm.weights, some)
            ]

        size = self._size(clients)
        return Train(clients, orders, size=size, layout=algorithm.layout, keep_sent=algorithm.keeps_sent)

    def score(
        self, clients: Sequence[Client], weights: Callable[[Sequence[Client]], Sequence[Weights] | None] | None = None
    ) -> Exchanges[dict[str, EvaluateResult]]:
        """Return the clients' scores, by name, of what `weights` returns, by default their personal models."""
        algorithm, target = self.algorithm, self.target
        write, refinement = weights or algorithm.personal, algorithm.recipe(self.number).refinement

        def orders(some: Sequence[Client]) -> list[EvaluateOrder]:
            rows = self._written(write, some)
            return [EvaluateOrder(self.scope, target, row, refinement, algorithm.metrics) for row in rows]

        wanted = Ask(clients, orders, self.check_score, self._size(clients), quorum=False, in_turns=True)
        return {client.client_id: result for client, result in (yield from ask(wanted))}

    def _written(self, write: Callable[[Sequence[Client]], object], some: Sequence[Client]) -> Sequence[Weights | None]:
        """Return what a method of the algorithm writes for each client, or None; ConfigError if it is anything else."""
        rows = write(some) if some else []
        if rows is None:
            return [None] * len(some)
        if not isinstance(rows, Sequence) or len(rows) != len(some) or not all(isinstance(x, Weights) for x in rows):
            wanted = f"{getattr(write, '__qualname__', write)} to return {len(some)} Weights, one a client, or None"
            raise ConfigError(f"{self.algorithm.config.strategy}: expected {wanted}, found {describe(rows)}")
        return rows

    def check_score(self, client: Client, result: EvaluateResult, models: int = 1) -> None:
        """Raise a WireError for impossible scores, or for more examples than the client has for each of `models`."""
        result.check()
        setting, metrics, about = self.algorithm.setting, self.algorithm.metrics, client.about
        task, outputs = setting.task, setting.spec.num_classes
        if result.val.total > models * about.val_examples or result.test.total > models * about.test_examples:
            raise WireError("expected at most the validation and test examples that it said it has, found more")
        single = {f"{metric}/{at}" for metric in metrics for at in range(outputs)}
        length = task.length(outputs, metrics) if result.val.counts or result.test.counts else 0  # it may be large
        pixels = math.prod(task.output_shape(outputs, about.input_shape)[1:])
        for score in (result.val, result.test):
            if unknown := set(score.metrics) - set(metrics) - single:
                raise WireError(f"expected the metrics {', '.join(metrics)}, found {min(unknown)}")
            if len(score.counts) not in (0, length):
                raise WireError(f"expected {length} counts or none, found {len(score.counts)}")
            counts = task.unpacked(score.counts, outputs) if score.counts else None
            if counts and not task.are_counts(*counts, pixels * score.total):
                raise WireError(f"expected counts of {score.total} examples, found others")

    def _size(self, clients: Sequence[Client]) -> int:
        return max((self.algorithm.layout(client).numel for client in clients), default=0)
