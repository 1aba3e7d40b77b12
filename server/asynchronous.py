"""Asynchronous mode: nobody waits for anybody. Each reply is learned from when it comes; its client's place is filled.

As in Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019, https://arxiv.org/abs/1903.03934, a reply's
staleness is the number of replies that were applied since its order was written. What the strategy makes of it is its
own affair (`PersonalisedStrategy.apply`); beyond `max_staleness` a reply is dropped.

A round is `cohort` applied replies, so that a run trains as many client steps as a synchronous one of as many rounds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.common.messages import EvaluateResult
from hyperbloom.server.federation import FASTEST_POLL_S, SLOWEST_POLL_S, Federation, Traffic
from hyperbloom.server.listener import NOTHING_DONE, Listener, Progress, RoundReport, Selection
from hyperbloom.server.rounds import FRUITLESS_ROUNDS, Save, better, due, give_up, tell
from hyperbloom.strategies.personalised import PersonalisedStrategy, Round

__all__ = ["run_asynchronously"]

STALENESS_PER_COHORT = 20


def run_asynchronously(
    strategy: PersonalisedStrategy,
    federation: Federation,
    config: RunConfig,
    listeners: Sequence[Listener],
    done: Progress = NOTHING_DONE,
    save: Save = lambda progress: None,
) -> Selection:
    """Train until `rounds` times `cohort` replies are applied; return the evaluation that validation selects.

    Goes on from what is `done`; orders that were on their way then are written anew.

    Raises:
        CohortError: `FRUITLESS_ROUNDS` times `cohort` replies in a row were of no use, or nobody was left.
    """
    return _Loop(strategy, federation, config, listeners, done, save).run()


@dataclass
class _Pending:
    """An evaluation on its way: the server's state when it was asked for, and what has come so far."""

    number: int
    elapsed: float
    state: dict[str, Tensor]
    open: set[str]
    asked: float
    scores: dict[str, EvaluateResult] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class _Loop:
    def __init__(
        self,
        strategy: PersonalisedStrategy,
        federation: Federation,
        config: RunConfig,
        listeners: Sequence[Listener],
        done: Progress,
        save: Save,
    ) -> None:
        self.strategy, self.federation, self.config, self.listeners = strategy, federation, config, listeners
        self.done, self.save = done, save
        self.limit = config.max_staleness or STALENESS_PER_COHORT * config.cohort
        self.total = config.rounds * config.cohort
        self.begin = time.perf_counter() - done.elapsed
        self.best = done.best
        self._pending: _Pending | None = None
        self._written: dict[str, int] = {}  # open training orders: message id -> replies applied when it was written
        self._applied = done.applied
        self._draws = done.orders
        self._handed_out = time.perf_counter()
        self._useless = 0  # replies in a row
        self._failed: set[int] = set()  # rows whose last reply was of no use, since one was applied

    def run(self) -> Selection:
        late, first = self.federation.late, max(self.done.round, 0) + 1
        self.strategy.round = Round()
        if (
            first > 1 and (first - 1) % self.config.eval_every == 0
        ):  # the checkpoint was written before it was asked for
            self._ask_for_evaluation(first - 1, self.done.elapsed)
        for number in range(first, self.config.rounds + 1):
            start, self.strategy.roster.round = time.perf_counter(), number
            while self._applied < number * self.config.cohort:
                self._turn()
            seconds, elapsed = time.perf_counter() - start, time.perf_counter() - self.begin
            late, before = self.federation.late, late
            # What comes while an evaluation is waited for belongs to the next round.
            outcome, self.strategy.round = self.strategy.round, Round()
            self._report(number, outcome, seconds, elapsed, late - before, self.federation.take_traffic())
            if due(self.config, number):
                self._finish_evaluation()
                self.save(Progress(number, self.best, 0, self._draws, self._applied, elapsed))
            if number % self.config.eval_every == 0 or number == self.config.rounds:
                self._finish_evaluation()
                self._ask_for_evaluation(number, elapsed)
        self._finish_evaluation()
        if self.best is None:
            raise CohortError("no client could be evaluated in any round; see the log for each client's reason")
        return self.best

    def _turn(self) -> None:
        """Hand out work, and take in what has come."""
        # Whoever works on an evaluation is not gone; and `gather` takes no replies in.
        if not self._written and not self._pending:
            self.federation.gather(self.strategy, 1, self.config.join_timeout_s)
        self._hand_out()
        if not self._take_in():
            time.sleep(FASTEST_POLL_S if self._written else SLOWEST_POLL_S)

    def _hand_out(self) -> None:
        """Fill the places that are free; an order's number is unique, so that no two train on the same batches."""
        places = self.config.cohort - len(self._written)
        if places < 1 or not self.strategy.roster.idle_count:
            return
        candidates = self.strategy.candidates()
        if self._written:  # who has just failed waits for the others: their replies decide whether to go on
            candidates = [client for client in candidates if client.row not in self._failed]
        clients = self.strategy.roster.draw(self._draws + 1, places, candidates)
        if not clients:
            self._wait_for_trainable()
            return
        self._draws, self._handed_out = self._draws + 1, time.perf_counter()
        orders = self.strategy.train_orders(self._draws, clients)
        self.federation.send(orders)
        self._written |= {order.metadata.message_id: self._applied for order in orders}

    def _wait_for_trainable(self) -> None:
        """Raise a CohortError if all who are idle have nothing to learn, and nobody else has come for long."""
        waits = not self._written and not self._pending
        if waits and time.perf_counter() - self._handed_out > self.config.join_timeout_s:
            raise CohortError(
                f"none of the clients that are here can be trained, and no other came within "
                f"{self.config.join_timeout_s:.0f} s. With options.freeze start novel clients"
            )

    def _take_in(self) -> bool:
        """Return whether anything has come."""
        replies = self.federation.poll()
        for reply in replies:
            written = self._written.pop(reply.metadata.reply_to_message_id, None)
            if written is not None:
                sender = self.strategy.roster.on_node(reply.metadata.src_node_id)
                update = self.strategy.accept(reply)
                staleness = self._applied - written
                if update is None:
                    self._useless += 1
                    if sender is not None:
                        self._failed.add(sender.row)
                elif staleness > self.limit:
                    name = update.client.client_id
                    self.strategy.round.refused[name] = f"staleness {staleness} is over the limit of {self.limit}"
                    self._useless += 1
                elif self._applied == self.total:
                    self.strategy.round.refused[update.client.client_id] = "dropped: the last round was over"
                else:
                    self.strategy.apply(update, staleness)
                    self.strategy.round.staleness.append(staleness)
                    self.strategy.round.results[update.client.client_id] = update.result
                    self._applied, self._useless = self._applied + 1, 0
                    self._failed.clear()
            elif self._pending and reply.metadata.reply_to_message_id in self._pending.open:
                self._take_in_score(self._pending, reply)
        self._forget_lost()
        if self._pending and not self._pending.open:
            self._conclude(self._pending)
        if self._useless >= FRUITLESS_ROUNDS * self.config.cohort:
            give_up(self.strategy, f"among the last {self._useless}")
        return bool(replies)

    def _take_in_score(self, pending: _Pending, reply: Message) -> None:
        """Keep a client's scores, or why there are none; what training brings is in another round."""
        pending.open.discard(reply.metadata.reply_to_message_id)
        training = self.strategy.round
        self.strategy.round = Round(refused=pending.refused, lied=training.lied, quarantined=training.quarantined)
        if score := self.strategy.accept_score(reply):
            pending.scores[score[0]] = score[1]
        self.strategy.round = training

    def _forget_lost(self) -> None:
        """Free the places of clients that are gone or took too long."""
        self.federation.give_up(self.config.round_timeout_s)
        for message_id in [i for i in self._written if not self.federation.expects(i)]:
            del self._written[message_id]
            self._useless += 1
            if name := self.strategy.forget(message_id):
                self.strategy.round.refused[name] = "no reply"
        if self._pending:
            for message_id in [i for i in self._pending.open if not self.federation.expects(i)]:
                self._pending.open.discard(message_id)
                if name := self.strategy.forget(message_id):
                    self._pending.refused[name] = "no reply"

    def _ask_for_evaluation(self, number: int, elapsed: float) -> None:
        """Send everyone their weights to score, behind whatever work they have; training goes on meanwhile."""
        state = {name: tensor.detach().clone() for name, tensor in self.strategy.state().items()}
        orders = self.strategy.evaluation_orders(number, self.strategy.roster.trusted)
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
        evaluation = self.strategy.evaluation(done.scores) if done.scores else None
        selection = better(self.best, done.number, evaluation)
        if selection is not self.best and selection is not None:
            self.best = selection
            for listener in self.listeners:
                listener.selected(selection, done.state, self.strategy.roster)
        outcome = Round(evaluation=evaluation, refused=done.refused)
        self._report(done.number, outcome, time.perf_counter() - done.asked, done.elapsed, 0, Traffic())

    def _report(self, number: int, outcome: Round, seconds: float, elapsed: float, late: int, traffic: Traffic) -> None:
        of, down, up = self.config.rounds, traffic.down, traffic.up
        tell(self.listeners, RoundReport(number, of, outcome, seconds, elapsed, late, down, up))
