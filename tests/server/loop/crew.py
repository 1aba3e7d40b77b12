"""Clients that work on their orders one after another, each at its own pace, and a log of who was asked what, when."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Error, Message, RecordDict

from hyperbloom.common.config import RunConfig
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import EvaluateOrder, EvaluateResult, Scope, TrainOrder, TrainResult
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.loop.admission import Admission
from hyperbloom.server.loop.asynchronous import run_asynchronously
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import NOTHING_DONE, Listener, Progress, RoundReport, Selection
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.rounds import Run, run_rounds
from hyperbloom.server.loop.session import greeting_of
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, ask, train
from hyperbloom.strategies.local import Local
from hyperbloom.strategies.turn import Evaluation, Turn

from ...scores import right
from ..conftest import Clock, ScriptedGrid

Pace = Callable[[str], float]


@dataclass(frozen=True)
class Entry:
    """A line of the log: `what` is "order" or "answer"; `kind` the message's type; `id` the order's."""

    what: str
    kind: str
    client: str
    id: str


class LoggingGrid(ScriptedGrid):
    """Writes a line for every training or evaluation order that is pushed and every answer that is pulled."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.log: list[Entry] = []
        self.names: dict[int, str] = {}
        self.answered: dict[str, float] = {}  # by order, when

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        outgoing = list(messages)
        ids = super().push_messages(outgoing)
        self._note("order", [(message, i) for message, i in zip(outgoing, ids, strict=True) if i])
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        self.answered |= {reply.metadata.reply_to_message_id: self.clock.passed for reply in replies}
        self._note("answer", [(reply, reply.metadata.reply_to_message_id) for reply in replies])
        return replies

    def _note(self, what: str, messages: list[tuple[Message, str]]) -> None:
        for message, identity in messages:
            node = max(message.metadata.src_node_id, message.metadata.dst_node_id)
            if message.metadata.message_type in ("train", "evaluate"):
                self.log.append(Entry(what, message.metadata.message_type, self.names[node], identity))


@dataclass
class Told(Listener):
    """Everything that a listener hears; `hears` is called with each report."""

    reports: list[RoundReport] = field(default_factory=list)
    selections: list[tuple[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    hears: Callable[[RoundReport], None] = lambda report: None

    def round_done(self, report: RoundReport) -> None:
        self.reports.append(report)
        self.hears(report)

    def selected(self, selection: Selection, state: Any, roster: Roster) -> None:
        self.selections.append((selection.round, {name: tensor.clone() for name, tensor in state.items()}))

    @property
    def staleness(self) -> list[int]:
        """Return the staleness of every reply, in the order in which they were applied."""
        return [each for report in self.reports for each in report.outcome.staleness]

    @property
    def refused(self) -> list[tuple[int, str, str]]:
        """Return round, name and text of all who were left out."""
        return [(r.number, name, why.text) for r in self.reports for name, why in r.outcome.refused.items()]


class Crew:
    """A run over scripted clients.

    Attributes:
        pace: by client and kind of order (`train`, `evaluate`), the seconds that it takes, looked up at every poll,
            given the order's id.
        answer: by client, what it answers instead of a sound reply.
        learned: losses of the replies that the algorithm learned from; the loss of a reply is its order's number.
    """

    def __init__(self, grid: LoggingGrid, clock: Clock, **config: Any) -> None:
        values: dict[str, Any] = {"strategy": "local", "rounds": 1, "eval_every": 1, "join_timeout_s": 60.0}
        self.grid, self.clock = grid, clock
        self.config = RunConfig(**(values | config))
        self.events: list[str] = []
        self.roster = Roster()
        self.algorithm: Any = make_algorithm(self.config)
        self.federation = Federation(grid, self.roster, self.events.append)
        self.federation.admission = Admission(self.config, self.algorithm)
        self.federation.greeting = greeting_of(self.algorithm)
        self.told = Told()
        self.pace: dict[tuple[str, str], Pace] = {}
        self.answer: dict[str, Callable[[Message], RecordDict | Error]] = {}
        self.accuracy: Callable[[str, int], int] = lambda name, number: 5
        self.learned: list[float] = []
        self._watch_learning()

    def _watch_learning(self) -> None:
        learn = self.algorithm.learn

        def learned(updates: Any) -> None:
            self.learned += [update.result.loss for update in updates]
            learn(updates)

        self.algorithm.learn = learned

    def join(self, node: int, name: str, train: float | Pace = 0.1, evaluate: float | Pace = 0.01) -> None:
        """Let a client appear that works on its orders one after another."""
        self.grid.names[node] = name
        for kind, pace in (("train", train), ("evaluate", evaluate)):
            self.set_pace(name, kind, pace)
        queue: list[str] = []
        began: dict[str, float] = {}

        def work(message: Message) -> RecordDict | Error | None:
            identity = message.metadata.message_id
            if identity not in queue:
                queue.append(identity)
            if queue[0] != identity:
                return None
            start = began.setdefault(identity, self.clock.now)
            if self.clock.now < start + self.pace[name, message.metadata.message_type](identity):
                return None
            queue.pop(0)
            other = self.answer.get(name)
            return other(message) if other else self.sound(name, message)

        self.grid.join(node, name, orders=work)

    def set_pace(self, name: str, kind: str, seconds: float | Pace) -> None:
        """Let a client take so long for orders of a kind from now on, the one that it works on included."""
        self.pace[name, kind] = seconds if callable(seconds) else lambda identity: seconds

    def sound(self, name: str, message: Message) -> RecordDict:
        """Return a sound reply, with a small change if weights travel."""
        if message.metadata.message_type == "evaluate":
            correct = self.accuracy(name, unpack(EvaluateOrder, message.content).scope.round)
            return pack(EvaluateResult(right(correct, 10, 1.0), right(correct, 10, 1.0)))
        order, number = unpack(TrainOrder, message.content), int(message.metadata.message_id[1:])
        weights = None
        if order.weights:
            generator = torch.Generator().manual_seed(number)
            values = 0.01 * torch.randn(order.weights.values.shape, generator=generator)
            weights = Weights(order.weights.layout, values)
        return pack(TrainResult(0.0, weights, float(number)))

    def run(self, *listeners: Listener, done: Progress = NOTHING_DONE) -> Selection:
        """Wait for the clients that have joined, and run all rounds after `done`."""
        self.federation.gather(len(self.grid.nodes), 60.0)
        self.roster.sort(0)
        self.federation.admission.begin(self.roster, 0)
        self.events.clear()
        play = run_asynchronously if self.config.asynchronous else run_rounds
        scope = Scope("run-1", 0, self.config.seed)
        return play(Run(self.config, self.algorithm, self.federation, [self.told, *listeners], scope), done)

    def entries(self, kind: str, client: str | None = None) -> list[Entry]:
        """Return the lines of the log about orders of a kind."""
        return [entry for entry in self.grid.log if entry.kind == kind and client in (None, entry.client)]

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the server's state."""
        return {name: tensor.clone() for name, tensor in self.algorithm.state().items()}


class Twice(Local):
    """Asks its cohort, then those who answered again, and learns from the second answers; evaluates as well twice."""

    def round(self, turn: Turn) -> Exchanges[None]:
        first = yield from ask(Ask(turn.cohort, turn.training(turn.cohort).orders))
        if first:
            self.learn((yield from train(turn.training([client for client, _ in first]))))

    def evaluate(self, turn: Turn, clients: Sequence[Client]) -> Exchanges[Evaluation]:
        first = yield from turn.score(clients)
        named = {client.client_id: client for client in clients}
        return Evaluation((yield from turn.score([named[name] for name in first])))


__all__ = ["Crew", "Entry", "LoggingGrid", "Told", "Twice"]
