"""The round loop: draw, play the exchanges, evaluate, select. Flower's own loop has no hook around a round."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from hyperbloom.common.config import FEWEST_CLIENTS, RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.newcomers import Expectation, expect
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy.masks import threshold_of
from hyperbloom.common.wire.orders import Scope
from hyperbloom.server.loop.exchange import Director, Evaluated, Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import NOTHING_DONE, Listener, Progress, RoundReport, Selection
from hyperbloom.server.loop.protection import Protection
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.exchange import Client, Exchanges, draw
from hyperbloom.strategies.fedavg import FedAvg
from hyperbloom.strategies.odpfl import ODPFL
from hyperbloom.strategies.turn import Evaluation, Turn

FRUITLESS_ROUNDS = 10
NEVER_EVALUATED = (
    "no round can be selected: in none was the selecting metric known on validation examples. Either no client could "
    "be evaluated (the log has each client's reason; with --min-masked or --min-noise a client tells scores only up to "
    "its --max-scores), or it is undefined for all (select names another)"
)

Save = Callable[[Progress], None]
"""Writes a checkpoint."""


@dataclass
class Run:
    """One algorithm with its clients.

    Attributes:
        scope: what orders say of the run: its id, and to which rounds it may go back. Each round sets its own number.
        halfway: called with the number of each round after which clients compare, but not after the last.
    """

    config: RunConfig
    algorithm: Algorithm
    federation: Federation
    listeners: Sequence[Listener]
    scope: Scope
    halfway: Callable[[int], None] = lambda number: None

    def __post_init__(self) -> None:
        self.director = Director(self.federation, self.config)
        self.protection = Protection(self.algorithm, self.listeners)

    @property
    def masked(self) -> bool:
        """Whether the server learns only sums of changes; without replies there is no sum."""
        return self.config.secure_aggregation and self.algorithm.reply != "nothing"

    def candidates(self) -> list[Client]:
        """Return the clients from which a cohort can be drawn now."""
        return [client for client in self.federation.idle if self.may_train(client)]

    def may_train(self, client: Client) -> bool:
        """Return whether a client may be in a cohort."""
        return self.algorithm.trains(client) and not self.config.is_novel(client.row)

    def can_go_on(self, forbidden: bool = False) -> bool:
        """Return whether enough clients are here, or waiting brings no more: a quarantine ends after rounds.

        After a masked round that clients found too small, as many must be here as stay to the end of a whole cohort.
        """
        roster, config, least = self.federation.roster, self.config, FEWEST_CLIENTS if self.masked else 1
        if self.masked and forbidden:
            least = threshold_of(config.cohort, config.min_replies)
        held = partial(roster.conduct.in_quarantine, round_number=self.federation.round)
        here = self.candidates()
        return len(here) >= least or all(c in here or held(c.client_id) for c in roster if self.may_train(c))

    def turn(self, number: int, cohort: Sequence[Client] = (), candidates: Sequence[Client] = ()) -> Turn:
        """Return a round as the algorithm sees it."""
        return Turn(self.algorithm, replace(self.scope, round=number), cohort, candidates)

    def draw(self, number: int) -> Turn:
        """Draw the cohort of a round."""
        candidates = self.candidates()
        return self.turn(number, draw(self.config.seed, number, self.config.cohort, candidates), candidates)

    def stop_early(self, number: int) -> None:
        """Tell the listeners that patience has ended the run."""
        told = f"validation {title_of(self.algorithm.metrics[0])} has not become better"
        for listener in self.listeners:
            listener.event(f"{told} for {self.config.patience} evaluations: round {number} was the last")

    def train(self, number: int, outcome: Outcome) -> bool:
        """Play a round of training. Return whether a client gave a usable answer."""
        turn = self.draw(number)
        exchanges: Exchanges[None] = self.protection.round(self.algorithm.round(turn))
        if self.masked:
            from hyperbloom.server.loop.masks import under_masks

            exchanges = under_masks(exchanges, self.config, turn, outcome, self.director.blame)
        self.director.play(exchanges, outcome, len(turn.cohort))
        return bool(outcome.results)

    def evaluate(self, number: int, outcome: Outcome) -> None:
        """Evaluate all idle clients, and record the busy ones as left out."""
        federation, busy = self.federation, self.federation.post.busy
        for client in federation.trusted:
            if federation.roster.node_of(client) in busy:
                outcome.leave_out(client, Reason.BUSY, "not evaluated: it still works on an earlier round")
        exchanges = self.algorithm.evaluate(self.turn(number), federation.idle)
        outcome.evaluation = evaluated(self.director.play(exchanges, outcome), self)


def evaluated(evaluation: Evaluation, run: Run) -> Evaluated | None:
    """Return an evaluation's scores with the names of novel clients, or None if nobody answered."""
    novel = {client.client_id for client in run.federation.roster if run.config.is_novel(client.row)}
    untrained = novel if run.algorithm.private == "all" else set()  # their models are their own, so nobody trains them
    scores = {name: evaluation.scores[name] for name in sorted(evaluation.scores.keys() - untrained)}
    if not scores:
        return None
    names, spec = run.algorithm.metrics, run.algorithm.setting.spec
    about = (names, run.algorithm.setting.task, spec.num_classes)
    return Evaluated(scores, frozenset(novel & scores.keys()), evaluation.rank, *about)


def run_rounds(run: Run, done: Progress = NOTHING_DONE, save: Save = lambda progress: None) -> Selection:
    """Run all rounds after `done`; return the evaluation that validation selects.

    Raises:
        Fruitless: no usable reply for `FRUITLESS_ROUNDS` rounds in a row, or in all of a shorter run (two or more).
        CohortError: no client could be evaluated, or all have left.
    """
    config, federation = run.config, run.federation
    best, fruitless, late, forbidden = done.best, done.fruitless, federation.late, False
    begin = time.perf_counter() - done.elapsed
    # Round 0 scores what another run has learned, before this one adds to it.
    for number in range(max(done.round + 1, 0 if config.init_from else 1), config.rounds + 1):
        if config.has_lost_patience(best.round if best else None, number - 1):
            run.stop_early(number - 1)
            break
        start, outcome = time.perf_counter(), Outcome()
        federation.post.take_traffic()  # discard the traffic of the last evaluation
        federation.round = number
        federation.gather(1, config.join_timeout_s, partial(run.can_go_on, forbidden))
        useful = number == 0 or run.train(number, outcome)
        fruitless = 0 if useful else fruitless + bool(outcome.refused)  # if all are in quarantine, nobody was asked
        forbidden = not useful and any(why.reason is Reason.FORBIDDEN for why in outcome.refused.values())
        elapsed = time.perf_counter() - begin
        traffic, asked = federation.post.take_traffic(), len(outcome.results.keys() | outcome.refused.keys())
        if number % config.eval_every == 0 or number == config.rounds:
            run.evaluate(number, outcome)
            best = select(run, best, number, outcome.evaluation)
        seconds, late, before = time.perf_counter() - start, federation.late, late
        report = RoundReport(number, outcome, seconds, elapsed, late - before, traffic.down, traffic.up, asked)
        for listener in run.listeners:
            listener.round_done(report)
        if fruitless == min(FRUITLESS_ROUNDS, max(2, config.rounds)):
            raise Fruitless(outcome, f"in {fruitless} rounds, giving up after round {number}", best)
        if due(config.gains_every, config, number):
            run.halfway(number)
        if due(config.checkpoint_every, config, number):
            save(Progress(number, best, fruitless, orders=number, elapsed=time.perf_counter() - begin))
    if best is None:
        raise CohortError(f"{config.strategy}: {NEVER_EVALUATED}")
    if config.gains and federation.round > done.round:  # a comparison with training alone may follow, and take long
        save(Progress(federation.round, best, fruitless, federation.round, elapsed=time.perf_counter() - begin))
    return best


def select(
    run: Run,
    best: Selection | None,
    number: int,
    evaluation: Evaluated | None,
    state: Mapping[str, Tensor] | None = None,
) -> Selection | None:
    """Return the best evaluation so far, and tell the listeners if it is this round's, of the present or that state."""
    selection = _better(best, number, evaluation)
    if selection is not None and selection is not best:
        if isinstance(run.algorithm, ODPFL):
            asked = run.algorithm.expectation(run.turn(number), run.federation.idle)
            selection = replace(selection, newcomers=run.director.play(asked, Outcome()))
        elif evaluation is not None:
            selection = replace(selection, newcomers=_with_common(run, number, evaluation))
        state = run.algorithm.state() if state is None else state
        for listener in run.listeners:
            listener.selected(selection, state, run.federation.roster)
    return selection


def _with_common(run: Run, number: int, evaluation: Evaluated) -> Expectation | None:
    """Return what newcomers may expect of the model for all, if all clients are scored with it and some are novel."""
    recipe, metric, scores = run.algorithm.recipe(number), evaluation.names[0], evaluation.scores
    if not isinstance(run.algorithm, FedAvg) or recipe.private != "none" or recipe.refinement:
        return None
    pairs = [(scores[name].val.value(metric), scores[name].test.value(metric)) for name in sorted(evaluation.novel)]
    told = np.array([pair for pair in pairs if None not in pair], float).T.tolist()
    return expect(told[:1], told[1:], len(evaluation.of("val")), metric, run.config.strategy) if told else None


def due(every: int | None, config: RunConfig, number: int) -> bool:
    """Return whether what is done `every` so many rounds follows round `number`; what follows the last is apart."""
    return 0 < number < config.rounds and bool(every) and number % (every or 1) == 0


def _better(best: Selection | None, number: int, evaluation: Evaluated | None) -> Selection | None:
    """Return the evaluation of round `number` if validation prefers it, else the best so far."""
    if evaluation is None:
        return best
    metrics = evaluation.metrics()
    if "val_mean" not in metrics:  # only novel clients answered, or the metric is undefined for all
        return best
    metric = evaluation.names[0]
    scale = scale_of(metric)
    rank = evaluation.rank or (0, scale.sign * metrics["val_mean"])
    values = {name: result.test.value(metric) for name, result in evaluation.scores.items()}
    shown = {name: scale.factor * value for name, value in values.items() if value is not None}
    if best is not None:  # one that reached less than half of the clients of the other says little beside it
        few, many = 2 * len(shown) < len(best.test_accuracy), len(shown) > 2 * len(best.test_accuracy)
        if few or (rank <= best.rank and not many):
            return best
    return Selection(number, metrics, shown, rank, metric, evaluation.counts())


class Fruitless(CohortError):
    """No reply could be used for long; `best` is what validation has selected until then.

    `reason` is why, if all were left out for the same reason.
    """

    def __init__(self, outcome: Outcome, when: str, best: Selection | None) -> None:
        whys = "; ".join(f"{name}: {why}" for name, why in outcome.refused.items()) or "nobody is there"
        reasons = {why.reason for why in outcome.refused.values()}
        super().__init__(f"no usable reply {when} ({whys})", reason=reasons.pop() if len(reasons) == 1 else None)
        self.best = best
