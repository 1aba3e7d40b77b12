"""The round loop: order, exchange, aggregate, evaluate, select. Our own: Flower's has no hook around a round."""

import time
from collections.abc import Callable, Iterator, Sequence

from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.server.federation import Federation
from hyperbloom.server.listener import NOTHING_DONE, Listener, Progress, RoundReport, Selection
from hyperbloom.strategies.personalised import Evaluation, Leg, PersonalisedStrategy
from hyperbloom.strategies.roster import Client
from hyperbloom.strategies.secure_aggregation import secure_legs

__all__ = ["FRUITLESS_ROUNDS", "Save", "better", "due", "give_up", "run_rounds", "tell"]

FRUITLESS_ROUNDS = 10

BYTES_AT_ONCE = 32 * 2**20
"""Weights that are written into messages at a time; a message holds them once or twice more until it is sent."""

MOST_AT_ONCE = 1000
"""Clients that are evaluated at a time, however small their networks: a message is some kilobytes by itself."""


Save = Callable[[Progress], None]
"""Writes a checkpoint."""


def run_rounds(
    strategy: PersonalisedStrategy,
    federation: Federation,
    config: RunConfig,
    listeners: Sequence[Listener],
    done: Progress = NOTHING_DONE,
    save: Save = lambda progress: None,
) -> Selection:
    """Run all rounds of a strategy that are not `done`; return the evaluation that validation selects.

    Raises:
        CohortError: nobody answered for `FRUITLESS_ROUNDS` rounds in a row, or nobody was left.
    """
    best, fruitless, late = done.best, done.fruitless, federation.late
    begin = time.perf_counter() - done.elapsed
    # What another run has learned is scored before anything is added to it, as round 0.
    for number in range(max(done.round + 1, 0 if config.init_from else 1), config.rounds + 1):
        start = time.perf_counter()
        federation.take_traffic()  # what an evaluation has brought since
        federation.gather(strategy, 1, config.join_timeout_s)
        fruitless = 0 if number == 0 or _train(strategy, federation, config, number) else fruitless + 1
        elapsed = time.perf_counter() - begin
        traffic = federation.take_traffic()
        if number % config.eval_every == 0 or number == config.rounds:
            _evaluate(strategy, federation, config, number)
            selection = better(best, number, strategy.round.evaluation)
            if selection is not None and selection is not best:
                best = selection
                for listener in listeners:
                    listener.selected(selection, strategy.state(), strategy.roster)
        seconds = time.perf_counter() - start
        left_out = federation.late - late
        report = RoundReport(
            number, config.rounds, strategy.round, seconds, elapsed, left_out, traffic.down, traffic.up
        )
        late = federation.late
        tell(listeners, report)
        if fruitless == FRUITLESS_ROUNDS:
            give_up(strategy, f"in {fruitless} rounds, giving up after round {number}")
        if due(config, number):
            save(Progress(number, best, fruitless, orders=number, elapsed=time.perf_counter() - begin))
    if best is None:
        raise CohortError("no client could be evaluated in any round; see the log for each client's reason")
    return best


def _train(strategy: PersonalisedStrategy, federation: Federation, config: RunConfig, number: int) -> bool:
    """Return False if clients were asked and none of them answered usefully."""
    cohort = strategy.begin_round(number)
    secure = config.secure_aggregation
    for leg in secure_legs(strategy, number, cohort) if secure else strategy.legs(number, cohort):
        _exchange(strategy, federation, config, leg)
    return bool(strategy.round.results) or not cohort


def _evaluate(strategy: PersonalisedStrategy, federation: Federation, config: RunConfig, number: int) -> None:
    """Evaluate all who are there and idle, slice by slice."""
    roster = strategy.roster
    for client in roster.trusted:
        if client.node_id in roster.busy:
            strategy.round.refused[client.client_id] = "not evaluated: it still works on an earlier round"
    for clients in _slices(strategy, roster.idle):
        for leg in strategy.evaluation_legs(number, clients):
            _exchange(strategy, federation, config, leg)


def _exchange(strategy: PersonalisedStrategy, federation: Federation, config: RunConfig, leg: Leg) -> None:
    """Ask the clients of a leg that are still there and idle, and hand the replies over as they come."""
    orders = (leg.orders(_there(strategy, clients)) for clients in _slices(strategy, leg.clients))
    leg.take(federation.exchange(orders, config.round_timeout_s))


def _there(strategy: PersonalisedStrategy, clients: Sequence[Client]) -> list[Client]:
    """Look clients up again: while others were asked, some may have left or moved to another node."""
    now = {client.row: client for client in strategy.roster.idle}
    for client in clients:
        if client.row not in now:
            strategy.round.refused.setdefault(client.client_id, "left before it was asked")
    return [now[client.row] for client in clients if client.row in now]


def _slices(strategy: PersonalisedStrategy, clients: Sequence[Client]) -> Iterator[Sequence[Client]]:
    """Yield so many clients at a time as memory allows: each gets weights of its own."""
    at_once = min(MOST_AT_ONCE, max(1, BYTES_AT_ONCE // max(1, 4 * strategy.largest())))
    for start in range(0, len(clients), at_once):
        yield clients[start : start + at_once]


def tell(listeners: Sequence[Listener], report: RoundReport) -> None:
    """Tell everyone of a round."""
    for listener in listeners:
        for name, until in report.outcome.quarantined.items():
            listener.event(
                f"{name} is in quarantine until after round {until}: another reply was refused for its content "
                f"({report.outcome.refused.get(name)})"
            )
        listener.round_done(report)


def due(config: RunConfig, number: int) -> bool:
    """Return whether a checkpoint follows round `number`; what follows the last one is not the loop's affair."""
    return bool(config.checkpoint_every) and 0 < number < config.rounds and number % config.checkpoint_every == 0


def better(best: Selection | None, number: int, evaluation: Evaluation | None) -> Selection | None:
    """Return the evaluation of round `number` if validation prefers it, else the best so far."""
    if evaluation is None:
        return best
    metrics = evaluation.metrics()
    if "val_mean" not in metrics:  # only novel clients answered
        return best
    rank = evaluation.rank or (0, metrics["val_mean"])
    if best is not None and rank <= best.rank:
        return best
    accuracy = {name: 100 * result.score("test").accuracy for name, result in evaluation.scores.items()}
    return Selection(number, metrics, accuracy, rank)


def give_up(strategy: PersonalisedStrategy, when: str) -> None:
    """Raise a CohortError that says why nobody's reply could be used."""
    reasons = "; ".join(f"{name}: {why}" for name, why in strategy.round.refused.items()) or "nobody is there"
    raise CohortError(f"no usable reply {when} ({reasons})")
