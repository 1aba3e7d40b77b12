"""One exchange: send orders, judge each answer, return the accepted ones.

Only this module decides whether an answer is accepted or its client is left out of the round.
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from flwr.app import RecordDict
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import WireError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.metrics import scale_of
from hyperbloom.common.reasons import Reason
from hyperbloom.common.tasks import CLASSIFICATION, Task
from hyperbloom.common.wire.orders import EvaluateResult, Failed, Order, SplitScore, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import shown, unpack_answer
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.post import Arrival, Failure, Letter, Pause
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, Update, resume

BYTES_AT_ONCE = 32 * 2**20
"""Bytes of weights written into messages at a time. Until it is sent, a message holds them once or twice more."""

TTL_S, MARGIN_S = 43_200.0, 600.0  # Flower's own, and by how much an order outlives the wait for its answer
MOST_AT_ONCE = 1000
"""Clients asked at a time, even with small networks, because each message takes some kilobytes."""

ReturnT = TypeVar("ReturnT")
ClientT = TypeVar("ClientT")


@dataclass(frozen=True)
class Evaluated:
    """The scores of all clients that answered, by name.

    Attributes:
        rank: selects the best round; None: the mean of the first metric on validation examples.
        names: the metrics that were asked for; the first one selects.
    """

    scores: Mapping[str, EvaluateResult]
    novel: frozenset[str] = frozenset()
    rank: tuple[int, float] | None = None
    names: tuple[str, ...] = ("accuracy",)
    task: Task = CLASSIFICATION
    outputs: int = 0

    def of(self, split: str, novel: bool = False) -> list[SplitScore]:
        """Return the scores of known or of novel clients on `val` or `test`."""
        return [getattr(result, split) for name, result in self.scores.items() if (name in self.novel) == novel]

    def metrics(self) -> dict[str, float]:
        """Return figures over clients, shares in percent: validation and test of known clients, test of novel clients.

        `val_mean` and its like are of the selecting metric, `val_rmse_mean` and its like of another. `mean` is the mean
        over the clients for which the metric is defined, and `undefined` counts the others. `std` (population) and
        `worst` are over clients, and `pooled` is over all examples together. Novel clients count in `novel_test_...`
        only: in practice they have no labels, so no choice may depend on theirs.
        """
        metrics: dict[str, float] = {}
        for prefix, split, scores in (
            ("", "val", self.of("val")),
            ("", "test", self.of("test")),
            ("novel_", "test", self.of("test", novel=True)),
        ):
            if not scores:
                continue
            pooled = self._pooled(scores)
            for name in dict.fromkeys([*self.names, *(metric for score in scores for metric in score.metrics)]):
                start = f"{prefix}{split}" if name == self.names[0] else f"{prefix}{split}_{name}"
                metrics |= {f"{start}_{key}": value for key, value in _over_clients(name, scores).items()}
                if name in pooled:
                    metrics[f"{start}_pooled"] = scale_of(name).factor * pooled[name]
            metrics[f"{prefix}{split}_loss"] = statistics.fmean(score.loss for score in scores)
        return metrics

    def counts(self) -> tuple[float, ...]:
        """Return the sums of the known clients' counts on test examples; none unless all have disclosed theirs."""
        return _sum_of_counts(self.of("test"))

    def _pooled(self, scores: Sequence[SplitScore]) -> dict[str, float]:
        """Return the metrics over all examples together, as far as clients disclose what this takes."""
        counts = _sum_of_counts(scores)
        if counts:
            return self.task.pooled(counts, self.outputs, self.names)
        means = [name for name in self.names if self.task.metrics[name].mean]
        total = sum(score.total for score in scores)
        each = {name: [score.value(name) for score in scores] for name in means}
        return {
            name: math.fsum(v * score.total for v, score in zip(values, scores, strict=True) if v is not None) / total
            for name, values in each.items()
            if None not in values
        }


def _over_clients(name: str, scores: Sequence[SplitScore]) -> dict[str, float]:
    """Return mean, deviation and worst of a metric over clients, and for how many it is undefined if it is for some."""
    scale = scale_of(name)
    each = [scale.factor * value for score in scores if (value := score.value(name)) is not None]
    undefined = {"undefined": float(len(scores) - len(each))} if len(each) < len(scores) else {}
    if not each:
        return undefined
    found = {"mean": statistics.fmean(each), "std": statistics.pstdev(each), "worst": scale.worst(each)}
    return found | undefined


def _sum_of_counts(scores: Sequence[SplitScore]) -> tuple[float, ...]:
    lengths = {len(score.counts) for score in scores}
    return tuple(map(math.fsum, zip(*(score.counts for score in scores), strict=True))) if len(lengths) == 1 else ()


@dataclass
class Outcome:
    """What a round brought: results by client name, and the reasons why clients were left out.

    In asynchronous mode, `staleness` has an entry per applied reply. `quarantined` holds, by name, the last round of
    each quarantine that began in this round.
    """

    results: dict[str, TrainResult] = field(default_factory=dict)
    evaluation: Evaluated | None = None
    refused: dict[str, Failure] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    quarantined: dict[str, int] = field(default_factory=dict)

    @property
    def lied(self) -> list[str]:
        """Return the clients whose replies were refused for their content."""
        return [name for name, refused in self.refused.items() if refused.reason.is_lie]

    def leave_out(self, client: Client, reason: Reason, text: str) -> None:
        """Record why a client contributes nothing."""
        self.refused[client.client_id] = Failure(reason, text)


@dataclass(frozen=True)
class Sent:
    """What the server remembers of an order.

    Attributes:
        dtype: of the weights that were sent; None if none were.
        values: `(P,)`, the sent weights in the order of `layout`, if they are kept.
        layout: how the returned vector is divided into tensors.
    """

    client: Client
    kind: type[Order]
    dtype: torch.dtype | None = None
    values: Tensor | None = None
    layout: Layout | None = None
    reply: str = "nothing"


class Director:
    """Plays the exchanges of algorithms with the clients of a federation."""

    def __init__(self, federation: Federation, config: RunConfig) -> None:
        self.federation, self.config = federation, config

    def play(self, exchanges: Exchanges[ReturnT], outcome: Outcome, cohort: int = 0) -> ReturnT:
        """Play all exchanges of a round in turn, and return the generator's return value.

        With a size of the `cohort`, a share of `min_replies` of it must answer an exchange with a quorum.
        """
        answers: Any = None
        while True:
            try:
                ask = resume(exchanges, answers)
            except StopIteration as over:
                return over.value
            answers = self._exchange(ask, outcome, cohort)

    def _exchange(self, ask: Ask[Any], outcome: Outcome, cohort: int) -> Sequence[Any]:
        accepted: list[tuple[Client, Any]] = []
        waiting: list[Letter] = []
        for clients in slices(ask.clients, ask.size):
            waiting += self.send(ask, self.still(clients, self.federation.idle, outcome), outcome)
            if ask.in_turns:
                accepted += self._collect(ask, waiting, outcome)
                waiting = []
        accepted += self._collect(ask, waiting, outcome)
        accepted.sort(key=lambda pair: pair[0].row)
        if ask.quorum and cohort and len(accepted) / cohort < self.config.min_replies:
            # Compare shares: 0.14 * 50 is a little more than 7 in floating point.
            for client, _ in accepted:
                outcome.leave_out(client, Reason.DROPPED, f"dropped: only {len(accepted)} of {cohort} answered")
            accepted = []
        if not isinstance(ask, Train):
            return accepted
        outcome.results = {client.client_id: without_weights(update.result) for client, update in accepted}
        examples = capped_examples([client for client, _ in accepted], self.config.examples_cap)
        return [replace(update, examples=count) for (_, update), count in zip(accepted, examples, strict=True)]

    def still(self, clients: Sequence[Client], now_here: Sequence[Client], outcome: Outcome) -> list[Client]:
        """Return the clients that are still here, as they are now; some may have left or moved meanwhile."""
        now = {client.row: client for client in now_here}
        for client in clients:
            if client.row not in now and client.client_id not in outcome.refused:
                outcome.leave_out(client, Reason.LEFT, "left before it was asked")
        return [now[client.row] for client in clients if client.row in now]

    def send(self, ask: Ask[Any], clients: Sequence[Client], outcome: Outcome) -> list[Letter]:
        """Write orders for these clients, and send them."""
        orders = [(c, order, _remember(ask, c, order)) for c, order in zip(clients, ask.orders(clients), strict=True)]
        letters = self.federation.send(orders, ttl=max(TTL_S, self.config.round_timeout_s + MARGIN_S))
        reached = {letter.about.client.row for letter in letters}
        for client in clients:
            if client.row not in reached:
                outcome.leave_out(client, Reason.UNREACHABLE, "its node cannot be reached")
        return letters

    def _collect(self, ask: Ask[Any], letters: Sequence[Letter], outcome: Outcome) -> list[tuple[Client, Any]]:
        """Wait until all have answered or left, or the round times out; return the accepted answers."""
        accepted: list[tuple[Client, Any]] = []
        deadline, pause = time.monotonic() + self.config.round_timeout_s, Pause(self.federation.post.wait)
        while self.federation.post.waits_for(letters) and time.monotonic() < deadline:
            arrivals = self.federation.poll()
            for arrival in arrivals:
                accepted += [(arrival.letter.about.client, one) for one in self.judge(ask, arrival, outcome)]
            if self.federation.post.waits_for(letters):
                pause.take(bool(arrivals))
        too_late = time.monotonic() >= deadline
        self.federation.post.give_up(letters)
        answered, roster = {client.row for client, _ in accepted}, self.federation.roster
        for client, kind in ((letter.about.client, letter.about.kind) for letter in letters):
            name = client.client_id
            if client.row in answered or name in outcome.refused:
                if issubclass(kind, TrainOrder):  # who evaluates in time may still be too slow to train
                    roster.conduct.in_time(name)
                continue
            outcome.leave_out(client, Reason.NO_REPLY, "no reply")
            if too_late and roster.node_of(client) in self.federation.post.busy:
                self._note(client, self.federation.missed(name), outcome)
        return accepted

    def judge(self, ask: Ask[Any], arrival: Arrival, outcome: Outcome) -> Iterator[Any]:
        """Yield the content of an accepted answer, or record why its client is left out."""
        judged = accept(ask, arrival.letter.about, arrival.content)
        if not isinstance(judged, Failure):
            yield judged
            return
        client = arrival.letter.about.client
        outcome.leave_out(client, judged.reason, judged.text)
        if judged.reason.is_lie:
            self.blame(client, judged.text, outcome)
        ask.failed(client, judged.reason)

    def blame(self, client: Client, text: str, outcome: Outcome) -> None:
        """Leave a client out for the content of its reply, and count this towards its quarantine."""
        outcome.leave_out(client, Reason.CONTENT, text)
        self._note(client, self.federation.blame(client.client_id, text), outcome)

    def _note(self, client: Client, until: int | None, outcome: Outcome) -> None:
        if until is not None:
            outcome.quarantined[client.client_id] = until


def slices(clients: Sequence[ClientT], size: int) -> Iterator[Sequence[ClientT]]:
    """Yield groups of clients that fit into memory if each client gets `size` numbers of its own."""
    at_once = min(MOST_AT_ONCE, max(1, BYTES_AT_ONCE // max(1, 4 * size)))
    for start in range(0, len(clients), at_once):
        yield clients[start : start + at_once]


def without_weights(result: TrainResult) -> TrainResult:
    """Return the part of a result that the log keeps; the weights of a large cohort would fill the memory."""
    return TrainResult(result.seconds, loss=result.loss)


def capped_examples(clients: Sequence[Client], cap: float) -> list[int]:
    """Return the number of examples with which each client counts in an average.

    Clients report these numbers and nobody can check them, so each is limited to `cap` times the cohort's median, of
    an even number the lower one in the middle: of two clients, one could raise their mean.
    """
    said = [client.about.train_examples for client in clients]
    most = int(cap * statistics.median_low(said)) if said else 0
    return [min(each, most) for each in said]


def _remember(ask: Ask[Any], client: Client, order: Order) -> Sent:
    if not isinstance(ask, Train) or not isinstance(order, TrainOrder) or order.weights is None:
        return Sent(client, type(order))
    layout, sent = ask.layout(client), order.weights
    values = sent.part(layout) if ask.keep_sent else None
    return Sent(client, type(order), sent.values.dtype, values, layout, order.reply)


def accept(ask: Ask[Any], sent: Sent, content: RecordDict | Failure) -> Any:
    """Return the content of an answer, or as `Failure` why it is not accepted. A pure function: it changes no state."""
    if isinstance(content, Failure):
        return content
    try:
        answer: Any = unpack_answer(sent.kind.answer, content)
        if isinstance(answer, Failed):
            return Failure(answer.reason, answer.text)
        if isinstance(answer, TrainResult):
            answer.check()
        ask.check(sent.client, answer)
        return _update(ask, sent, answer) if isinstance(ask, Train) else answer
    except WireError as error:
        return Failure(Reason.CONTENT, shown(str(error)))  # it may quote the answer


def _update(ask: Train, sent: Sent, result: TrainResult) -> Update:
    """Return the update in a training reply. Raise a WireError if the order did not ask for such a reply."""
    if sent.dtype is None or sent.layout is None or sent.reply == "nothing":
        return Update(sent.client, result, None, None, None, sent.client.about.train_examples)
    weights = result.weights if ask.codec is None else _decoded(ask, result, sent)
    if weights is None:
        raise WireError("expected weights in the reply, found none")
    weights.check(sent.layout, sent.dtype)
    weights.check_norm()
    result = replace(result, weights=None, encoded=None)
    return Update(sent.client, result, sent.values, weights.values, sent.layout, sent.client.about.train_examples)


def _decoded(ask: Train, result: TrainResult, sent: Sent) -> Weights:
    """Return the decoded change, or the sent weights plus this change if the order asked for weights."""
    assert ask.codec is not None and sent.layout is not None
    if result.encoded is None:
        raise WireError(f"expected a change encoded as {ask.codec.name}, found none")
    delta = ask.codec.decode(result.encoded, sent.layout)
    if sent.reply == "weights":
        assert sent.values is not None, "who averages weights keeps what was sent"
        delta = sent.values + delta
    return Weights(sent.layout, delta)
