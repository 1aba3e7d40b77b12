"""What the round loop tells those who watch it: the run folder, the terminal, and whoever comes later."""

from dataclasses import dataclass

from hyperbloom.strategies.personalised import PersonalisedStrategy, Round

__all__ = ["Listener", "RoundReport", "Selection"]


@dataclass(frozen=True)
class RoundReport:
    """A round that is over."""

    number: int
    of: int
    outcome: Round
    seconds: float


@dataclass(frozen=True)
class Selection:
    """The round with the best mean validation accuracy so far; what is reported is its test accuracy (percent)."""

    round: int
    metrics: dict[str, float]
    test_accuracy: dict[str, float]


class Listener:
    """Override what you want to hear."""

    def phase(self, strategy: PersonalisedStrategy, name: str) -> None:
        """A strategy starts its rounds."""

    def event(self, text: str) -> None:
        """Something happened to a client: joined, left, refused."""

    def round_done(self, report: RoundReport) -> None:
        """A round is over; `report.outcome.evaluation` is set if it ended with an evaluation."""

    def selected(self, selection: Selection, strategy: PersonalisedStrategy) -> None:
        """The evaluation of this round is the best so far."""

    def phase_done(self, strategy: PersonalisedStrategy) -> None:
        """A strategy has run all its rounds."""
