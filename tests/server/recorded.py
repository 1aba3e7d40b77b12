"""A run folder as a run leaves it, written by `RunFolder` from made-up rounds: no client, no training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hyperbloom.common.config import RunConfig
from hyperbloom.common.messages import EvaluateResult, TrainResult
from hyperbloom.server.loop.listener import RoundReport, Selection
from hyperbloom.server.run_folder import RunFolder
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.personalised import Evaluation, PersonalisedStrategy, Round
from hyperbloom.strategies.roster import Roster

from .conftest import ABOUT

ROUNDS = 6


def some_config(**changes: object) -> RunConfig:
    """Return the description of a run of six rounds."""
    return RunConfig(strategy="pfedhn", rounds=ROUNDS, eval_every=2, baselines=("local",)).model_copy(update=changes)


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
        self.roster = Roster(0)
        for row, name in enumerate(names):
            said = replace(ABOUT, client_id=name, token=name, class_shares=shares[row] if shares else ())
            self.roster.admit(row + 1, said)
        self.state = dict(state or {"embeddings": torch.eye(len(names), 4)})

    def strategy(self, name: str) -> PersonalisedStrategy:
        """Return a strategy with this run's clients and state."""
        config = self.config.model_copy(update={"strategy": name, "baselines": ()})
        strategy = make_strategy(config, "run-1", self.roster)
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
            scores = {name: EvaluateResult(5, 10, 1.0, hits, 100, 1.0) for name, hits in right.items()}
            evaluation = Evaluation(scores)
        results = {self.names[0]: TrainResult(1.0 / number, 0.1, None)}
        outcome = Round(results, evaluation, refused)
        return RoundReport(number, self.config.rounds, outcome, 0.5, 0.5 * number, 0, 2000, 1000)

    def go(self, number: int, **refused: str) -> None:
        """Let a round be over."""
        report = self.report(number, **refused)
        self.folder.round_done(report)
        if evaluation := report.outcome.evaluation:
            accuracy = {name: 100 * result.score("test").accuracy for name, result in evaluation.scores.items()}
            selection = Selection(number, evaluation.metrics(), accuracy)
            self.folder.selected(selection, self.state, self.roster)

    def whole(self) -> Path:
        """Run it all, and return its folder."""
        for name in (self.config.strategy, *self.config.baselines):
            self.begin(name)
            for number in range(1, self.config.rounds + 1):
                self.go(number)
            self.folder.phase_done(self.strategy(name))
        return self.path
