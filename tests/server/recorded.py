"""A run folder as a run leaves it, written by `RunFolder` from made-up rounds: no client, no training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.orders import EvaluateResult, TrainResult
from hyperbloom.server.grids.inline import InlineGrid
from hyperbloom.server.loop.exchange import Evaluated, Outcome
from hyperbloom.server.loop.federation import Federation
from hyperbloom.server.loop.listener import RoundReport, Selection
from hyperbloom.server.loop.post import Failure
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.algorithm import Algorithm

from ..scores import right
from .conftest import ABOUT

ROUNDS = 6


def some_config(**changes: object) -> RunConfig:
    """Return the description of a run of six rounds."""
    return RunConfig(strategy="pfedhn", rounds=ROUNDS, eval_every=2, baselines=("local",)).model_copy(update=changes)


def score(val_correct: int, val_total: int, test_correct: int, test_total: int, loss: float = 1.0) -> EvaluateResult:
    """Return a client's scores."""
    return EvaluateResult(right(val_correct, val_total, loss), right(test_correct, test_total, loss))


def federation_of(roster: Roster) -> Federation:
    """Return the federation of clients that have been admitted."""
    return Federation(InlineGrid(lambda message, context: message, []), roster, lambda text: None)


def left_out(**why: str) -> dict[str, Failure]:
    """Return who was left out of a round, with what each client said of it."""
    return {name: Failure(Reason.FAILED, text) for name, text in why.items()}


class Recording:
    """A run that goes on when a test says so.

    Args:
        path: its folder.
        names: of its clients, in order of their rows.
        config: of the run.
        shares: what each client discloses of its classes, if anything.
        state: of the server.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str] = ("a", "b", "c"),
        config: RunConfig | None = None,
        shares: Sequence[tuple[float, ...]] = (),
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.path, self.names, self.config = path, names, config or some_config()
        self.folder = RunFolder(path, self.config, "run-1")
        self.roster = Roster()
        for row, name in enumerate(names):
            said = replace(ABOUT, client_id=name, token=name, class_shares=shares[row] if shares else ())
            self.roster.admit(row + 1, said)
        self.folder.gathering(federation_of(self.roster))
        self.state = dict(state or {"embeddings": torch.eye(len(names), 4)})

    def strategy(self, name: str) -> Algorithm:
        """Return a strategy with this run's state."""
        strategy = make_algorithm(self.config.model_copy(update={"strategy": name, "baselines": ()}))
        strategy.state = lambda: dict(self.state)  # type: ignore[method-assign]
        return strategy

    def begin(self, name: str) -> None:
        """Begin a strategy."""
        self.name = name
        self.folder.phase(self.strategy(name), name)

    def report(self, number: int, **refused: str) -> RoundReport:
        """Return a round of half a second in which the first client trains.

        Every second round all are scored; client `row` is right in `10 * number + row` of 100 cases, at most in all.
        """
        evaluation = None
        if number % self.config.eval_every == 0:
            right = {name: min(100, 10 * number + row) for row, name in enumerate(self.names)}
            scores = {name: score(5, 10, hits, 100) for name, hits in right.items()}
            evaluation = Evaluated(scores)
        results = {self.names[0]: TrainResult(0.1, loss=1.0 / number)}
        outcome = Outcome(results, evaluation, left_out(**refused))
        asked = len(results) + len(refused)
        return RoundReport(number, outcome, 0.5, 0.5 * number, 0, 2000, 1000, asked)

    def go(self, number: int, **refused: str) -> None:
        """Let a round be over."""
        report = self.report(number, **refused)
        self.folder.round_done(report)
        if evaluation := report.outcome.evaluation:
            accuracy = {name: 100 * result.test.values[0] for name, result in evaluation.scores.items()}
            selection = Selection(number, evaluation.metrics(), accuracy)
            self.folder.selected(selection, self.state, self.roster)

    def whole(self) -> Path:
        """Run it all, and return its folder."""
        for name in (self.config.strategy, *self.config.baselines):
            self.begin(name)
            for number in range(1, self.config.rounds + 1):
                self.go(number)
            self.folder.phase_done(self.strategy(name))
        self.folder.end()
        return self.path
