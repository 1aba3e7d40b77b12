"""Asynchronous mode: the server learns from each reply as it arrives, and gives the free place to another client.

As in Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019, https://arxiv.org/abs/1903.03934, the staleness of
a reply is the number of replies that were applied since its order was written. The algorithm decides how to weigh
it. The server drops a reply whose staleness exceeds `max_staleness`.

A round is `cohort` applied replies. A run therefore trains as many client steps as a synchronous run of equal length.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hyperbloom.common.errors import CohortError
from hyperbloom.common.reasons import Reason
from hyperbloom.server.loop import rounds
from hyperbloom.server.loop.exchange import Outcome, without_weights
from hyperbloom.server.loop.federation import NONE_TRAINS
from hyperbloom.server.loop.listener import NOTHING_DONE, Progress, RoundReport, Selection
from hyperbloom.server.loop.post import FASTEST_POLL_S, SLOWEST_POLL_S, Arrival, Failure, Letter, Traffic
from hyperbloom.strategies.exchange import Ask, Client, Exchanges, Train, draw, resume
from hyperbloom.strategies.turn import Evaluation

STALENESS_PER_COHORT = 20


def run_asynchronously(
    run: rounds.Run, done: Progress = NOTHING_DONE, save: rounds.Save = lambda progress: None
) -> Selection:
    """Train until `rounds` times `cohort` replies are applied; return the evaluation that validation selects.

    A resumed run starts from `done`. It writes new orders in place of those that were still open.

    Raises:
        CohortError: `FRUITLESS_ROUNDS` times `cohort` replies in a row were useless, or no client was left.
    """
    loop = _Loop(run, done, save)
    try:
        return loop.run()
    finally:  # wait no longer for answers to open orders: a baseline that follows must not get them
        run.federation.post.give_up([written.letter for written in loop.open_orders.values()])


@dataclass(frozen=True)
class _Written:
    """An open order to train; `applied` counts the replies applied when it was written."""

    ask: Train
    letter: Letter
    applied: int


@dataclass
class _Pending:
    """An open evaluation: the server's state when it began, and the answers so far."""

    number: int
    elapsed: float
    state: dict[str, Tensor]
    asked: float
    exchanges: Exchanges[Evaluation]
    ask: Ask[object] = field(default_factory=lambda: Ask((), lambda clients: ()))
    letters: dict[str, Letter] = field(default_factory=dict)
    answers: list[tuple[Client, object]] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)


class _Loop:
    def __init__(self, run: rounds.Run, done: Progress, save: rounds.Save) -> None:
        self.of, self.done, self.save = run, done, save
        self.config, self.federation, self.director = run.config, run.federation, run.director
        self.limit = self.config.max_staleness or STALENESS_PER_COHORT * self.config.cohort
        self.total = self.config.rounds * self.config.cohort
        self.begin = time.perf_counter() - done.elapsed
        self.best = done.best
        self.outcome = Outcome()
        self._pending: _Pending | None = None
        self.open_orders: dict[str, _Written] = {}  # by message id
        self._applied = done.applied
        self._draws = done.orders
        self._handed_out = time.perf_counter()
        self._useless = 0  # in a row
        self._failed: set[int] = set()  # rows whose last reply was useless; cleared when a reply is applied

    def run(self) -> Selection:
        late, number = self.federation.late, max(self.done.round, 0)
        if number and number % self.config.eval_every == 0 and not self._is_over(number):
            self._ask_for_evaluation(number, self.done.elapsed)  # its checkpoint precedes this evaluation
        while not self._is_over(number):
            number += 1
            start, self.federation.round = time.perf_counter(), number
            while self._applied < number * self.config.cohort:
                self._turn()
            seconds, elapsed = time.perf_counter() - start, time.perf_counter() - self.begin
            late, before = self.federation.late, late
            # Replies that arrive during an evaluation count for the next round.
            outcome, self.outcome = self.outcome, Outcome()
            self._report(number, outcome, seconds, elapsed, late - before, self.federation.post.take_traffic())
            if rounds.due(self.config.gains_every, self.config, number):
                self._finish(orders=True)
                self.of.halfway(number)
            if rounds.due(self.config.checkpoint_every, self.config, number):
                self._finish()
                self.save(Progress(number, self.best, 0, self._draws, self._applied, elapsed))
            if number % self.config.eval_every == 0 or number == self.config.rounds:
                self._finish()
                if self._lacks_patience(number):
                    self.of.stop_early(number)
                else:
                    self._ask_for_evaluation(number, elapsed)
        self._finish(orders=self.config.gains)  # to compare models, all clients are asked at once
        if self.best is None:
            raise CohortError(f"{self.config.strategy}: {rounds.NEVER_EVALUATED}")
        if self.config.gains and number > self.done.round:
            elapsed = time.perf_counter() - self.begin
            self.save(Progress(number, self.best, 0, self._draws, self._applied, elapsed))
        return self.best

    def _lacks_patience(self, number: int) -> bool:
        """Return whether patience ends the run with round `number`, by the evaluations before it."""
        return self.config.has_lost_patience(self.best.round if self.best else None, number - self.config.eval_every)

    def _is_over(self, number: int) -> bool:
        """Return whether round `number` is the last."""
        due = number % self.config.eval_every == 0
        return number >= self.config.rounds or (due and self._lacks_patience(number))

    def _turn(self) -> None:
        """Send new orders, and process the replies that have arrived."""
        # A client that works on an evaluation is still here, and `gather` would not process its answer.
        if not self.open_orders and not self._pending:
            self.federation.gather(1, self.config.join_timeout_s)
        self._hand_out()
        if not self._take_in():
            self.federation.post.wait(FASTEST_POLL_S if self.open_orders else SLOWEST_POLL_S)

    def _hand_out(self) -> None:
        """Give the free places to clients. Each order has its own number, so that no two train on the same batches."""
        places = self.config.cohort - len(self.open_orders)
        if places < 1 or not self.federation.idle_count:
            return
        candidates = self.of.candidates()
        if self.open_orders:  # a client that has just failed waits: the replies of the others decide whether to go on
            candidates = [client for client in candidates if client.row not in self._failed]
        clients = draw(self.config.seed, self._draws + 1, places, candidates)
        if not clients:
            waits = not self.open_orders and not self._pending
            if waits and any(map(self.of.may_train, self.federation.roster)) and self.of.can_go_on():
                self.federation.roster.conduct.begin_anew()  # no round would come to an end, and they with it
                return
            if waits and time.perf_counter() - self._handed_out > self.config.join_timeout_s:
                raise CohortError(
                    f"{NONE_TRAINS}, and no other came within {self.config.join_timeout_s:.0f} s. "
                    "With options.freeze start novel clients"
                )
            return
        self._draws, self._handed_out = self._draws + 1, time.perf_counter()
        ask = self.of.protection.training(self.of.turn(self._draws, clients).training(clients))
        for letter in self.director.send(ask, clients, self.outcome):
            self.open_orders[letter.id] = _Written(ask, letter, self._applied)

    def _take_in(self) -> bool:
        """Process the replies that have arrived; return whether there were any."""
        arrivals = self.federation.poll()
        for arrival in arrivals:
            written = self.open_orders.pop(arrival.letter.id, None)
            if written is not None:
                self._apply(written, arrival)
            elif isinstance(arrival.content, Failure) and arrival.late:
                self.director.blame(arrival.letter.about.client, arrival.content.text, self.outcome)
            elif self._pending and self._pending.letters.pop(arrival.letter.id, None):
                pending, client = self._pending, arrival.letter.about.client
                for answer in self.director.judge(pending.ask, arrival, pending.outcome):
                    pending.answers.append((client, answer))
        self._forget_lost()
        if self._pending and not self._pending.letters:
            self._go_on(self._pending, sorted(self._pending.answers, key=lambda pair: pair[0].row))
        if self._useless >= rounds.FRUITLESS_ROUNDS * self.config.cohort:
            raise rounds.Fruitless(self.outcome, f"among the last {self._useless}", self.best)
        return bool(arrivals)

    def _apply(self, written: _Written, arrival: Arrival) -> None:
        client, staleness = arrival.letter.about.client, self._applied - written.applied
        found = list(self.director.judge(written.ask, arrival, self.outcome))
        if not found:
            self._useless += 1
            self._failed.add(client.row)
        elif staleness > self.limit:
            self.outcome.leave_out(client, Reason.STALE, f"staleness {staleness} is over the limit of {self.limit}")
        elif self._applied == self.total:
            self.outcome.leave_out(client, Reason.DROPPED, "dropped: the last round was over")
        else:
            update = replace(found[0], staleness=staleness)
            self.of.algorithm.learn(self.of.protection.learned([update]))
            self.outcome.staleness.append(staleness)
            self.outcome.results[client.client_id] = without_weights(update.result)
            self._applied, self._useless = self._applied + 1, 0
            self._failed.clear()

    def _forget_lost(self) -> None:
        """Free the places of clients that have left or did not answer in time."""
        post, limit = self.federation.post, self.config.round_timeout_s
        for letter in post.give_up([written.letter for written in self.open_orders.values()], limit):
            del self.open_orders[letter.id]
            self._useless += 1
            self.outcome.leave_out(letter.about.client, Reason.NO_REPLY, "no reply")
        if pending := self._pending:
            for letter in post.give_up(pending.letters.values(), limit):
                del pending.letters[letter.id]
                pending.outcome.leave_out(letter.about.client, Reason.NO_REPLY, "no reply")

    def _ask_for_evaluation(self, number: int, elapsed: float) -> None:
        """Send every client its weights to score; a busy client scores them later. Training continues meanwhile."""
        state = {name: tensor.detach().clone() for name, tensor in self.of.algorithm.state().items()}
        exchanges = self.of.algorithm.evaluate(self.of.turn(number), self.federation.trusted)
        self._pending = _Pending(number, elapsed, state, time.perf_counter(), exchanges)
        self._go_on(self._pending, None)

    def _go_on(self, pending: _Pending, answers: Sequence[tuple[Client, object]] | None) -> None:
        """Start the evaluation's next exchange from the last answers, or finish the evaluation."""
        try:
            pending.ask = resume(pending.exchanges, answers)
        except StopIteration as over:
            self._pending, outcome = None, pending.outcome
            outcome.evaluation = rounds.evaluated(over.value, self.of)
            self.best = rounds.select(self.of, self.best, pending.number, outcome.evaluation, pending.state)
            seconds = time.perf_counter() - pending.asked
            self._report(pending.number, outcome, seconds, pending.elapsed, 0, Traffic())
            return
        clients = self.director.still(pending.ask.clients, self.federation.roster.live, pending.outcome)
        letters = self.director.send(pending.ask, clients, pending.outcome)
        pending.letters, pending.answers = {letter.id: letter for letter in letters}, []

    def _finish(self, orders: bool = False) -> None:
        """Wait until the open evaluation, or all open `orders`, are answered or given up; send no new ones."""
        while self._pending or (orders and self.open_orders):
            if not self._take_in():
                self.federation.post.wait(FASTEST_POLL_S)

    def _report(
        self, number: int, outcome: Outcome, seconds: float, elapsed: float, late: int, traffic: Traffic
    ) -> None:
        asked = 0 if outcome.evaluation else len(outcome.results) + len(outcome.refused)
        report = RoundReport(number, outcome, seconds, elapsed, late, traffic.down, traffic.up, asked)
        for listener in self.of.listeners:
            listener.round_done(report)
