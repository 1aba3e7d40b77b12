"""What the round loop tells those who watch it: the run folder, the terminal, and whoever comes later."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hyperbloom.strategies.personalised import PersonalisedStrategy, Round
from hyperbloom.strategies.roster import Roster

__all__ = ["Listener", "RoundReport", "Selection"]


@dataclass(frozen=True)
class RoundReport:
    """A round that is over, or in asynchronous mode an evaluation that was asked for at the end of a round.

    Attributes:
        number: of the round, from 1.
        of: rounds in all.
        outcome: what it brought.
        seconds: what it took, evaluation included.
        elapsed: seconds from the strategy's first round to the end of this round's training.
        late: replies that came after their deadline since the last report.
    """

    number: int
    of: int
    outcome: Round
    seconds: float
    elapsed: float
    late: int = 0


@dataclass(frozen=True)
class Selection:
    """The round with the best mean validation accuracy so far; what is reported is its test accuracy (percent)."""

    round: int
    metrics: dict[str, float]
    test_accuracy: dict[str, float]
    rank: tuple[int, float] = (0, 0.0)  # what it was selected by


class Listener:
    """Override what you want to hear."""

    def phase(self, strategy: PersonalisedStrategy, name: str) -> None:
        """A strategy starts its rounds."""

    def event(self, text: str) -> None:
        """Something happened to a client: joined, left, refused."""

    def round_done(self, report: RoundReport) -> None:
        """A round is over; `report.outcome.evaluation` is set if it ended with an evaluation."""

    def selected(self, selection: Selection, state: Mapping[str, Tensor], roster: Roster) -> None:
        """The evaluation of this round is the best so far; `state` is the server's that was evaluated."""

    def phase_done(self, strategy: PersonalisedStrategy) -> None:
        """A strategy has run all its rounds."""
