"""What the round loop tells those who watch it: the run folder, the terminal, and whoever comes later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `flower-server watch` needs none of what these import
    from torch import Tensor

    from hyperbloom.server.loop.exchange import Outcome
    from hyperbloom.server.loop.federation import Federation
    from hyperbloom.server.loop.roster import Roster
    from hyperbloom.strategies.algorithm import Algorithm

__all__ = ["NOTHING_DONE", "Checkpoint", "Listener", "Progress", "Resume", "RoundReport", "Selection"]


@dataclass(frozen=True)
class RoundReport:
    """A round that is over, or in asynchronous mode an evaluation that was asked for at the end of a round.

    Attributes:
        number: of the round, from 1; 0 is the evaluation of what a run starts from (`init_from`).
        of: rounds in all.
        outcome: what it brought.
        seconds: what it took, evaluation included.
        elapsed: seconds from the strategy's first round to the end of this round's training.
        late: replies that came after their deadline since the last report.
        bytes_down: sent to clients for training in this round, evaluation left out.
        bytes_up: received from them.
    """

    number: int
    of: int
    outcome: "Outcome"
    seconds: float
    elapsed: float
    late: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass(frozen=True)
class Selection:
    """The round with the best mean validation accuracy so far; what is reported is its test accuracy (percent)."""

    round: int
    metrics: dict[str, float]
    test_accuracy: dict[str, float]
    rank: tuple[int, float] = (0, 0.0)  # what it was selected by

    def __post_init__(self) -> None:
        """A checkpoint's JSON has lists, which do not compare with tuples."""
        object.__setattr__(self, "rank", tuple(self.rank))


@dataclass(frozen=True)
class Progress:
    """How far a strategy has come.

    Attributes:
        round: the last one that is over; -1 before the first.
        best: what validation has selected so far.
        fruitless: rounds in a row that brought nothing.
        orders: number of the last order that was written.
        applied: asynchronous: replies that were learned from.
        elapsed: seconds of training.
    """

    round: int = -1
    best: Selection | None = None
    fruitless: int = 0
    orders: int = 0
    applied: int = 0
    elapsed: float = 0.0


NOTHING_DONE = Progress()


@dataclass(frozen=True)
class Checkpoint:
    """All that a server has to know to go on from here.

    Attributes:
        run_id: by which clients keep their personal state.
        phase: 0 for the run's strategy, then its baselines in turn; their number when the run is over.
        progress: of that phase.
        results: selections of the phases that are over, by name.
        roster: as `Roster.to_json` returns it.
        here: clients that were there.
        tensors: as `Algorithm.checkpoint` returns them.
    """

    run_id: str
    phase: int
    progress: Progress
    results: Mapping[str, Selection]
    roster: Mapping[str, Any]
    here: int
    tensors: "Mapping[str, Tensor]"


@dataclass(frozen=True)
class Resume:
    """Where a run goes on.

    Attributes:
        checkpoint: from there.
        points: phase and last order of all checkpoints that there are, in order of time.
        rewound: phase and last order of all that the run has gone back to, this time included.
    """

    checkpoint: Checkpoint
    points: Sequence[tuple[int, int]]
    rewound: Sequence[tuple[int, int]]


class Listener:
    """Override what you want to hear."""

    def gathering(self, federation: "Federation") -> None:
        """The run begins: whoever takes part is in `federation` from now on."""

    def phase(self, algorithm: "Algorithm", name: str) -> None:
        """A strategy starts its rounds."""

    def event(self, text: str) -> None:
        """Something happened to a client: joined, left, refused."""

    def released(self, names: Sequence[str]) -> None:
        """Changes with noise are about to be asked of these clients: it is spent, whatever comes of it."""

    def round_done(self, report: RoundReport) -> None:
        """A round is over; `report.outcome.evaluation` is set if it ended with an evaluation."""

    def selected(self, selection: Selection, state: "Mapping[str, Tensor]", roster: "Roster") -> None:
        """The evaluation of this round is the best so far; `state` is the server's that was evaluated."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """All that is known is in `checkpoint`; its tensors change in the next round."""

    def phase_done(self, algorithm: "Algorithm") -> None:
        """A strategy has run all its rounds."""
