"""The round loop: order, exchange, aggregate, evaluate, select. Our own: Flower's has no hook around a round."""

import time
from collections.abc import Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.server.federation import Federation
from hyperbloom.server.listener import Listener, RoundReport, Selection
from hyperbloom.strategies.personalised import PersonalisedStrategy

__all__ = ["run_rounds"]

FRUITLESS_ROUNDS = 10

BYTES_AT_ONCE = 256 * 2**20
"""Weights that an evaluation holds at a time; messages in flight hold them once or twice more."""

MOST_AT_ONCE = 1000
"""Clients that are evaluated at a time, however small their networks: a message is some kilobytes by itself."""


def run_rounds(
    strategy: PersonalisedStrategy,
    federation: Federation,
    config: RunConfig,
    listeners: Sequence[Listener],
) -> Selection:
    """Run all rounds of a strategy and return the evaluation that validation selects.

    Raises:
        CohortError: nobody answered for `FRUITLESS_ROUNDS` rounds in a row, or nobody was left.
    """
    best: Selection | None = None
    fruitless = 0
    for number in range(1, config.rounds + 1):
        start = time.perf_counter()
        federation.gather(strategy, 1, config.join_timeout_s)
        fruitless = 0 if _train(strategy, federation, config, number) else fruitless + 1
        if number % config.eval_every == 0 or number == config.rounds:
            _evaluate(strategy, federation, config, number)
            selection = _selection(strategy, number)
            if selection and (best is None or selection.metrics["val_mean"] > best.metrics["val_mean"]):
                best = selection
                for listener in listeners:
                    listener.selected(best, strategy)
        report = RoundReport(number, config.rounds, strategy.round, time.perf_counter() - start)
        for listener in listeners:
            listener.round_done(report)
        if fruitless == FRUITLESS_ROUNDS:
            reasons = "; ".join(f"{name}: {why}" for name, why in strategy.round.refused.items()) or "nobody is there"
            raise CohortError(f"no usable reply in {fruitless} rounds, giving up after round {number} ({reasons})")
    if best is None:
        raise CohortError("no client could be evaluated in any round; see the log for each client's reason")
    return best


def _train(strategy: PersonalisedStrategy, federation: Federation, config: RunConfig, number: int) -> bool:
    """Return False if clients were asked and none of them answered usefully."""
    orders = strategy.configure_train(number, ArrayRecord(), ConfigRecord(), federation.grid)
    strategy.aggregate_train(number, _exchange(federation, orders, config))
    return bool(strategy.round.results) or not orders


def _evaluate(strategy: PersonalisedStrategy, federation: Federation, config: RunConfig, number: int) -> None:
    """Evaluate everyone who is there now, so many at once as memory allows: each has weights of its own."""
    rows = [client.row for client in strategy.roster.live]
    largest = max((4 * layout.numel for layout in strategy.layouts.values()), default=1)
    at_once = min(MOST_AT_ONCE, max(1, BYTES_AT_ONCE // largest))
    for start in range(0, len(rows), at_once):
        asked = set(rows[start : start + at_once])
        # Looked up again: while the others were asked, some may have left or moved to another node.
        clients = [client for client in strategy.roster.live if client.row in asked]
        orders = strategy.evaluation_orders(number, clients)
        strategy.aggregate_evaluate(number, _exchange(federation, orders, config))


def _exchange(federation: Federation, orders: list[Message], config: RunConfig) -> list[Message]:
    return list(federation.exchange(orders, config.round_timeout_s))


def _selection(strategy: PersonalisedStrategy, number: int) -> Selection | None:
    evaluation = strategy.round.evaluation
    if evaluation is None:
        return None
    accuracy = {name: 100 * result.score("test").accuracy for name, result in evaluation.scores.items()}
    return Selection(number, evaluation.metrics(), accuracy)
