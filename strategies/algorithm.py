"""What the author of a strategy writes: an algorithm over clients and flat vectors of weights.

Two methods are the algorithm: `weights` says what each client is sent, `learn` makes something of what came back. All
else has a default. Messages, admission, deadlines, compression, noise, masks, resume points and scores are the affair
of whoever runs the rounds.

    serves -> build -> join (each client) -> round, round, evaluate, round, ... -> checkpoint
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from hyperbloom.common.config import RunConfig, Section, check
from hyperbloom.common.errors import ConfigError, ModelError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.methods import Method
from hyperbloom.common.models import ModelSpec, body_layout, full_layout, head_layout
from hyperbloom.common.wire import (
    SGD,
    EvaluateOrder,
    EvaluateResult,
    Introduction,
    Refinement,
    Scope,
    Target,
    TrainOrder,
    Weights,
)
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, Update, ask, train

__all__ = ["LARGEST_NETWORK", "Algorithm", "Evaluation", "NoOptions", "Recipe", "Setting", "Turn", "is_novel"]

LARGEST_NETWORK = 50_000_000
"""Parameters beyond which the first client's word is not enough to build a target network."""


class NoOptions(Section):
    """Options of a strategy that has none."""


@dataclass(frozen=True)
class Setting:
    """What the data of the first client decide.

    Attributes:
        spec: the target network of the first size.
        layouts: by size, how what travels lies in a flat vector.
    """

    spec: ModelSpec
    layouts: Mapping[str, Layout]


@dataclass(frozen=True)
class Recipe:
    """How clients work with what they are sent.

    Attributes:
        private: what of the target network stays on the client, one of `PRIVATE`.
        method: how they train; None: by plain SGD.
        refinement: what they do before they score weights; None: nothing.
        resemble: what their representations are to resemble.
        norms: how the graph of an own model treats norms.
        hypernetwork: settings of the graph hypernetwork whose parameters travel, as JSON.
    """

    private: str
    method: Method | None = None
    refinement: Refinement | None = None
    resemble: Weights | None = None
    norms: str | None = None
    hypernetwork: str | None = None


@dataclass(frozen=True)
class Turn:
    """A round, as an algorithm sees it.

    Attributes:
        scope: what its orders say of run and round.
        cohort: the clients that were drawn for it.
        candidates: those from whom they were drawn.
    """

    scope: Scope
    cohort: Sequence[Client] = ()
    candidates: Sequence[Client] = ()

    @property
    def number(self) -> int:
        """Return the number of the round."""
        return self.scope.round


@dataclass(frozen=True)
class Evaluation:
    """Scores of clients by name.

    Attributes:
        rank: by which rounds are selected; None: the mean validation accuracy.
    """

    scores: Mapping[str, EvaluateResult] = field(default_factory=dict)
    rank: tuple[int, float] | None = None


def is_novel(client: Client, config: RunConfig) -> bool:
    """Return whether a client is one of the last `novel` percent by name, which never train."""
    return bool(config.novel) and client.row >= config.clients - math.ceil(config.clients * config.novel / 100)


class Algorithm(ABC):
    """Base of all algorithms.

    Args:
        config: the run.

    Attributes:
        options: the strategy's own, checked.
        setting: what the first client's data decided; there once `build` was called.
        clients: all that have joined, by row.

    Raises:
        ConfigError: the options are wrong, or do not go with the rest of the run.
    """

    options_type: ClassVar[type[Section]] = NoOptions
    private: ClassVar[str] = "none"
    """What of the target network stays on the client."""
    reply: ClassVar[str] = "delta"
    """What clients send back from training, one of `REPLIES`."""
    asynchronous: ClassVar[bool] = False
    """Whether `learn` can take single replies, at any time."""
    sums: ClassVar[bool] = False
    """Whether `learn` makes nothing of updates but their mean, weighted by `examples`."""
    noise_at: ClassVar[tuple[str, ...]] = ()
    """Where noise can hide all that training sends, of `PrivacyConfig.where`."""
    keeps_sent: bool = True
    """Whether `learn` wants the weights that were sent."""
    own_models: ClassVar[Literal["no", "may", "must"]] = "no"
    """Whether clients bring models of their own."""
    asks: ClassVar[str] = "own"
    """What must be known of these, one of `ASKS`."""
    norms: str | None = None
    """How the graph of an own model treats norms."""
    reference: str | None = None
    """Digest of the reference set that clients will need."""

    options: Section
    setting: Setting

    def __init__(self, config: RunConfig) -> None:
        """Check the options; nothing is built before the first client says what its data look like."""
        self.config = config
        self.options = check(self.options_type, config.options, f"options of {config.strategy}")
        self.clients: dict[int, Client] = {}
        self.check()

    def check(self) -> None:
        """Raise a ConfigError for combinations that cannot work; called before anything starts."""

    # ------------------------------------------------------------------ who takes part

    def settle(self, about: Introduction) -> Setting:
        """Return what the data of the first client decide.

        Raises:
            ModelError: no target network fits them.
        """
        of = {"head": body_layout, "body": head_layout}.get(self.private, full_layout)
        data = (about.input_shape, about.num_classes)
        specs = [ModelSpec.choose(self.config.model, size, *data) for size in self.config.sizes]
        layouts = {spec.size: of(spec) for spec in specs}
        largest = max(layout.numel for layout in layouts.values())
        if largest > LARGEST_NETWORK and self.config.input_shape is None:
            raise ModelError(
                f"{largest:,} parameters are beyond {LARGEST_NETWORK:,}; set input_shape if they are meant"
            )
        return Setting(specs[0], layouts)

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Raise a RefusedError if a client cannot take part; `others` have been admitted before."""

    def build(self, setting: Setting) -> None:
        """Make the server's networks."""
        self.setting = setting

    def join(self, client: Client, first: bool) -> None:
        """Make room for a client, in order of rows; or, not for the first time, look again at what it has become."""
        self.clients[client.row] = client

    def trains(self, client: Client) -> bool:
        """Return whether a client may be drawn for a cohort."""
        return True

    # ------------------------------------------------------------------ a round

    def recipe(self, number: int) -> Recipe:
        """Return how clients work in round `number`."""
        return Recipe(self.private)

    def layout(self, client: Client) -> Layout:
        """Return how what a client sends back lies in a flat vector."""
        return self.setting.layouts[client.about.size]

    @abstractmethod
    def weights(self, clients: Sequence[Client]) -> Sequence[Weights] | None:
        """Return what each of `clients` is sent, or None if nothing travels."""

    @abstractmethod
    def learn(self, updates: Sequence[Update]) -> None:
        """Learn from what came back: from a round, in order of rows, or from one client in asynchronous mode."""

    def round(self, turn: Turn) -> Exchanges[None]:
        """Play the exchanges of a round of training. Here one: the cohort trains."""
        self.learn((yield from train(self.training(turn, turn.cohort))))

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        """Play the exchanges that score some clients. Here one: each scores the weights that are its own now."""
        return Evaluation((yield from self.score(turn, clients)))

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Tensor]:
        """Return the server's learned state by name, as it is stored in the run folder."""
        return {}

    def checkpoint(self) -> dict[str, Tensor]:
        """Return, by name, all that `restore` needs to go on as if nothing had happened."""
        return self.state()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `checkpoint` returned. The networks are built, and all clients of then have joined."""

    def check_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Find out before anything starts whether `start_from` can take another run's state.

        Raises:
            ConfigError: it cannot.
        """
        raise ConfigError(f"init_from: {self.config.strategy} has no way to start from another run")

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from what `state` returned in another run, whose clients have rows before those that join.

        Raises:
            ConfigError: it does not fit this run.
        """
        self.check_start(tensors)

    # ------------------------------------------------------------------ pieces for `round` and `evaluate`

    def target(self, number: int) -> Target:
        """Return what orders of round `number` say of the target network."""
        spec, recipe = self.setting.spec, self.recipe(number)
        return Target(spec.name, spec.num_classes, recipe.private, recipe.norms, recipe.hypernetwork)

    def training(self, turn: Turn, clients: Sequence[Client]) -> Train:
        """Return the exchange in which some clients train."""
        recipe, target = self.recipe(turn.number), self.target(turn.number)
        local = self.config.local
        rate = local.rate(turn.number, self.config.rounds)
        sgd = SGD(local.steps, local.batch_size, rate, local.momentum, local.weight_decay, local.clip)

        def orders(some: Sequence[Client]) -> list[TrainOrder]:
            rows = _or_nothing(self.weights(some) if some else None, len(some))
            return [
                TrainOrder(turn.scope, target, sgd, self.reply, row, recipe.method, recipe.resemble) for row in rows
            ]

        return Train(clients, orders, size=self.size(clients), layout=self.layout, keep_sent=self.keeps_sent)

    def score(
        self,
        turn: Turn,
        clients: Sequence[Client],
        weights: Callable[[Sequence[Client]], Sequence[Weights] | None] | None = None,
    ) -> Exchanges[dict[str, EvaluateResult]]:
        """Let some clients score the weights that `weights` returns, by default those that are their own now.

        Returns:
            the scores by name.
        """
        write, refinement = weights or self.weights, self.recipe(turn.number).refinement
        target = self.target(turn.number)

        def orders(some: Sequence[Client]) -> list[EvaluateOrder]:
            rows = _or_nothing(write(some) if some else None, len(some))
            return [EvaluateOrder(turn.scope, target, row, refinement) for row in rows]

        wanted = Ask(clients, orders, check_score, self.size(clients), quorum=False, in_turns=True)
        return {client.client_id: result for client, result in (yield from ask(wanted))}

    def size(self, clients: Sequence[Client]) -> int:
        """Return how many numbers the largest weights of some clients have."""
        return max((self.layout(client).numel for client in clients), default=0)

    def is_novel(self, client: Client) -> bool:
        """Return whether a client never trains, and is scored apart."""
        return is_novel(client, self.config)


def check_score(client: Client, result: EvaluateResult, models: int = 1) -> None:
    """Raise a WireError for scores that cannot be, or of more examples than a client has, for each of `models`."""
    result.check()
    about = client.about
    if result.val.total > models * about.val_examples or result.test.total > models * about.test_examples:
        raise WireError("expected at most the validation and test examples that it said it has, found more")


def _or_nothing(rows: Sequence[Weights] | None, count: int) -> Sequence[Weights | None]:
    return rows if rows is not None else [None] * count
