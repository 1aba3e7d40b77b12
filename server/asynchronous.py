"""Asynchronous mode: nobody waits for anybody. Each reply is learned from when it comes; its client's place is filled.

As in Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019, https://arxiv.org/abs/1903.03934, a reply's
staleness is the number of replies that were applied since its order was written. What the strategy makes of it is its
own affair (`PersonalisedStrategy.apply`); beyond `max_staleness` a reply is dropped.

A round is `cohort` applied replies, so that a run trains as many client steps as a synchronous one of as many rounds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.common.messages import EvaluateResult
from hyperbloom.server.federation import FASTEST_POLL_S, SLOWEST_POLL_S, Federation
from hyperbloom.server.listener import Listener, RoundReport, Selection
from hyperbloom.server.rounds import FRUITLESS_ROUNDS, better, give_up
from hyperbloom.strategies.personalised import Evaluation, PersonalisedStrategy, Round

__all__ = ["run_asynchronously"]

STALENESS_PER_COHORT = 20


def run_asynchronously(
    strategy: PersonalisedStrategy,
    federation: Federation,
    config: RunConfig,
    listeners: Sequence[Listener],
) -> Selection:
    """Train until `rounds` times `cohort` replies are applied; return the evaluation that validation selects.

    Raises:
        CohortError: `FRUITLESS_ROUNDS` times `cohort` replies in a row were of no use, or nobody was left.
    """
    return _Loop(strategy, federation, config, listeners).run()


@dataclass
class _Pending:
    """An evaluation on its way: the server's state when it was asked for, and what has come so far."""

    number: int
    elapsed: float
    state: dict[str, Tensor]
    open: set[str]
    asked: float
    scores: dict[str, EvaluateResult] = field(default_factory=dict)


class _Loop:
    def __init__(
        self,
        strategy: PersonalisedStrategy,
        federation: Federation,
        config: RunConfig,
        listeners: Sequence[Listener],
    ) -> None:
        self.strategy, self.federation, self.config, self.listeners = strategy, federation, config, listeners
        self.limit = config.max_staleness or STALENESS_PER_COHORT * config.cohort
        self.begin = time.perf_counter()
        self.best: Selection | None = None
        self._pending: _Pending | None = None
        self._written: dict[str, int] = {}  # open training orders: message id -> replies applied when it was written
        self._applied = 0
        self._draws = 0
        self._useless = 0  # replies in a row

    def run(self) -> Selection:
        late = self.federation.late
        for number in range(1, self.config.rounds + 1):
            start = time.perf_counter()
            self.strategy.round = Round()
            while self._applied < number * self.config.cohort:
                self._turn()
            seconds, elapsed = time.perf_counter() - start, time.perf_counter() - self.begin
            late, before = self.federation.late, late
            self._report(number, self.strategy.round, seconds, elapsed, late - before)
            if number % self.config.eval_every == 0 or number == self.config.rounds:
                self._finish_evaluation()
                self._ask_for_evaluation(number, elapsed)
        self._finish_evaluation()
        if self.best is None:
            raise CohortError("no client could be evaluated in any round; see the log for each client's reason")
        return self.best

    def _turn(self) -> None:
        """Hand out work, and take in what has come."""
        if not self._written:
            self.federation.gather(self.strategy, 1, self.config.join_timeout_s)
        self._hand_out()
        if not self._take_in():
            time.sleep(FASTEST_POLL_S if self._written else SLOWEST_POLL_S)

    def _hand_out(self) -> None:
        """Fill the places that are free; an order's number is unique, so that no two train on the same batches."""
        places = self.config.cohort - len(self._written)
        if places < 1 or not self.strategy.roster.idle_count:
            return
        self._draws += 1
        clients = self.strategy.roster.draw(self._draws, places, self.strategy.trainable())
        orders = self.strategy.train_orders(self._draws, clients)
        self.federation.send(orders)
        self._written |= {order.metadata.message_id: self._applied for order in orders}

    def _take_in(self) -> bool:
        """Return whether anything has come."""
        replies = self.federation.poll()
        for reply in replies:
            written = self._written.pop(reply.metadata.reply_to_message_id, None)
            if written is not None:
                update = self.strategy.accept(reply)
                staleness = self._applied - written
                if update is None:
                    self._useless += 1
                elif staleness > self.limit:
                    name = update.client.client_id
                    self.strategy.round.refused[name] = f"staleness {staleness} is over the limit of {self.limit}"
                    self._useless += 1
                else:
                    self.strategy.apply(update, staleness)
                    self.strategy.round.staleness.append(staleness)
                    self.strategy.round.results[update.client.client_id] = update.result
                    self._applied, self._useless = self._applied + 1, 0
            elif self._pending and reply.metadata.reply_to_message_id in self._pending.open:
                self._pending.open.discard(reply.metadata.reply_to_message_id)
                if score := self.strategy.accept_score(reply):
                    self._pending.scores[score[0]] = score[1]
        self._forget_lost()
        if self._pending and not self._pending.open:
            self._conclude(self._pending)
        if self._useless >= FRUITLESS_ROUNDS * self.config.cohort:
            give_up(self.strategy, f"among the last {self._useless}")
        return bool(replies)

    def _forget_lost(self) -> None:
        """Free the places of clients that are gone or took too long."""
        self.federation.give_up(self.config.round_timeout_s)
        evaluated = self._pending.open if self._pending else set()
        for message_id in [i for i in (*self._written, *evaluated) if not self.federation.expects(i)]:
            name = self.strategy.forget(message_id)
            if name:
                self.strategy.round.refused[name] = "no reply"
            self._useless += self._written.pop(message_id, None) is not None
            evaluated.discard(message_id)

    def _ask_for_evaluation(self, number: int, elapsed: float) -> None:
        """Send everyone their weights to score, behind whatever work they have; training goes on meanwhile."""
        state = {name: tensor.detach().clone() for name, tensor in self.strategy.state().items()}
        orders = self.strategy.evaluation_orders(number, self.strategy.roster.live)
        self.federation.send(orders)
        ids = {order.metadata.message_id for order in orders}
        self._pending = _Pending(number, elapsed, state, ids, time.perf_counter())

    def _finish_evaluation(self) -> None:
        """Wait until the evaluation on its way is complete; no new work is handed out."""
        while self._pending:
            if not self._take_in():
                time.sleep(FASTEST_POLL_S)

    def _conclude(self, done: _Pending) -> None:
        self._pending = None
        if not done.scores:
            return
        evaluation = Evaluation({name: done.scores[name] for name in sorted(done.scores)})
        selection = better(self.best, done.number, evaluation)
        if selection is not self.best and selection is not None:
            self.best = selection
            for listener in self.listeners:
                listener.selected(selection, done.state, self.strategy.roster)
        self._report(done.number, Round(evaluation=evaluation), time.perf_counter() - done.asked, done.elapsed, 0)

    def _report(self, number: int, outcome: Round, seconds: float, elapsed: float, late: int) -> None:
        for listener in self.listeners:
            listener.round_done(RoundReport(number, self.config.rounds, outcome, seconds, elapsed, late))
