"""The round as Flower sees it: orders out, replies in, each matched to the client that it was sent to.

A strategy of ours is a subclass that overrides `weights_for` and `update`; both are about clients and flat vectors
of weights, and know nothing of Flower. Flower's own strategies send every node the same payload and demand equal keys,
so this subclasses `Strategy` itself.
"""

import math
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from hyperbloom import __version__
from hyperbloom.common.compression import Codec
from hyperbloom.common.config import FEWEST_CLIENTS, MOST_CLIENTS, RunConfig, Section, check
from hyperbloom.common.errors import ConfigError, ModelError, RefusedError, WireError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import (
    LARGEST_NORM,
    LONGEST_LAYOUT,
    UNREADABLE,
    EvaluateOrder,
    EvaluateResult,
    Greeting,
    Introduction,
    Packable,
    TrainOrder,
    TrainResult,
    Weights,
)
from hyperbloom.common.methods import Method
from hyperbloom.common.models import ModelSpec, body_layout, full_layout, head_layout
from hyperbloom.common.names import check_name
from hyperbloom.strategies.roster import Client, Roster

__all__ = ["ClientUpdate", "Evaluation", "Leg", "NoOptions", "Order", "PersonalisedStrategy", "is_novel"]

LARGEST_NETWORK = 50_000_000
"""Parameters beyond which the first client's word is not enough to build a target network."""

LONGEST_VERSION = 100

ResultT = TypeVar("ResultT", bound=Packable)


class Order(Protocol):
    """A message to a client that it answers."""

    type: ClassVar[str]

    def pack(self) -> RecordDict:
        """Return the content of the Flower message."""


class NoOptions(Section):
    """Options of a strategy that has none."""


@dataclass(frozen=True)
class ClientUpdate:
    """A reply that was accepted: `sent` and `returned` are `(P,)`; `result` is without what they are made of.

    `sent` is None if the strategy does not keep it, `returned` where nothing travels.
    """

    client: Client
    result: TrainResult
    sent: Tensor | None
    returned: Tensor | None
    layout: Layout | None = None  # of both


def _is_scaling(about: Introduction) -> bool:
    """Return whether what a client says of its preprocessing can be done to inputs of its shape."""
    positive = (about.divisor, *about.std)
    fits = len(about.mean) == len(about.std) and len(about.std) in (0, *about.input_shape[:1])
    return fits and all(map(math.isfinite, (*positive, *about.mean))) and min(positive) > 0


def is_novel(client: Client, config: RunConfig) -> bool:
    """Return whether a client is one of the last `novel` percent by name."""
    return bool(config.novel) and client.row >= config.clients - math.ceil(config.clients * config.novel / 100)


@dataclass(frozen=True)
class Evaluation:
    """Scores of all clients that answered, by name, and which of them are novel."""

    scores: Mapping[str, EvaluateResult]
    novel: Set[str] = frozenset()
    rank: tuple[int, float] | None = None  # by which rounds are selected; the mean validation accuracy, if None

    def metrics(self) -> dict[str, float]:
        """Return federated accuracy (percent) on validation and test, and on the test examples of novel clients.

        `mean` is the paper's formula, the mean over clients of each client's accuracy; `pooled` is all correct
        answers over all examples, as the authors' code reports it; `std` (population) and `worst` are over clients.
        Novel clients are in `novel_test_...` alone: nothing is chosen by labels that they would not have.
        """
        metrics: dict[str, float] = {}
        known = [result for name, result in self.scores.items() if name not in self.novel]
        novel = [result for name, result in self.scores.items() if name in self.novel]
        for prefix, split, results in (("", "val", known), ("", "test", known), ("novel_", "test", novel)):
            scores = [result.score(split) for result in results]
            if not scores:
                continue
            each = [100 * score.accuracy for score in scores]
            start = f"{prefix}{split}"
            metrics[f"{start}_mean"] = statistics.fmean(each)
            metrics[f"{start}_std"] = statistics.pstdev(each)
            metrics[f"{start}_worst"] = min(each)
            metrics[f"{start}_pooled"] = 100 * sum(s.correct for s in scores) / sum(s.total for s in scores)
            metrics[f"{start}_loss"] = statistics.fmean(score.loss for score in scores)
        return metrics


@dataclass
class Round:
    """What the last round brought, for the log: results by client name, and why others were left out.

    `lied` names those of the refused whose reply's content was at fault; `quarantined` has, of those that are asked
    nothing from now on, the last round for which this holds. `staleness` has, in asynchronous mode, an entry per reply:
    the replies applied since its order was written.
    """

    results: dict[str, TrainResult] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    refused: dict[str, str] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    lied: list[str] = field(default_factory=list)
    quarantined: dict[str, int] = field(default_factory=dict)


class _Failed(WireError):
    """There is no reply to judge: the client could not, or the network."""


@dataclass(frozen=True)
class Leg:
    """One exchange of a round: who is asked, what some of them are sent, and who takes the replies as they come.

    `orders` is called with a part of `clients` at a time, those of them that are still there.
    """

    clients: Sequence[Client]
    orders: Callable[[Sequence[Client]], list[Message]]
    take: Callable[[Iterator[Message]], object]


@dataclass(frozen=True)
class _Order:
    """What a client was sent: weights of `dtype`, or none; `sent` is `(P,)` if the strategy keeps it."""

    client: Client
    dtype: torch.dtype | None
    sent: Tensor | None
    layout: Layout | None


class PersonalisedStrategy(Strategy):
    """Base of all strategies.

    Args:
        config: the run.
        run_id: names the run to the clients, who keep personal state under it.
        roster: who is in the federation; kept up to date by whoever runs the rounds.

    Raises:
        ConfigError: the strategy's options, or the name of the compression, are wrong.
    """

    options_type: ClassVar[type[Section]] = NoOptions
    private: ClassVar[str] = "none"
    reply: ClassVar[str] = "delta"
    trained: type[TrainResult] = TrainResult  # what an order to train is answered with
    keeps_sent: bool = True  # whether `update` wants the weights that were sent; a large cohort's fill the memory
    own_models: ClassVar[Literal["no", "may", "must"]] = "no"  # whether clients bring models of their own
    asks: ClassVar[str] = "own"  # what must be known of these, one of ASKS
    asynchronous: ClassVar[bool] = False  # whether `apply` can learn from single replies
    noise_at: ClassVar[tuple[str, ...]] = ()  # where noise can hide all that training sends, of PrivacyConfig.where
    sums: ClassVar[bool] = False  # whether all are sent the same, and `update` needs only the mean by `counts`
    options: Section

    @classmethod
    def for_run(cls, config: RunConfig) -> "type[PersonalisedStrategy]":
        """Return the class that does what a run asks for, where one name stands for several."""
        return cls

    def __init__(self, config: RunConfig, run_id: str, roster: Roster) -> None:
        """Check the options; nothing is built before the first client says what its data look like."""
        self.config = config
        self.run_id = run_id
        self.roster = roster
        self.options = check(self.options_type, config.options, f"options of {config.strategy}")
        self.codec = Codec.parse(config.compression)
        self.layouts: dict[str, Layout] = {}
        self.round = Round()
        self.spec: ModelSpec | None = None  # target network of the first size, once a client has joined
        self.resume_points: tuple[int, ...] = ()  # rounds to which the run may go back after a crash
        self.rewound: tuple[int, ...] = ()  # rounds to which it has gone back
        self._orders: dict[str, _Order] = {}  # those not answered yet, by message id
        self._asked = 0  # clients that were ordered to train in this round
        self._unsent: list[tuple[Message, _Order]] = []  # a message has no id before it is sent
        self.on_release: Callable[[Sequence[str]], None] = lambda names: None  # who will send a change with noise
        if config.models and self.own_models == "no":
            raise ConfigError(f"models: {config.strategy} sends the same model to all clients; set model instead")
        if config.asynchronous and not self.asynchronous:
            raise ConfigError(f"asynchronous: {config.strategy} learns from whole rounds; set it to false")
        self._check_privacy()
        self.check_config()

    def _check_privacy(self) -> None:
        """Refuse noise that would not cover what the strategy sends, and sums where it needs single replies."""
        name, where = self.config.strategy, self.config.privacy.where
        if where != "none" and where not in self.noise_at:
            able = f"with {' or '.join(self.noise_at)} it can" if self.noise_at else "it sends more than changes"
            raise ConfigError(f"privacy.where: noise on the {where} cannot hide all that {name} sends; {able}")
        if where == "server" and self.codec is not None:
            raise ConfigError("compression: expected none with privacy.where=server: what it owes escapes the clipping")
        if self.config.secure_aggregation and not self.sums:
            why = f"cannot work: {name} needs each single reply"
            raise ConfigError(f"secure_aggregation: it {why}; leave it out, or let clients add noise (--dp-clients)")
        if self.config.secure_aggregation and not FEWEST_CLIENTS <= self.config.cohort <= MOST_CLIENTS:
            raise ConfigError(
                f"cohort: expected {FEWEST_CLIENTS} to {MOST_CLIENTS} with secure_aggregation, found "
                f"{self.config.cohort}; a sum of fewer hides nobody, one of more takes too many masks"
            )

    # ------------------------------------------------------------------ what a strategy of its own overrides

    @abstractmethod
    def weights_for(self, clients: Sequence[Client]) -> list[Tensor] | None:
        """Return the weights `(P,)` for each of `clients`, or None if nothing travels."""

    def layout_for(self, client: Client) -> Layout:
        """Return how what travels to and from a client lies in a flat vector."""
        return self.layouts[client.about.size]

    def sent_layout_for(self, client: Client) -> Layout:
        """Return how what travels to a client lies in a flat vector, where that is more than what travels back."""
        return self.layout_for(client)

    def method(self) -> Method | None:
        """Return how clients train in this round; None: by plain SGD."""
        return None

    @abstractmethod
    def update(self, updates: Sequence[ClientUpdate]) -> None:
        """Learn from a round's replies, which come in order of rows."""

    def apply(self, update: ClientUpdate, staleness: int) -> None:
        """Learn from one reply in asynchronous mode; `staleness` replies were applied since its order was written."""
        raise NotImplementedError

    def greeting(self) -> Greeting:
        """Return what new nodes are asked."""
        return Greeting(__version__, asks=None if self.own_models == "no" else self.asks)

    def check_config(self) -> None:
        """Raise a ConfigError for combinations that cannot work; called before anything starts."""

    def build(self) -> None:
        """Make the server's networks; called once, when `layouts` is known."""

    def refinement(self) -> dict[str, Any]:
        """Return the fields of an evaluation order that say what a client does to its weights before."""
        return {}

    def joined(self, client: Client) -> None:
        """Make room for a client; called once per client, in order of rows."""

    def returned(self, client: Client) -> None:
        """Look again at a client that has come back: its data and its model may be others."""

    def legs(self, server_round: int, cohort: Sequence[Client]) -> Iterator[Leg]:
        """Yield the exchanges of a round's training, one after the other; the next is asked for when one is over.

        What one brings for the next lives in the generator; `collect` checks replies. Who has not answered a leg as it
        should is out of the later ones, of which it must not be a client.
        """
        yield Leg(cohort, partial(self.train_orders, server_round), partial(self.aggregate_train, server_round))

    def evaluation_legs(self, server_round: int, clients: Sequence[Client]) -> Iterator[Leg]:
        """Yield the exchanges that evaluate some clients, so many at a time as memory allows."""
        orders, take = partial(self.evaluation_orders, server_round), partial(self.aggregate_evaluate, server_round)
        yield Leg(clients, orders, take)

    def largest(self) -> int:
        """Return how many numbers the largest message to a client holds."""
        return max((layout.numel for layout in self.layouts.values()), default=1)

    def trainable(self) -> list[Client]:
        """Return the clients from which cohorts are drawn; those that are novel are left out by `candidates`."""
        return self.roster.idle

    def candidates(self) -> list[Client]:
        """Return the clients from which a cohort is drawn now."""
        return [client for client in self.trainable() if not self.is_novel(client)]

    def is_novel(self, client: Client) -> bool:
        """Return whether a client never trains, and is scored apart."""
        return is_novel(client, self.config)

    def state(self) -> dict[str, Tensor]:
        """Return the server's learned state by name, as it is stored in the run folder."""
        return {}

    def check_initial(self, tensors: Mapping[str, Tensor]) -> None:
        """Find out before anything starts whether `load` can take these tensors.

        Raises:
            ConfigError: it cannot.
        """
        raise ConfigError(f"init_from: {self.config.strategy} has no way to start from another run")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from what `state` returned in another run; ConfigError if it does not fit."""
        self.check_initial(tensors)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return, by name, all that `restore` needs to go on as if nothing had happened.

        What `state` returns, unless rounds leave more behind than that.
        """
        return self.state()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `checkpoint` returned; the networks are built, and all clients of then have joined."""
        if tensors:
            self.load(tensors)

    # ------------------------------------------------------------------ joining

    def check_newcomer(self, about: Introduction) -> None:
        """Refuse a client whose data or machine do not fit; the first one decides where the run does not say.

        Raises:
            RefusedError: says what was expected and what the client has.
        """
        config, spec = self.config, self.spec
        input_shape = spec.input_shape if spec else config.input_shape
        num_classes = spec.num_classes if spec else config.num_classes
        if input_shape not in (None, about.input_shape):
            raise RefusedError(
                f"expected inputs of shape {input_shape} as in this federation, found {about.input_shape}"
            )
        if num_classes not in (None, about.num_classes):
            raise RefusedError(f"expected {num_classes} classes as in this federation, found {about.num_classes}")
        if about.size not in config.sizes:
            raise RefusedError(f"expected --size to be one of {', '.join(config.sizes)}, found {about.size}")
        try:
            check_name(about.client_id, "--client-id")  # it becomes the name of a folder
        except ConfigError as error:
            raise RefusedError(str(error)[:300]) from None
        words = (about.version, about.graph or "", *(about.types or ()))
        if len(about.version) > LONGEST_VERSION or sum(map(len, words)) > LONGEST_LAYOUT:
            raise RefusedError("expected less to be said of its version and model; it is kept in every checkpoint")
        if about.class_shares and not _are_shares(about.class_shares, about.num_classes):
            raise RefusedError("expected a share from 0 to 1 for each class, and 1 in all, found others")
        if not _is_scaling(about):
            raise RefusedError("expected a divisor, and a mean and a deviation for each channel or none, found others")
        if min(about.train_examples, about.val_examples, about.test_examples) < 1:
            raise RefusedError("expected examples for training, validation and test, found an empty set")
        if spec is None:
            try:
                self._adopt(about)
            except ModelError as error:
                raise RefusedError(str(error)) from None
            except (RuntimeError, OverflowError) as error:
                raise RefusedError(f"no target network can be built for its inputs and classes: {error}") from None

    def _adopt(self, about: Introduction) -> None:
        """Build the target networks for the shape of the first client's data."""
        of = {"head": body_layout, "body": head_layout}.get(self.private, full_layout)
        data = (about.input_shape, about.num_classes)
        specs = [ModelSpec.choose(self.config.model, size, *data) for size in self.config.sizes]
        layouts = {spec.size: of(spec) for spec in specs}
        largest = max(layout.numel for layout in layouts.values())
        if largest > LARGEST_NETWORK and self.config.input_shape is None:
            raise ModelError(
                f"{largest:,} parameters are beyond {LARGEST_NETWORK:,}; set input_shape if they are meant"
            )
        self.layouts, self.spec = layouts, specs[0]
        self.build()

    # ------------------------------------------------------------------ one round, in the order of time

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Draw the cohort and write each member its order. `arrays` and `config` are not used: state stays here."""
        return self.train_orders(server_round, self.begin_round(server_round))

    def begin_round(self, server_round: int) -> list[Client]:
        """Draw the cohort."""
        self.round, self.roster.round = Round(), server_round
        cohort = self.roster.draw(server_round, self.config.cohort, self.candidates())
        self._asked = len(cohort)
        return cohort

    def train_orders(self, server_round: int, clients: Sequence[Client]) -> list[Message]:
        """Order some clients to train."""
        if clients and self.reply != "nothing" and self.config.privacy.where != "none":
            self.on_release([client.client_id for client in clients])
        return self._address(
            clients,
            self.weights_for(clients) if clients else [],
            lambda weights: TrainOrder(**self.training(server_round), weights=weights),
            server_round,
        )

    def training(self, server_round: int) -> dict[str, Any]:
        """Return the fields of an order to train that are the same for all clients."""
        method, privacy = self.method(), self.config.privacy
        sends = self.reply != "nothing"
        hidden = privacy.where == "client" and sends
        # Where changes are hidden, strategies that send none must not tell more than those that do.
        quiet = not sends and (privacy.where == "client" or self.config.secure_aggregation)
        return {
            **self._common(server_round),
            "dp_clip": privacy.clip if hidden else None,
            "dp_noise": privacy.noise if hidden else None,
            "quiet": quiet or None,
            "reply": self.reply,
            "compression": self.codec.name if self.codec else None,
            "method": method.to_json() if method else None,
            **self.config.local.order(server_round, self.config.rounds),
        }

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord | None]:
        """Check the replies as they come, and learn from those that pass; the others are named in `round.refused`.

        Nothing is learned if they are fewer than `min_replies` of those asked.
        """
        accepted = [update for reply in replies if (update := self.accept(reply)) is not None]
        self._close()
        updates = sorted(accepted, key=lambda update: update.client.row)
        if not self._enough([update.client for update in updates]):
            updates = []
        self.round.results = {update.client.client_id: update.result for update in updates}
        self.update(updates)
        if not updates:
            return None, None
        losses = [update.result.loss for update in updates]
        return None, MetricRecord({"loss": statistics.fmean(losses), "clients": len(updates)})

    def accept(self, reply: Message) -> ClientUpdate | None:
        """Return what a reply to a training order brings, or None, and the reason in `round.refused`."""
        order = self._ordered(reply)
        if order is None:
            return None
        try:
            result = self._unpack(reply, order, self.trained)
            if isinstance(result, TrainResult):
                result.check()
            returned = self._returned(result, order)
            # The log keeps a round's results until the next; a large cohort's weights would fill the memory.
            result = replace(result, weights=None, encoded=None)
            return ClientUpdate(order.client, result, order.sent, returned, order.layout)
        except WireError as error:
            self.refuse(order.client.client_id, error)
            return None

    def collect(
        self,
        replies: Iterable[Message],
        kind: type[ResultT],
        check: Callable[[Client, ResultT], object] = lambda client, result: None,
        quorum: bool = True,
    ) -> list[tuple[Client, ResultT]]:
        """Return what the replies to a leg bring, in order of rows; the others are named in `round.refused`.

        Args:
            replies: as they come.
            kind: what each must be.
            check: raises a WireError for a reply that does not answer what its client was asked.
            quorum: nothing is returned if they are fewer than `min_replies` of the cohort, as in `aggregate_train`.
        """
        accepted: list[tuple[Client, ResultT]] = []
        for reply in replies:
            order = self._ordered(reply)
            if order is None:
                continue
            try:
                result = self._unpack(reply, order, kind)
                check(order.client, result)
                accepted.append((order.client, result))
            except WireError as error:
                self.refuse(order.client.client_id, error)
        self._close()
        accepted.sort(key=lambda pair: pair[0].row)
        return accepted if not quorum or self._enough([client for client, _ in accepted]) else []

    def _enough(self, answered: Sequence[Client]) -> bool:
        """Return whether those who answered a leg are as many as the round wants of its cohort; else refuse them."""
        # A quotient, as the setting is one: 0.14 * 50 is a little more than 7.
        enough = not self._asked or len(answered) / self._asked >= self.config.min_replies
        if not enough:
            for client in answered:
                self.round.refused[client.client_id] = f"dropped: only {len(answered)} of {self._asked} answered"
        return enough

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send every live client the weights that are its own now."""
        return self.evaluation_orders(server_round, self.roster.trusted)

    def evaluation_orders(self, server_round: int, clients: Sequence[Client]) -> list[Message]:
        """Send some clients the weights that are their own now."""
        return self.score_orders(server_round, self.weights_for, clients)

    def score_orders(
        self,
        server_round: int,
        weights_for: Callable[[Sequence[Client]], Sequence[Tensor] | None],
        clients: Sequence[Client],
    ) -> list[Message]:
        """Send some clients the weights that `weights_for` returns, to be scored."""
        return self._address(
            clients,
            weights_for(clients) if clients else [],
            lambda weights: EvaluateOrder(**self._common(server_round), **self.refinement(), weights=weights),
            server_round,
        )

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Collect the scores; those of all that were asked in this round are in `round.evaluation`."""
        scores = dict(score for reply in replies if (score := self.accept_score(reply)) is not None)
        self._close()
        return self.record(scores)

    def record(self, scores: Mapping[str, EvaluateResult]) -> MetricRecord | None:
        """Add scores by name to those of this round."""
        scores = {**(self.round.evaluation.scores if self.round.evaluation else {}), **scores}
        if not scores:
            return None
        self.round.evaluation = self.evaluation(scores)
        return MetricRecord(dict(self.round.evaluation.metrics()))

    def evaluation(self, scores: Mapping[str, EvaluateResult]) -> Evaluation:
        """Return scores with the names of those clients that are novel."""
        novel = {client.client_id for client in self.roster if self.is_novel(client)} if self.config.novel else set()
        return Evaluation({name: scores[name] for name in sorted(scores)}, novel & scores.keys())

    def answers(self, client: Client) -> int:
        """Return how many answers to one example a client's score counts; more than one where it tries many models."""
        return 1

    def accept_score(self, reply: Message) -> tuple[str, EvaluateResult] | None:
        """Return a client's name and scores from the reply to an evaluation order, or None as in `accept`."""
        order = self._ordered(reply)
        if order is None:
            return None
        try:
            result = self._unpack(reply, order, EvaluateResult)
            self.check_score(order.client, result)
            return order.client.client_id, result
        except WireError as error:
            self.refuse(order.client.client_id, error)
            return None

    def check_score(self, client: Client, result: EvaluateResult) -> None:
        """Raise a WireError for scores that cannot be, or of more examples than a client has."""
        result.check()
        most, about = self.answers(client), client.about
        if result.val_total > most * about.val_examples or result.test_total > most * about.test_examples:
            raise WireError("expected at most the validation and test examples that it said it has, found more")

    def refuse(self, name: str, error: WireError) -> None:
        """Note why a reply is not used, and whether its client is to blame."""
        self.round.refused[name] = str(error)
        if isinstance(error, _Failed):
            return
        self.round.lied.append(name)
        until = self.roster.conduct.lied(name, self.roster.round)
        if until is not None:
            self.round.quarantined[name] = until

    def counts(self, updates: Sequence[ClientUpdate]) -> list[int]:
        """Return by how many examples each reply counts in an average: nobody can check what clients say.

        No more than `examples_cap` times the median of the cohort.
        """
        return self.counts_of([update.client for update in updates])

    def counts_of(self, clients: Sequence[Client]) -> list[int]:
        """Return by how many examples each of a cohort counts, as `counts`."""
        said = [client.about.train_examples for client in clients]
        most = int(self.config.examples_cap * statistics.median(said)) if said else 0
        return [min(each, most) for each in said]

    def forget(self, message_id: str) -> str | None:
        """Expect no answer to an order any more; return the name of the client that it went to."""
        order = self._expected().pop(message_id, None)
        return order.client.client_id if order else None

    def summary(self) -> None:
        """Flower's hook for a log line; the run folder holds the resolved configuration."""

    # ------------------------------------------------------------------ between us and Flower

    def _common(self, server_round: int) -> dict[str, Any]:
        assert self.spec is not None, "no client has joined"
        return {
            "run_id": self.run_id,
            "round": server_round,
            "model": self.spec.name,
            "num_classes": self.spec.num_classes,
            "private": self.private,
            "seed": self.config.seed,
            "resume_points": self.resume_points or None,
            "rewound": self.rewound or None,
        }

    def _address(
        self,
        clients: Sequence[Client],
        rows: Sequence[Tensor] | None,
        order: Callable[[Weights | None], TrainOrder | EvaluateOrder],
        server_round: int,
    ) -> list[Message]:
        """Write one message per client, with its row of weights."""

        def content(index: int) -> TrainOrder | EvaluateOrder:
            return order(None if rows is None else Weights(self.sent_layout_for(clients[index]), rows[index]))

        return self.post(server_round, ((client, content(index)) for index, client in enumerate(clients)))

    def post(self, server_round: int, contents: Iterable[tuple[Client, Order]]) -> list[Message]:
        """Write each client its order, and remember what it was sent; messages written before must have been sent."""
        self._expected()  # lets go of those
        messages = []
        for client, content in contents:
            assert client.node_id is not None, "only live clients get orders"
            messages.append(Message(content.pack(), client.node_id, content.type, group_id=str(server_round)))
            weights = content.weights if isinstance(content, TrainOrder) else None
            layout = None if weights is None else self.layout_for(client)
            sent = None if weights is None or layout is None else weights.part(layout)
            dtype = None if sent is None else sent.dtype
            self._unsent.append((messages[-1], _Order(client, dtype, sent if self.keeps_sent else None, layout)))
        return messages

    def _ordered(self, reply: Message) -> _Order | None:
        """Return the order that a reply answers, which then is answered; nothing in the reply can choose another."""
        return self._expected().pop(reply.metadata.reply_to_message_id, None)

    def _expected(self) -> dict[str, _Order]:
        """Return the orders that wait for an answer, by message id; they must have been sent."""
        for message, order in self._unsent:
            if message_id := message.metadata.message_id:
                self._orders[message_id] = order
            else:
                self.round.refused[order.client.client_id] = "its node cannot be reached"
        self._unsent = []
        return self._orders

    def _unpack(self, reply: Message, order: _Order, kind: type[ResultT]) -> ResultT:
        """Return a reply's content; WireError if the client could not, or if another node has answered.

        Errors of the infrastructure come from the SuperLink's node, so the sender is checked for results only.
        """
        if reply.has_error():
            reason = reply.error.reason or f"error {reply.error.code}"
            raise WireError(reason) if reply.error.code == UNREADABLE else _Failed(reason)
        if reply.metadata.src_node_id != order.client.node_id:
            # Whoever it was, it was not the one that would be blamed.
            raise _Failed("the reply came from another node than the order went to")
        return kind.unpack(reply.content)

    def _close(self) -> None:
        """Note who has not answered."""
        for order in self._expected().values():
            self.round.refused[order.client.client_id] = "no reply"
        self._orders = {}

    def _returned(self, result: TrainResult, order: _Order) -> Tensor | None:
        layout = order.layout
        if order.dtype is None or layout is None:
            return None
        weights = result.weights if self.codec is None else self._decoded(self.codec, result, layout, order.sent)
        if weights is None:
            raise WireError("expected weights in the reply, found none")
        weights.check(layout, order.dtype)
        norm = float(weights.values.double().norm())
        if norm > LARGEST_NORM:
            raise WireError(f"expected a norm of at most {LARGEST_NORM:.0e}, found {norm:.1e}")
        return weights.values

    def _decoded(self, codec: Codec, result: TrainResult, layout: Layout, sent: Tensor | None) -> Weights:
        """Return what an encoded change stands for: itself, or the weights that it makes of those sent."""
        if result.encoded is None:
            raise WireError(f"expected a change encoded as {codec.name}, found none")
        delta = codec.decode(result.encoded, layout)
        if self.reply == "weights":
            assert sent is not None, "who averages weights keeps what was sent"
            delta = sent + delta
        return Weights(layout, delta)


def _are_shares(values: Sequence[float], classes: int) -> bool:
    return len(values) == classes and min(values) >= 0 and abs(sum(values) - 1) < 1e-3
